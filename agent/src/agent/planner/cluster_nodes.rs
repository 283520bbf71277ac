// SPDX-License-Identifier: Apache-2.0
//! What belongs to the cluster's nodes, where no external IP is served. They are watched only once a Service has an external IP: in a
//! large cluster all Nodes are much data for each node. Does no I/O.

use std::sync::Arc;
use std::time::{Duration, Instant};

use steerage_model::{Node, Service};
use steerage_watch::{Event, Store};

use crate::local_node::LocalNode;
use crate::plan::{self, NodeNetworks, serves};

/// External IPs wait for the list of Nodes for this long, and are served then all the same: whoever may not list them has external IPs as
/// with kube-proxy.
pub(super) const LIST_LIMIT: Duration = Duration::from_secs(10);

/// The cluster's nodes.
#[derive(Default)]
pub(super) struct ClusterNodes {
    /// Only the fields that matter here.
    nodes: Store<Node>,
    /// They are not the ones of the last plan any more.
    changed: bool,
    /// When a Service had an external IP for the first time.
    wanted: Option<Instant>,
    /// No list will come.
    given_up: bool,
    planned: plan::ClusterNodes,
}

impl ClusterNodes {
    /// Takes an event of the watch of all Nodes.
    pub(super) fn on_node(&mut self, event: Event<Node>) {
        let Self { nodes, changed, .. } = self;
        let event = match event {
            Event::Apply(node) => Event::Apply(networks(node)),
            Event::InitApply(node) => Event::InitApply(networks(node)),
            event => event,
        };
        *changed |= matches!(event, Event::InitDone);
        nodes.apply(event, |_, _| *changed = true);
    }

    /// Takes note of a Service that is about to be planned.
    pub(super) fn on_service(&mut self, service: &Service, local_node: &LocalNode, now: Instant) {
        let rules = &local_node.external_ips;
        if self.wanted.is_none()
            && serves(service, local_node.kube_proxy_replacement)
            && service.external_ips.iter().any(|addr| rules.refusal_by_this_node(*addr).is_none())
        {
            self.wanted = Some(now);
        }
    }

    /// Takes note that no list will come.
    pub(super) fn give_up(&mut self) {
        self.given_up = true;
    }

    /// Whether they have to be watched.
    pub(super) fn are_wanted(&self) -> bool {
        self.wanted.is_some()
    }

    /// Until when external IPs wait for them at most; `None` if they do not wait.
    pub(super) fn deadline(&self) -> Option<Instant> {
        (self.planned == plan::ClusterNodes::Awaited).then_some(self.wanted? + LIST_LIMIT)
    }

    /// What plans use from now on, and whether that is something else than before.
    pub(super) fn update(&mut self, now: Instant) -> bool {
        let Some(wanted) = self.wanted else { return false };
        let is_late = now.duration_since(wanted) >= LIST_LIMIT;
        let planned = if self.nodes.has_synced() {
            if !std::mem::take(&mut self.changed) {
                return false;
            }
            plan::ClusterNodes::Known(Arc::new(self.nodes.iter().collect::<NodeNetworks>()))
        } else if is_late || self.given_up {
            plan::ClusterNodes::Unknown
        } else {
            plan::ClusterNodes::Awaited
        };
        let is_new_unknown =
            self.planned == plan::ClusterNodes::Awaited && planned == plan::ClusterNodes::Unknown;
        if is_new_unknown && !self.given_up {
            tracing::warn!(
                waited = ?LIST_LIMIT,
                "Nodes not listed in time; serving external IPs that may be addresses of nodes"
            );
        }
        let is_new = self.planned != planned;
        self.planned = planned;
        is_new
    }

    /// What plans use.
    pub(super) fn planned(&self) -> &plan::ClusterNodes {
        &self.planned
    }
}

/// A node's name, addresses and networks: thousands of nodes have much else, which changes more often.
fn networks(node: Node) -> Node {
    let Node { name, addresses, external_addresses, pod_cidrs, .. } = node;
    Node { name, addresses, external_addresses, pod_cidrs, ..Node::default() }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use steerage_model::Key;

    use super::*;

    fn addr(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn service(external_ip: &str) -> Service {
        Service {
            cluster_ips: vec![addr("10.96.0.1")],
            external_ips: vec![addr(external_ip)],
            ..Service::new(Key::new("shop", "web"))
        }
    }

    fn local_node() -> LocalNode {
        let mut local_node = LocalNode { kube_proxy_replacement: true, ..LocalNode::default() };
        local_node.external_ips.node = vec![addr("10.0.0.1")];
        local_node
    }

    fn list(cluster: &mut ClusterNodes, nodes: &[(&str, &str)]) {
        cluster.on_node(Event::Init);
        for (name, address) in nodes {
            let node = Node { name: (*name).to_owned(), addresses: vec![addr(address)], ..Node::default() };
            cluster.on_node(Event::InitApply(node));
        }
        cluster.on_node(Event::InitDone);
    }

    fn known(nodes: &[(&str, &str)]) -> plan::ClusterNodes {
        let node = |(_, address): &(&str, &str)| Node { addresses: vec![addr(address)], ..Node::default() };
        let nodes: Vec<Node> = nodes.iter().map(node).collect();
        plan::ClusterNodes::Known(Arc::new(nodes.iter().collect()))
    }

    #[test]
    fn external_ips_wait_for_the_list_of_nodes_and_not_for_ever() {
        let (mut cluster, start) = (ClusterNodes::default(), Instant::now());
        cluster.on_service(&service("10.0.0.1"), &local_node(), start);
        let labelled = LocalNode { kube_proxy_replacement: false, ..local_node() };
        cluster.on_service(&service("192.0.2.1"), &labelled, start);
        assert!(!cluster.update(start) && !cluster.are_wanted(), "refused anyway, or kube-proxy's");
        cluster.on_service(&service("192.0.2.1"), &local_node(), start);
        assert!(cluster.update(start) && cluster.are_wanted());
        assert_eq!(cluster.planned(), &plan::ClusterNodes::Awaited);
        assert_eq!(cluster.deadline(), Some(start + LIST_LIMIT));
        assert!(!cluster.update(start + LIST_LIMIT / 2), "still waiting");
        assert!(cluster.update(start + LIST_LIMIT));
        assert_eq!((cluster.planned(), cluster.deadline()), (&plan::ClusterNodes::Unknown, None));
        let others = [("a", "10.0.0.2"), ("b", "10.0.0.3")];
        list(&mut cluster, &others);
        assert!(cluster.update(start + 2 * LIST_LIMIT), "late is better than never");
        assert_eq!(cluster.planned(), &known(&others));
    }

    #[test]
    fn external_ips_do_not_wait_for_a_list_that_will_not_come() {
        let (mut cluster, start) = (ClusterNodes::default(), Instant::now());
        cluster.on_service(&service("192.0.2.1"), &local_node(), start);
        assert!(cluster.update(start));
        cluster.give_up();
        assert!(cluster.update(start));
        assert_eq!((cluster.planned(), cluster.deadline()), (&plan::ClusterNodes::Unknown, None));
    }

    #[test]
    fn only_changed_addresses_change_plans() {
        let (mut cluster, now) = (ClusterNodes::default(), Instant::now());
        list(&mut cluster, &[("a", "10.0.0.2")]);
        assert!(!cluster.update(now), "no Service has an external IP");
        cluster.on_service(&service("192.0.2.1"), &local_node(), now);
        assert!(cluster.update(now), "they were listed already");
        assert_eq!(cluster.planned(), &known(&[("a", "10.0.0.2")]));
        let of_a = |address| Node { name: "a".to_owned(), addresses: vec![addr(address)], ..Node::default() };
        cluster.on_node(Event::Apply(Node { cordoned: true, ..of_a("10.0.0.2") }));
        assert!(!cluster.changed && !cluster.update(now), "nothing depends on it");
        // A list is not complete before its end: what it lacks so far stays.
        cluster.on_node(Event::Init);
        assert!(!cluster.update(now));
        cluster.on_node(Event::InitApply(of_a("10.0.0.4")));
        cluster.on_node(Event::InitDone);
        assert!(cluster.update(now));
        assert_eq!(cluster.planned(), &known(&[("a", "10.0.0.4")]));
        cluster.on_node(Event::Delete { key: "a".to_owned(), version: String::new() });
        assert!(cluster.update(now));
        assert_eq!(cluster.planned(), &known(&[]), "its address may belong to a Service now");
    }
}
