// SPDX-License-Identifier: Apache-2.0
//! Which of the draining nodes still get packets from this host. `engine` lets it read what the kernel has counted, once a second, and
//! reports what follows. It changes nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use steerage_edge_api::DrainingNode;
use steerage_model::chain;

use crate::logged_problem::LoggedProblem;

/// Without a packet for so long, a node counts as one that this host does not forward to. Connections that are idle for longer are not
/// seen: they end when their node does.
const QUIET_AFTER: Duration = Duration::from_mins(1);

/// The draining nodes, by name.
#[derive(Debug, Default)]
pub(crate) struct Drains(BTreeMap<String, Drain>);

/// A node that drains, as the groups of targets have it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct DrainingTargets {
    pub(crate) addresses: BTreeSet<IpAddr>,
    /// New connections go to one of them: no other target is healthy.
    pub(crate) is_used: bool,
}

#[derive(Debug)]
struct Drain {
    targets: DrainingTargets,
    /// What was counted last, and since when it has not changed; `None` before.
    counted: Option<(u64, Instant)>,
    forwards: bool,
    /// Why they could not be counted the last time.
    problem: LoggedProblem,
}

impl Drain {
    fn new(targets: DrainingTargets) -> Self {
        Self { targets, counted: None, forwards: true, problem: LoggedProblem::default() }
    }
}

impl Drains {
    /// The nodes that drain now. Of each it is first said that it is forwarded to.
    pub(crate) fn set_nodes(&mut self, mut nodes: BTreeMap<String, DrainingTargets>) {
        self.0.retain(|node, _| nodes.contains_key(node));
        for (node, drain) in &mut self.0 {
            drain.targets = nodes.remove(node).unwrap_or_default();
        }
        self.0.extend(nodes.into_iter().map(|(node, targets)| (node, Drain::new(targets))));
    }

    /// Reads how many packets were ever forwarded to each target, and returns what this host reports. A node whose packets cannot be
    /// read counts as one that begins to drain.
    pub(crate) fn follow<E: std::error::Error>(
        &mut self,
        packets: impl Fn(IpAddr) -> Result<u64, E>,
        now: Instant,
    ) -> Vec<DrainingNode> {
        for (node, drain) in &mut self.0 {
            let addresses = drain.targets.addresses.iter();
            match addresses.map(|address| packets(*address)).sum::<Result<u64, E>>() {
                Ok(sum) => {
                    if drain.problem.set(None) {
                        tracing::info!(node, "packets to a draining node counted again");
                    }
                    // A target that was added anew counts from zero.
                    if drain.counted.is_none_or(|(before, _)| before != sum) {
                        drain.counted = Some((sum, now));
                    }
                }
                Err(error) => {
                    let error = chain(&error);
                    if drain.problem.set(Some(error.clone())) {
                        tracing::warn!(node, error, "packets to a draining node not counted; retrying");
                    }
                    drain.counted = None;
                }
            }
            let is_recent = |(_, at): (u64, Instant)| now.duration_since(at) < QUIET_AFTER;
            drain.forwards = drain.targets.is_used || drain.counted.is_none_or(is_recent);
        }
        self.report()
    }

    /// What this host reports of the nodes, as when it counted last.
    pub(crate) fn report(&self) -> Vec<DrainingNode> {
        let report =
            |(node, drain): (&String, &Drain)| DrainingNode { node: node.clone(), forwards: drain.forwards };
        self.0.iter().map(report).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counted packets of a node with one address for each number; `None`: they cannot be read.
    type Counted<'a> = (&'a str, Option<[u64; 2]>);

    #[test]
    fn node_is_quiet_a_minute_after_its_last_packet() {
        let start = Instant::now();
        let mut drains = Drains::default();
        let mut forwards = |seconds: u64, counted: &[Counted<'_>]| {
            let now = start + Duration::from_secs(seconds);
            let address = |node: &str, index: u8| IpAddr::from([10, 0, node.as_bytes()[0], index]);
            let addresses = |node: &str| BTreeSet::from([address(node, 0), address(node, 1)]);
            let targets =
                |node: &str| DrainingTargets { addresses: addresses(node), is_used: node == "used" };
            drains.set_nodes(counted.iter().map(|(node, _)| ((*node).to_owned(), targets(node))).collect());
            let packets = |of: IpAddr| {
                let found = counted.iter().find_map(|(node, counted)| {
                    let index = (0..2).find(|index| address(node, *index) == of)?;
                    Some(counted.map(|counted| counted[usize::from(index)]))
                });
                found.flatten().ok_or(std::fmt::Error)
            };
            let report = drains.follow(packets, now);
            assert_eq!(report, drains.report());
            report.into_iter().map(|node| (node.node, node.forwards)).collect::<Vec<_>>()
        };
        let named = |nodes: &[(&str, bool)]| -> Vec<_> {
            nodes.iter().map(|(node, forwards)| ((*node).to_owned(), *forwards)).collect()
        };
        let (a, b) = (("a", Some([7, 1])), ("b", Some([0, 0])));
        assert_eq!(forwards(0, &[a]), named(&[("a", true)]), "what came before is not known");
        assert_eq!(forwards(59, &[a, b]), named(&[("a", true), ("b", true)]));
        assert_eq!(forwards(60, &[a, b]), named(&[("a", false), ("b", true)]));
        assert_eq!(forwards(90, &[("a", Some([7, 2])), b]), named(&[("a", true), ("b", true)]));
        assert_eq!(forwards(149, &[("a", Some([7, 2])), b]), named(&[("a", true), ("b", false)]));
        assert_eq!(forwards(150, &[("a", Some([0, 2]))]), named(&[("a", true)]), "counted anew");
        assert_eq!(forwards(210, &[("a", Some([0, 2]))]), named(&[("a", false)]));
        assert_eq!(forwards(211, &[("a", None)]), named(&[("a", true)]), "not known");
        let used = ("used", Some([5, 5]));
        assert_eq!(forwards(220, &[used]), named(&[("used", true)]));
        assert_eq!(forwards(290, &[used]), named(&[("used", true)]), "new connections go there");
        assert_eq!(forwards(300, &[]), []);
        assert_eq!(forwards(301, &[("a", Some([0, 2]))]), named(&[("a", true)]), "another drain");
    }
}
