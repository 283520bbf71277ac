// SPDX-License-Identifier: Apache-2.0
//! What other programs do to nftables. All series exist from the start, so that their first increase is seen.

use std::collections::BTreeSet;

use steerage_nft::{Family as TableFamily, Table};
use steerage_process::prometheus_client::metrics::counter::Counter;
use steerage_process::prometheus_client::metrics::family::Family;
use steerage_process::prometheus_client::metrics::gauge::Gauge;
use steerage_process::prometheus_client::registry::Registry;

use crate::foreign::{ChangeKind, ForeignChange, Interference, Reason};
use crate::rules::TABLE;

/// Label of changes of which the table is not known.
const ANY: &str = "any";

type ChangeLabels = [(&'static str, String); 2];
type ReasonLabel = [(&'static str, &'static str); 1];

/// Changes of the agent's tables by other programs, by table and kind. Clones share them.
#[derive(Debug, Clone)]
pub struct ForeignChanges(Family<ChangeLabels, Counter>);

impl Default for ForeignChanges {
    fn default() -> Self {
        let changes = Self(Family::default());
        for family in [TableFamily::Ip, TableFamily::Ip6] {
            let table = Table::new(family, TABLE);
            for kind in ChangeKind::ALL.into_iter().filter(|kind| *kind != ChangeKind::Unknown) {
                drop(changes.0.get_or_create(&labels(Some(&table), kind)));
            }
        }
        drop(changes.0.get_or_create(&labels(None, ChangeKind::Unknown)));
        changes
    }
}

impl ForeignChanges {
    /// Counts a change once for each table and kind.
    pub fn count(&self, change: &ForeignChange) {
        for (table, kind) in change.kinds() {
            self.0.get_or_create(&labels(table, kind)).inc();
        }
    }

    /// Registers it.
    pub fn register(self, registry: &mut Registry) {
        let help = "Changes of the agent's tables by other programs";
        registry.register("foreign_changes", help, self.0);
    }
}

fn labels(table: Option<&Table>, kind: ChangeKind) -> ChangeLabels {
    [("table", table.map_or_else(|| ANY.to_owned(), Table::to_string)), ("change", kind.name().to_owned())]
}

/// Tables of other programs that harm Services, or may, by reason. Clones share them.
#[derive(Debug, Clone)]
pub struct ForeignTables(Family<ReasonLabel, Gauge>);

impl Default for ForeignTables {
    fn default() -> Self {
        let tables = Self(Family::default());
        tables.set(&BTreeSet::new());
        tables
    }
}

impl ForeignTables {
    /// Sets the numbers of tables.
    pub fn set(&self, found: &BTreeSet<Interference>) {
        for reason in Reason::ALL {
            let of_reason = found.iter().filter(|interference| interference.reason == reason);
            let tables: BTreeSet<_> = of_reason.map(|interference| &interference.table).collect();
            let count = i64::try_from(tables.len()).unwrap_or(i64::MAX);
            self.0.get_or_create(&[("reason", reason.name())]).set(count);
        }
    }

    /// Registers it.
    pub fn register(self, registry: &mut Registry) {
        let help = "Tables of other programs that drop by default, that kube-proxy left, or that are of iptables; the log has their names";
        registry.register("foreign_tables", help, self.0);
    }
}

#[cfg(test)]
mod tests {
    use steerage_process::prometheus_client::encoding::text::encode;

    use super::*;

    #[test]
    fn series_exist_from_the_start_and_tables_are_counted_once() {
        let mut registry = Registry::default();
        let (changes, tables) = (ForeignChanges::default(), ForeignTables::default());
        changes.clone().register(&mut registry);
        tables.clone().register(&mut registry);
        let text = || {
            let mut text = String::new();
            encode(&mut text, &registry).expect("writable");
            text
        };
        assert_eq!(text().lines().filter(|line| line.ends_with(" 0")).count(), 7 + 3, "{}", text());
        changes.count(&ForeignChange::unknown());
        let chain = |name: &str| Interference {
            reason: Reason::DropsByDefault,
            table: "inet x".to_owned(),
            chain: Some((name.to_owned(), "forward")),
        };
        tables.set(&[chain("a"), chain("b")].into());
        for line in [
            "foreign_changes_total{table=\"any\",change=\"unknown\"} 1",
            "foreign_changes_total{table=\"ip6 steerage\",change=\"deleted\"} 0",
            "foreign_tables{reason=\"drops_by_default\"} 1",
            "foreign_tables{reason=\"kube_proxy\"} 0",
        ] {
            assert!(text().contains(line), "{line}: {}", text());
        }
    }
}
