// SPDX-License-Identifier: Apache-2.0
//! The resources that all Services share: what the writer in `shared` has to know of each kind. Pure, but for the sets of nodes.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use steerage_model::{Family, Key};
use steerage_provider_api::{Error, Owner, SharedSet, TargetSet};
use steerage_provider_cloud::ToReconcile;

use crate::admission::{Admission, SecurityGroupDocument, Source};
use crate::desired::{WantedPool, nodes};
use crate::limits::check_namespace;
use crate::marks::Mark;
use crate::merge::{FrontendAddress, Intent, Layout, Sets, writable};
use crate::named_in_refusal::Names;
use crate::reasons;
use crate::types::{Balancer, Frontend, Part, Provisioning, Ref, SecurityGroup};

/// What is asked of Azure for a kind.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Actions {
    pub(crate) get: &'static str,
    pub(crate) put: &'static str,
    pub(crate) delete: &'static str,
}

/// Whether Azure refuses the address of a node.
pub(crate) type IsRefused<'a> = &'a (dyn Fn(&IpAddr) -> bool + Sync);

/// A resource that many Services share.
pub(crate) trait Document: Send + Sync + 'static {
    /// What is read and written.
    type Body: Clone + PartialEq + Serialize + DeserializeOwned + Send + Sync;
    /// What a Service wants there.
    type Wanted: Clone + PartialEq + Send + Sync;

    fn actions(&self) -> Actions;
    fn path(&self) -> String;
    /// Its name for users.
    fn title(&self) -> String;
    fn etag(&self, body: &Self::Body) -> Option<String>;
    fn provisioning(&self, body: &Self::Body) -> Provisioning;
    /// Refuses what is not this cluster's.
    fn check(&self, body: &Self::Body) -> Result<(), Error>;
    /// Makes it have what a Service wants. Whether that changed anything. After an error it is as it was.
    fn apply(
        &self,
        body: &mut Option<Self::Body>,
        wanted: &Self::Wanted,
        is_refused: IsRefused<'_>,
    ) -> Result<bool, Error>;
    /// Whether only what cannot be wrong in itself differs: members of pools.
    fn is_minor(&self, before: Option<&Self::Body>, after: Option<&Self::Body>) -> bool;
    /// Whether it is all that a Service wants, and not a part of that.
    fn is_whole(&self, wanted: &Self::Wanted) -> bool;
    /// Forgets a Service that has nothing in it.
    fn forget(&self, service: &Key, body: Option<&Self::Body>);
    /// Gives a Service what it had before, in a resource whose last change failed.
    fn take_back(&self, body: &mut Self::Body, before: Option<&Self::Body>, wanted: &Self::Wanted);
    /// Brings what no single Service owns in place. Whether that changed anything.
    fn tidy(&self, body: &mut Option<Self::Body>, is_refused: IsRefused<'_>) -> bool;
    /// Takes out what is given up, unless it has nothing else.
    fn leave_out(&self, body: &mut Self::Body);
    /// Whether all that it has is given up.
    fn is_given_up(&self, body: &Self::Body) -> bool;
    /// Takes out the Services that these words of Azure name, and returns them. At first only what serves, so that they keep their
    /// addresses; those that a later word names again as a whole.
    fn leave_out_named(&self, body: &mut Self::Body, words: &[String]) -> BTreeSet<Mark>;
    /// The public IPs with these paths hold up all Services: those that use them say so.
    fn note_not_ready(&self, body: &Self::Body, paths: &[String]);
    /// These Services are left out: their own calls may bring them back.
    fn note_left_out(&self, services: &BTreeSet<Mark>);
    /// Whether it has nothing left, and was made by Steerage.
    fn is_empty(&self, body: &Self::Body) -> bool;
    /// The request that writes it.
    fn written(&self, body: Self::Body) -> Value;
    /// What of Azure's words about an error names the Service that wants this.
    fn names(&self, wanted: &Self::Wanted) -> Names;
    /// The paths of the public IPs to which it refers.
    fn referred(&self, body: &Self::Body) -> Vec<String>;
    /// The addresses in its pools.
    fn members(&self, body: &Self::Body) -> BTreeSet<IpAddr>;
    /// The addresses of nodes that a Service, or without one the shared sets, want.
    fn nodes(&self, wanted: Option<&Self::Wanted>) -> Vec<IpAddr>;
}

/// A load balancer, with the sets of nodes that its Services share.
#[derive(Debug)]
pub(crate) struct BalancerDocument {
    pub(crate) layout: Layout,
    sets: Mutex<BTreeMap<SharedSet, TargetSet>>,
    /// The Services that have parts, as far as this process knows.
    known: Mutex<BTreeMap<Mark, Key>>,
    /// Public IPs with which Azure takes no change for long, by path in lower case: it is written without them.
    given_up: Mutex<BTreeSet<String>>,
    /// Services that the calls of others left out, or that hold the others up. Nothing of their own makes the controller look at them.
    pub(crate) to_reconcile: ToReconcile,
}

impl BalancerDocument {
    pub(crate) fn new(layout: Layout) -> Self {
        Self {
            layout,
            sets: Mutex::default(),
            known: Mutex::default(),
            given_up: Mutex::default(),
            to_reconcile: ToReconcile::default(),
        }
    }

    fn given_up(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.given_up.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// It is to be written without this public IP of Steerage's, which is this owner's.
    pub(crate) fn give_up(&self, path: &str, owner: &Owner) {
        if self.given_up().insert(path.to_ascii_lowercase()) {
            // Its call fails as long as the public IP does, and is repeated until then.
            self.to_reconcile.add(owner.clone());
            tracing::warn!(
                resource = self.layout.name(),
                path,
                "public IP not ready for long; writing the load balancer without its Service"
            );
        }
    }

    /// This public IP is ready.
    pub(crate) fn use_again(&self, path: &str) {
        self.given_up().remove(&path.to_ascii_lowercase());
    }

    /// Whether one of these public IPs, by path in lower case, is left out.
    pub(crate) fn has_given_up(&self, paths: &BTreeSet<String>) -> bool {
        !self.given_up().is_disjoint(paths)
    }

    /// The parts with this mark are the Service's, also if this process has not written them: it may be refused since it began.
    pub(crate) fn note_service(&self, mark: &Mark, service: &Key) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if !known.contains_key(mark) {
            known.insert(mark.clone(), service.clone());
        }
    }

    /// Whose parts these are, if its Service was seen.
    fn owner(&self, mark: &Mark) -> Option<Owner> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.get(mark).and_then(|service| mark.owner(&self.layout.config.cluster, service))
    }

    /// Remembers a shared set, if it is newer than the one that is known.
    pub(crate) fn note_set(&self, set: &TargetSet) {
        let Some(shared) = set.shared else { return };
        let mut sets = self.sets.lock().unwrap_or_else(PoisonError::into_inner);
        if sets.get(&shared).is_none_or(|known| known.generation <= set.generation) {
            sets.insert(shared, set.clone());
        }
    }

    /// Refuses a requested address that a node has: Azure's words about it would be about the node.
    fn check_addresses(&self, body: Option<&Balancer>, wanted: &Intent) -> Result<(), Error> {
        let Intent::Present(fragment) = wanted else { return Ok(()) };
        for front in &fragment.frontends {
            let FrontendAddress::Private { address: Some(address), .. } = &front.address else { continue };
            let is_member = body.is_some_and(|body| self.members(body).contains(address));
            if is_member || [None, Some(wanted)].iter().any(|of| self.nodes(*of).contains(address)) {
                let message = format!(
                    "The address {address} is a node's. No load balancer is created or changed. Request another one."
                );
                return Err(Error::invalid(reasons::ADDRESS_NOT_AVAILABLE, message));
            }
        }
        Ok(())
    }

    fn sets(&self) -> Sets {
        let sets = self.sets.lock().unwrap_or_else(PoisonError::into_inner);
        let of = |set: &TargetSet| {
            let families = [Family::V4, Family::V6];
            families.map(|family| (family, nodes(set, family, &mut BTreeMap::new()))).into()
        };
        sets.iter().map(|(shared, set)| (*shared, of(set))).collect()
    }
}

impl Document for BalancerDocument {
    type Body = Balancer;
    type Wanted = Intent;

    fn actions(&self) -> Actions {
        Actions { get: "GET loadBalancers", put: "PUT loadBalancers", delete: "DELETE loadBalancers" }
    }

    fn path(&self) -> String {
        self.layout.path()
    }

    fn title(&self) -> String {
        format!("load balancer {}", self.layout.name())
    }

    fn etag(&self, body: &Balancer) -> Option<String> {
        body.etag.clone()
    }

    fn provisioning(&self, body: &Balancer) -> Provisioning {
        body.properties.provisioning_state.unwrap_or_default()
    }

    fn check(&self, body: &Balancer) -> Result<(), Error> {
        self.layout.check(body)
    }

    fn apply(
        &self,
        body: &mut Option<Balancer>,
        wanted: &Intent,
        is_refused: IsRefused<'_>,
    ) -> Result<bool, Error> {
        self.check_addresses(body.as_ref(), wanted)?;
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        match wanted {
            Intent::Present(fragment) => {
                if let Some(body) = body {
                    let counts = self.layout.counts(&body.properties, fragment);
                    check_namespace(
                        &body.properties,
                        (&self.layout.config.cluster, &known),
                        fragment,
                        counts,
                    )?;
                }
                known.insert(fragment.mark.clone(), fragment.service.clone());
            }
            Intent::Absent(mark, _) => drop(known.remove(mark)),
            Intent::Targets(..) | Intent::Withdrawn(_) => {}
        }
        drop(known);
        match (&mut *body, wanted) {
            (Some(balancer), _) => self.layout.apply(balancer, wanted, is_refused),
            (None, Intent::Present(_)) => {
                let mut balancer = self.layout.empty();
                self.layout.apply(&mut balancer, wanted, is_refused)?;
                *body = Some(balancer);
                Ok(true)
            }
            (None, _) => Ok(false),
        }
    }

    fn is_minor(&self, before: Option<&Balancer>, after: Option<&Balancer>) -> bool {
        let (Some(before), Some(after)) = (before, after) else { return false };
        let (one, other) = (&before.properties, &after.properties);
        one.frontends == other.frontends
            && one.rules == other.rules
            && one.probes == other.probes
            && before.tags == after.tags
    }

    fn is_whole(&self, wanted: &Intent) -> bool {
        matches!(wanted, Intent::Present(_) | Intent::Absent(..))
    }

    fn forget(&self, service: &Key, body: Option<&Balancer>) {
        let marks = body.map(|body| self.layout.marks(body)).unwrap_or_default();
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|mark, of| of != service || marks.contains(mark));
    }

    fn take_back(&self, body: &mut Balancer, before: Option<&Balancer>, wanted: &Intent) {
        let mark = match wanted {
            Intent::Present(fragment) => &fragment.mark,
            Intent::Targets(mark, _) | Intent::Withdrawn(mark) | Intent::Absent(mark, _) => mark,
        };
        self.layout.take_back(body, before, mark);
    }

    fn tidy(&self, body: &mut Option<Balancer>, is_refused: IsRefused<'_>) -> bool {
        let sets = self.sets();
        let given_up = self.given_up().clone();
        body.as_mut().is_some_and(|balancer| {
            let is_out = self.layout.leave_out(balancer, &given_up);
            self.layout.tidy(balancer, &sets, is_refused) | is_out
        })
    }

    fn leave_out(&self, body: &mut Balancer) {
        self.layout.leave_out(body, &self.given_up());
    }

    fn is_given_up(&self, body: &Balancer) -> bool {
        self.layout.is_given_up(body, &self.given_up())
    }

    fn leave_out_named(&self, body: &mut Balancer, words: &[String]) -> BTreeSet<Mark> {
        let before = body.clone();
        let services = self.layout.leave_out_named(body, words);
        if *body != before {
            // What only they used.
            self.layout.tidy(body, &Sets::new(), &|_| false);
        }
        services
    }

    fn note_not_ready(&self, body: &Balancer, paths: &[String]) {
        let is_such = |part: &&Part<Frontend>| {
            part.properties.public_ip.as_ref().is_some_and(|ip| paths.iter().any(|path| Ref::to(path) == *ip))
        };
        let parts = body.properties.frontends.iter().filter(is_such);
        let marks = parts.filter_map(|part| Mark::read(&self.layout.config.cluster, &part.name));
        marks.filter_map(|mark| self.owner(&mark)).for_each(|owner| self.to_reconcile.add(owner));
    }

    fn note_left_out(&self, services: &BTreeSet<Mark>) {
        for mark in services {
            let owner = self.owner(mark);
            let service = owner.as_ref().map_or("unknown".to_owned(), |owner| owner.service.to_string());
            tracing::warn!(
                service,
                parts = mark.part(""),
                resource = self.layout.name(),
                "Azure refuses the load balancer as it is because of this Service; writing it without this Service"
            );
            if let Some(owner) = owner {
                self.to_reconcile.add(owner);
            }
        }
    }

    fn is_empty(&self, body: &Balancer) -> bool {
        Layout::is_empty(body)
    }

    fn written(&self, body: Balancer) -> Value {
        serde_json::to_value(writable(body)).unwrap_or_default()
    }

    fn names(&self, wanted: &Intent) -> Names {
        let (mark, fragment) = match wanted {
            Intent::Present(fragment) => (&fragment.mark, Some(fragment)),
            Intent::Targets(mark, _) | Intent::Withdrawn(mark) | Intent::Absent(mark, _) => (mark, None),
        };
        let mut names = Names { mark: Some(mark.part("").to_ascii_lowercase()), ..Names::default() };
        for front in fragment.into_iter().flat_map(|fragment| &fragment.frontends) {
            names.add_address(&front.address);
        }
        names.chosen.add(fragment.and_then(|fragment| fragment.probe.path.as_deref()).unwrap_or_default());
        names
    }

    fn referred(&self, body: &Balancer) -> Vec<String> {
        let all = body.properties.frontends.iter().filter_map(|part| part.properties.public_ip.as_ref());
        all.map(|of| of.id.0.clone()).collect()
    }

    fn members(&self, body: &Balancer) -> BTreeSet<IpAddr> {
        let parts = body.properties.pools.iter().flat_map(|pool| &pool.properties.addresses);
        parts.filter_map(|part| part.properties.ip_address).collect()
    }

    fn nodes(&self, wanted: Option<&Intent>) -> Vec<IpAddr> {
        let of = |pool: &WantedPool| match pool {
            WantedPool::Own(nodes) => nodes.keys().copied().collect(),
            WantedPool::Shared(_) => Vec::new(),
        };
        match wanted {
            Some(Intent::Present(fragment)) => {
                fragment.frontends.iter().flat_map(|front| of(&front.pool)).collect()
            }
            Some(Intent::Targets(_, pools)) => pools.values().flat_map(of).collect(),
            Some(Intent::Withdrawn(_) | Intent::Absent(..)) => Vec::new(),
            None => self
                .sets()
                .values()
                .flat_map(|set| set.values())
                .flat_map(|nodes| nodes.keys().copied())
                .collect(),
        }
    }
}

impl Document for SecurityGroupDocument {
    type Body = SecurityGroup;
    type Wanted = Admission;

    fn actions(&self) -> Actions {
        let put = "PUT networkSecurityGroups";
        Actions { get: "GET networkSecurityGroups", put, delete: put }
    }

    fn path(&self) -> String {
        self.path.clone()
    }

    fn title(&self) -> String {
        format!("network security group {}", self.path.rsplit('/').next().unwrap_or_default())
    }

    fn etag(&self, body: &SecurityGroup) -> Option<String> {
        body.etag.clone()
    }

    fn provisioning(&self, body: &SecurityGroup) -> Provisioning {
        body.properties.provisioning_state.unwrap_or_default()
    }

    fn check(&self, _: &SecurityGroup) -> Result<(), Error> {
        Ok(())
    }

    fn apply(
        &self,
        body: &mut Option<SecurityGroup>,
        wanted: &Admission,
        _: IsRefused<'_>,
    ) -> Result<bool, Error> {
        match body {
            Some(group) => SecurityGroupDocument::apply(self, group, wanted),
            // Nothing is left to remove.
            None if wanted.vips.is_empty() => Ok(false),
            None => {
                let message = format!(
                    "The network security group {} does not exist. No rule is written. Correct --azure-network-security-group.",
                    self.path
                );
                Err(Error::invalid(reasons::NO_SECURITY_GROUP, message))
            }
        }
    }

    fn is_minor(&self, _: Option<&SecurityGroup>, _: Option<&SecurityGroup>) -> bool {
        false
    }

    fn is_whole(&self, _: &Admission) -> bool {
        true
    }

    fn forget(&self, _: &Key, _: Option<&SecurityGroup>) {}

    fn take_back(&self, body: &mut SecurityGroup, before: Option<&SecurityGroup>, _: &Admission) {
        // A rule is several Services': all of the cluster's are those of before.
        if let Some(before) = before {
            self.take_rules_back(body, before);
        }
    }

    fn tidy(&self, _: &mut Option<SecurityGroup>, _: IsRefused<'_>) -> bool {
        false
    }

    fn leave_out(&self, _: &mut SecurityGroup) {}

    fn is_given_up(&self, _: &SecurityGroup) -> bool {
        false
    }

    /// A rule is several Services'.
    fn leave_out_named(&self, _: &mut SecurityGroup, _: &[String]) -> BTreeSet<Mark> {
        BTreeSet::new()
    }

    fn note_not_ready(&self, _: &SecurityGroup, _: &[String]) {}

    fn note_left_out(&self, _: &BTreeSet<Mark>) {}

    fn is_empty(&self, _: &SecurityGroup) -> bool {
        false
    }

    fn written(&self, mut body: SecurityGroup) -> Value {
        body.properties.provisioning_state = None;
        serde_json::to_value(body).unwrap_or_default()
    }

    fn names(&self, wanted: &Admission) -> Names {
        let mut names = Names::default();
        for vip in &wanted.vips {
            names.own.add(&vip.to_string());
        }
        for allow in &wanted.allows {
            match &allow.source {
                Source::Tag(tag) => names.chosen.add(tag),
                Source::Ranges(ranges) => ranges.iter().for_each(|range| names.chosen.add(range)),
            }
        }
        names
    }

    fn referred(&self, _: &SecurityGroup) -> Vec<String> {
        Vec::new()
    }

    fn members(&self, _: &SecurityGroup) -> BTreeSet<IpAddr> {
        BTreeSet::new()
    }

    fn nodes(&self, _: Option<&Admission>) -> Vec<IpAddr> {
        Vec::new()
    }
}

#[cfg(test)]
mod tests {
    use crate::config::tests::config;
    use crate::limits::tests::intent;

    use super::*;

    #[test]
    fn service_without_parts_is_forgotten() {
        let document = BalancerDocument::new(Layout { config: config(), is_internal: false });
        let known = || document.known.lock().unwrap().len();
        let mut body = None;
        for name in ["served", "refused"] {
            let mut planned = body.clone();
            let wanted = intent(&crate::desired::tests::named(name, &[80], &[1]));
            document.apply(&mut planned, &wanted, &|_| false).unwrap();
            // Azure refuses the second one.
            body = body.or(planned);
        }
        for name in ["served", "refused"] {
            document.forget(&Key::new("shop", name), body.as_ref());
        }
        assert_eq!(known(), 1);
        document.forget(&Key::new("shop", "served"), None);
        assert_eq!(known(), 0);
    }
}
