// SPDX-License-Identifier: Apache-2.0
//! What the provider remembers of a Service. No I/O.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use steerage_model::Ingress;
use steerage_provider_api::Owner;
use steerage_provider_cloud::Refusals;
use tokio::time::Instant;

use crate::denied::Denied;
use crate::desired::Desired;
use crate::object::Id;
use crate::observe::Inventory;
use crate::step::Step;
use crate::tree::Tree;

/// Where only targets follow, all is read again after this time.
const OLD: Duration = Duration::from_mins(10);
/// Only the resource of an operation waits longer for it.
pub(crate) const STUCK: Duration = Duration::from_mins(5);

/// A change whose operation has not ended.
#[derive(Clone, Debug)]
pub(crate) struct Pending {
    pub(crate) owner: Owner,
    pub(crate) step: Step,
    pub(crate) is_shared: bool,
    /// The operation's path.
    pub(crate) operation: String,
    pub(crate) since: Instant,
}

impl Pending {
    /// Whether it runs for so long that only its own resource waits for it.
    pub(crate) fn is_stuck(&self) -> bool {
        self.since.elapsed() >= STUCK
    }
}

/// What is complete, and what was answered then.
#[derive(Clone, Debug)]
pub(crate) struct Complete {
    pub(crate) wanted: Desired,
    pub(crate) ingress: Vec<Ingress>,
}

/// Everything that is remembered of a Service.
#[derive(Debug, Default)]
pub(crate) struct ServiceState {
    /// The owner's load balancer as it was read last, with the changes since then.
    pub(crate) tree: Option<(Owner, Tree)>,
    /// What is left of earlier Services of the name.
    pub(crate) earlier: Vec<(Owner, Tree)>,
    /// Whether all of it was read since the last change of which nothing is known.
    pub(crate) is_verified: bool,
    /// Whether it was read, or changed, by this process.
    pub(crate) is_seen: bool,
    read_at: Option<Instant>,
    /// When endpoints were seen last, or attached.
    looked_at: Option<Instant>,
    /// Shared resources that were looked for.
    pub(crate) looked_for: BTreeSet<Id>,
    pub(crate) pending: Vec<Pending>,
    /// Whether what is known is of the list for first looks.
    pub(crate) is_first_look: bool,
    /// During a deletion: when nothing was known to be left but groups, which is to be verified.
    pub(crate) unverified_since: Option<Instant>,
    /// During a deletion: a list in which nothing was left but groups.
    pub(crate) last_look: Option<Arc<Inventory>>,
    pub(crate) complete: Option<Complete>,
    /// The addresses that were returned while those that they replace still served.
    pub(crate) announced: Option<Vec<Ingress>>,
    /// Changes of firewall rules that the credentials may not make.
    pub(crate) denied: Denied,
    /// Whose load balancer is being deleted.
    deleting: Option<Owner>,
    /// The nodes of VMs.
    pub(crate) nodes: BTreeMap<String, String>,
    /// VMs that GCE refuses as endpoints.
    pub(crate) refused: Refusals<String>,
}

impl ServiceState {
    /// The owner's load balancer, if all of it is known.
    pub(crate) fn known(&self, owner: &Owner) -> Option<&Tree> {
        let known = self.tree.as_ref().filter(|(of, _)| of == owner && self.is_verified);
        known.map(|(_, tree)| tree)
    }

    /// The tree of an owner, whether it is the present or an earlier one.
    pub(crate) fn tree_of(&mut self, owner: &Owner) -> Option<&mut Tree> {
        let all = self.tree.iter_mut().chain(&mut self.earlier);
        all.into_iter().find(|(of, _)| of == owner).map(|(_, tree)| tree)
    }

    /// All was read.
    pub(crate) fn note_read(&mut self, owner: &Owner, tree: Tree, earlier: Vec<(Owner, Tree)>) {
        (self.tree, self.earlier) = (Some((owner.clone(), tree)), earlier);
        (self.is_verified, self.is_seen, self.read_at) = (true, true, Some(Instant::now()));
        self.is_first_look = false;
        self.looked_for.clear();
        self.end_deletion();
    }

    /// Endpoints were in place then.
    pub(crate) fn note_looked(&mut self, at: Instant) {
        self.looked_at = self.looked_at.max(Some(at));
    }

    /// Whether endpoints were seen within this time.
    pub(crate) fn has_looked_within(&self, time: Duration) -> bool {
        self.looked_at.is_some_and(|at| at.elapsed() < time)
    }

    /// Whether it was read so long ago that somebody may have changed it.
    pub(crate) fn is_old(&self) -> bool {
        self.read_at.is_none_or(|at| at.elapsed() >= OLD)
    }

    /// Something may have changed that is not known: all is read again. Operations are still followed.
    pub(crate) fn forget(&mut self) {
        (self.tree, self.is_verified, self.complete) = (None, false, None);
        self.earlier.clear();
        self.looked_for.clear();
        self.is_first_look = false;
        self.end_deletion();
    }

    /// What a deletion found does not count any more.
    pub(crate) fn end_deletion(&mut self) {
        (self.unverified_since, self.last_look) = (None, None);
    }

    /// Changes are about to be sent. The call may be abandoned before their answers come.
    pub(crate) fn begin(&mut self) {
        (self.is_verified, self.is_seen, self.complete) = (false, true, None);
    }

    pub(crate) fn note_pending(&mut self, pending: Pending) {
        self.pending.push(pending);
    }

    /// Whether all that has not ended is left alone.
    pub(crate) fn may_continue(&self) -> bool {
        self.pending.iter().all(Pending::is_stuck)
    }

    /// Whether a change of the resource has not ended.
    pub(crate) fn is_changing(&self, id: &Id) -> bool {
        self.pending.iter().any(|pending| pending.step.id() == id)
    }

    /// The owner's load balancer is to be deleted: what was refused before is tried once more.
    pub(crate) fn note_deletion(&mut self, owner: &Owner) {
        if self.deleting.as_ref() != Some(owner) {
            self.deleting = Some(owner.clone());
            self.denied.clear();
        }
    }

    /// A Service of the name is to have a load balancer: what was refused of a deletion before is tried once more, as far as it is wanted.
    pub(crate) fn note_wanted(&mut self) {
        if self.deleting.take().is_some() {
            self.denied.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use steerage_model::Key;

    use super::*;
    use crate::object::Kind;

    #[tokio::test(start_paused = true)]
    async fn only_the_resource_of_a_stuck_operation_waits() {
        let mut state = ServiceState::default();
        let owner = Owner { service: Key::new("a", "b"), uid: "u".to_owned() };
        let step = Step::Delete { id: Id::new(Kind::Address, "x") };
        state.note_pending(Pending {
            owner,
            step,
            is_shared: false,
            operation: String::new(),
            since: Instant::now(),
        });
        tokio::time::advance(Duration::from_mins(4)).await;
        assert!(!state.may_continue());
        tokio::time::advance(STUCK).await;
        assert!(state.may_continue() && state.is_changing(&Id::new(Kind::Address, "x")));
    }
}
