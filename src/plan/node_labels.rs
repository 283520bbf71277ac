// SPDX-License-Identifier: Apache-2.0
//! The labels that a Service asks of the nodes that are its targets.

use std::collections::BTreeMap;
use std::fmt;

use steerage_model::{Service, annotations};

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

/// The labels, by Steerage's annotation or by the provider's older name for it. `None` if the Service asks for none.
pub(crate) fn node_labels(service: &Service, config: &Config) -> Result<Option<NodeLabels>, PlanError> {
    let names = [Some(annotations::TARGET_NODE_LABELS), config.capabilities.node_labels];
    let mut found: Option<NodeLabels> = None;
    for name in names.into_iter().flatten() {
        let Some(value) = service.annotations.get(name) else { continue };
        let invalid = |problem: String| PlanError::InvalidAnnotation { name, value: value.clone(), problem };
        let labels = parse(value).map_err(invalid)?;
        if has_pod_targets(service, config)? {
            return Err(invalid("it chooses nodes, but the targets are pods".to_owned()));
        }
        if found.replace(labels.clone()).is_some_and(|other| other != labels) {
            return Err(invalid(format!("{} has other labels", annotations::TARGET_NODE_LABELS)));
        }
    }
    Ok(found)
}

fn parse(text: &str) -> Result<NodeLabels, String> {
    let mut labels = BTreeMap::new();
    for item in text.split(',').map(str::trim) {
        let Some((key, value)) = item.split_once('=').filter(|(key, _)| !key.trim().is_empty()) else {
            return Err(format!("`{item}` is no label; write key=value, separated by commas"));
        };
        let (key, value) = (key.trim(), value.trim());
        if labels.insert(key.to_owned(), value.to_owned()).is_some_and(|other| other != value) {
            return Err(format!("no node has two values of {key}"));
        }
    }
    Ok(NodeLabels(labels))
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
        let found = node_labels(&service, &config);
        found.map(|labels| labels.map(|labels| labels.to_string())).map_err(|error| error.to_string())
    }

    #[test]
    fn labels_are_read_by_both_names() {
        assert_eq!(read(&[]), Ok(None));
        for name in [annotations::TARGET_NODE_LABELS, OF_PROVIDER] {
            assert_eq!(read(&[(name, " b = 2, a=1,empty=")]), Ok(Some("a=1,b=2,empty=".to_owned())));
        }
        let both = |other| [(annotations::TARGET_NODE_LABELS, "a=1,b=2"), (OF_PROVIDER, other)];
        assert_eq!(read(&both("b=2,a=1")), Ok(Some("a=1,b=2".to_owned())));
        assert!(read(&both("a=1")).unwrap_err().contains("has other labels"));
    }

    #[test]
    fn what_no_node_can_have_is_refused() {
        for value in ["", "a", "=1", "a=1,", "a=1,a=2"] {
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
