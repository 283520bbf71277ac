// SPDX-License-Identifier: Apache-2.0
//! What other programs do to nftables: has their changes of the agent's tables repaired, and reports them and tables that harm
//! Services, by name. Called by the loop.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Instant;

use ipnet::IpNet;
use steerage_process::duration;
use steerage_watch::events::{EventLimit, Notice, Severity, Subject};

use super::{Agent, LoopState};
use crate::foreign::{ForeignChain, ForeignChange, Interference, Reason, interferences};
use crate::kernel::Noticed;
use crate::plan::Frontend;
use crate::rules::KernelState;

/// What other programs did.
#[derive(Debug, Default)]
pub(super) struct ForeignState {
    unrepaired: Option<Unrepaired>,
    /// Clients outside source ranges may have been admitted since the last sweep that ends their connections.
    may_have_admitted: bool,
    /// Tables as they were reported last.
    interferences: BTreeSet<Interference>,
    limit: EventLimit,
}

/// Changes of the agent's tables that are not repaired, or not compared with everything yet.
#[derive(Debug)]
struct Unrepaired {
    change: ForeignChange,
    noticed: Instant,
    /// Elements that were written to repair it so far.
    elements: usize,
}

/// What the event says of a change; `None` if no change is known, only that notifications were lost. `has_ranges`: Services have source
/// ranges.
fn note(change: &ForeignChange, has_ranges: bool) -> Option<String> {
    let tables = change.tables();
    if tables.is_empty() {
        return None;
    }
    let (by, deleted) = (change.authors(), tables.values().any(|damage| damage.is_deleted));
    let advice = if deleted { ": `nft flush ruleset` deletes tables of all programs" } else { "" };
    let admitted = admitted(change, has_ranges);
    Some(format!(
        "Another program changed the agent's nftables tables: {change}, by {by}. They are repaired; until then packets to Services were \
         lost{admitted}. Find out why it does so{advice}."
    ))
}

/// What a change may have meant for clients that no Service admits.
fn admitted(change: &ForeignChange, has_ranges: bool) -> &'static str {
    if has_ranges && change.may_admit() {
        ", and clients outside loadBalancerSourceRanges may have been admitted. Their connections are ended"
    } else {
        ""
    }
}

/// What the event says of what nobody saw change. `has_ranges`: Services have source ranges.
fn note_of_found(found: &ForeignChange, has_ranges: bool) -> Option<String> {
    let has_rules = found.tables().values().any(|damage| !damage.chains.is_empty());
    let (what, consequence) = if has_rules {
        ("replaced rules while no agent ran", "may have been lost")
    } else {
        (
            "changed lists of endpoints while no agent watched them, or an agent was killed while it repaired them",
            "were lost, or reached endpoints that are gone",
        )
    };
    let admitted = admitted(found, has_ranges);
    let told = || {
        format!(
            "The agent's nftables tables were not what was written last: {found}. Another program {what}. They are repaired; until then \
             packets to Services {consequence}{admitted}."
        )
    };
    (!found.is_empty()).then(told)
}

impl Agent {
    pub(super) fn take_noticed(&mut self, state: &mut LoopState, noticed: Noticed) {
        match noticed {
            Noticed::Nothing => {}
            Noticed::Chains(chains) => self.report_interferences(state, &chains),
            Noticed::Change(change) => {
                self.metrics.foreign_changes.count(&change);
                state.foreign.may_have_admitted |= change.may_admit();
                if let Some(note) = note(&change, !self.ruleset.source_ranges().is_empty()) {
                    let (changed, by) = (change.to_string(), change.authors());
                    tracing::warn!(changed, by, "tables changed by another program; repairing them");
                    self.publish(state, "TablesChanged", "Repair", note);
                } else {
                    tracing::warn!("notifications of changes of the tables were lost; comparing the tables");
                }
                let elements = state.foreign.unrepaired.take().map_or(0, |before| before.elements);
                state.foreign.unrepaired = Some(Unrepaired { change, noticed: Instant::now(), elements });
                // A write that has just failed failed for this.
                state.retry = None;
            }
        }
    }

    /// Repairs at once what is known to be damaged. The next write compares everything, but for long lists if that worked.
    pub(super) fn repair_first(&mut self, state: &mut LoopState) -> bool {
        let Some(Unrepaired { change, elements: repaired, .. }) = &mut state.foreign.unrepaired else {
            return false;
        };
        // A deleted table is loaded by the next write, and what passes until then can only be cleaned up after it.
        let is_partial =
            change.damage().is_some_and(|damage| damage.values().all(|damage| !damage.is_deleted));
        let mut is_repaired = false;
        // After a failed write it is not known what the tables held.
        if is_partial && self.dataplane.state() == KernelState::InSync {
            let result =
                tokio::task::block_in_place(|| self.dataplane.repair_first(&mut self.ruleset, change));
            match result {
                Ok(elements) => {
                    *repaired += elements;
                    is_repaired = true;
                    tracing::debug!(elements, "damaged parts of the tables repaired; comparing the tables");
                    // Connections that passed meanwhile need not wait for that.
                    let mut stale = self.ruleset.take_all_stale_flows();
                    if state.foreign.may_have_admitted {
                        stale.sources = self.ruleset.source_ranges();
                    }
                    self.cleaner.clean(stale);
                }
                Err(error) => {
                    tracing::debug!(%error, "damaged parts of the tables not repaired; comparing everything");
                }
            }
        }
        self.dataplane.foreign_change_noticed(is_repaired);
        true
    }

    /// Reports that a change is repaired: everything was compared, and so many elements were written then.
    pub(super) fn report_repaired(state: &mut LoopState, elements: usize) {
        if let Some(Unrepaired { change, noticed, elements: repaired }) = state.foreign.unrepaired.take() {
            let (elements, took) = (repaired + elements, duration::rounded(noticed.elapsed()));
            if elements == 0 && change.tables().is_empty() {
                return tracing::info!(%took, "tables compared after lost notifications; nothing to repair");
            }
            let changed = change.to_string();
            tracing::info!(changed, elements, %took, "tables repaired after another program changed them");
        }
    }

    /// Reports and counts rules and lists that were not what was written last. Who changed them is not known: see decision 37.
    pub(super) fn report_found(&mut self, state: &mut LoopState) {
        let found = self.dataplane.take_found();
        if let Some(note) = note_of_found(&found, !self.ruleset.source_ranges().is_empty()) {
            let changed = found.to_string();
            tracing::warn!(
                changed,
                "tables are not what was written last: another program changed them unseen, or a write was cut short; repairing them"
            );
            self.metrics.foreign_changes.count(&found);
            state.foreign.may_have_admitted |= found.may_admit();
            self.publish(state, "TablesChanged", "Repair", note);
        }
    }

    /// The source ranges of which connections from outside are to be ended, after everything was compared.
    pub(super) fn take_ranges_to_sweep(&self, state: &mut LoopState) -> BTreeMap<Frontend, Arc<[IpNet]>> {
        let may = std::mem::take(&mut state.foreign.may_have_admitted);
        if may { self.ruleset.source_ranges() } else { BTreeMap::new() }
    }

    fn report_interferences(&mut self, state: &mut LoopState, chains: &[ForeignChain]) {
        let found = interferences(chains, self.settings.kube_proxy_replacement);
        self.metrics.foreign_tables.set(&found);
        let known = std::mem::replace(&mut state.foreign.interferences, found.clone());
        for interference in found.difference(&known) {
            let Interference { reason, table, chain } = interference;
            let (chain, hook) = match chain {
                Some((chain, hook)) => (Some(chain), Some(hook)),
                None => (None, None),
            };
            match reason {
                Reason::DropsByDefault => tracing::warn!(
                    table,
                    chain,
                    hook,
                    "table of another program drops what its rules do not accept; they have to accept traffic to pods and node ports"
                ),
                Reason::KubeProxy => tracing::warn!(
                    table,
                    "table of kube-proxy, which this agent replaces: its old rules go on translating and dropping; end kube-proxy, and \
                     run kube-proxy --cleanup"
                ),
                Reason::Iptables => {
                    tracing::info!(table, "table of iptables: its rules see the packets of Services, too");
                }
            }
            if interference.is_harmful() {
                self.publish(state, "ForeignTable", "Watch", format!("On this node, {interference}."));
            }
        }
        for Interference { table, reason, .. } in known.difference(&found) {
            tracing::info!(table, reason = reason.name(), "table of another program no longer reported");
        }
    }

    fn publish(&self, state: &mut LoopState, reason: &'static str, action: &'static str, note: String) {
        let node = state.planner.index.node(&self.settings.node);
        if let Some(node) = node.filter(|_| state.foreign.limit.take(tokio::time::Instant::now())) {
            let subject = Subject::node(node);
            self.recorder.publish(Notice { subject, severity: Severity::Warning, reason, action, note });
        }
    }
}

#[cfg(test)]
mod tests {
    use steerage_nft::{Change, Family, ObjectKind, Table};

    use super::*;

    #[test]
    fn note_tells_rules_from_lists_that_nobody_saw_change() {
        assert_eq!(note_of_found(&ForeignChange::default(), true), None);
        let mut found = ForeignChange::default();
        found.add_elements(Table::new(Family::Ip, "steerage"), "endpoints".to_owned(), 1);
        let lists = note_of_found(&found, true).expect("a change");
        assert!(
            lists.contains("1 element of endpoints") && lists.contains("while no agent watched"),
            "{lists}"
        );
        found.add_rules(Table::new(Family::Ip6, "steerage"), "services".to_owned(), 2);
        for has_ranges in [false, true] {
            let rules = note_of_found(&found, has_ranges).expect("a change");
            assert!(rules.contains("2 rules of services") && rules.contains("while no agent ran"), "{rules}");
            assert_eq!(rules.contains("Their connections are ended"), has_ranges, "{rules}");
        }
    }

    #[test]
    fn note_names_a_flush_only_where_a_table_is_gone_and_nobody_for_lost_notifications() {
        assert_eq!(note(&ForeignChange::unknown(), true), None);
        let changed = |object, deleted| {
            let mut change = ForeignChange::default();
            let name = Some("slots-3".to_owned());
            change.add(Change {
                port: 1,
                table: Table::new(Family::Ip, "steerage"),
                object,
                name,
                deleted,
                is_dormant: false,
                base: None,
            });
            note(&change, true).expect("a change")
        };
        let elements = changed(ObjectKind::Elements, true);
        assert!(elements.contains("slots-3") && elements.ends_with("Find out why it does so."), "{elements}");
        let rules = changed(ObjectKind::Rule, true);
        assert!(
            rules.contains("clients outside loadBalancerSourceRanges may have been admitted. Their"),
            "{rules}"
        );
        let table = changed(ObjectKind::Table, true);
        assert!(table.contains("deleted") && table.contains("`nft flush ruleset`"), "{table}");
    }
}
