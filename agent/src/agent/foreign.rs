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
    /// Changes of the agent's tables that are not repaired.
    change: Option<(ForeignChange, Instant)>,
    /// Tables as they were reported last.
    interferences: BTreeSet<Interference>,
    limit: EventLimit,
}

impl Agent {
    pub(super) fn take_noticed(&mut self, state: &mut LoopState, noticed: Noticed) {
        match noticed {
            Noticed::Nothing => {}
            Noticed::Chains(chains) => self.report_interferences(state, &chains),
            Noticed::Change(change) => {
                let (changed, by) = (change.to_string(), change.authors());
                tracing::warn!(changed, by, "tables changed by another program; repairing them");
                self.metrics.foreign_changes.count(&change);
                let note = format!(
                    "Another program changed the agent's nftables tables: {changed}, by {by}. They are repaired; until then packets to \
                     Services were lost. Find out why it does so: `nft flush ruleset` deletes tables of all programs."
                );
                self.publish(state, "TablesChanged", "Repair", note);
                state.foreign.change = Some((change, Instant::now()));
                // A write that has just failed failed for this.
                state.retry = None;
            }
        }
    }

    /// Repairs at once what is known to be damaged. The next write compares everything.
    pub(super) fn repair_first(&mut self, state: &LoopState) -> bool {
        let Some((change, _)) = &state.foreign.change else { return false };
        // A deleted table is loaded by the next write, and what passes until then can only be cleaned up after it.
        let is_partial =
            change.damage().is_some_and(|damage| damage.values().all(|damage| !damage.is_deleted));
        // After a failed write it is not known what the tables held.
        if is_partial && self.dataplane.state() == KernelState::InSync {
            let repaired =
                tokio::task::block_in_place(|| self.dataplane.repair_first(&mut self.ruleset, change));
            match repaired {
                Ok(elements) => {
                    tracing::debug!(elements, "damaged parts of the tables repaired; comparing everything");
                    // Connections that passed meanwhile need not wait for that.
                    self.cleaner.clean(self.ruleset.take_all_stale_flows());
                }
                Err(error) => {
                    tracing::debug!(%error, "damaged parts of the tables not repaired; comparing everything");
                }
            }
        }
        self.dataplane.foreign_change_noticed();
        true
    }

    /// Reports that a change is repaired: everything was compared.
    pub(super) fn report_repaired(state: &mut LoopState, elements: usize) {
        if let Some((_, noticed)) = state.foreign.change.take() {
            let took = duration::rounded(noticed.elapsed());
            tracing::info!(elements, %took, "tables repaired after another program changed them");
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
