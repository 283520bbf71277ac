// SPDX-License-Identifier: Apache-2.0
//! The labels that a Service asks of the nodes that are its targets.

use std::collections::BTreeMap;
use std::fmt;

use steerage_model::{Service, annotations, shown};

use super::{Config, PlanError, has_pod_targets};

/// Labels that a node must have, all of them.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct NodeLabels(BTreeMap<String, String>);

impl NodeLabels {
    pub(super) fn are_on(&self, labels: &BTreeMap<String, String>) -> bool {
        self.0.iter().all(|(key, value)| labels.get(key) == Some(value))
    }
}

impl fmt::Display for NodeLabels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pairs: Vec<String> = self.0.iter().map(|(key, value)| format!("{key}={value}")).collect();
        f.write_str(&pairs.join(","))
    }
}

/// More labels say no more, and each would be compared on every node.
const MAX_LABELS: usize = 10;

/// The labels, by Steerage's annotation or by the provider's older name for it. `None` if the Service asks for none.
pub(crate) fn node_labels(service: &Service, config: &Config) -> Result<Option<NodeLabels>, PlanError> {
    let older = config.capabilities.node_labels;
    let mut found: Option<NodeLabels> = None;
    for name in [Some(annotations::TARGET_NODE_LABELS), older].into_iter().flatten() {
        let Some(value) = service.annotations.get(name) else { continue };
        let labels = parse(value).map_err(|problem| invalid(service, name, problem))?;
        // AWS's cloud controller manager takes it for any value, and its Load Balancer Controller for the empty one.
        if older == Some(name) && labels.0.values().any(String::is_empty) {
            let problem =
                format!("a label has no value; for an empty one use {}", annotations::TARGET_NODE_LABELS);
            return Err(invalid(service, name, problem));
        }
        if found.replace(labels.clone()).is_some_and(|other| other != labels) {
            return Err(invalid(
                service,
                name,
                format!("{} has other labels", annotations::TARGET_NODE_LABELS),
            ));
        }
    }
    Ok(found)
}

/// Refuses labels of nodes for a Service whose targets are pods, and unreadable ones.
pub(super) fn check_node_labels(service: &Service, config: &Config) -> Result<(), PlanError> {
    if node_labels(service, config)?.is_none() || !has_pod_targets(service, config)? {
        return Ok(());
    }
    let names = [Some(annotations::TARGET_NODE_LABELS), config.capabilities.node_labels];
    let mut names = names.into_iter().flatten();
    let name = names.find(|name| service.annotations.contains_key(*name));
    let name = name.unwrap_or(annotations::TARGET_NODE_LABELS);
    Err(invalid(service, name, "it chooses nodes, but the targets are pods".to_owned()))
}

fn invalid(service: &Service, name: &'static str, problem: String) -> PlanError {
    let value = service.annotations.get(name).cloned().unwrap_or_default();
    PlanError::InvalidAnnotation { name, value, problem }
}

fn parse(text: &str) -> Result<NodeLabels, String> {
    let mut labels = BTreeMap::new();
    for item in text.split(',').map(str::trim) {
        let pair = item.split_once('=').map(|(key, value)| (key.trim(), value.trim()));
        let Some((key, value)) = pair.filter(|(key, value)| is_key(key) && is_value(value)) else {
            return Err(format!("`{}` is no label; write key=value, separated by commas", shown(item)));
        };
        if labels.insert(key.to_owned(), value.to_owned()).is_some_and(|other| other != value) {
            return Err(format!("no node has two values of {key}"));
        }
        if labels.len() > MAX_LABELS {
            return Err(format!("it has more than {MAX_LABELS} labels"));
        }
    }
    Ok(NodeLabels(labels))
}

/// A label's key as the API server takes it: a name, perhaps after a DNS name and a slash.
fn is_key(text: &str) -> bool {
    let (prefix, name) = text.split_once('/').unwrap_or(("a", text));
    !name.is_empty() && is_value(name) && !prefix.is_empty() && prefix.len() <= 253 && is_word(prefix)
}

/// A label's value as the API server takes it.
fn is_value(text: &str) -> bool {
    text.len() <= 63 && (text.is_empty() || is_word(text))
}

fn is_word(text: &str) -> bool {
    let is_inside = |c: u8| c.is_ascii_alphanumeric() || matches!(c, b'-' | b'_' | b'.');
    let is_end = |c: Option<&u8>| c.is_some_and(u8::is_ascii_alphanumeric);
    let bytes = text.as_bytes();
    bytes.iter().copied().all(is_inside) && is_end(bytes.first()) && is_end(bytes.last())
}

#[cfg(test)]
mod tests {
    use steerage_model::Key;
    use steerage_provider_api::{Steering, TargetsAnnotation};

    use super::*;

    const OF_PROVIDER: &str = "example.com/target-node-labels";

    fn read(of: &[(&str, &str)]) -> Result<Option<String>, String> {
        let mut config = Config::with_defaults(steerage_provider_edge::capabilities(), Steering::HealthCheck);
        config.capabilities.node_labels = Some(OF_PROVIDER);
        config.capabilities.pod_targets =
            Some(TargetsAnnotation { name: "example.com/type", nodes: "instance", pods: "ip" });
        let mut service = Service::new(Key::new("shop", "web"));
        service.annotations =
            of.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let found = check_node_labels(&service, &config).and_then(|()| node_labels(&service, &config));
        found.map(|labels| labels.map(|labels| labels.to_string())).map_err(|error| error.to_string())
    }

    #[test]
    fn labels_are_read_by_both_names() {
        assert_eq!(read(&[]), Ok(None));
        for name in [annotations::TARGET_NODE_LABELS, OF_PROVIDER] {
            assert_eq!(
                read(&[(name, " b = 2, example.com/a=1")]),
                Ok(Some("b=2,example.com/a=1".to_owned()))
            );
        }
        assert_eq!(read(&[(annotations::TARGET_NODE_LABELS, "a=")]), Ok(Some("a=".to_owned())));
        assert!(read(&[(OF_PROVIDER, "a=")]).unwrap_err().contains(annotations::TARGET_NODE_LABELS));
        let both = |other| [(annotations::TARGET_NODE_LABELS, "a=1,b=2"), (OF_PROVIDER, other)];
        assert_eq!(read(&both("b=2,a=1")), Ok(Some("a=1,b=2".to_owned())));
        assert!(read(&both("a=1")).unwrap_err().contains("has other labels"));
    }

    #[test]
    fn what_no_node_can_have_is_refused() {
        let many: Vec<String> = (0..11).map(|n| format!("a{n}=1")).collect();
        let long = format!("a={}", "b".repeat(64));
        for value in [
            "",
            "a",
            "=1",
            "a=1,",
            "a=1,a=2",
            "a!=1",
            "a==1",
            "a=1;b=2",
            "a b=1",
            "/a=1",
            "a/=1",
            "-a=1",
            &long,
            &many.join(","),
        ] {
            let error = read(&[(annotations::TARGET_NODE_LABELS, value)]).unwrap_err();
            assert!(error.contains(annotations::TARGET_NODE_LABELS), "{error}");
        }
        let of_pods = [(annotations::TARGET_NODE_LABELS, "a=1"), ("example.com/type", "ip")];
        assert!(read(&of_pods).unwrap_err().contains("pods"));
    }

    #[test]
    fn node_needs_every_label() {
        let labels = parse("a=1,b=2").unwrap();
        let on = |pairs: &[(&str, &str)]| {
            labels.are_on(&pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect())
        };
        assert!(on(&[("a", "1"), ("b", "2"), ("c", "3")]));
        assert!(!on(&[("a", "1")]) && !on(&[("a", "1"), ("b", "3")]) && !on(&[]));
    }
}
