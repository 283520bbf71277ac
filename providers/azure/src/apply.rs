// SPDX-License-Identifier: Apache-2.0
//! Brings a Service in place: public IPs, its parts of the load balancer, and the rules that admit its clients. Where clients are limited,
//! the rules come before the ports. What it had before goes last, in `retire`. Nothing waits: the controller calls again.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use steerage_model::{Family, Ingress, IpMode};
use steerage_provider_api::{Compare, Error, LoadBalancer, Outcome, Owner, Progress};
use tokio::time::Instant;

use crate::admission::Admission;
use crate::desired::{Desired, WantedAddress};
use crate::document::{BalancerDocument, Document as _};
use crate::merge::{Fragment, FrontendAddress, FrontendPart, Intent, Layout, Others};
use crate::provider::{Azure, KNOWN, RECENT};
use crate::public_ips::{Prepared, Usable};
use crate::reasons;
use crate::retire::{Place, Retired};
use crate::service_state::{Complete, Left, ServiceState};
use crate::shared::{Shared, Written};
use crate::types::{Balancer, Frontend, Part};

/// Until the other load balancer, which could not be read, is asked again, and what Azure said of a public IP.
const UNKNOWN_WAIT: Duration = Duration::from_secs(30);

/// The addresses of a Service.
struct Addresses {
    parts: Vec<FrontendPart>,
    /// Those that are known: public ones.
    vips: BTreeSet<IpAddr>,
    /// Paths of public IPs, in lower case.
    used: BTreeSet<String>,
    is_listed: bool,
    /// What Azure does not keep of what was written.
    lost: Vec<String>,
    /// Why the tags or the DNS label of one are not as they should be.
    failed: Option<(&'static str, String)>,
    left: Left,
}

/// The outcome of a change that is not complete.
pub(crate) fn again(wait: Duration) -> Outcome {
    Outcome { progress: Progress::Again(wait), ..Outcome::done() }
}

impl Azure {
    pub(crate) async fn apply_wanted(
        &self,
        lb: &LoadBalancer,
        wanted: Desired,
        entry: &mut ServiceState,
        compare: Compare,
    ) -> Result<Outcome, Error> {
        let (owner, set) = (&lb.owner, lb.nodes());
        let [balancer, _] = self.of_scheme(wanted.is_internal);
        balancer.document.note_set(&set);
        let outcome = self.refusals(balancer, &set, wanted.refused.clone()).await;
        let refused: BTreeSet<IpAddr> = balancer.refused(all_addresses(&set)).await.into_keys().collect();
        if compare == Compare::Remembered
            && let Some(complete) = &entry.complete
            && complete.owner == *owner
            && complete.wanted == wanted
            && complete.refused == refused
            && !complete.left.is_due()
            && !balancer.document.has_given_up(&complete.used)
        {
            return Ok(with_trouble(balancer, &complete.used, complete.answer(outcome)).await);
        }
        entry.complete = None;
        let (age, listed) = match compare {
            Compare::InPlace => (RECENT, RECENT),
            Compare::Remembered => (Duration::MAX, KNOWN),
        };

        if entry.alone != Some(wanted.is_internal) {
            entry.alone = None;
        }
        let mut trouble = match self.delete_earlier((owner, wanted.is_internal), entry, age, listed).await? {
            Retired::Again(wait) => return Ok(again(wait)),
            Retired::Unknown(error) => Some(error),
            Retired::Announce | Retired::Done => None,
        };
        let addresses = match self.addresses(owner, &wanted, entry, (age, listed)).await? {
            Ok(addresses) => addresses,
            Err(wait) => return Ok(again(wait)),
        };
        let fragment = Fragment {
            service: owner.service.clone(),
            mark: wanted.mark.clone(),
            is_listed: addresses.is_listed,
            frontends: addresses.parts.clone(),
            rules: wanted.rules.clone(),
            probe: wanted.probe.clone(),
            others: Others::Serve,
        };
        let intent = Intent::Present(fragment.clone());
        balancer.check_rejected(&owner.service, &intent).await?;
        if let Some(wait) = self.limit_first(owner, &wanted, &fragment, &addresses.vips, entry, age).await? {
            return Ok(again(wait));
        }
        if let Some(wait) = self.drop_unpublished(lb, &fragment, (balancer, entry), age).await? {
            return Ok(again(wait));
        }
        let body = match self.write(balancer, &owner.service, intent, age).await? {
            Written::Again(wait) => return Ok(again(wait)),
            Written::Done(body) => body,
        };
        let (own, others) = balancer.document.layout.split(body.as_ref(), &fragment);
        let mut vips = addresses.vips;
        if wanted.is_internal {
            vips = private_addresses(own);
            if vips.len() < wanted.frontends.len() {
                return Err(private_address_not_shown(&balancer.document.layout));
            }
        }
        let ingress = ingress(&wanted, &vips);
        let place =
            Place { wanted: &wanted, fragment: &fragment, vips: &vips, used: &addresses.used, others };
        match self.retire(owner, &place, is_known(lb, entry, &ingress), entry, (age, listed)).await? {
            Retired::Again(wait) => return Ok(again(wait)),
            Retired::Announce => {
                entry.announced = Some(ingress.clone());
                return Ok(Outcome { ingress, ..again(self.config.poll) });
            }
            Retired::Unknown(error) => trouble = Some(error),
            Retired::Done => {}
        }
        if let Some(error) = trouble {
            return Ok(self.unknown(wanted.is_internal, &error, Outcome { ingress, ..outcome }));
        }
        (entry.announced, entry.silent) = (None, BTreeSet::new());
        entry.vips.clone_from(&vips);
        let incomplete = addresses.failed.or_else(|| not_kept(&addresses.lost));
        entry.complete = Some(Complete {
            owner: owner.clone(),
            wanted,
            ingress: ingress.clone(),
            incomplete: incomplete.clone(),
            refused,
            used: addresses.used.clone(),
            left: addresses.left,
        });
        let refused = entry.complete.as_ref().map(|complete| complete.wanted.refused.clone());
        let outcome = self.refusals(balancer, &set, refused.unwrap_or_default()).await;
        // What the write found refused is part of what is complete.
        if let Some(complete) = &mut entry.complete {
            complete.refused = balancer.refused(all_addresses(&set)).await.into_keys().collect();
        }
        let outcome = addresses.left.with_times(Outcome { ingress, incomplete, ..outcome });
        Ok(with_trouble(balancer, &addresses.used, outcome).await)
    }

    /// Brings the addresses of a Service in place. `Err` with a time if they are not yet.
    async fn addresses(
        &self,
        owner: &Owner,
        wanted: &Desired,
        entry: &mut ServiceState,
        (age, listed): (Duration, Duration),
    ) -> Result<Result<Addresses, Duration>, Error> {
        let (calls, [balancer, _]) = (&*self.calls, self.of_scheme(wanted.is_internal));
        let (mut parts, mut vips, mut used, mut is_listed, mut lost) =
            (Vec::new(), BTreeSet::new(), BTreeSet::new(), false, Vec::new());
        let (mut failed, mut left) = (None, Left::default());
        for front in &wanted.frontends {
            let of = (owner, front.family);
            let prepared = match &front.address {
                WantedAddress::Private { subnet, address } => {
                    is_listed = true;
                    let address = FrontendAddress::Private { subnet: subnet.clone(), address: *address };
                    parts.push(FrontendPart { family: front.family, address, pool: front.pool.clone() });
                    continue;
                }
                WantedAddress::New(new) => {
                    self.public_ips.ensure(calls, of, new, &mut entry.operations, listed).await?
                }
                WantedAddress::Given { group, by } => {
                    let path = balancer.document.layout.path();
                    let given = (group.as_deref(), by);
                    let prepared = self.public_ips.given(calls, of, given, &path, listed).await?;
                    if let Prepared::Ready(usable) = &prepared
                        && let Some(wait) = self.claim(owner, wanted, usable, age).await?
                    {
                        return Ok(Err(wait));
                    }
                    prepared
                }
            };
            let usable = match prepared {
                Prepared::Again(wait) => return Ok(Err(wait)),
                Prepared::Ready(usable) => usable,
            };
            balancer.document.use_again(&usable.id);
            if let Some(settings) = usable.failed {
                left.retry = Some(Instant::now() + settings.retry);
                failed = Some((settings.reason, settings.message));
            }
            left.rest = usable.rest.map(|rest| Instant::now() + rest).into_iter().chain(left.rest).min();
            is_listed |= !usable.is_ours;
            vips.insert(usable.address);
            used.insert(usable.id.to_ascii_lowercase());
            let name = usable.id.rsplit('/').next().unwrap_or_default();
            lost.extend(usable.lost.iter().map(|what| format!("{what} of the public IP {name}")));
            let address = FrontendAddress::Public(usable.id);
            parts.push(FrontendPart { family: front.family, address, pool: front.pool.clone() });
        }
        self.address_owners.keep_claims(owner, &vips);
        Ok(Ok(Addresses { parts, vips, used, is_listed, lost, failed, left }))
    }

    /// Claims an address of the user: a refused Service must not change the rules of the one that has it. When to call again; `None` if it
    /// is claimed.
    async fn claim(
        &self,
        owner: &Owner,
        wanted: &Desired,
        usable: &Usable,
        age: Duration,
    ) -> Result<Option<Duration>, Error> {
        let [balancer, _] = self.of_scheme(wanted.is_internal);
        Ok(match self.balancer(balancer, age).await? {
            Err(wait) => Some(wait),
            Ok(body) => {
                let address = FrontendAddress::Public(usable.id.clone());
                balancer.document.layout.check_address(body.as_ref(), &wanted.mark, &address)?;
                // A Service that requested it first may have no frontend yet.
                self.address_owners.claim(owner, usable.address, reasons::ADDRESS_NOT_AVAILABLE)?;
                None
            }
        })
    }

    /// Limits the clients of a Service before its ports serve, if it limits any. When to call again; `None` if that is done.
    async fn limit_first(
        &self,
        owner: &Owner,
        wanted: &Desired,
        fragment: &Fragment,
        public: &BTreeSet<IpAddr>,
        entry: &ServiceState,
        age: Duration,
    ) -> Result<Option<Duration>, Error> {
        let (calls, [balancer, _]) = (&*self.calls, self.of_scheme(wanted.is_internal));
        let Some(security_group) = self.security_group.as_ref().filter(|_| !wanted.sources.is_everybody())
        else {
            return Ok(None);
        };
        let intent = Intent::Present(fragment.clone());
        if let Some(wait) = balancer.check_place(calls, &intent, age).await? {
            return Ok(Some(wait));
        }
        let mut vips = public.clone();
        if wanted.is_internal {
            let present = match self.balancer(balancer, age).await? {
                Ok(present) => present,
                Err(wait) => return Ok(Some(wait)),
            };
            vips = private_addresses(balancer.document.layout.split(present.as_ref(), fragment).0);
            if vips.len() < fragment.frontends.len() {
                // The address is not known, and nobody may connect to it before it is.
                let without = Fragment { rules: Vec::new(), ..fragment.clone() };
                let written = self.write(balancer, &fragment.service, Intent::Present(without), age).await?;
                let body = match written {
                    Written::Again(wait) => return Ok(Some(wait)),
                    Written::Done(body) => body,
                };
                vips = private_addresses(balancer.document.layout.split(body.as_ref(), fragment).0);
            }
        }
        self.address_owners.note(owner, &vips);
        let mut both = &vips | &(&entry.vips - &entry.silent);
        self.address_owners.leave_out_of_others(owner, &mut both);
        let admission =
            Admission::new(both, &BTreeSet::new(), &wanted.rules, &wanted.sources, wanted.is_internal)
                .of(wanted.service.namespace());
        if let Written::Again(wait) = security_group.write(calls, &fragment.service, admission, age).await? {
            return Ok(Some(wait));
        }
        Ok(None)
    }

    /// The outcome of a Service that is served, and may have old addresses in the other load balancer.
    fn unknown(&self, is_internal: bool, error: &Error, outcome: Outcome) -> Outcome {
        let [_, other] = self.of_scheme(is_internal);
        let message = format!(
            "The Service is served. The {} cannot be read or written, so old addresses of the Service may still be there. Steerage tries again. \
             {error}",
            other.document.title()
        );
        let incomplete = Some((error.reason(), message));
        Outcome { incomplete, retry_refused: Some(UNKNOWN_WAIT), ..outcome }
    }

    /// Where a Service moves again before its old address is gone, removes the address in between: nobody knows it. So it has two at most.
    /// When to call again; `None` if that is done.
    async fn drop_unpublished(
        &self,
        lb: &LoadBalancer,
        fragment: &Fragment,
        (balancer, entry): (&Shared<BalancerDocument>, &mut ServiceState),
        age: Duration,
    ) -> Result<Option<Duration>, Error> {
        let body = match self.balancer(balancer, age).await? {
            Ok(body) => body,
            Err(wait) => return Ok(Some(wait)),
        };
        let (own, others) = balancer.document.layout.split(body.as_ref(), fragment);
        let of = |parts: &[&Part<Frontend>], family: Family| {
            parts.iter().filter(|part| fragment.mark.is_frontend(family, &part.name)).count()
        };
        let mut families = fragment.frontends.iter().map(|front| front.family);
        if families.all(|family| of(&others, family) < 2 || of(&own, family) > 0) {
            return Ok(None);
        }
        let (mut kept, mut dropped) = (fragment.clone(), BTreeSet::new());
        for front in &mut kept.frontends {
            for part in others.iter().filter(|part| fragment.mark.is_frontend(front.family, &part.name)) {
                let vips = self.addresses_of([*part].into_iter(), RECENT).await?;
                let is_published = vips.iter().any(|ip| lb.published.contains(ip));
                match FrontendAddress::of(part).filter(|_| is_published) {
                    Some(address) => front.address = address,
                    None => dropped.extend(vips),
                }
            }
        }
        kept.others = Others::Gone;
        // Their rules in the security group go with those of the old address.
        entry.vips.extend(dropped);
        Ok(match self.write(balancer, &fragment.service, Intent::Present(kept), age).await? {
            Written::Again(wait) => Some(wait),
            Written::Done(_) => None,
        })
    }

    /// Deletes what earlier Services of the name left, in the order of a deletion: their addresses say what is theirs.
    async fn delete_earlier(
        &self,
        (owner, is_internal): (&Owner, bool),
        entry: &mut ServiceState,
        age: Duration,
        listed: Duration,
    ) -> Result<Retired, Error> {
        let (calls, mark) = (&*self.calls, self.mark(owner));
        let mut trouble = None;
        let ours = self.public_ips.of_service(calls, owner, listed).await?;
        let mut earlier: BTreeSet<Owner> = ours.into_iter().map(|(of, _)| of).collect();
        for balancer in &self.balancers {
            let body = match self.balancer(balancer, age).await {
                Ok(Ok(body)) => body,
                Ok(Err(wait)) => return Ok(Retired::Again(wait)),
                // Another one has its name: nothing in it is Steerage's. If it is needed, its write says so.
                Err(Error::Invalid { .. })
                    if !self.has_parts(balancer, |of| of.base == mark.base).await? =>
                {
                    None
                }
                Err(_) if entry.alone.is_some_and(|alone| alone != balancer.document.layout.is_internal) => {
                    None
                }
                // A Service that is not in it does not need it.
                Err(error) if balancer.document.layout.is_internal != is_internal => {
                    trouble = Some(error);
                    None
                }
                Err(error) => return Err(error),
            };
            let marks = body.map(|body| balancer.document.layout.marks(&body)).unwrap_or_default();
            let of_name = marks.into_iter().filter(|of| of.base == mark.base && of.uid != mark.uid);
            earlier.extend(of_name.filter_map(|of| of.owner(&self.config.cluster, &owner.service)));
        }
        for of in earlier.into_iter().filter(|of| of.uid != owner.uid) {
            if let Progress::Again(wait) = self.delete_all(&of, entry).await? {
                return Ok(Retired::Again(wait));
            }
        }
        Ok(trouble.map_or(Retired::Done, Retired::Unknown))
    }

    /// The load balancer of a scheme, and the other one.
    pub(crate) fn of_scheme(
        &self,
        is_internal: bool,
    ) -> [&crate::shared::Shared<crate::document::BalancerDocument>; 2] {
        let [external, internal] = &self.balancers;
        if is_internal { [internal, external] } else { [external, internal] }
    }
}

/// Whether clients know these addresses. What was handed over may not have reached the Service's status, from which they know the old one.
fn is_known(lb: &LoadBalancer, entry: &ServiceState, ingress: &[Ingress]) -> bool {
    let is_announced = || entry.announced.as_deref() == Some(ingress);
    lb.published.is_empty() && is_announced()
        || ingress.iter().all(|one| one.ip.is_some_and(|ip| lb.published.contains(&ip)))
}

/// The condition of a Service some of whose wishes do not stay in Azure.
fn not_kept(lost: &[String]) -> Option<(&'static str, String)> {
    (!lost.is_empty()).then(|| {
        let message = format!(
            "Azure accepted {} and did not keep that: a policy may take it away. It is not written again. All else is in place. Exempt the \
             resource group from the policy, or change the annotation.",
            lost.join(", ")
        );
        (reasons::OPERATION_NOT_PERMITTED, message)
    })
}

/// The same outcome, which says so if Azure takes no change because of one of these public IPs.
async fn with_trouble(
    balancer: &Shared<BalancerDocument>,
    used: &BTreeSet<String>,
    outcome: Outcome,
) -> Outcome {
    let outcome = not_ready(&balancer.not_ready().await, used, outcome);
    forbidden(&balancer.forbidden().await, used, outcome)
}

fn forbidden(all: &BTreeMap<String, Error>, used: &BTreeSet<String>, outcome: Outcome) -> Outcome {
    let Some((path, error)) = all.iter().find(|(path, _)| used.contains(*path)) else { return outcome };
    let message = format!(
        "The Service is served. Azure takes no change of the load balancer, for all Services, because of its public IP {}. Give the \
         identity the right to use it, or exempt it from the policy. Deleting the Service frees the others, too. {error}",
        path.rsplit('/').next().unwrap_or_default()
    );
    let incomplete = Some((error.reason(), message));
    Outcome { incomplete, retry_refused: Some(UNKNOWN_WAIT), ..outcome }
}

/// The same outcome, which says so if Azure takes no change because one of these public IPs is not ready.
fn not_ready(all: &BTreeMap<String, String>, used: &BTreeSet<String>, outcome: Outcome) -> Outcome {
    if outcome.incomplete.as_ref().is_some_and(|(reason, _)| *reason == reasons::PUBLIC_IP_NOT_READY) {
        // It says also which change failed, and why.
        return outcome;
    }
    let Some((path, words)) = all.iter().find(|(path, _)| used.contains(*path)) else { return outcome };
    let message = format!(
        "The Service is served. Its public IP {} is not ready, and Azure takes no change of the load balancer until it is. Steerage writes \
         its own again. Write one of yours again: `az network public-ip update --ids {path}`. {words}",
        path.rsplit('/').next().unwrap_or_default()
    );
    let incomplete = Some((reasons::PUBLIC_IP_NOT_READY, message));
    Outcome { incomplete, retry_refused: Some(UNKNOWN_WAIT), ..outcome }
}

fn all_addresses(set: &steerage_provider_api::TargetSet) -> impl Iterator<Item = IpAddr> + '_ {
    set.targets.iter().flat_map(|target| target.addresses.iter().copied())
}

pub(crate) fn private_addresses(parts: Vec<&crate::types::Part<crate::types::Frontend>>) -> BTreeSet<IpAddr> {
    parts.into_iter().filter_map(|part| part.properties.private_ip).collect()
}

fn private_address_not_shown(layout: &Layout) -> Error {
    Error::Unavailable(format!(
        "Azure does not show the private address of the load balancer yet. Steerage retries. If this lasts, look at its frontends: `az \
         network lb frontend-ip list --lb-name {} --resource-group {}`.",
        layout.name(),
        layout.config.resource_group
    ))
}

/// In the Service's order of families.
fn ingress(wanted: &Desired, vips: &BTreeSet<IpAddr>) -> Vec<Ingress> {
    let of = |family: Family| vips.iter().copied().find(|vip| Family::of(*vip) == family);
    let all = wanted.frontends.iter().filter_map(|front| of(front.family));
    all.map(|ip| Ingress { ip: Some(ip), hostname: None, ip_mode: Some(IpMode::Vip) }).collect()
}

impl crate::merge::Layout {
    /// The frontends of a Service, if there is a load balancer.
    pub(crate) fn frontends_of<'a>(
        &self,
        body: Option<&'a Balancer>,
        mark: &crate::marks::Mark,
    ) -> Vec<&'a crate::types::Part<crate::types::Frontend>> {
        body.map(|body| self.frontends(body, mark)).unwrap_or_default()
    }
}
