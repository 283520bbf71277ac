// SPDX-License-Identifier: Apache-2.0
//! Tests the IAM policy of `docs/providers/aws-iam.md`: it allows the calls of `client`, and nothing on resources of others.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use steerage_provider_cloud::marks;

use serde_json::Value;

/// The keys of a request that conditions compare, and under `RESOURCE` the type of the resource that the request is checked on.
type Context = BTreeMap<String, &'static str>;

/// The prefix of the actions of `ELBv2`.
pub(crate) const ELB: &str = "elasticloadbalancing:";
/// The prefix of the actions of EC2.
pub(crate) const EC2: &str = "ec2:";

const RESOURCE: &str = "resource";

fn policy() -> Vec<Value> {
    policy_below("## IAM policy")
}

/// The first policy below a heading.
fn policy_below(heading: &str) -> Vec<Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/providers/aws-iam.md");
    let text = std::fs::read_to_string(path).unwrap();
    let section = text.split_once(&format!("\n{heading}\n")).unwrap().1;
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

fn is_granted(service: &str, action: &str, context: &Context) -> bool {
    is_granted_by(&policy(), service, action, context)
}

/// Whether a statement allows the action in this context, as IAM decides it for the operators that the policies use.
fn is_granted_by(policy: &[Value], service: &str, action: &str, context: &Context) -> bool {
    let resource = context.get(RESOURCE).map(|kind| format!("arn:aws:ec2:*:*:{kind}/*"));
    policy.iter().any(|statement| {
        assert_eq!(statement["Effect"], "Allow");
        let is_met = |operator: &str, key: &str, values: BTreeSet<String>| match operator {
            "StringEquals" => context.get(key).is_some_and(|value| values.contains(*value)),
            "ForAllValues:StringNotEquals" => {
                assert_eq!(key, "aws:TagKeys");
                tag_keys(context).is_disjoint(&values)
            }
            "ForAllValues:StringEquals" => {
                assert_eq!(key, "aws:TagKeys");
                tag_keys(context).is_subset(&values)
            }
            "Null" => context.contains_key(key) != values.contains("true"),
            _ => panic!("the test does not know the operator {operator}"),
        };
        let is_met = statement.get("Condition").is_none_or(|condition| {
            condition.as_object().unwrap().iter().all(|(operator, keys)| {
                keys.as_object().unwrap().iter().all(|(key, values)| is_met(operator, key, strings(values)))
            })
        });
        let covers = |pattern: &String| pattern == "*" || Some(pattern) == resource.as_ref();
        is_met
            && strings(&statement["Action"]).contains(&format!("{service}{action}"))
            && strings(&statement["Resource"]).iter().any(covers)
    })
}

/// Whether the policy allows a call. EC2 checks it on each resource; that of a new group also on its VPC, which has no tags of the request.
fn is_allowed(service: &str, action: &str, context: &Context) -> bool {
    let on = |kind| Context::from([(RESOURCE.to_owned(), kind)]);
    let checks = match (service, action) {
        (EC2, "CreateSecurityGroup") => vec![joined(&[context.clone(), on("security-group")]), on("vpc")],
        (EC2, action) if !action.starts_with("Describe") => {
            vec![joined(&[context.clone(), on("security-group")])]
        }
        _ => vec![context.clone()],
    };
    checks.iter().all(|check| is_granted(service, action, check))
}

/// The actions that the source of `client` calls, each with the prefix of its service.
pub(crate) fn called() -> BTreeSet<(&'static str, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/client");
    let mut called = BTreeSet::new();
    let files = std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().path());
    for file in files.filter(|path| path.is_file()) {
        let text = std::fs::read_to_string(file).unwrap();
        let text: String = text.chars().filter(|c| !c.is_whitespace()).collect();
        for (field, service) in [("self.elb.", ELB), ("self.ec2.", EC2)] {
            for call in text.split(field).skip(1) {
                let words = call.split_once('(').unwrap().0.split('_');
                let action = words.map(|word| word[..1].to_uppercase() + &word[1..]).collect();
                called.insert((service, action));
            }
        }
    }
    called
}

fn requests(tag: &'static str) -> Context {
    Context::from([(format!("aws:RequestTag/{}", marks::CLUSTER), tag)])
}

fn touches(tag: &'static str) -> Context {
    Context::from([(format!("aws:ResourceTag/{}", marks::CLUSTER), tag)])
}

fn joined(contexts: &[Context]) -> Context {
    contexts.iter().flatten().map(|(key, value)| (key.clone(), *value)).collect()
}

/// As AWS checks `AddTags`, and EC2 `CreateTags`, beside an action that creates a tagged resource.
fn creates(service: &str, action: &'static str) -> Context {
    Context::from([(format!("{service}CreateAction"), action)])
}

#[test]
fn every_call_is_allowed_on_own_resources() {
    let called = called();
    assert!(called.len() > 20 && called.contains(&(ELB, "DescribeTargetHealth".to_owned())), "{called:?}");
    assert!(called.contains(&(EC2, "CreateSecurityGroup".to_owned())), "{called:?}");
    for (service, action) in &called {
        let context = match action.as_str() {
            read if read.starts_with("Describe") => Context::new(),
            "CreateLoadBalancer" | "CreateSecurityGroup" | "CreateTargetGroup" => requests("CLUSTER"),
            "CreateListener" => joined(&[requests("CLUSTER"), touches("CLUSTER")]),
            _ => touches("CLUSTER"),
        };
        assert!(is_allowed(service, action, &context), "{service}{action}");
    }
    for (service, tagging, action) in [
        (ELB, "AddTags", "CreateListener"),
        (ELB, "AddTags", "CreateLoadBalancer"),
        (ELB, "AddTags", "CreateTargetGroup"),
        (EC2, "CreateTags", "CreateSecurityGroup"),
    ] {
        let context = joined(&[requests("CLUSTER"), creates(service, action)]);
        assert!(is_allowed(service, tagging, &context), "{service}{action}");
    }
}

#[test]
fn no_change_is_allowed_on_resources_of_others() {
    for (service, action) in called().iter().filter(|(_, action)| !action.starts_with("Describe")) {
        let is_new =
            matches!(action.as_str(), "CreateLoadBalancer" | "CreateSecurityGroup" | "CreateTargetGroup");
        for other in [Context::new(), touches("another")] {
            for mark in [Context::new(), requests("another"), requests("CLUSTER")] {
                let context = joined(&[other.clone(), mark.clone()]);
                let is_ours = is_new && mark == requests("CLUSTER");
                assert_eq!(is_allowed(service, action, &context), is_ours, "{action} with {context:?}");
            }
        }
    }
}

/// Otherwise the policy would allow to tag a load balancer of others, and then to delete it; or to give an own one away.
#[test]
fn existing_resources_cannot_change_hands() {
    let own = [requests("CLUSTER"), touches("CLUSTER")];
    for (service, tagging, action) in
        [(ELB, "AddTags", "CreateLoadBalancer"), (EC2, "CreateTags", "CreateSecurityGroup")]
    {
        assert!(!is_allowed(service, tagging, &joined(&own)), "{tagging}");
        let of_another = joined(&[requests("another"), creates(service, action)]);
        assert!(!is_allowed(service, tagging, &of_another), "{tagging}");
    }
    assert!(!is_allowed(ELB, "RemoveTags", &joined(&own)));
    let further = Context::from([("aws:RequestTag/team".to_owned(), "shop")]);
    for action in ["AddTags", "RemoveTags"] {
        for other in [Context::new(), touches("another")] {
            assert!(!is_allowed(ELB, action, &joined(&[other.clone(), further.clone()])), "{action}");
            assert!(!is_allowed(ELB, action, &joined(&[other, requests("CLUSTER")])), "{action}");
        }
        assert!(is_allowed(ELB, action, &joined(&[touches("CLUSTER"), further.clone()])), "{action}");
        for key in [marks::CLUSTER, marks::CLUSTER_UID, marks::SERVICE, marks::UID] {
            let hand_over = Context::from([(format!("aws:RequestTag/{key}"), "x")]);
            let context = joined(&[touches("CLUSTER"), further.clone(), hand_over]);
            assert!(!is_allowed(ELB, action, &context), "{key}");
        }
    }
}

/// EC2 checks each of these on the type of its resource alone.
#[test]
fn only_security_groups_can_be_created_and_tagged_in_ec2() {
    let tagging = joined(&[requests("CLUSTER"), creates(EC2, "CreateSecurityGroup")]);
    for (kind, is_group) in [("security-group", true), ("instance", false), ("vpc", false)] {
        let on = Context::from([(RESOURCE.to_owned(), kind)]);
        assert_eq!(is_granted(EC2, "CreateTags", &joined(&[tagging.clone(), on])), is_group, "{kind}");
    }
    let group = Context::from([(RESOURCE.to_owned(), "security-group")]);
    assert!(!is_granted(EC2, "CreateSecurityGroup", &group), "a group without tags");
}

#[test]
fn nothing_is_allowed_that_is_not_called() {
    let listed: BTreeSet<String> =
        policy().iter().flat_map(|statement| strings(&statement["Action"])).collect();
    let mut needed: BTreeSet<String> =
        called().iter().map(|(service, action)| format!("{service}{action}")).collect();
    // EC2 checks this one beside a creation.
    needed.insert(format!("{EC2}CreateTags"));
    assert_eq!(listed, needed);
}

/// The further policy lets the controller mark what other controllers made for this cluster, and nothing else.
#[test]
fn adoption_reaches_only_what_other_controllers_made_for_the_cluster() {
    let further = policy_below("## IAM policy for an adoption");
    let listed: BTreeSet<String> =
        further.iter().flat_map(|statement| strings(&statement["Action"])).collect();
    assert_eq!(listed, BTreeSet::from([format!("{ELB}AddTags")]));
    let is_allowed = |contexts: &[Context]| is_granted_by(&further, ELB, "AddTags", &joined(contexts));
    let on = |key: &str, value: &'static str| Context::from([(format!("aws:ResourceTag/{key}"), value)]);
    let owner =
        [marks::CLUSTER_UID, marks::SERVICE, marks::UID].map(|key| (format!("aws:RequestTag/{key}"), "x"));
    let marks = joined(&[requests("CLUSTER"), Context::from(owner)]);
    for theirs in [on("kubernetes.io/cluster/CLUSTER", "owned"), on("elbv2.k8s.aws/cluster", "CLUSTER")] {
        assert!(is_allowed(&[marks.clone(), theirs.clone()]), "{theirs:?}");
        assert!(!is_allowed(&[requests("another"), theirs.clone()]), "as another cluster's");
        assert!(!is_allowed(&[marks.clone(), theirs.clone(), touches("CLUSTER")]), "what is marked already");
        assert!(!is_allowed(&[marks.clone(), theirs.clone(), touches("another")]), "another Steerage's");
        let further_tag = Context::from([("aws:RequestTag/team".to_owned(), "shop")]);
        assert!(!is_allowed(&[marks.clone(), theirs, further_tag]), "another tag");
    }
    for others in [
        Context::new(),
        on("kubernetes.io/cluster/CLUSTER", "shared"),
        on("kubernetes.io/cluster/another", "owned"),
        on("elbv2.k8s.aws/cluster", "another"),
    ] {
        assert!(!is_allowed(&[marks.clone(), others.clone()]), "{others:?}");
    }
}
