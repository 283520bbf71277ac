// SPDX-License-Identifier: Apache-2.0
//! What the simulated nodes state of their health-check ports, and the bodies of their answers, as the agent makes them. Pure.
//!
//! A complete statement lists thousands of ports, nearly all with 0: it is a copy of one text, in which a few digits differ.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use steerage_model::Statement;

/// What precedes the number of the last change in a revision: of a process and a family, as with the agent.
const ORIGIN: &str = "00000000005ca1e5-4-";
/// Bytes of `"20000":0,`: all ports have five digits, and counts have one.
const ENTRY: usize = 10;

/// The kind of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AnswerKind {
    Complete,
    Changes,
    Unchanged,
}

/// The statements of all nodes.
#[derive(Debug, Default)]
pub(super) struct Stated {
    /// The number of the last change of any node.
    change: u64,
    /// The ports that all nodes have, in order, each with the number of the change with which it came.
    ports: Vec<(u16, u64)>,
    /// `"20000":0,"20001":0,` for these.
    zeros: String,
    nodes: Vec<NodeState>,
}

#[derive(Clone, Debug, Default)]
struct NodeState {
    /// Counts that are not 0.
    counts: BTreeMap<u16, u8>,
    /// What has changed, with the number of the change.
    changes: Vec<(u64, u16)>,
}

impl Stated {
    pub(super) fn new(nodes: u32) -> Self {
        let nodes = usize::try_from(nodes).unwrap_or(0);
        Self { nodes: vec![NodeState::default(); nodes], ..Self::default() }
    }

    /// Every node opens a port, without an endpoint. Ports come in order.
    pub(super) fn open(&mut self, port: u16) {
        self.change += 1;
        self.ports.push((port, self.change));
        let _ = write!(self.zeros, "\"{port:05}\":0,");
    }

    /// A node has another number of endpoints, at most 9.
    pub(super) fn set(&mut self, node: u32, port: u16, count: u8) {
        let Some(state) = usize::try_from(node).ok().and_then(|at| self.nodes.get_mut(at)) else { return };
        self.change += 1;
        state.changes.push((self.change, port));
        if count == 0 {
            state.counts.remove(&port);
        } else {
            state.counts.insert(port, count.min(9));
        }
    }

    /// The answer to a request that knows this revision.
    pub(super) fn answer(&self, node: u32, after: Option<&str>) -> Option<(AnswerKind, String)> {
        let state = self.nodes.get(usize::try_from(node).ok()?)?;
        let last = self.last_change(state);
        let Some(known) = after.and_then(known).filter(|known| *known <= last) else {
            return Some((AnswerKind::Complete, self.complete(state, last)));
        };
        let opened = self.ports.iter().rev().take_while(|(_, change)| *change > known).map(|(port, _)| *port);
        let changed =
            state.changes.iter().rev().take_while(|(change, _)| *change > known).map(|(_, port)| *port);
        let count = |port: u16| (port, Some(state.counts.get(&port).copied().unwrap_or(0).into()));
        let ports: BTreeMap<_, _> = opened.chain(changed).map(count).collect();
        let kind = if ports.is_empty() { AnswerKind::Unchanged } else { AnswerKind::Changes };
        let revision = revision(last);
        let statement = Statement { revision, complete: false, healthy: true, ports, edge_tunnel: None };
        Some((kind, serde_json::to_string(&statement).ok()?))
    }

    fn last_change(&self, state: &NodeState) -> u64 {
        let opened = self.ports.last().map_or(0, |(_, change)| *change);
        state.changes.last().map_or(0, |(change, _)| *change).max(opened)
    }

    fn complete(&self, state: &NodeState, last: u64) -> String {
        let mut ports = self.zeros.trim_end_matches(',').to_owned();
        for (port, count) in &state.counts {
            if let Ok(at) = self.ports.binary_search_by_key(port, |(port, _)| *port) {
                let digit = (at + 1) * ENTRY - 2;
                ports.replace_range(digit..=digit, &count.to_string());
            }
        }
        let revision = revision(last);
        format!(r#"{{"revision":"{revision}","complete":true,"healthy":true,"ports":{{{ports}}}}}"#)
    }
}

fn revision(change: u64) -> String {
    format!("{ORIGIN}{change}-true")
}

fn known(revision: &str) -> Option<u64> {
    revision.strip_prefix(ORIGIN)?.strip_suffix("-true")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(stated: &Stated, node: u32, after: Option<&str>) -> (AnswerKind, Statement) {
        let (kind, body) = stated.answer(node, after).unwrap();
        let statement: Statement = serde_json::from_str(&body).unwrap();
        assert_eq!(body, serde_json::to_string(&statement).unwrap(), "the form is the agent's");
        (kind, statement)
    }

    #[test]
    fn complete_statement_lists_all_ports() {
        let mut stated = Stated::new(2);
        assert_eq!(parsed(&stated, 0, None).1.ports, BTreeMap::new());
        for port in 20_000..20_012 {
            stated.open(port);
        }
        stated.set(1, 20_000, 1);
        stated.set(1, 20_009, 2);
        stated.set(1, 20_011, 3);
        let (kind, statement) = parsed(&stated, 1, None);
        assert_eq!((kind, statement.complete, statement.ports.len()), (AnswerKind::Complete, true, 12));
        let endpoints: Vec<_> = statement.ports.into_iter().filter(|(_, count)| *count != Some(0)).collect();
        assert_eq!(endpoints, [(20_000, Some(1)), (20_009, Some(2)), (20_011, Some(3))]);
        assert!(parsed(&stated, 0, None).1.ports.values().all(|count| *count == Some(0)));
        assert_eq!(stated.answer(2, None), None);
    }

    #[test]
    fn later_answers_have_what_has_changed() {
        let mut stated = Stated::new(2);
        stated.open(20_000);
        stated.open(20_001);
        let first = parsed(&stated, 0, None).1.revision;
        assert_eq!(parsed(&stated, 0, Some(&first)).0, AnswerKind::Unchanged);
        stated.set(1, 20_000, 1);
        assert_eq!(parsed(&stated, 0, Some(&first)).0, AnswerKind::Unchanged, "another node's");
        stated.set(0, 20_000, 1);
        stated.open(20_002);
        let (kind, statement) = parsed(&stated, 0, Some(&first));
        assert_eq!((kind, statement.complete), (AnswerKind::Changes, false));
        assert_eq!(statement.ports, [(20_000, Some(1)), (20_002, Some(0))].into());
        assert_eq!(parsed(&stated, 0, Some(&statement.revision)).0, AnswerKind::Unchanged);
        stated.set(0, 20_000, 0);
        assert_eq!(parsed(&stated, 0, Some(&statement.revision)).1.ports, [(20_000, Some(0))].into());
        for unknown in ["", "x", "00000000005ca1e5-4-900-true"] {
            assert_eq!(parsed(&stated, 0, Some(unknown)).0, AnswerKind::Complete, "{unknown}");
        }
    }
}
