// SPDX-License-Identifier: Apache-2.0
//! The nodes that drain and to which no edge host forwards packets any more. Pure.

use std::collections::BTreeSet;

use steerage_edge_api::DrainingNode;
use steerage_provider_api::{NoticeSubject, ProviderNotice};

use crate::entry::Entry;
use crate::health::ActiveHosts;
use crate::objects::HostContent;

/// A node drains, and no edge host forwards packets to it any more.
pub const DRAINED: &str = "Drained";

/// The nodes that all hosts call quiet which answer for an address. A host that says nothing of a node may not have heard of its drain
/// yet, or is of an earlier version: then nobody knows. A dead host counts only for shards that nobody has taken over.
pub(crate) fn drained<'a>(
    hosts: &ActiveHosts,
    entries: impl Iterator<Item = &'a Entry<HostContent>>,
) -> BTreeSet<String> {
    let serving = hosts.serving();
    let quiet = |node: &&DrainingNode| !node.forwards;
    let reports = entries.filter(|entry| serving.contains(entry.name.as_str())).map(|entry| {
        let spec = entry.content.as_ref().ok().map(|content| &content.spec);
        let nodes = spec.and_then(|spec| spec.draining_nodes.as_deref()).unwrap_or_default();
        nodes.iter().filter(quiet).map(|node| node.node.clone()).collect::<BTreeSet<_>>()
    });
    reports.reduce(|all, one| &all & &one).unwrap_or_default()
}

/// What the node's event says.
pub(crate) fn notice(node: &str) -> ProviderNotice {
    ProviderNotice {
        subject: NoticeSubject::Node(node.to_owned()),
        is_warning: false,
        action: "DrainNode",
        reason: DRAINED,
        note: "No edge host has forwarded a packet to the node for a minute. New connections go to other nodes. You can stop the node."
            .to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn host(name: &str, shards: &str, draining: &Value) -> Entry<HostContent> {
        let spec = json!({
            "version": "1", "interface": "eth0", "addresses": [], "active": true, "activeShards": shards,
            "drainingNodes": draining,
        });
        let managers = json!([{"manager": format!("steerage-edge-{name}"), "time": "2026-11-01T05:00:00Z"}]);
        let version = if name == "dead" { "1" } else { "2" };
        let metadata =
            json!({"name": name, "uid": name, "resourceVersion": version, "managedFields": managers});
        Entry::parse(&json!({"metadata": metadata, "spec": spec}).to_string()).expect("a host")
    }

    fn nodes(nodes: &[(&str, bool)]) -> Value {
        nodes.iter().map(|(node, forwards)| json!({"node": node, "forwards": forwards})).collect()
    }

    #[test]
    fn node_is_drained_once_all_serving_hosts_say_that_it_is_quiet() {
        let quiet = || nodes(&[("n1", false), ("n2", false)]);
        for (what, entries, expected) in [
            ("one host", vec![host("a", "0-127", &quiet())], vec!["n1", "n2"]),
            (
                "one still forwards",
                vec![
                    host("a", "0-63", &quiet()),
                    host("b", "64-127", &nodes(&[("n1", true), ("n2", false)])),
                ],
                vec!["n2"],
            ),
            (
                "one has not heard of it",
                vec![host("a", "0-63", &quiet()), host("b", "64-127", &nodes(&[("n1", false)]))],
                vec!["n1"],
            ),
            (
                "an earlier version",
                vec![host("a", "0-63", &quiet()), host("b", "64-127", &Value::Null)],
                vec![],
            ),
            (
                "a standby",
                vec![host("a", "0-127", &quiet()), host("b", "", &nodes(&[("n1", true)]))],
                vec!["n1", "n2"],
            ),
            (
                "another one has taken over",
                vec![host("a", "0-127", &quiet()), host("dead", "0-127", &nodes(&[("n1", true)]))],
                vec!["n1", "n2"],
            ),
            (
                "nobody has taken over",
                vec![host("a", "0-63", &quiet()), host("dead", "64-127", &nodes(&[("n1", true)]))],
                vec![],
            ),
            ("no host serves", vec![host("a", "", &quiet())], vec![]),
            ("no host", vec![], vec![]),
        ] {
            let found = drained(&ActiveHosts::new(entries.iter()), entries.iter());
            assert_eq!(found.iter().map(String::as_str).collect::<Vec<_>>(), expected, "{what}");
        }
    }
}
