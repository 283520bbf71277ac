// SPDX-License-Identifier: Apache-2.0
//! What the provider remembers of one Service. No I/O.
//!
//! A read of AWS may show an old state for some seconds. So a change whose answer was an error that leaves open whether AWS made it,
//! or whose call was abandoned, makes the resources unknown, and they are read again only after [`Config::settle`]. While they are
//! known, they are newer than a read within that time.
//!
//! [`Config::settle`]: crate::Config::settle

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use steerage_model::Ingress;
use steerage_provider_api::{Compare, Error, Owner};
use steerage_provider_cloud::LastAttempt;
use tokio::time::Instant;

use crate::change_gate::ChangeWait;
use crate::client::{Balancer, CallError, ListedGroup};
use crate::desired::Desired;
use crate::failing_groups::FailingGroups;
use crate::groups_in_use::GroupsInUse;
use crate::health_check::HealthCheckSettings;
use crate::inventory::Listed;
use crate::ip_address_type::IpAddressType;
use crate::ip_address_type_sync::KnownIpAddressType;
use crate::last_known::{FailedChange, LastKnown};
use crate::named_groups::NamedGroups;
use crate::observe::Resources;
use crate::partial_read::PartialRead;
use crate::put_back::{LeftCertificates, LeftListeners};
use crate::reasons;
use crate::refused_answers::RefusedAnswers;
use crate::refused_listeners::{Refused, named};
use crate::registered::RegisteredIds;
use crate::security_group::{Requested, Rule, Security, SecurityGroup};
use crate::shared::LoadBalancerUse;
use crate::source_nat_sync::{KnownSourceNat, has_udp};
use crate::subnet_sync::KnownPlacement;
use crate::target_id::TargetNames;
use crate::targets::RefusedTargets;
use crate::try_change::WAITS_AT_GATE;

/// A call makes no further calls to AWS after this time.
const CALL_TIME: Duration = Duration::from_secs(40);
/// The same for one that had to wait before it began.
const SHORTEST_CALL: Duration = Duration::from_secs(10);

/// No call makes further calls after this time: its caller gives it up after a minute.
pub(crate) const LONGEST_CALL: Duration = Duration::from_secs(50);

/// What the list of the start says of a Service.
#[derive(Debug, Default)]
pub(crate) enum FirstLook {
    /// Nothing that helps.
    #[default]
    Unknown,
    /// The Service has no resources.
    Nothing,
    /// The resources of one owner, and no others of the Service.
    Owned(Owner, Box<Listed>),
}

/// The cached state of one Service.
#[derive(Default)]
pub(crate) struct ServiceState {
    pub(crate) initialized: bool,
    /// When the present call, or the last one, began.
    pub(crate) began: Option<Instant>,
    pub(crate) first_look: FirstLook,
    /// Names of target groups that may exist.
    pub(crate) names: BTreeSet<String>,
    /// Where the resources of each owner are; of those that are not here, nothing is known to exist.
    pub(crate) uses: BTreeMap<Owner, LoadBalancerUse>,
    /// Whether everything must be compared as soon as no other Service changes the shared load balancer.
    pub(crate) must_compare: bool,
    /// Why a part of a Service at a shared load balancer is not in place, from its last change.
    pub(crate) incomplete: Option<(&'static str, String)>,
    /// Listeners that the last change deleted, with their ports.
    pub(crate) freed: Vec<(String, u16)>,
    /// Since when everything of a deleted owner is gone from a shared load balancer.
    pub(crate) left_shared: Option<Instant>,
    /// ARN of the load balancer if another controller created it, so that its name is not Steerage's.
    pub(crate) adopted: Option<String>,
    /// The owner's resources; `None` if they must be read.
    pub(crate) resources: Option<(Owner, Resources)>,
    /// What is known instead of `resources` after a change that may have been made.
    pub(crate) last_known: Option<LastKnown>,
    /// Health checks, by ARN of the group, that AWS may have taken: the call had no answer, and the group was not read since.
    pub(crate) open_checks: HashMap<String, HealthCheckSettings>,
    /// ARNs of created resources whose tags were not read yet: AWS may have returned an existing one of others.
    pub(crate) unproven: BTreeSet<String>,
    /// Registered targets by ARN of the group.
    pub(crate) registered: HashMap<String, RegisteredIds>,
    pub(crate) refused_targets: RefusedTargets,
    pub(crate) failing: FailingGroups,
    /// Whether the next try to change or compare the structure sets the targets first: the last one was throttled or failed.
    pub(crate) targets_first: bool,
    /// How often in a row a change of the structure failed.
    pub(crate) failed_changes: u32,
    /// The change that failed last, until the next try.
    pub(crate) failed_change: Option<FailedChange>,
    /// Whether the Service's hostname is published, or was.
    pub(crate) is_published: bool,
    /// Ports whose new listener AWS did not take at the last try, without refusing it.
    pub(crate) open_listeners: BTreeSet<u16>,
    /// That the last try had to wait, because changes of others hang.
    pub(crate) waits_at_gate: Option<ChangeWait>,
    /// The names of targets, from the last call with targets.
    pub(crate) target_names: TargetNames,
    /// The structure that `resources` has; `None` while a change of it is not complete.
    pub(crate) complete: Option<Complete>,
    /// Whether one of `resources` is gone, or another one is there: they must be read.
    pub(crate) must_read: bool,
    /// Whether `resources` were read when reads may not have shown every change.
    pub(crate) is_read_early: bool,
    /// Whether `resources` come from a list: without listeners and attributes.
    pub(crate) is_partial: bool,
    /// Whether that list shows that the load balancer has a listener.
    pub(crate) is_listening_by_list: bool,
    /// Names of target groups in `resources` that are no longer wanted, and since when.
    pub(crate) leaving: BTreeMap<String, Instant>,
    /// Names of target groups that this process created, and that no listener has used.
    pub(crate) unused: BTreeSet<String>,
    /// Names of target groups whose nodes are not followed, because no listener uses them and the structure is refused.
    pub(crate) unfollowed: BTreeSet<String>,
    pub(crate) groups_in_use: GroupsInUse,
    pub(crate) deletion: Option<PendingDeletion>,
    /// What a read of the resources has read so far.
    pub(crate) reading: PartialRead,
    /// The security groups of the Service's owners: of the present one, and of predecessors.
    pub(crate) security_groups: BTreeMap<Owner, KnownSecurityGroup>,
    /// Whether predecessors may have security groups that are not in `security_groups`.
    pub(crate) has_predecessors: bool,
    /// Since when a new security group's name is that of another one, as far as EC2 shows.
    pub(crate) security_group_taken: Option<Instant>,
    /// What is wanted, from the last call that said so.
    pub(crate) wanted: Option<(Owner, Desired)>,
    /// The load balancer as an earlier call knew it.
    pub(crate) last_balancer: Option<(Owner, Balancer)>,
    /// The sources that a refused Service requests since then: no others are admitted.
    pub(crate) restricted: Option<(Owner, Requested)>,
    /// The security groups that an annotation names, as last tried, and those that the load balancer had afterwards.
    pub(crate) named_groups: Option<LastAttempt<NamedGroups, BTreeSet<String>>>,
    /// Steerage's own group as last attached or tried, and the groups that the load balancer had afterwards.
    pub(crate) attached: Option<LastAttempt<String, BTreeSet<String>>>,
    /// What is known of the load balancer's IP address type.
    pub(crate) ip_address_type: KnownIpAddressType,
    /// What is known of the load balancer's subnets.
    pub(crate) subnets: KnownPlacement,
    /// What is known of the load balancer's source NAT.
    pub(crate) source_nat: KnownSourceNat,
    /// What AWS refused in the present change, which throttling may interrupt.
    pub(crate) refused_answers: RefusedAnswers,
    /// Tries in a row in which AWS refused something that it may accept later.
    pub(crate) refused_tries: u32,
    /// When a structure is tried again that a quota refuses as a whole.
    pub(crate) retry_rejected: Option<Instant>,
    /// When targets are tried again for which a quota had no room, and the number of such tries in a row.
    pub(crate) retry_targets: Option<Instant>,
    pub(crate) exceeded_tries: u32,
    /// Ports that wait for a first target before they change, and since when.
    pub(crate) waiting_ports: Option<(Vec<u16>, Instant)>,
    /// What AWS refused of a change that waits for targets.
    pub(crate) refused_meanwhile: Option<Refused>,
    /// When that is tried again.
    pub(crate) retry_meanwhile: Option<Instant>,
    /// Listeners that left for others which are not there yet.
    pub(crate) left: LeftListeners,
    pub(crate) left_certificates: LeftCertificates,
    /// When a Service last changed the shared load balancer before the present call.
    pub(crate) others_wrote: Option<Instant>,
    /// Calls in a row whose security groups were not in place in the end.
    pub(crate) security_failures: u32,
    /// When a security group was last created, or that was tried.
    pub(crate) security_group_created: Option<Instant>,
    /// Whether the next look at health may use the targets that were just read.
    pub(crate) shares_health: bool,
    /// When the load balancer was last compared because AWS says that nothing uses its targets; `None` since something does.
    pub(crate) compared_unused: Option<Instant>,
    /// When the last change was sent.
    pub(crate) written: Option<Instant>,
}

/// A security group, and what this process did to it.
#[derive(Debug)]
pub(crate) struct KnownSecurityGroup {
    pub(crate) group: SecurityGroup,
    /// When its rules were last changed.
    pub(crate) written: Option<Instant>,
    /// When AWS first refused to delete it, because it is in use.
    pub(crate) in_use_since: Option<Instant>,
    /// The wanted rules for which it had no room, and what the user was told. Tried again when it is read, or others are wanted.
    pub(crate) full: Option<(BTreeSet<Rule>, String)>,
    /// The narrower rules of a refused Service for which it had no room beside the present ones.
    pub(crate) no_room_for: Option<BTreeSet<Rule>>,
}

impl KnownSecurityGroup {
    /// One that was read.
    pub(crate) fn from_read(group: SecurityGroup) -> Self {
        Self { group, written: None, in_use_since: None, full: None, no_room_for: None }
    }
}

/// A structure that is in place at AWS.
pub(crate) struct Complete {
    pub(crate) structure: Desired,
    /// What AWS refused of it: some listeners. Tried again when everything is compared, and at `retry`.
    pub(crate) refused: Option<Refused>,
    /// When AWS may accept what it refused.
    pub(crate) retry: Option<Instant>,
    /// What is published; `None` until the load balancer is active.
    pub(crate) ingress: Option<Vec<Ingress>>,
    /// When AWS was last asked whether it is active; `None` before the first time.
    pub(crate) asked: Option<Instant>,
    /// When the listeners and attributes must be read: so far only lists were.
    pub(crate) verify: Option<Instant>,
}

/// Resources that are being deleted. Their tags proved whose they are.
#[derive(Debug)]
pub(crate) struct PendingDeletion {
    pub(crate) owner: Owner,
    /// Whether they are all that the owner has; otherwise they make room for what the owner wants.
    pub(crate) is_final: bool,
    /// Whether AWS may have deleted the load balancer, whose deletion had no answer.
    pub(crate) is_sent: bool,
    /// Name and ARN of the load balancer.
    pub(crate) balancer: Option<(String, String)>,
    /// When it was deleted: AWS releases its groups later. `None` if there was none.
    pub(crate) balancer_deleted: Option<Instant>,
    /// ARNs of target groups by name.
    pub(crate) groups: BTreeMap<String, String>,
    /// The security groups, which go last.
    pub(crate) security_groups: PendingSecurityGroups,
}

/// The security groups of a deletion.
#[derive(Debug)]
pub(crate) enum PendingSecurityGroups {
    /// They must be read.
    Unread,
    /// Their IDs, and when AWS first refused to delete one because it is in use.
    Ids { ids: BTreeSet<String>, in_use_since: Option<Instant> },
}

impl PendingDeletion {
    /// For how long AWS still holds groups that it releases so long after their load balancer; `None` if it does not.
    pub(crate) fn held_for(&self, release: Duration) -> Option<Duration> {
        let released = self.balancer_deleted? + release;
        Some(released.saturating_duration_since(Instant::now())).filter(|wait| !wait.is_zero())
    }

    /// Those of `owner`, including its security groups.
    pub(crate) fn all(owner: &Owner, resources: &Resources) -> Self {
        Self {
            is_final: true,
            security_groups: PendingSecurityGroups::Unread,
            ..Self::replaced(owner, resources)
        }
    }

    /// Those that are in the way of `owner`: of its predecessors, whose security groups have names of their own.
    pub(crate) fn replaced(owner: &Owner, resources: &Resources) -> Self {
        Self {
            owner: owner.clone(),
            is_final: false,
            is_sent: false,
            security_groups: PendingSecurityGroups::none(),
            balancer_deleted: None,
            balancer: resources.balancer.as_ref().map(|b| (b.name.clone(), b.arn.clone())),
            groups: resources.groups.iter().map(|(name, group)| (name.clone(), group.arn.clone())).collect(),
        }
    }

    /// The load balancer is gone.
    pub(crate) fn note_deleted(&mut self) {
        (self.balancer, self.balancer_deleted) = (None, Some(Instant::now()));
    }

    /// Deletes no security group that is still there.
    pub(crate) fn keep_security_groups(&mut self) {
        (self.is_final, self.security_groups) = (false, PendingSecurityGroups::none());
    }
}

impl PendingSecurityGroups {
    fn none() -> Self {
        Self::Ids { ids: BTreeSet::new(), in_use_since: None }
    }
}

impl ServiceState {
    /// Whether the owner's resources are known.
    pub(crate) fn is_known(&self, owner: &Owner) -> bool {
        self.resources.as_ref().is_some_and(|(known, _)| known == owner)
    }

    /// Whether the owner's load balancer is known to have this structure.
    pub(crate) fn is_complete(&self, owner: &Owner, wanted: &Desired) -> bool {
        self.is_known(owner) && self.complete.as_ref().is_some_and(|complete| complete.structure == *wanted)
    }

    /// Whether the structure is to be changed or compared.
    pub(crate) fn has_change_to_try(&self, owner: &Owner, wanted: &Desired, compare: Compare) -> bool {
        compare == Compare::InPlace || self.must_verify() || !self.is_complete(owner, wanted)
    }

    /// Whether the last change failed, or a part of it: the next one may hang.
    pub(crate) fn has_failed_change(&self) -> bool {
        let has_open =
            |complete: &Complete| complete.refused.as_ref().is_some_and(Refused::is_of_open_listener);
        self.failed_change.is_some() || self.complete.as_ref().is_some_and(has_open)
    }

    /// Whether a port that is not wanted in this way may be served: the structure is not complete, or AWS refused to change its listener.
    /// A list shows no listeners: until they are read, it may be any port.
    pub(crate) fn may_serve(&self, owner: &Owner, wanted: &Desired, port: u16) -> bool {
        let is_unread = self.complete.as_ref().is_some_and(|found| found.verify.is_some());
        if is_unread || !self.is_complete(owner, wanted) {
            return true;
        }
        let has_refused = self.complete.as_ref().is_some_and(|found| found.refused.is_some());
        let mut listeners = self.resources.iter().flat_map(|(_, resources)| &resources.listeners);
        has_refused && listeners.any(|listener| listener.port == port)
    }

    /// Whether Steerage's security group has rules of a port that is not wanted.
    pub(crate) fn has_rules_of_other_ports(&self, owner: &Owner, wanted: &Desired) -> bool {
        let (Security::Rules(rules), Some(known)) = (&wanted.security, self.security_groups.get(owner))
        else {
            return false;
        };
        let of = |rule: &Rule| (rule.protocol, rule.port);
        let ports: BTreeSet<_> = rules.iter().map(of).collect();
        known.group.own.iter().any(|rule| !ports.contains(&of(rule)))
    }

    /// Whether the owner's load balancer is known to have IPv6.
    pub(crate) fn has_ipv6(&self, owner: &Owner) -> bool {
        self.balancer(owner).is_some_and(|found| found.ip_address_type == IpAddressType::DualStack)
    }

    /// Whether another Service changed the shared load balancer a moment ago: reads may show it as it was before.
    pub(crate) fn is_just_changed(&self, owner: &Owner, settle: Duration) -> bool {
        matches!(self.uses.get(owner), Some(LoadBalancerUse::Shared(_)))
            && self.others_wrote.is_some_and(|at| at.elapsed() < settle)
    }

    /// The owner's load balancer, as far as it is known.
    pub(crate) fn balancer(&self, owner: &Owner) -> Option<&Balancer> {
        let known = self.resources.as_ref().filter(|(known, _)| known == owner);
        known.and_then(|(_, resources)| resources.balancer.as_ref())
    }

    /// The same, to note what a call changed.
    pub(crate) fn balancer_mut(&mut self, owner: &Owner) -> Option<&mut Balancer> {
        let known = self.resources.as_mut().filter(|(known, _)| known == owner);
        known.and_then(|(_, resources)| resources.balancer.as_mut())
    }

    /// Whether the owner's load balancer may have a listener with UDP, whoever made it. A list shows none.
    pub(crate) fn may_have_udp(&self, owner: &Owner) -> bool {
        let is_read = self.complete.as_ref().is_some_and(|complete| complete.verify.is_none());
        let known = self.resources.as_ref().filter(|(known, _)| known == owner && is_read);
        known.is_none_or(|(_, resources)| {
            let mut all = resources.listeners.iter().chain(&resources.foreign_listeners);
            all.any(|listener| has_udp(&listener.protocol))
        })
    }

    /// Whether the owner's load balancer has other security groups than Steerage's, because an annotation names them.
    pub(crate) fn has_spare_group(&self, owner: &Owner) -> bool {
        let is_named =
            |(of, wanted): &(Owner, Desired)| of == owner && matches!(wanted.security, Security::Named(_));
        let (Some(known), Some(balancer)) = (self.security_groups.get(owner), self.balancer(owner)) else {
            return false;
        };
        self.wanted.as_ref().is_some_and(is_named)
            && !balancer.security_groups.is_empty()
            && !balancer.security_groups.contains(&known.group.id)
    }

    /// Whether the listeners and attributes must be read now, or what AWS refused must be tried again.
    pub(crate) fn must_verify(&self) -> bool {
        let due = self.complete.iter().flat_map(|complete| [complete.verify, complete.retry]).flatten();
        due.min().is_some_and(|at| at <= Instant::now())
    }

    /// Why a part is not in place while the structure waits for something.
    pub(crate) fn incomplete_meanwhile(&self) -> Option<(&'static str, String)> {
        /// `EndpointSlices` may lack a changed port for a moment.
        const PATIENCE: Duration = Duration::from_secs(10);
        let refused = self.refused_meanwhile.as_ref().map(|found| (found.reason, found.message.clone()));
        let waiting = self
            .waiting_ports
            .as_ref()
            .filter(|(ports, since)| !ports.is_empty() && since.elapsed() >= PATIENCE);
        let waiting = waiting.map(|(ports, _)| {
            let message = format!(
                "Served, but not as requested, because no endpoint has their new target port: {}. Steerage changes them when one \
                 does. Check targetPort, and the ports of the pods.",
                named(ports)
            );
            (reasons::NO_TARGETS_YET, message)
        });
        let at_gate = self.waits_at_gate.filter(|wait| wait.is_long);
        let at_gate = at_gate.map(|_| (Error::THROTTLED, WAITS_AT_GATE.to_owned()));
        let all: Vec<_> = [refused, waiting, at_gate].into_iter().flatten().collect();
        let (reason, _) = all.first()?;
        let messages: Vec<&str> = all.iter().map(|(_, message)| message.as_str()).collect();
        Some((*reason, messages.join(" ")))
    }

    /// The time until reads show every change that was sent.
    pub(crate) fn unsettled(&self, settle: Duration) -> Option<Duration> {
        let rest = (self.written? + settle).saturating_duration_since(Instant::now());
        (!rest.is_zero()).then_some(rest)
    }

    /// Whether EC2 shows every security group that was created.
    pub(crate) fn has_settled_security_groups(&self, settle: Duration) -> bool {
        self.security_group_created.is_none_or(|at| at.elapsed() >= settle)
    }

    /// Takes over what the list of the start says, if it says something of this owner and nothing newer is known.
    pub(crate) fn adopt_list(&mut self, owner: &Owner) {
        if self.resources.is_none()
            && self.written.is_none()
            && let FirstLook::Owned(listed, found) = &self.first_look
            && listed == owner
        {
            let groups = found.groups.iter().map(|listed| (listed.name.clone(), listed.group.clone()));
            let resources = Resources {
                balancer: found.balancer.clone(),
                balancer_tags: found.balancer_tags.clone(),
                groups: groups.collect(),
                ..Resources::default()
            };
            let balancer = found.balancer.as_ref().map(|balancer| &balancer.arn);
            let is_used = |group: &ListedGroup| group.balancers.iter().any(|arn| Some(arn) == balancer);
            self.is_listening_by_list = found.groups.iter().any(is_used);
            self.resources = Some((owner.clone(), resources));
            self.is_partial = true;
        }
    }

    /// Forgets resources of which only a list is known.
    pub(crate) fn drop_partial(&mut self) {
        if std::mem::take(&mut self.is_partial) {
            (self.resources, self.complete) = (None, None);
        }
    }

    /// Leaves the present call some time, where others or the list of the start took it, and none that it does not have: a change whose
    /// answer its caller does not wait for would be worse than none.
    pub(crate) fn grant_time(&mut self) {
        let latest = Instant::now().checked_sub(CALL_TIME.saturating_sub(SHORTEST_CALL));
        let longest = self.began.map(|began| began + LONGEST_CALL.saturating_sub(CALL_TIME));
        self.began = self.began.max(latest.min(longest));
    }

    /// When the present call must end. The caller gives it up after a minute, and an answer that is lost by then would make everything
    /// unknown. A call that is made before may still wait ten seconds for its budget.
    pub(crate) fn must_end(&self) -> Instant {
        self.began.unwrap_or_else(Instant::now) + CALL_TIME
    }

    /// Refuses to make a further call to AWS if the present call must end: the next one continues.
    pub(crate) fn check_time(&self) -> Result<(), CallError> {
        if Instant::now() < self.must_end() { Ok(()) } else { Err(CallError::out_of_time()) }
    }

    /// Takes the resources out before a change. They stay unknown if the change is abandoned.
    pub(crate) fn take_resources(&mut self, owner: &Owner) -> Option<Resources> {
        self.complete = None;
        let (known, resources) = self.resources.take()?;
        (known == *owner).then_some(resources)
    }

    /// The answer to a call that lets a listener use the target group of this name. Unless it was surely refused, the group was used.
    pub(crate) async fn unless_refused<T>(
        &mut self,
        group: &str,
        call: impl Future<Output = Result<T, CallError>>,
    ) -> Result<T, CallError> {
        let was_unused = self.unused.remove(group);
        let answer = call.await;
        if was_unused && answer.as_ref().is_err_and(|failure| !failure.leaves_open()) {
            self.unused.insert(group.to_owned());
        }
        answer
    }

    /// The target group is deleted.
    pub(crate) fn forget_group(&mut self, name: &str, arn: &str) {
        self.registered.remove(arn);
        self.leaving.remove(name);
        self.unused.remove(name);
        self.names.remove(name);
    }

    /// The groups whose nodes need not follow while the structure is refused: those that no listener uses, unless connections live there.
    /// A try registers all nodes under `health-check` steering, and they would leave again after each one. Pods are followed: another
    /// one may get their address.
    pub(crate) fn idle_groups(&self) -> BTreeSet<String> {
        // A listener that forwards to several groups may use any of them.
        let is_clear = |(_, resources): &&(Owner, Resources)| {
            let mut all = resources.listeners.iter().chain(&resources.foreign_listeners);
            all.all(|listener| listener.group_arn.is_some())
        };
        let is_read = self.complete.is_none() && !self.is_partial && !self.is_read_early;
        let known = self.resources.iter().filter(|_| is_read).filter(is_clear);
        let groups =
            known.flat_map(|(_, resources)| resources.groups.iter().map(move |group| (resources, group)));
        let idle = groups.filter(|(resources, (name, group))| {
            !group.has_pods
                && !resources.uses(&group.arn)
                && !self.left.need(&group.arn)
                && !self.leaving.contains_key(*name)
        });
        idle.map(|(_, (name, _))| name.clone()).collect()
    }

    /// When AWS may accept refused targets.
    pub(crate) fn retry_refused(&self) -> Option<Duration> {
        let refused = (!self.refused_targets.is_empty()).then_some(RefusedTargets::FIRST_WAIT);
        let exceeded = self.retry_targets.map(|at| at.saturating_duration_since(Instant::now()));
        refused.into_iter().chain(exceeded).min()
    }

    /// When to call again although everything is complete.
    pub(crate) fn again(&self) -> Option<Duration> {
        let refused = self.retry_refused();
        let due = self.complete.iter().flat_map(|complete| [complete.verify, complete.retry]).flatten();
        let verify = due.min().map(|at| at.saturating_duration_since(Instant::now()));
        let groups = self.resources.iter().flat_map(|(_, resources)| &resources.groups);
        let leaving = groups.filter(|(name, _)| self.leaving.contains_key(*name));
        let in_use = leaving.filter_map(|(_, group)| self.groups_in_use.must_wait(&group.arn));
        let overdue = in_use.filter(|retry| retry.is_overdue).map(|retry| retry.after);
        refused.into_iter().chain(verify).chain(overdue).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn call_that_waited_gets_no_time_that_its_caller_does_not_wait() {
        for (waited, left) in [(0, 40), (20, 20), (35, 10), (45, 5), (50, 0), (58, 0)] {
            let began = Instant::now();
            let mut state = ServiceState { began: Some(began), ..ServiceState::default() };
            tokio::time::advance(Duration::from_secs(waited)).await;
            state.grant_time();
            let rest = state.must_end().saturating_duration_since(Instant::now());
            assert_eq!((rest, state.check_time().is_ok()), (Duration::from_secs(left), left > 0), "{waited}");
        }
    }
}
