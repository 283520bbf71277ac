// SPDX-License-Identifier: Apache-2.0
//! Which of the draining nodes still get packets from this host. `engine` hands over what the kernel has counted, and reports what
//! follows. Pure.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use steerage_edge_api::DrainingNode;

/// Without a packet for so long, a node counts as one that this host does not forward to. Connections that are idle for longer are not
/// seen: they end when their node does.
const QUIET_AFTER: Duration = Duration::from_mins(1);

/// The draining nodes, by name.
#[derive(Debug, Default)]
pub(crate) struct Drains(BTreeMap<String, Drain>);

#[derive(Debug)]
struct Drain {
    /// What was counted last.
    packets: u64,
    /// When that had changed, or the node began to drain.
    at: Instant,
}

impl Drains {
    /// Takes in the number of packets that were ever forwarded to each draining node; others do not drain.
    pub(crate) fn update(&mut self, counted: &BTreeMap<String, u64>, now: Instant) {
        self.0.retain(|node, _| counted.contains_key(node));
        for (node, packets) in counted {
            match self.0.get_mut(node) {
                // A target that was added anew counts from zero.
                Some(drain) if drain.packets != *packets => *drain = Drain { packets: *packets, at: now },
                Some(_) => {}
                None => _ = self.0.insert(node.clone(), Drain { packets: *packets, at: now }),
            }
        }
    }

    /// What this host reports of them.
    pub(crate) fn report(&self, now: Instant) -> Vec<DrainingNode> {
        let report = |(node, drain): (&String, &Drain)| DrainingNode {
            node: node.clone(),
            forwards: now.duration_since(drain.at) < QUIET_AFTER,
        };
        self.0.iter().map(report).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_is_quiet_a_minute_after_its_last_packet() {
        let start = Instant::now();
        let mut drains = Drains::default();
        let mut forwards = |seconds: u64, counted: &[(&str, u64)]| {
            let now = start + Duration::from_secs(seconds);
            let counted = counted.iter().map(|(node, packets)| ((*node).to_owned(), *packets)).collect();
            drains.update(&counted, now);
            drains.report(now).into_iter().map(|node| (node.node, node.forwards)).collect::<Vec<_>>()
        };
        let named = |nodes: &[(&str, bool)]| -> Vec<_> {
            nodes.iter().map(|(node, forwards)| ((*node).to_owned(), *forwards)).collect()
        };
        assert_eq!(forwards(0, &[("a", 7)]), named(&[("a", true)]), "what came before is not known");
        assert_eq!(forwards(59, &[("a", 7), ("b", 0)]), named(&[("a", true), ("b", true)]));
        assert_eq!(forwards(60, &[("a", 7), ("b", 0)]), named(&[("a", false), ("b", true)]));
        assert_eq!(forwards(90, &[("a", 8), ("b", 0)]), named(&[("a", true), ("b", true)]));
        assert_eq!(forwards(149, &[("a", 8), ("b", 0)]), named(&[("a", true), ("b", false)]));
        assert_eq!(forwards(150, &[("a", 2)]), named(&[("a", true)]), "counted anew");
        assert_eq!(forwards(300, &[]), []);
        assert_eq!(forwards(301, &[("a", 2)]), named(&[("a", true)]), "another drain");
    }
}
