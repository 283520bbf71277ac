// SPDX-License-Identifier: Apache-2.0
//! Counts statements: what load balancers ask of the node's health-check ports, and whether it was news.

use steerage_process::prometheus_client::metrics::counter::Counter;
use steerage_process::prometheus_client::metrics::family::Family;
use steerage_process::prometheus_client::registry::Registry;

/// What a statement has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StatementKind {
    /// All ports.
    Complete,
    /// What has changed.
    Changes,
    /// Nothing: nothing changed while the request waited.
    Unchanged,
}

impl StatementKind {
    const ALL: [Self; 3] = [Self::Complete, Self::Changes, Self::Unchanged];

    fn name(self) -> &'static str {
        match self {
            Self::Complete => "complete",
            Self::Changes => "changes",
            Self::Unchanged => "unchanged",
        }
    }
}

/// Statements, by kind. All series exist from the start. Clones share them.
#[derive(Debug, Clone)]
pub struct StatementMetrics(Family<[(&'static str, &'static str); 1], Counter>);

impl Default for StatementMetrics {
    fn default() -> Self {
        let statements = Self(Family::default());
        for kind in StatementKind::ALL {
            drop(statements.of_kind(kind));
        }
        statements
    }
}

impl StatementMetrics {
    /// Counts a statement.
    pub fn count(&self, kind: StatementKind) {
        self.of_kind(kind).inc();
    }

    /// Registers it.
    pub fn register(self, registry: &mut Registry) {
        let help = "Statements that were sent, by kind: complete (all health-check node ports), changes, or unchanged (nothing changed while the request waited)";
        registry.register("statements", help, self.0);
    }

    fn of_kind(&self, kind: StatementKind) -> Counter {
        self.0.get_or_create(&[("kind", kind.name())]).clone()
    }

    #[cfg(test)]
    pub(crate) fn counts(&self) -> [u64; 3] {
        StatementKind::ALL.map(|kind| self.of_kind(kind).get())
    }
}
