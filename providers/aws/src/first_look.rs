// SPDX-License-Identifier: Apache-2.0
//! The first comparison of each Service after a restart, with the list of the start instead of reads of its own.
//!
//! The list shows load balancers, and target groups with their checks and load balancers. It shows neither listeners, beyond that
//! one forwards to a group, nor attributes. These are read later, at most one Service at a time; at once for Services whose annotations
//! name some of it: such a change may have been interrupted, or made while no process ran.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::PoisonError;
use std::time::Duration;

use steerage_model::{Ingress, Key};
use steerage_provider_api::Owner;
use steerage_provider_cloud::marks;
use tokio::time::Instant;

use crate::client::ListedGroup;
use crate::desired::{Desired, DesiredGroup};
use crate::inventory::{Inventory, Listed};
use crate::provider::Aws;
use crate::security_group::SecurityGroup;
use crate::security_group_sync;
use crate::shared::LoadBalancerUse;
use crate::state::{Complete, FirstLook, ServiceState};

/// The first Service reads the rest after this time, when the start is over.
const VERIFY_AFTER: Duration = Duration::from_secs(30);
/// One Service reads the rest in this time: about three calls, of the ten a second that AWS refills.
const VERIFY_SHARE: Duration = Duration::from_millis(500);

/// What the list says of a Service.
pub(crate) struct FirstLookResult {
    pub(crate) look: FirstLook,
    /// Names of its target groups.
    pub(crate) names: BTreeSet<String>,
    pub(crate) security_groups: BTreeMap<Owner, Vec<SecurityGroup>>,
    /// IDs of the security groups that its load balancer has.
    pub(crate) attached: BTreeSet<String>,
    /// Where the resources of each owner are.
    pub(crate) uses: BTreeMap<Owner, LoadBalancerUse>,
    /// ARN of its load balancer, if that has another name than Steerage's.
    pub(crate) adopted: Option<String>,
}

/// What the list says of the Service, whose load balancer has this name.
pub(crate) fn first_look(inventory: &mut Inventory, service: &Key, balancer: &str) -> FirstLookResult {
    let mut found = inventory.take(service);
    let groups = found.values().flat_map(|listed| listed.groups.iter().map(|group| group.name.clone()));
    let names: BTreeSet<String> = groups.collect();
    let security_groups =
        found.iter_mut().map(|(owner, listed)| (owner.clone(), std::mem::take(&mut listed.security_groups)));
    let security_groups = security_groups.collect();
    let balancers = || found.values().filter_map(|listed| listed.balancer.as_ref());
    let attached = balancers().flat_map(|balancer| balancer.security_groups.iter().cloned()).collect();
    let adopted = balancers().find(|found| found.name != balancer).map(|found| found.arn.clone());
    let uses = found.iter().filter_map(|(owner, listed)| Some((owner.clone(), use_of(listed)?))).collect();
    // An owner of whom only a security group is listed says nothing about load balancers.
    found.retain(|_, listed| *listed != Listed::default());
    let look = match found.pop_first() {
        Some((owner, listed)) if found.is_empty() => FirstLook::Owned(owner, Box::new(listed)),
        None if !inventory.has_name(balancer) => FirstLook::Nothing,
        _ => FirstLook::Unknown,
    };
    FirstLookResult { look, names, security_groups, attached, uses, adopted }
}

/// Where these resources are; `None` if the list does not tell.
pub(crate) fn use_of(listed: &Listed) -> Option<LoadBalancerUse> {
    let of_group = |group: &ListedGroup| {
        group
            .group
            .tags
            .get(marks::SHARED)
            .map_or(LoadBalancerUse::Own, |name| LoadBalancerUse::Shared(name.clone()))
    };
    listed.groups.first().map(of_group).or_else(|| listed.balancer.is_some().then_some(LoadBalancerUse::Own))
}

/// Whether the list shows the wanted structure, as far as it shows any.
fn shows(listed: &Listed, wanted: &Desired) -> bool {
    let Some(balancer) = &listed.balancer else { return false };
    let is_wanted = |found: &crate::client::ListedGroup| {
        let is_same = |group: &DesiredGroup| {
            group.name == found.name
                && group.health == found.group.health
                && group.labels.are_on(&found.group.tags)
        };
        wanted.groups.iter().any(is_same)
            && found.group.only_200
            && found.balancers == [balancer.arn.as_str()]
    };
    balancer.failed.is_none()
        && balancer.scheme == Some(wanted.scheme)
        && balancer.ip_address_type == wanted.ip_address_type
        && wanted.source_nat.is_met_by(&balancer.source_nat)
        && wanted.placement.check(&balancer.placed).is_ok()
        && security_group_sync::check(wanted, balancer).is_ok()
        && wanted.labels.are_on(&listed.balancer_tags)
        && listed.groups.len() == wanted.groups.len()
        && listed.groups.iter().all(is_wanted)
}

impl Aws {
    /// Uses the list for a Service's first comparison. False if the list is no help, or does not show all that is wanted.
    pub(crate) fn compare_with_list(
        &self,
        owner: &Owner,
        wanted: &Desired,
        entry: &mut ServiceState,
    ) -> bool {
        let FirstLook::Owned(listed_owner, listed) = &entry.first_look else { return false };
        if listed_owner != owner || entry.written.is_some() || !shows(listed, wanted) {
            return false;
        }
        let active = listed.balancer.as_ref().filter(|balancer| balancer.active);
        let hostname = active.map(|balancer| balancer.hostname.clone());
        let ingress = hostname.map(|name| vec![Ingress { ip: None, hostname: Some(name), ip_mode: None }]);
        entry.adopt_list(owner);
        entry.first_look = FirstLook::Unknown;
        if entry.resources.as_ref().is_none_or(|(known, _)| known != owner) {
            return false;
        }
        // Rules of another port: it may be served until AWS accepts a new one, or a change was interrupted.
        let is_read_now = wanted.is_beyond_lists || entry.has_rules_of_other_ports(owner, wanted);
        let verify = if is_read_now { Instant::now() } else { self.verify_slot() };
        entry.complete = Some(Complete {
            structure: wanted.clone(),
            refused: None,
            retry: None,
            ingress,
            asked: None,
            verify: Some(verify),
        });
        entry.shares_health = true;
        !is_read_now
    }

    /// When a Service reads what the list does not show.
    fn verify_slot(&self) -> Instant {
        let mut next = self.next_verify.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = (*next).max(Instant::now() + VERIFY_AFTER);
        *next = slot + VERIFY_SHARE;
        slot
    }
}
