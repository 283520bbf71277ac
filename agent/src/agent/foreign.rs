// SPDX-License-Identifier: Apache-2.0
//! What other programs do to nftables: has their changes of the agent's tables repaired, and reports them and tables that harm
//! Services, by name. Called by the loop.

use std::collections::BTreeSet;
use std::time::Instant;

use steerage_process::duration;
use steerage_watch::events::{EventLimit, Notice, Severity, Subject};

use super::{Agent, LoopState};
use crate::foreign::{ForeignChain, ForeignChange, Interference, Reason, interferences};
use crate::kernel::Noticed;
use crate::rules::KernelState;

/// What other programs did.
#[derive(Debug, Default)]
pub(super) struct ForeignState {
    unrepaired: Option<Unrepaired>,
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

/// What the event says of a change; `None` if no change is known, only that notifications were lost.
fn note(change: &ForeignChange) -> Option<String> {
    let tables = change.tables();
    if tables.is_empty() {
        return None;
    }
    let (by, deleted) = (change.authors(), tables.values().any(|damage| damage.is_deleted));
    let advice = if deleted { ": `nft flush ruleset` deletes tables of all programs" } else { "" };
    Some(format!(
        "Another program changed the agent's nftables tables: {change}, by {by}. They are repaired; until then packets to Services were \
         lost. Find out why it does so{advice}."
    ))
}

impl Agent {
    pub(super) fn take_noticed(&mut self, state: &mut LoopState, noticed: Noticed) {
        match noticed {
            Noticed::Nothing => {}
            Noticed::Chains(chains) => self.report_interferences(state, &chains),
            Noticed::Change(change) => {
                self.metrics.foreign_changes.count(&change);
                if let Some(note) = note(&change) {
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
                    self.cleaner.clean(self.ruleset.take_all_stale_flows());
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

    /// Reports and counts lists that were not what their digests said. Who changed them is not known: see decision 37.
    pub(super) fn report_wrong_lists(&mut self, state: &mut LoopState) {
        let found = self.dataplane.take_found();
        if !found.is_empty() {
            let changed = found.to_string();
            tracing::warn!(
                changed,
                "lists of endpoints are not what was written last: another program changed them unseen, or a write was cut short; repairing them"
            );
            self.metrics.foreign_changes.count(&found);
            let note = format!(
                "Lists of endpoints in the agent's nftables tables were not what was written last: {changed}. Another program changed \
                 them while no agent watched, or an agent was killed while it repaired them. They are repaired; until then packets to \
                 Services were lost, or reached endpoints that are gone."
            );
            self.publish(state, "TablesChanged", "Repair", note);
        }
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
    fn note_names_a_flush_only_where_a_table_is_gone_and_nobody_for_lost_notifications() {
        assert_eq!(note(&ForeignChange::unknown()), None);
        let changed = |object, deleted| {
            let mut change = ForeignChange::default();
            let name = Some("slots-3".to_owned());
            change.add(Change { port: 1, table: Table::new(Family::Ip, "steerage"), object, name, deleted });
            note(&change).expect("a change")
        };
        let elements = changed(ObjectKind::Elements, true);
        assert!(elements.contains("slots-3") && elements.ends_with("Find out why it does so."), "{elements}");
        let table = changed(ObjectKind::Table, true);
        assert!(table.contains("deleted") && table.contains("`nft flush ruleset`"), "{table}");
    }
}
