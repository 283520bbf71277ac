// SPDX-License-Identifier: Apache-2.0
//! What the provider remembers of a Service. No I/O.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde_json::Value;
use steerage_model::Ingress;
use steerage_provider_api::{Error, Owner};
use steerage_provider_cloud::Refusals;
use steerage_provider_cloud::shared::LoadBalancerUse;
use tokio::time::Instant;

use crate::adoption::is_part;
use crate::desired::Desired;
use crate::node_rules_sync::RulesState;
use crate::step::Step;
use crate::types::{Balancer, Listener, Monitor, Pool, Provisioning};

/// Wait after the first load balancer in `ERROR` before another is replaced; it doubles with each.
const FIRST_REPLACEMENT_WAIT: Duration = Duration::from_secs(10);
/// How long a load balancer in `ERROR` is kept while it serves.
pub(crate) const SERVING_REPLACEMENT_WAIT: Duration = Duration::from_mins(10);
/// For how long it must seem not to serve before it is replaced earlier.
const SERVING_DOUBT: Duration = Duration::from_secs(15);
const LONGEST_REPLACEMENT_WAIT: Duration = Duration::from_mins(10);
/// The longest time between two questions whether a change is complete, of one that takes as long as usual.
const LONGEST_POLL: Duration = Duration::from_secs(5);
/// The same of one that takes longer.
const LONGEST_STUCK_POLL: Duration = Duration::from_mins(1);
/// Where only targets follow, all is read again after this time.
const OLD: Duration = Duration::from_mins(10);
/// After a quota refused a change, those that need more members, or another pool, for a moment are not sent for this time.
const QUOTA_WAIT: Duration = Duration::from_mins(10);
/// Where one change follows the other, the parts are looked at after this time.
const LONGEST_UNCHECKED: Duration = Duration::from_mins(1);
/// A load balancer that is `PENDING` for this time is not changing: Octavia's worker is down, or died meanwhile.
const STUCK: Duration = Duration::from_mins(10);

/// A load balancer with everything in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tree {
    pub(crate) balancer: Balancer,
    pub(crate) listeners: Vec<Listener>,
    pub(crate) pools: Vec<Pool>,
}

impl Tree {
    /// One of which nothing is known yet.
    pub(crate) fn empty(balancer: Balancer) -> Self {
        Self { balancer, listeners: Vec::new(), pools: Vec::new() }
    }

    /// The load balancer that an answer to its creation shows, once it is complete.
    pub(crate) fn created(answer: &Value) -> Option<Self> {
        let shown = answer.get("loadbalancer")?;
        let mut pools = Vec::new();
        for pool in shown.get("pools")?.as_array()? {
            let mut read = read::<Pool>(pool)?;
            read.members = serde_json::from_value(pool.get("members")?.clone()).ok()?;
            for member in &mut read.members {
                member.provisioning_status = Provisioning::Active;
            }
            read.monitor = read_monitor(pool.get("healthmonitor")?);
            pools.push(read);
        }
        let listeners = shown.get("listeners")?.as_array()?.iter().map(read).collect::<Option<_>>()?;
        Some(Self { balancer: serde_json::from_value(shown.clone()).ok()?, listeners, pools })
    }

    /// The owner's parts that are in `ERROR`.
    pub(crate) fn failed(&self, owner: &Owner) -> BTreeSet<String> {
        let is_ours = |name: &str, tags: &[String]| is_part(owner, &self.balancer, name, tags);
        let mut failed = BTreeSet::new();
        let mut note = |status: Provisioning, what: String| {
            if status == Provisioning::Error {
                failed.insert(what);
            }
        };
        for listener in self.listeners.iter().filter(|listener| is_ours(&listener.name, &listener.tags)) {
            note(listener.provisioning_status, format!("listener {}", listener.name));
        }
        for pool in self.pools.iter().filter(|pool| is_ours(&pool.name, &pool.tags)) {
            note(pool.provisioning_status, format!("pool {}", pool.name));
            for member in &pool.members {
                note(member.provisioning_status, format!("members of pool {}", pool.name));
            }
            if let Some(monitor) = &pool.monitor {
                note(monitor.provisioning_status, format!("health monitor of pool {}", pool.name));
            }
        }
        failed
    }

    /// The parts of others.
    pub(crate) fn others(&self, owner: &Owner) -> BTreeSet<&str> {
        let is_other = |name: &str, tags: &[String]| !is_part(owner, &self.balancer, name, tags);
        let listeners = self.listeners.iter().filter(|part| is_other(&part.name, &part.tags));
        let pools = self.pools.iter().filter(|part| is_other(&part.name, &part.tags));
        listeners.map(|part| part.id.as_str()).chain(pools.map(|part| part.id.as_str())).collect()
    }

    /// What a change makes of it, which its answer shows. False if that is not certain.
    pub(crate) fn note(&mut self, step: &Step, answer: &Value) -> bool {
        self.noted(step, answer).is_some()
    }

    fn noted(&mut self, step: &Step, answer: &Value) -> Option<()> {
        let shown = |key: &str| answer.get(key);
        match step {
            Step::UpdateBalancer { .. } => {
                self.balancer = serde_json::from_value(shown("loadbalancer")?.clone()).ok()?;
            }
            Step::SetMembers { pool, members, .. } => {
                self.pools.iter_mut().find(|known| known.id == *pool)?.members.clone_from(members);
            }
            Step::CreatePool { .. } => self.pools.push(read(shown("pool")?)?),
            Step::UpdatePool { id, .. } => {
                let known = self.pools.iter_mut().find(|known| known.id == *id)?;
                let changed = read::<Pool>(shown("pool")?)?;
                let (members, monitor) = (std::mem::take(&mut known.members), known.monitor.take());
                *known = Pool { members, monitor, ..changed };
            }
            Step::DeletePool { id, .. } => self.pools.retain(|known| known.id != *id),
            Step::CreateMonitor { .. } | Step::UpdateMonitor { .. } => {
                let monitor = read_monitor(shown("healthmonitor")?)?;
                let of = monitor.pools.first()?.id.clone();
                self.pools.iter_mut().find(|known| known.id == of)?.monitor = Some(monitor);
            }
            Step::DeleteMonitor { id, .. } => {
                for known in &mut self.pools {
                    known.monitor.take_if(|monitor| monitor.id == *id);
                }
            }
            Step::CreateListener { .. } => self.listeners.push(read(shown("listener")?)?),
            Step::UpdateListener { id, .. } => {
                *self.listeners.iter_mut().find(|known| known.id == *id)? = read(shown("listener")?)?;
            }
            Step::DeleteListener { id, .. } => self.listeners.retain(|known| known.id != *id),
        }
        Some(())
    }
}

/// A listener or pool, as it is once the change that shows it is complete.
fn read<T: DeserializeOwned + Settle>(shown: &Value) -> Option<T> {
    let mut found: T = serde_json::from_value(shown.clone()).ok()?;
    found.settle();
    Some(found)
}

fn read_monitor(shown: &Value) -> Option<Monitor> {
    let mut found: Monitor = serde_json::from_value(shown.clone()).ok()?;
    found.provisioning_status = Provisioning::Active;
    Some(found)
}

/// What a change leaves `PENDING` in its own answer.
trait Settle {
    fn settle(&mut self);
}

impl Settle for Listener {
    fn settle(&mut self) {
        self.provisioning_status = Provisioning::Active;
    }
}

impl Settle for Pool {
    fn settle(&mut self) {
        self.provisioning_status = Provisioning::Active;
    }
}

/// What is complete, and what was answered then.
#[derive(Clone, Debug)]
pub(crate) struct Complete {
    pub(crate) owner: Owner,
    pub(crate) wanted: Desired,
    pub(crate) ingress: Vec<Ingress>,
    /// Why the address is not what was asked for.
    pub(crate) incomplete: Option<(&'static str, String)>,
}

/// The address that was in place last.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Addressed {
    /// UID of the Service.
    pub(crate) uid: String,
    pub(crate) address: IpAddr,
    /// Whether it was a floating IP of the user.
    pub(crate) is_given: bool,
    /// Whether it was a floating IP of Steerage.
    pub(crate) is_own: bool,
}

/// Everything that is remembered of a Service.
#[derive(Debug, Default)]
pub(crate) struct ServiceState {
    /// The owner's load balancer as it was read last, with the changes since then.
    pub(crate) tree: Option<(Owner, Tree)>,
    /// The owner's other load balancers, which go when the address is on the right one.
    pub(crate) spare: Vec<Balancer>,
    /// Whether those were looked for since the load balancer was created.
    pub(crate) is_listed: bool,
    /// The load balancer in `ERROR` that serves, and since when that is known.
    failing: Option<(String, Instant)>,
    /// Since when that one seems not to serve.
    down_since: Option<Instant>,
    /// The load balancer that is waited for, and since when it is known to be `PENDING`.
    pending: Option<(String, Instant)>,
    /// Whether all of it was read since the last complete change.
    pub(crate) is_verified: bool,
    /// When it was read.
    read_at: Option<Instant>,
    /// Since when changes of parts were made whose failure the load balancer would not show.
    pub(crate) unchecked_since: Option<Instant>,
    /// How often in a row parts were in `ERROR` after changes that Octavia accepted.
    failed_changes: u32,
    /// When a change was sent whose end is not known.
    pub(crate) changing: Option<Instant>,
    pub(crate) complete: Option<Complete>,
    pub(crate) addressed: Option<Addressed>,
    /// Where its load balancer is.
    pub(crate) usage: LoadBalancerUse,
    /// The shared load balancer that the Service left, by name: its floating IP goes if nobody uses it.
    pub(crate) left_shared: Option<String>,
    /// A shared load balancer that cannot be changed now, which the Service leaves.
    pub(crate) leaving: Option<String>,
    /// The shared load balancer of which a port of the Service becomes free, by name.
    pub(crate) freed_port_of: Option<String>,
    /// The owner whose deletion was begun, until the Service is to have its load balancer again.
    being_deleted: Option<Owner>,
    /// How often the deletion of load balancers was sent that were in `ERROR`.
    deletions: BTreeMap<String, u32>,
    /// Whether a load balancer of the Service's own was deleted.
    pub(crate) had_own: bool,
    /// Since when it leaves a second load balancer of the name.
    pub(crate) leaving_since: Option<Instant>,
    /// The rules of the nodes' security group.
    pub(crate) rules: RulesState,
    /// Members that Octavia refuses.
    pub(crate) refused: Refusals<IpAddr>,
    /// Load balancers that were replaced one after the other, and until when the next one waits.
    replaced: (u32, Option<Instant>),
    /// The VIPs of a load balancer that is replaced.
    pub(crate) kept_vips: Vec<IpAddr>,
    /// VIPs that their subnets do not give any more.
    pub(crate) refused_vips: Vec<IpAddr>,
    /// The last accepted change, how often it was accepted in a row, and when.
    last: Option<(Step, u32, Instant)>,
    /// When the project's quota of members refused a change.
    at_member_quota: Option<Instant>,
    /// When it had no room for another pool beside the present one.
    at_pool_quota: Option<Instant>,
    /// The name of the pool whose members changed last.
    pub(crate) last_pool: Option<String>,
}

/// Octavia accepts a change and does not show it: after so many times it is left for later.
const MAX_REPEATS: u32 = 3;
/// How much later.
const REPEAT_WAIT: Duration = Duration::from_mins(5);

impl ServiceState {
    /// The owner's load balancer, if it is known.
    pub(crate) fn known(&self, owner: &Owner) -> Option<&Tree> {
        self.tree.as_ref().filter(|(of, _)| of == owner).map(|(_, tree)| tree)
    }

    /// The addresses that clients know: these, and the one that was in place last.
    pub(crate) fn known_addresses(&self, owner: &Owner, published: &[IpAddr]) -> Vec<IpAddr> {
        let known = self.addressed.iter().filter(|known| known.uid == owner.uid).map(|known| known.address);
        known.chain(published.iter().copied()).collect()
    }

    /// All of the load balancer was read.
    pub(crate) fn note_read(&mut self, owner: &Owner, tree: Tree) {
        (self.tree, self.is_verified, self.read_at) =
            (Some((owner.clone(), tree)), true, Some(Instant::now()));
    }

    /// Whether it was read so long ago that somebody may have changed it.
    pub(crate) fn is_old(&self) -> bool {
        self.read_at.is_none_or(|at| at.elapsed() >= OLD)
    }

    /// Something may have changed that is not known: all is read again.
    pub(crate) fn forget(&mut self) {
        (self.tree, self.is_verified, self.changing, self.complete) = (None, false, None, None);
        (self.spare, self.is_listed) = (Vec::new(), false);
    }

    /// Whether a change may be made now: not if it was accepted again and again a moment ago.
    pub(crate) fn may_make(&mut self, step: &Step) -> bool {
        let repeats = self.last.as_ref().filter(|(last, ..)| last == step);
        let Some((count, at)) = repeats.map(|(_, count, at)| (*count, *at)) else { return true };
        // Its answer did not show what it made.
        self.is_verified = false;
        if at.elapsed() >= REPEAT_WAIT {
            self.last = None;
            return true;
        }
        count < MAX_REPEATS
    }

    /// A change was accepted.
    pub(crate) fn note_made(&mut self, step: &Step) {
        let count = self.last.as_ref().filter(|(last, ..)| last == step).map_or(0, |(_, count, _)| *count);
        self.last = Some((step.clone(), count + 1, Instant::now()));
    }

    /// A change was refused, or nobody knows: only changes that are accepted in a row count.
    pub(crate) fn note_failed(&mut self) {
        self.last = None;
    }

    /// The project's quota refused a change of members. False if that is known, so that another try helps no more.
    pub(crate) fn note_member_quota(&mut self) -> bool {
        let is_news = !self.is_at_member_quota();
        self.at_member_quota = Some(Instant::now());
        is_news
    }

    /// Whether the project had no quota for more members a moment ago.
    pub(crate) fn is_at_member_quota(&self) -> bool {
        self.at_member_quota.is_some_and(|at| at.elapsed() < QUOTA_WAIT)
    }

    /// The project's quota refused a change. False if it was not one that another pool needs which replaces a present one.
    pub(crate) fn note_pool_quota(&mut self, step: &Step) -> bool {
        let (name, present) = match step {
            Step::CreatePool { name, .. } => (name, 1),
            Step::CreateMonitor { pool: name, .. } | Step::SetMembers { name, .. } => (name, 2),
            _ => return false,
        };
        let pools = self.tree.iter().flat_map(|(_, tree)| &tree.pools);
        let is_replacing = pools.filter(|pool| pool.name == *name).count() >= present;
        let is_news = is_replacing && !self.is_at_pool_quota();
        if is_news {
            self.at_pool_quota = Some(Instant::now());
        }
        is_news
    }

    /// Whether the project had no quota for another pool a moment ago.
    pub(crate) fn is_at_pool_quota(&self) -> bool {
        self.at_pool_quota.is_some_and(|at| at.elapsed() < QUOTA_WAIT)
    }

    /// A change is about to be sent. The call may be abandoned before its answer comes.
    pub(crate) fn begin(&mut self) {
        self.is_verified = false;
        self.complete = None;
        self.changing.get_or_insert_with(Instant::now);
    }

    /// Whether changes were made for so long that their parts are looked at before the last one is complete.
    pub(crate) fn is_check_due(&self) -> bool {
        self.unchecked_since.is_some_and(|since| since.elapsed() >= LONGEST_UNCHECKED)
    }

    /// Changes are complete, and these parts are in `ERROR` after it. An error if that is so again and again.
    pub(crate) fn note_failed_parts(&mut self, id: &str, parts: &BTreeSet<String>) -> Result<(), Error> {
        self.unchecked_since = None;
        if parts.is_empty() {
            self.failed_changes = 0;
            return Ok(());
        }
        (self.is_verified, self.complete) = (false, None);
        self.failed_changes = self.failed_changes.saturating_add(1);
        if self.failed_changes < MAX_REPEATS {
            return Ok(());
        }
        let parts: Vec<&str> = parts.iter().map(String::as_str).collect();
        Err(Error::Unavailable(format!(
            "Octavia accepted changes of the load balancer {id} {} times in a row and failed them: {} in ERROR. The load balancer may still work as \
             before these changes, and admit sources that were removed. Steerage makes the changes again later. See `openstack loadbalancer \
             status show {id}` and Octavia's logs.",
            self.failed_changes,
            parts.join(", ")
        )))
    }

    /// A change was sent.
    pub(crate) fn sent(&mut self) {
        self.changing = Some(Instant::now());
        self.complete = None;
    }

    /// When to ask whether the last change is complete: soon at first.
    pub(crate) fn poll(&self, least: Duration) -> Duration {
        let passed = self.changing.map_or(Duration::ZERO, |at| at.elapsed());
        let passed = self.pending.as_ref().map_or(passed, |(_, since)| passed.max(since.elapsed()));
        let longest = (passed / 12).clamp(LONGEST_POLL, LONGEST_STUCK_POLL).max(least);
        (passed / 2).clamp(least, longest)
    }

    /// The name under which Services share its load balancer.
    pub(crate) fn shared(&self) -> Option<&str> {
        match &self.usage {
            LoadBalancerUse::Shared(name) => Some(name),
            LoadBalancerUse::Own => None,
        }
    }

    /// A load balancer was seen `PENDING`.
    pub(crate) fn note_pending(&mut self, balancer: &Balancer) -> Result<(), Error> {
        let id = &balancer.id;
        let known = self.pending.take().filter(|(known, _)| known == id);
        let (_, since) = self.pending.insert(known.unwrap_or_else(|| (id.clone(), Instant::now())));
        if since.elapsed() < STUCK {
            return Ok(());
        }
        let state = match balancer.provisioning_status {
            Provisioning::Deleting => "PENDING_DELETE",
            _ => "PENDING_CREATE or PENDING_UPDATE",
        };
        Err(Error::Unavailable(format!(
            "The load balancer {id} has been {state} for more than {} minutes, and Octavia lets nobody change or delete it. Steerage asks \
             again. Octavia's operator has to look at octavia-worker and its logs: no request ends this state. If no worker has the load \
             balancer any more, its provisioning_status is set to ERROR in Octavia's database.",
            STUCK.as_secs() / 60
        )))
    }

    /// The deletion of a load balancer was sent. An error if it ends in `ERROR` again and again.
    pub(crate) fn note_deletion(&mut self, balancer: &Balancer) -> Result<(), Error> {
        if balancer.provisioning_status != Provisioning::Error {
            return Ok(());
        }
        let id = &balancer.id;
        let count = self.deletions.entry(id.clone()).or_default();
        *count = count.saturating_add(1);
        if *count <= MAX_REPEATS {
            return Ok(());
        }
        Err(Error::Unavailable(format!(
            "Octavia failed the deletion of the load balancer {id} {} times or more: it is in ERROR. Steerage asks again. Look at Octavia's logs.",
            count.saturating_sub(1)
        )))
    }

    /// All of an owner is about to be deleted. The Service may come back before the end, and what was read is gone then.
    pub(crate) fn note_being_deleted(&mut self, owner: &Owner) {
        if self.known(owner).is_some() {
            (self.is_verified, self.complete) = (false, None);
        }
        self.being_deleted = Some(owner.clone());
    }

    /// The Service gets back what is left of its load balancer. It may stay refused for long, and what serves is kept.
    pub(crate) fn end_deletion(&mut self) {
        self.being_deleted = None;
    }

    /// Whether the owner's deletion was begun. The one of an earlier Service of the name does not count.
    pub(crate) fn is_being_deleted(&self, owner: &Owner) -> bool {
        self.being_deleted.as_ref() == Some(owner)
    }

    /// No load balancer is waited for.
    pub(crate) fn note_settled(&mut self) {
        self.pending = None;
    }

    /// Whether a load balancer in `ERROR` may be replaced now.
    pub(crate) fn may_replace(&self) -> bool {
        self.replaced.1.is_none_or(|until| Instant::now() >= until)
    }

    /// Whether a load balancer in `ERROR` that serves is kept for now.
    pub(crate) fn is_kept(&mut self, id: &str) -> bool {
        let now = Instant::now();
        let known = self.failing.take().filter(|(known, _)| known == id);
        let (id, since) = known.unwrap_or_else(|| (id.to_owned(), now));
        self.down_since = None;
        self.failing = Some((id, since));
        now.duration_since(since) < SERVING_REPLACEMENT_WAIT
    }

    /// Whether one that was kept because it served is to be looked at again, although it seems not to serve: after a partition its state is
    /// wrong for a moment.
    pub(crate) fn is_doubted(&mut self, id: &str) -> bool {
        if self.failing.as_ref().is_none_or(|(known, _)| known != id) {
            return false;
        }
        let now = Instant::now();
        self.down_since.get_or_insert(now).elapsed() < SERVING_DOUBT
    }

    /// It is replaced.
    pub(crate) fn note_replaced(&mut self) {
        let (count, _) = self.replaced;
        let wait = FIRST_REPLACEMENT_WAIT.saturating_mul(1 << count.min(10)).min(LONGEST_REPLACEMENT_WAIT);
        self.replaced = (count + 1, Some(Instant::now() + wait));
    }

    /// The load balancer works.
    pub(crate) fn note_working(&mut self) {
        (self.replaced, self.last, self.failing) = ((0, None), None, None);
        self.failed_changes = 0;
        self.down_since = None;
        self.kept_vips.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn broken_load_balancers_are_replaced_ever_more_slowly() {
        let mut state = ServiceState::default();
        let mut waits = Vec::new();
        for _ in 0..8 {
            assert!(state.may_replace());
            state.note_replaced();
            let start = Instant::now();
            while !state.may_replace() {
                tokio::time::advance(Duration::from_secs(10)).await;
            }
            waits.push(start.elapsed().as_secs());
        }
        assert_eq!(waits, [10, 20, 40, 80, 160, 320, 600, 600]);
        state.note_working();
        state.note_replaced();
        tokio::time::advance(Duration::from_secs(10)).await;
        assert!(state.may_replace());
    }

    #[tokio::test(start_paused = true)]
    async fn change_without_effect_is_left_for_later() {
        let step = |id: &str| Step::DeletePool { id: id.to_owned(), name: String::new() };
        let mut state = ServiceState { is_verified: true, ..ServiceState::default() };
        let mut make = |id: &str| {
            let may = state.may_make(&step(id));
            if may {
                state.note_made(&step(id));
            }
            (may, std::mem::replace(&mut state.is_verified, true))
        };
        let made = [(); 4].map(|()| make("a"));
        assert_eq!(made, [(true, true), (true, false), (true, false), (false, false)]);
        assert!(make("b").0 && make("a").0, "each is counted anew");
        assert!(make("a").0 && make("a").0 && !make("a").0);
        tokio::time::advance(REPEAT_WAIT).await;
        assert!(make("a").0, "later came");
        assert!(make("a").0 && make("a").0 && !make("a").0);
    }

    #[tokio::test(start_paused = true)]
    async fn slow_changes_are_asked_for_less_often() {
        let mut state = ServiceState::default();
        let least = Duration::from_millis(500);
        assert_eq!(state.poll(least), least);
        state.sent();
        tokio::time::advance(Duration::from_secs(4)).await;
        assert_eq!(state.poll(least), Duration::from_secs(2));
        tokio::time::advance(Duration::from_secs(50)).await;
        assert_eq!(state.poll(least), Duration::from_secs(5));
        tokio::time::advance(Duration::from_mins(5)).await;
        assert!(state.poll(least) > Duration::from_secs(25));
        tokio::time::advance(Duration::from_hours(1)).await;
        assert_eq!(state.poll(least), Duration::from_mins(1));
    }
}
