// SPDX-License-Identifier: Apache-2.0
//! What the provider remembers of a Service. No I/O.

use std::net::IpAddr;
use std::time::Duration;

use steerage_model::Ingress;
use steerage_provider_api::Owner;
use steerage_provider_cloud::Refusals;
use tokio::time::Instant;

use crate::desired::Desired;
use crate::step::Step;
use crate::types::{Balancer, Listener, Pool};

/// Wait after the first load balancer in `ERROR` before another is remade; it doubles with each.
const FIRST_REMAKE_WAIT: Duration = Duration::from_secs(10);
const LONGEST_REMAKE_WAIT: Duration = Duration::from_mins(10);
/// The longest time between two questions whether a change is complete.
const LONGEST_POLL: Duration = Duration::from_secs(5);

/// A load balancer with everything in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tree {
    pub(crate) balancer: Balancer,
    pub(crate) listeners: Vec<Listener>,
    pub(crate) pools: Vec<Pool>,
}

impl Tree {
    /// What a change makes of it, as far as that is certain. False if it must be read again.
    pub(crate) fn note(&mut self, step: &Step) -> bool {
        let Step::SetMembers { pool, members, .. } = step else { return false };
        let Some(changed) = self.pools.iter_mut().find(|known| known.id == *pool) else { return false };
        changed.members.clone_from(members);
        true
    }
}

/// What is complete, and what was answered then.
#[derive(Clone, Debug)]
pub(crate) struct Complete {
    pub(crate) owner: Owner,
    pub(crate) wanted: Desired,
    pub(crate) ingress: Vec<Ingress>,
}

/// Everything that is remembered of a Service.
#[derive(Debug, Default)]
pub(crate) struct ServiceState {
    /// The owner's load balancer as it was read last, with the changes since then.
    pub(crate) tree: Option<(Owner, Tree)>,
    /// Whether all of it was read since the last complete change.
    pub(crate) is_verified: bool,
    /// When a change was sent whose end is not known.
    pub(crate) changing: Option<Instant>,
    pub(crate) complete: Option<Complete>,
    /// Members that Octavia refuses.
    pub(crate) refused: Refusals<IpAddr>,
    /// Load balancers that were remade one after the other, and until when the next one waits.
    remade: (u32, Option<Instant>),
    /// The VIP of a load balancer that is remade.
    pub(crate) kept_vip: Option<IpAddr>,
    /// A VIP that the subnet does not give any more.
    pub(crate) refused_vip: Option<IpAddr>,
}

impl ServiceState {
    /// The owner's load balancer, if it is known.
    pub(crate) fn known(&self, owner: &Owner) -> Option<&Tree> {
        self.tree.as_ref().filter(|(of, _)| of == owner).map(|(_, tree)| tree)
    }

    /// Something may have changed that is not known: all is read again.
    pub(crate) fn forget(&mut self) {
        (self.tree, self.is_verified, self.changing, self.complete) = (None, false, None, None);
    }

    /// A change was sent.
    pub(crate) fn sent(&mut self) {
        self.changing = Some(Instant::now());
        self.complete = None;
    }

    /// When to ask whether the last change is complete: soon at first.
    pub(crate) fn poll(&self, least: Duration) -> Duration {
        let passed = self.changing.map_or(Duration::ZERO, |at| at.elapsed());
        (passed / 2).clamp(least, LONGEST_POLL.max(least))
    }

    /// Whether a load balancer in `ERROR` may be remade now.
    pub(crate) fn may_remake(&self) -> bool {
        self.remade.1.is_none_or(|until| Instant::now() >= until)
    }

    /// It is remade.
    pub(crate) fn note_remade(&mut self) {
        let (count, _) = self.remade;
        let wait = FIRST_REMAKE_WAIT.saturating_mul(1 << count.min(10)).min(LONGEST_REMAKE_WAIT);
        self.remade = (count + 1, Some(Instant::now() + wait));
    }

    /// The load balancer works.
    pub(crate) fn note_working(&mut self) {
        (self.remade, self.kept_vip) = ((0, None), None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn broken_load_balancers_are_remade_ever_more_slowly() {
        let mut state = ServiceState::default();
        let mut waits = Vec::new();
        for _ in 0..8 {
            assert!(state.may_remake());
            state.note_remade();
            let start = Instant::now();
            while !state.may_remake() {
                tokio::time::advance(Duration::from_secs(10)).await;
            }
            waits.push(start.elapsed().as_secs());
        }
        assert_eq!(waits, [10, 20, 40, 80, 160, 320, 600, 600]);
        state.note_working();
        state.note_remade();
        tokio::time::advance(Duration::from_secs(10)).await;
        assert!(state.may_remake());
    }

    #[tokio::test(start_paused = true)]
    async fn slow_changes_are_asked_for_less_often() {
        let mut state = ServiceState::default();
        let least = Duration::from_millis(500);
        assert_eq!(state.poll(least), least);
        state.sent();
        tokio::time::advance(Duration::from_secs(4)).await;
        assert_eq!(state.poll(least), Duration::from_secs(2));
        tokio::time::advance(Duration::from_mins(4)).await;
        assert_eq!(state.poll(least), Duration::from_secs(5));
    }
}
