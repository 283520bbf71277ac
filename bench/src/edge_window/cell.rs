// SPDX-License-Identifier: Apache-2.0
//! What is measured: a Service with two nodes for each signal, interval and threshold. Pure.

use std::collections::BTreeSet;
use std::time::Duration;

/// What tells the edge that a node has lost its endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub(super) enum Signal {
    /// `health-check` steering, nodes with an agent: the node says so at once
    Statements,
    /// `health-check` steering, nodes with kube-proxy: failed probes of the Service's health-check node port
    Probes,
    /// `fused` steering, nodes with kube-proxy: the controller writes which nodes have an endpoint, and the edge probes them
    Fused,
    /// `api` steering: the controller writes the targets
    Api,
}

impl Signal {
    /// All, in this order: stating nodes come first.
    pub(super) const ALL: [Self; 4] = [Self::Statements, Self::Probes, Self::Fused, Self::Api];

    /// In tables and plots.
    pub(super) fn title(self) -> &'static str {
        match self {
            Self::Statements => "health-check, statements",
            Self::Probes => "health-check, probes",
            Self::Fused => "fused, probes",
            Self::Api => "api",
        }
    }

    /// The value of the annotation.
    pub(super) fn steering(self) -> &'static str {
        match self {
            Self::Statements | Self::Probes => "health-check",
            Self::Fused => "fused",
            Self::Api => "api",
        }
    }

    /// Whether time is counted by failed probes.
    pub(super) fn is_by_probes(self) -> bool {
        self == Self::Probes
    }
}

/// One Service and its two nodes, one of which has an endpoint at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Cell {
    pub(super) signal: Signal,
    pub(super) interval: Duration,
    pub(super) threshold: u32,
    /// Its number.
    pub(super) service: u32,
}

impl Cell {
    /// Its nodes. The first has the endpoint at the beginning.
    pub(super) fn nodes(self) -> [u32; 2] {
        nodes_of(self.service)
    }

    /// Time between two datagrams. Where probes tell, a hundredth of the interval is seen.
    pub(super) fn gap(self) -> Duration {
        (self.interval / 100).clamp(FAST, SLOW)
    }

    /// The same while a move is measured.
    pub(super) fn measured_gap(self) -> Duration {
        if self.signal.is_by_probes() { self.gap() } else { FAST }
    }
}

/// The nodes of a Service.
pub(super) fn nodes_of(service: u32) -> [u32; 2] {
    [service * 2, service * 2 + 1]
}

const FAST: Duration = Duration::from_millis(1);
const SLOW: Duration = Duration::from_millis(20);

/// All cells, or those of some signals.
pub(super) fn all(only: &[Signal], intervals: &[Duration], thresholds: &[u32]) -> Vec<Cell> {
    let signals = Signal::ALL.into_iter().filter(|signal| only.is_empty() || only.contains(signal));
    let shapes = signals.flat_map(|signal| {
        intervals
            .iter()
            .flat_map(move |interval| thresholds.iter().map(move |threshold| (signal, *interval, *threshold)))
    });
    let cell = |(service, (signal, interval, threshold))| Cell { signal, interval, threshold, service };
    (0..).zip(shapes).map(cell).collect()
}

/// The number of nodes.
pub(super) fn nodes(cells: &[Cell]) -> u32 {
    u32::try_from(cells.len() * 2).unwrap_or(u32::MAX)
}

/// The number of nodes that state: the first ones.
pub(super) fn stating_nodes(cells: &[Cell]) -> u32 {
    let stating: Vec<_> = cells.iter().copied().filter(|cell| cell.signal == Signal::Statements).collect();
    nodes(&stating)
}

/// Where the endpoints of the Services are that nodes state.
pub(super) fn first_endpoints(cells: &[Cell]) -> Vec<BTreeSet<u32>> {
    let stating = cells.iter().filter(|cell| cell.signal == Signal::Statements);
    stating.map(|cell| BTreeSet::from([cell.nodes()[0]])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stating_nodes_come_first_and_no_node_is_shared() {
        let intervals = [100, 1000].map(Duration::from_millis);
        let cells = all(&[], &intervals, &[1, 2, 3]);
        assert_eq!((cells.len(), nodes(&cells), stating_nodes(&cells)), (24, 48, 12));
        let used: BTreeSet<_> = cells.iter().flat_map(|cell| cell.nodes()).collect();
        assert_eq!(used, (0..48).collect());
        assert!(
            cells.iter().all(|cell| (cell.signal == Signal::Statements) == (cell.nodes()[1] < 12)),
            "{cells:?}"
        );
        assert_eq!(first_endpoints(&cells)[5], [10].into());
        assert_eq!(stating_nodes(&all(&[Signal::Api], &intervals, &[1])), 0);
    }

    #[test]
    fn a_hundredth_of_the_interval_is_seen_within_bounds() {
        let gap = |signal, milliseconds| {
            let interval = Duration::from_millis(milliseconds);
            let cell = Cell { signal, interval, threshold: 1, service: 0 };
            (cell.gap().as_millis(), cell.measured_gap().as_millis())
        };
        assert_eq!(gap(Signal::Probes, 100), (1, 1));
        assert_eq!(gap(Signal::Probes, 500), (5, 5));
        assert_eq!(gap(Signal::Probes, 10_000), (20, 20));
        assert_eq!(gap(Signal::Statements, 10_000), (20, 1));
    }
}
