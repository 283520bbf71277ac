// SPDX-License-Identifier: Apache-2.0
//! Labels that choose target nodes, while they change, are wrong, or cannot be read. Targets while another kind of them is refused.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use steerage_model::{Node, TrafficPolicy, annotations};
use steerage_watch::Event;

use crate::cluster_index::owner_of;
use crate::pod_gates::tests::{add, pod};
use crate::reconcile::Reconciler;
use crate::reconcile::tests::{Polled, accepting, add_nodes, local_service, reconciler, set_endpoints};
use crate::request_queue::ReconcileRequest;

/// A cluster with the nodes `a` to `f`, and a Service that asks for nodes with a label.
struct Case {
    provider: Arc<Polled>,
    reconciler: Reconciler,
}

impl Case {
    fn new() -> Self {
        let provider = Arc::new(Polled::default());
        let reconciler = reconciler(Arc::<Polled>::clone(&provider), accepting());
        let case = Self { provider, reconciler };
        set_endpoints(&case.reconciler, "abcdef");
        case
    }

    fn label(&self, labelled: &str) {
        for name in ["a", "b", "c", "d", "e", "f"] {
            let value = if labelled.contains(name) { "web" } else { "batch" };
            let labels = Arc::new([("tier".to_owned(), value.to_owned())].into());
            let addresses = vec!["10.0.0.1".parse().expect("ip")];
            let node = Node { name: name.to_owned(), addresses, labels, ..Node::default() };
            self.reconciler.cluster.on_node(Event::Apply(node));
        }
    }

    fn delete(&self, nodes: &str) {
        for name in nodes.chars() {
            self.reconciler.cluster.on_node(Event::Delete { key: name.to_string(), version: String::new() });
        }
    }

    fn ask(&self, labels: &str) {
        let mut service = local_service();
        service.external_policy = TrafficPolicy::Cluster;
        service.annotations.insert(annotations::TARGET_NODE_LABELS.to_owned(), labels.to_owned());
        self.reconciler.cluster.on_service(Event::Apply(service));
    }

    /// The targets after a reconcile.
    async fn targets(&self) -> String {
        self.reconciler.reconcile(&owner_of(&local_service()), &ReconcileRequest::default()).await;
        self.provider.targets.lock().expect("lock").clone()
    }
}

#[tokio::test(start_paused = true)]
async fn labels_that_vanish_move_no_traffic_while_their_nodes_can_serve() {
    let case = Case::new();
    case.label("abc");
    case.ask("tier=web");
    assert_eq!(case.targets().await, "abc");
    case.label("");
    assert_eq!(case.targets().await, "abc", "taken away by mistake");
    case.ask("tier=wbe");
    assert_eq!(case.targets().await, "abc", "a typing error");
    case.delete("ab");
    assert_eq!(case.targets().await, "c");
    case.delete("c");
    assert_eq!(case.targets().await, "def", "better than none");
}

#[tokio::test(start_paused = true)]
async fn labels_that_come_back_one_by_one_do_not_send_all_clients_to_the_first_node() {
    let case = Case::new();
    case.label("");
    case.ask("tier=web");
    assert_eq!(case.targets().await, "abcdef");
    case.label("a");
    assert_eq!(case.targets().await, "abcdef", "held");
    case.label("ab");
    tokio::time::advance(Duration::from_secs(31)).await;
    assert_eq!(case.targets().await, "ab");
}

#[tokio::test(start_paused = true)]
async fn unreadable_labels_leave_nodes_as_they_are() {
    let case = Case::new();
    case.label("abc");
    case.ask("tier=web");
    assert_eq!(case.targets().await, "abc");
    case.ask("tier=web,");
    assert_eq!(case.targets().await, "abc");
    case.delete("c");
    assert_eq!(case.targets().await, "ab", "what was read is remembered");

    // Another process has read nothing.
    let other = Case::new();
    *other.provider.targets.lock().expect("lock") = "ab".to_owned();
    other.label("abc");
    other.ask("tier=web,");
    assert_eq!(other.targets().await, "ab");
    other.ask("tier=web");
    assert_eq!(other.targets().await, "abc");
}

/// A part of the load balancer may have the new kind of targets already, and the rest the old one: both follow.
#[tokio::test(start_paused = true)]
async fn refused_change_to_pods_gives_nodes_and_pods() {
    let provider = Arc::new(Polled::default());
    let mut reconciler = reconciler(Arc::<Polled>::clone(&provider), accepting());
    set_endpoints(&reconciler, "a");
    add_nodes(&reconciler, "ab");
    reconciler.cluster.on_service(Event::Apply(local_service()));
    let owner = owner_of(&local_service());
    reconciler.reconcile(&owner, &ReconcileRequest::default()).await;
    assert_eq!(*provider.targets.lock().expect("lock"), "a");
    provider.set_rejecting(true);
    provider.targets.lock().expect("lock").clear();
    add(&mut reconciler, pod(None));
    reconciler.reconcile(&owner, &ReconcileRequest::default()).await;
    let nodes = provider.targets.lock().expect("lock").clone();
    assert_eq!((nodes.is_empty(), provider.pods.load(Ordering::Acquire)), (false, 1));
}
