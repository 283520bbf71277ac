// SPDX-License-Identifier: Apache-2.0
//! Tests the IAM policy of `docs/providers/aws.md`: it allows the calls of `client`, and nothing on resources of others.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::Value;

use crate::names::{CLUSTER_TAG, CLUSTER_UID_TAG, SERVICE_TAG, UID_TAG};

/// The keys of a request that conditions compare.
type Context = BTreeMap<String, &'static str>;

const SERVICE: &str = "elasticloadbalancing:";

fn policy() -> Vec<Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/providers/aws.md");
    let text = std::fs::read_to_string(path).unwrap();
    let section = text.split_once("## IAM policy").unwrap().1;
    let json = section.split_once("```json").unwrap().1.split_once("```").unwrap().0;
    let policy: Value = serde_json::from_str(json).unwrap();
    policy["Statement"].as_array().unwrap().clone()
}

fn strings(value: &Value) -> BTreeSet<String> {
    let one_or_many = value.as_array().map_or_else(|| vec![value.clone()], Clone::clone);
    one_or_many.iter().map(|value| value.as_str().unwrap().to_owned()).collect()
}

/// The keys of the tags in a request. AWS fills `aws:TagKeys` with them.
fn tag_keys(context: &Context) -> BTreeSet<String> {
    context.keys().filter_map(|key| key.strip_prefix("aws:RequestTag/")).map(str::to_owned).collect()
}

/// Whether a statement allows the action, as IAM decides it for the operators that the policy uses.
fn is_allowed(action: &str, context: &Context) -> bool {
    policy().iter().any(|statement| {
        assert_eq!(statement["Effect"], "Allow");
        let is_met = |operator: &str, key: &str, values: BTreeSet<String>| match operator {
            "StringEquals" => context.get(key).is_some_and(|value| values.contains(*value)),
            "ForAllValues:StringNotEquals" => {
                assert_eq!(key, "aws:TagKeys");
                tag_keys(context).is_disjoint(&values)
            }
            _ => panic!("the test does not know the operator {operator}"),
        };
        let is_met = statement.get("Condition").is_none_or(|condition| {
            condition.as_object().unwrap().iter().all(|(operator, keys)| {
                keys.as_object().unwrap().iter().all(|(key, values)| is_met(operator, key, strings(values)))
            })
        });
        is_met && strings(&statement["Action"]).contains(&format!("{SERVICE}{action}"))
    })
}

/// The actions that the source of `client` calls.
pub(crate) fn called() -> BTreeSet<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/client");
    let mut called = BTreeSet::new();
    let files = std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().path());
    for file in files.filter(|path| path.is_file()) {
        let text = std::fs::read_to_string(file).unwrap();
        let text: String = text.chars().filter(|c| !c.is_whitespace()).collect();
        for call in text.split("self.elb.").skip(1) {
            let words = call.split_once('(').unwrap().0.split('_');
            called.insert(words.map(|word| word[..1].to_uppercase() + &word[1..]).collect());
        }
    }
    called
}

fn requests(tag: &'static str) -> Context {
    Context::from([(format!("aws:RequestTag/{CLUSTER_TAG}"), tag)])
}

fn touches(tag: &'static str) -> Context {
    Context::from([(format!("aws:ResourceTag/{CLUSTER_TAG}"), tag)])
}

fn joined(contexts: &[Context]) -> Context {
    contexts.iter().flatten().map(|(key, value)| (key.clone(), *value)).collect()
}

/// As AWS checks `AddTags` beside an action that creates a tagged resource.
fn creates(action: &'static str) -> Context {
    Context::from([(format!("{SERVICE}CreateAction"), action)])
}

#[test]
fn every_call_is_allowed_on_own_resources() {
    let called = called();
    assert!(called.len() > 15 && called.contains("DescribeTargetHealth"), "{called:?}");
    for action in &called {
        let context = match action.as_str() {
            read if read.starts_with("Describe") => Context::new(),
            "CreateLoadBalancer" | "CreateTargetGroup" => requests("CLUSTER"),
            "CreateListener" => joined(&[requests("CLUSTER"), touches("CLUSTER")]),
            _ => touches("CLUSTER"),
        };
        assert!(is_allowed(action, &context), "{action}");
    }
    for action in ["CreateListener", "CreateLoadBalancer", "CreateTargetGroup"] {
        assert!(is_allowed("AddTags", &joined(&[requests("CLUSTER"), creates(action)])), "{action}");
    }
}

#[test]
fn no_change_is_allowed_on_resources_of_others() {
    for action in called().iter().filter(|action| !action.starts_with("Describe")) {
        let is_new = matches!(action.as_str(), "CreateLoadBalancer" | "CreateTargetGroup");
        for other in [Context::new(), touches("another")] {
            for mark in [Context::new(), requests("another"), requests("CLUSTER")] {
                let context = joined(&[other.clone(), mark.clone()]);
                let is_ours = is_new && mark == requests("CLUSTER");
                assert_eq!(is_allowed(action, &context), is_ours, "{action} with {context:?}");
            }
        }
    }
}

/// Otherwise the policy would allow to tag a load balancer of others, and then to delete it; or to give an own one away.
#[test]
fn existing_resources_cannot_change_hands() {
    let own = [requests("CLUSTER"), touches("CLUSTER")];
    assert!(!is_allowed("AddTags", &joined(&own)));
    assert!(!is_allowed("AddTags", &joined(&[requests("another"), creates("CreateLoadBalancer")])));
    assert!(!is_allowed("RemoveTags", &joined(&own)));
    let further = Context::from([("aws:RequestTag/team".to_owned(), "shop")]);
    for action in ["AddTags", "RemoveTags"] {
        for other in [Context::new(), touches("another")] {
            assert!(!is_allowed(action, &joined(&[other.clone(), further.clone()])), "{action}");
            assert!(!is_allowed(action, &joined(&[other, requests("CLUSTER")])), "{action}");
        }
        assert!(is_allowed(action, &joined(&[touches("CLUSTER"), further.clone()])), "{action}");
        for key in [CLUSTER_TAG, CLUSTER_UID_TAG, SERVICE_TAG, UID_TAG] {
            let hand_over = Context::from([(format!("aws:RequestTag/{key}"), "x")]);
            assert!(!is_allowed(action, &joined(&[touches("CLUSTER"), further.clone(), hand_over])), "{key}");
        }
    }
}

#[test]
fn nothing_is_allowed_that_is_not_called() {
    let listed: BTreeSet<String> =
        policy().iter().flat_map(|statement| strings(&statement["Action"])).collect();
    let needed: BTreeSet<String> = called().iter().map(|action| format!("{SERVICE}{action}")).collect();
    assert_eq!(listed, needed);
}
