// SPDX-License-Identifier: Apache-2.0
//! Applies the steps of `diff` to AWS, and records in `Resources` what each call changed. `provider` calls it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures::FutureExt as _;
use steerage_model::Family;
use steerage_provider_api::{Compare, Error, Owner};
use steerage_provider_cloud::marks::{self, Ownership};
use tokio::time::Instant;
use tracing::Instrument as _;

use crate::change_listeners::hold_emptied;
use crate::client::{Balancer, CallError, NewBalancer, Tags, read_tags};
use crate::desired::Desired;
use crate::diff::{self, ObservedGroup, ObservedListener, Step, Tagged, balancer_steps, steps};
use crate::failing_groups::{Failures, Retry};
use crate::group_pass::{self, Lender};
use crate::health_check::HealthCheckSettings;
use crate::ip_address_type::IpAddressType;
use crate::labels::Labels;
use crate::observe::{Resources, put_back_tags};
use crate::placement::Placed;
use crate::provider::Aws;
use crate::put_back::is_refused;
use crate::refused_answers::Asked;
use crate::refused_listeners::{Refused, RefusedListeners};
use crate::registered::RegisteredIds;
use crate::security_group::Security;
use crate::source_nat::SourceNat;
use crate::state::ServiceState;
use crate::step_ports::{name_ports, ports_of};
use crate::targets::{self, SharedRefusals};
use crate::tls::Tls;
use crate::wanted_targets::WantedTargets;
use crate::{annotations, reasons, security_group_sync, shared, source_nat_sync};

/// After a target group failed, listeners are changed if the call still has this time.
const TIME_FOR_LISTENERS: Duration = Duration::from_secs(20);

/// How far the steps have come.
pub(crate) enum Stepped {
    /// All steps were made, but for those of listeners that AWS refused.
    Done(Option<Refused>),
    /// AWS does not show the tags of a created resource yet.
    Unproven,
    /// The listeners of these ports would lose their last target: their new groups have none yet. The other steps were made, but for those
    /// that AWS refused, or that must wait for these.
    Empty(Vec<u16>, Option<Refused>),
    /// No target group takes its targets. The other steps were made, but for those that must wait for targets.
    Failing(Error),
}

fn arn_of(resources: &Resources, group: &str) -> Result<String, Error> {
    let group = resources.groups.get(group).map(|g| g.arn.clone());
    group.ok_or_else(|| Error::Conflict("a target group no longer exists".to_owned()))
}

fn arn_of_tagged(of: &Tagged, balancer: &Balancer, resources: &Resources) -> Result<String, Error> {
    match of {
        Tagged::Balancer => Ok(balancer.arn.clone()),
        Tagged::Group(name) => arn_of(resources, name),
        Tagged::Listener(arn) => Ok(arn.clone()),
    }
}

fn tls_of<'a>(resources: &'a mut Resources, listener: &str) -> Option<&'a mut Tls> {
    resources.listeners.iter_mut().find(|f| f.arn == listener)?.tls.as_mut()
}

/// The tags of a new resource: those of every resource, and its labels.
fn labelled(tags: &Tags, labels: &Labels) -> Tags {
    tags.clone().into_iter().chain(labels.all()).collect()
}

/// Refuses what a load balancer cannot become, whatever else the Service requests. Some of it decides who reaches the load balancer: where
/// this is refused, nobody is admitted who was not.
pub(crate) fn check_kept(wanted: &Desired, balancer: &Balancer) -> Result<(), Error> {
    if balancer.scheme != Some(wanted.scheme) {
        let has = balancer.scheme.map_or("unknown", crate::config::Scheme::as_str);
        let message = format!(
            "The load balancer is {has}, and the Service requests {} by its annotation or by --aws-scheme. AWS cannot change it: the \
             load balancer stays {has}, and other changes of the Service wait. Set annotation {} to {has}, or create the Service \
             again, which changes its hostname.",
            wanted.scheme.as_str(),
            annotations::SCHEME
        );
        return Err(Error::invalid(reasons::SCHEME_IMMUTABLE, message));
    }
    wanted.placement.check(&balancer.placed)?;
    security_group_sync::check(wanted, balancer)
}

impl Aws {
    /// The error for a wanted port at which the load balancer has a listener that is not this Service's.
    fn refuse_taken_ports(
        &self,
        owner: &Owner,
        wanted: &Desired,
        balancer: &Balancer,
        resources: &Resources,
    ) -> Result<(), Error> {
        let is_wanted = |port: u16| wanted.listeners.iter().any(|listener| listener.port == port);
        let Some(taken) = resources.foreign_listeners.iter().find(|found| is_wanted(found.port)) else {
            return Ok(());
        };
        if let (Some(shared), Some(_)) = (&wanted.shared, marks::owner(&self.config.cluster, &taken.tags)) {
            return Err(shared::port_in_use(shared, taken.port));
        }
        let advice = if taken.tags.get(marks::UID).is_some_and(|uid| *uid != owner.uid) {
            "Its tags name another Service: ask the operator to put back those that somebody changed."
                .to_owned()
        } else {
            put_back_tags(&marks::of_owner(&self.config.cluster, owner), &taken.tags)
        };
        let message = format!(
            "Port {} of the load balancer {} has a listener without the tags of this Service. It is not changed. {advice} If another \
             program made the listener, remove it with that program.",
            taken.port, balancer.name
        );
        Err(Error::invalid(reasons::OBJECT_NOT_OWNED, message))
    }

    /// Applies the steps. The targets are registered before a listener needs them; the others stay registered. Groups that are no
    /// longer wanted are left for later. A listener that AWS refuses stays as it is, and the others follow all the same.
    pub(crate) async fn apply_steps(
        &self,
        owner: &Owner,
        wanted: &Desired,
        targets: &WantedTargets,
        resources: &mut Resources,
        entry: &mut ServiceState,
    ) -> Result<Stepped, Error> {
        let mut tags = marks::of_owner(&self.config.cluster, owner);
        tags.extend(wanted.shared.iter().map(|shared| (marks::SHARED.to_owned(), shared.clone())));
        tags.extend(wanted.listener_labels().all());
        self.put_back_of_other_change(owner, (wanted, targets), &tags, resources, entry).await?;
        let balancer = self.balancer(owner, wanted, resources, entry, &tags).await?;
        self.refuse_taken_ports(owner, wanted, &balancer, resources)?;
        if !self.delete_spare_groups(owner, wanted, resources, entry).await? {
            return Ok(Stepped::Unproven);
        }
        let mut refused = RefusedListeners::default();
        self.create_groups(owner, wanted, (&balancer, &tags), resources, entry, &mut refused).await?;
        if !self.prove(owner, wanted.shared.as_ref(), resources, entry).await? {
            return Ok(Stepped::Unproven);
        }
        let steps = steps(wanted, &resources.groups, &resources.listeners, resources.foreign_listeners.len());
        let (of_groups, others) = steps.split_at(steps.iter().take_while(|step| step.is_of_group()).count());
        for step in of_groups.iter().filter(|step| !refused.lacks_group(step)) {
            self.step(owner, step.clone(), &balancer, &tags, resources, entry).await?;
        }
        // Its lines name only the target group.
        let span = tracing::warn_span!("targets", service = %owner.service);
        let failures = self.register(wanted, targets, resources, entry).instrument(span).await;
        if let Some(failure) = failures.fatal() {
            return Err(failure.clone().into());
        }
        if failures.count() > 0 && Instant::now() + TIME_FOR_LISTENERS > entry.must_end() {
            // Other calls may take as long. The next try leaves out those that do not answer.
            return failures.of_all().map_or_else(
                || Err(CallError::out_of_time().into()),
                |failure| Ok(Stepped::Failing(failure.clone().into())),
            );
        }
        match failures.of_all().map(|failure| Error::from(failure.clone())) {
            None | Some(Error::Unavailable(_) | Error::Denied(_)) => {}
            Some(error) => return Err(error),
        }
        refused.hold_failing(wanted, resources, &failures)?;
        hold_emptied(others, targets, resources, entry, &mut refused)?;
        let leaving = source_nat_sync::udp_of_other_family(wanted, resources);
        let leaving: Vec<ObservedListener> = leaving.cloned().collect();
        if leaving.iter().any(|found| refused.has(found.port)) {
            // No listener can change its family before UDP does.
            return refused.conclude_as_a_whole(wanted, targets, resources);
        }
        let made_way = async {
            for found in &leaving {
                entry.left.note(wanted, found.port, found.clone());
                let step = Step::DeleteListener { arn: found.arn.clone() };
                self.step(owner, step, &balancer, &tags, resources, entry).await?;
            }
            // A listener takes a group with IPv6 only if the load balancer has IPv6. For any other reason it gets it last.
            if wanted.groups.iter().any(|group| group.family == Family::V6) {
                self.become_type(owner, IpAddressType::DualStack, resources, entry).await?;
            }
            Ok(())
        };
        let made_way = made_way.await;
        if is_refused(&made_way) {
            self.put_back_all(owner, (&balancer, &tags), resources, entry).await?;
        }
        made_way?;
        let rest;
        let others = if leaving.is_empty() {
            others
        } else {
            let foreign = resources.foreign_listeners.len();
            rest = diff::steps(wanted, &resources.groups, &resources.listeners, foreign);
            &rest[rest.iter().take_while(|step| step.is_of_group()).count()..]
        };
        self.change_listeners(owner, (wanted, others), (&balancer, &tags), resources, entry, &mut refused)
            .await?;
        let deletes_group = |step: &&Step| matches!(step, Step::DeleteGroup { .. });
        for step in others.iter().filter(deletes_group) {
            // One that a refused listener keeps stays, or one that may come back. For a listener of others, its deletion is tried until they let it go.
            let is_kept = |arn: &String| {
                entry.left.need(arn) || resources.listeners.iter().any(|f| f.group_arn.as_ref() == Some(arn))
            };
            if !matches!(step, Step::DeleteGroup { arn, .. } if is_kept(arn)) {
                self.step(owner, step.clone(), &balancer, &tags, resources, entry).await?;
            }
        }
        let stepped = refused.conclude(wanted, targets, resources)?;
        let failing = failures.of_all().map(|failure| Stepped::Failing(failure.clone().into()));
        for step in balancer_steps(wanted, &resources.balancer_attributes, &resources.balancer_tags) {
            self.step(owner, step, &balancer, &tags, resources, entry).await?;
        }
        Ok(failing.unwrap_or(stepped))
    }

    /// Reads the tags of what was created: for a name that exists, AWS returns the existing resource, whoever made it. False while
    /// AWS does not show them.
    pub(crate) async fn prove(
        &self,
        owner: &Owner,
        shared: Option<&String>,
        resources: &mut Resources,
        entry: &mut ServiceState,
    ) -> Result<bool, Error> {
        if entry.unproven.is_empty() {
            return Ok(true);
        }
        let arns: Vec<String> = entry.unproven.iter().cloned().collect();
        for (arn, tags) in read_tags(&*self.client, &arns).await? {
            let is_proven = match marks::ownership(&self.config.cluster, &tags) {
                Ownership::Ours(found) => found == *owner,
                Ownership::Shared(found) => shared == Some(&found),
                Ownership::SameName(_) | Ownership::Foreign => false,
            };
            if !is_proven {
                // The next call reads everything, and says what is wrong or deletes what an earlier Service left.
                return Err(Error::Conflict(format!("{arn} exists with other tags")));
            }
            entry.unproven.remove(&arn);
            if let Some(known) = resources.tags_of(&arn) {
                *known = tags;
            }
        }
        Ok(entry.unproven.is_empty())
    }

    /// Registers the targets in all wanted target groups, as far as AWS lets it.
    async fn register(
        &self,
        wanted: &Desired,
        targets: &WantedTargets,
        resources: &Resources,
        entry: &mut ServiceState,
    ) -> Failures {
        let all = targets.all();
        entry.refused_targets.retain(|id| all.contains_key(id));
        let limits = self.limits(entry, Compare::Remembered);
        // Those that this call has tried a moment ago would hang again.
        let just_tried = entry.failing.since(entry.began);
        let ServiceState { registered, refused_targets, unfollowed, failing, .. } = entry;
        let groups = wanted.groups.iter().filter_map(|group| resources.groups.get_key_value(&group.name));
        let groups = groups.filter(|(name, _)| !just_tried.contains(*name));
        // From now on they follow like all others, also where this try fails.
        let may_lag: BTreeSet<String> =
            unfollowed.iter().filter(|name| wanted.has_group(name)).cloned().collect();
        unfollowed.retain(|name| !may_lag.contains(name));
        let (lender, refusals) = (&Lender::new(registered), &SharedRefusals::new(refused_targets));
        let may_be_old = |name: &String, arn: &str| may_lag.contains(name) || !resources.uses(arn);
        let pass = group_pass::over(groups, (failing, Retry::NotHanging), |name, group| {
            let (client, arn, is_old) = (&*self.client, group.arn.as_str(), may_be_old(name, &group.arn));
            async move {
                let Some(targets) = targets.of(name, group) else { return Ok(()) };
                let mut known = lender.lend(arn);
                let added = if is_old {
                    // No listener may lead to a node that is no target any more. Another process may not have followed it.
                    targets::converge(client, arn, &mut known, targets, refusals, limits).await.map(|_| ())
                } else {
                    targets::add(client, arn, &mut known, targets, refusals, limits).await
                };
                match added {
                    // Others leave the group afterwards, which makes room.
                    Err(failure)
                        if failure.is_quota() && known.get(arn).is_some_and(|known| !known.is_empty()) =>
                    {
                        Ok(())
                    }
                    done => done,
                }
            }
            .boxed()
        });
        let (_, mut failures) = pass.await;
        failures.add_of(failing, &just_tried, |name| wanted.has_group(name));
        failures
    }

    async fn balancer(
        &self,
        owner: &Owner,
        wanted: &Desired,
        resources: &mut Resources,
        entry: &mut ServiceState,
        tags: &Tags,
    ) -> Result<Balancer, Error> {
        let Some(balancer) = &resources.balancer else {
            tracing::info!(
                service = %owner.service, shared = wanted.shared, name = wanted.name, scheme = wanted.scheme.as_str(),
                "creating load balancer"
            );
            let subnets = self.resolved(wanted).await?.mappings()?;
            let prefixes = self.given_prefixes(wanted).await?;
            let placed: Placed = subnets.iter().cloned().collect();
            let source_nat =
                wanted.source_nat.change(&SourceNat::Off, &placed, &prefixes).unwrap_or_default();
            let new = NewBalancer {
                name: wanted.name.clone(),
                scheme: wanted.scheme,
                ip_address_type: wanted.ip_address_type,
                source_nat,
                subnets,
                security_groups: self.ensure_security_groups(owner, wanted, entry).await?,
            };
            self.note_change();
            (entry.written, entry.subnets.written) = (Some(Instant::now()), Some(Instant::now()));
            let tags = match &wanted.shared {
                Some(shared) => labelled(&marks::of_shared(&self.config.cluster, shared), &wanted.labels),
                None => labelled(tags, &wanted.labels),
            };
            let made = match self.client.create_balancer(&new, &tags).await {
                Ok(made) => made,
                Err(failure) => {
                    let is_named = matches!(wanted.security, Security::Named(_));
                    if self.is_about_backend_group(&failure) && !is_named {
                        self.drop_security_group(owner, entry).await;
                        return Err(failure.rejected());
                    }
                    if failure.is("InvalidSecurityGroup") && is_named {
                        return Err(failure.rejected());
                    }
                    if failure.is("InvalidSecurityGroup")
                        && entry.has_settled_security_groups(self.config.settle)
                    {
                        // It is in another VPC than the subnets; or somebody deleted it, and the next call creates another.
                        entry.security_groups.remove(owner);
                        return Err(failure.rejected());
                    }
                    let error = failure.into();
                    if matches!(error, Error::Invalid { .. }) {
                        self.drop_security_group(owner, entry).await;
                    }
                    return Err(self.name_lacking_ipv6(error, wanted.ip_address_type, &placed).await);
                }
            };
            // AWS may show requested addresses, and the group, only later.
            let NewBalancer { security_groups, source_nat, .. } = new;
            let source_nat = made.source_nat.or_requested(source_nat);
            let made = Balancer { placed, security_groups, source_nat, ..made };
            entry.unproven.insert(made.arn.clone());
            self.new_balancers.expect(&made.arn);
            resources.balancer = Some(made.clone());
            (resources.balancer_tags, resources.balancer_attributes) = (tags, BTreeMap::new());
            return Ok(made);
        };
        check_kept(wanted, balancer)?;
        Ok(balancer.clone())
    }

    /// Changes the type now, because a step needs it.
    pub(crate) async fn become_type(
        &self,
        owner: &Owner,
        kind: IpAddressType,
        resources: &mut Resources,
        entry: &mut ServiceState,
    ) -> Result<(), Error> {
        match resources.balancer.as_mut().filter(|found| found.ip_address_type != kind) {
            Some(balancer) => self.set_ip_address_type(owner, balancer, kind, entry).await,
            None => Ok(()),
        }
    }

    /// Adds those that AWS accepts, whatever becomes of the others.
    pub(crate) async fn add_certificates(
        &self,
        listener: &str,
        certificates: BTreeSet<String>,
        resources: &mut Resources,
        entry: &mut ServiceState,
    ) -> Result<(), Error> {
        let mut refused = None;
        for arn in certificates {
            let asked = Asked::Certificate(arn.clone());
            let done = if let Some(error) = entry.refused_answers.expected(&asked) {
                Err(error)
            } else {
                entry.check_time()?;
                let done = self.client.add_certificate(listener, &arn).await.map_err(Error::from);
                done.inspect_err(|error| entry.refused_answers.note(asked, error))
            };
            match done {
                Ok(()) => {
                    if let Some(tls) = tls_of(resources, listener) {
                        tls.others.insert(arn);
                    }
                }
                Err(error @ Error::Invalid { .. }) if error.reason() != reasons::QUOTA_EXCEEDED => {
                    refused.get_or_insert(error);
                }
                Err(error) => return Err(error),
            }
        }
        refused.map_or(Ok(()), Err)
    }

    async fn remove_certificates(
        &self,
        listener: &str,
        certificates: BTreeSet<String>,
        resources: &mut Resources,
        entry: &ServiceState,
    ) -> Result<(), Error> {
        for arn in certificates {
            entry.check_time()?;
            self.client.remove_certificate(listener, &arn).await?;
            if let Some(tls) = tls_of(resources, listener) {
                tls.others.remove(&arn);
            }
        }
        Ok(())
    }

    /// Makes a step. A failure names the ports for which it is.
    pub(crate) async fn step(
        &self,
        owner: &Owner,
        step: Step,
        balancer: &Balancer,
        tags: &Tags,
        resources: &mut Resources,
        entry: &mut ServiceState,
    ) -> Result<(), Error> {
        let wanted = entry.wanted.as_ref().filter(|(of, _)| of == owner).map(|(_, wanted)| wanted);
        let ports = ports_of(&step, wanted, resources);
        let is_kept = matches!(step, Step::CreateGroup(_)) || !step.is_of_group();
        let done = self.make_step(owner, step, balancer, tags, resources, entry).await;
        done.map_err(|error| name_ports(error, &ports, is_kept))
    }

    async fn modify_health(
        &self,
        arn: String,
        health: HealthCheckSettings,
        resources: &mut Resources,
        entry: &mut ServiceState,
    ) -> Result<(), Error> {
        entry.open_checks.insert(arn.clone(), health.clone());
        let done = self.client.modify_health(&arn, &health).await;
        if done.as_ref().err().is_none_or(|failure| !failure.leaves_open()) {
            entry.open_checks.remove(&arn);
        }
        done?;
        if let Some(group) = resources.groups.values_mut().find(|group| group.arn == arn) {
            (group.health, group.only_200) = (health, true);
        }
        Ok(())
    }

    async fn make_step(
        &self,
        owner: &Owner,
        step: Step,
        balancer: &Balancer,
        tags: &Tags,
        resources: &mut Resources,
        entry: &mut ServiceState,
    ) -> Result<(), Error> {
        if !matches!(step, Step::DeleteGroup { .. }) {
            entry.check_time()?;
            tracing::info!(service = %owner.service, %step, "changing load balancer");
            self.note_change();
            entry.written = Some(Instant::now());
        }
        match step {
            Step::CreateGroup(group) => {
                let tags = labelled(tags, &group.labels);
                entry.names.insert(group.name.clone());
                let made = self.client.create_group(&group, &self.config.vpc, &tags).await?;
                entry.unproven.insert(made.arn.clone());
                entry.unused.insert(group.name.clone());
                entry.registered.entry(made.arn.clone()).or_insert_with(RegisteredIds::new);
                let has_pods = group.has_pods();
                let seen = ObservedGroup { health: group.health, has_pods, only_200: true, tags, ..made };
                resources.groups.insert(group.name, seen);
            }
            Step::ModifyHealth { arn, health } => {
                self.modify_health(arn, health, resources, entry).await?;
            }
            Step::SetAttributes { group, attributes } => {
                self.client.set_attributes(&arn_of(resources, &group)?, &attributes).await?;
                if let Some(group) = resources.groups.get_mut(&group) {
                    group.attributes.extend(attributes.into_iter().map(|(k, v)| (k.to_owned(), v)));
                }
            }
            Step::SetBalancerAttributes(attributes) => {
                self.client.set_balancer_attributes(&balancer.arn, &attributes).await?;
                let new = attributes.into_iter().map(|(key, value)| (key.to_owned(), value));
                resources.balancer_attributes.extend(new);
            }
            Step::AddTags { of, tags } => {
                let arn = arn_of_tagged(&of, balancer, resources)?;
                self.client.add_tags(&arn, &tags).await?;
                if let Some(known) = resources.tags_of(&arn) {
                    known.extend(tags);
                }
            }
            Step::RemoveTags { of, keys } => {
                let arn = arn_of_tagged(&of, balancer, resources)?;
                self.client.remove_tags(&arn, &keys).await?;
                if let Some(known) = resources.tags_of(&arn) {
                    known.retain(|key, _| !keys.contains(key));
                }
            }
            Step::CreateListener { port, protocol, group: name, tls } => {
                let group = arn_of(resources, &name)?;
                let call =
                    self.client.create_listener(&balancer.arn, (port, protocol), tls.as_ref(), &group, tags);
                let made = entry.unless_refused(&name, call).await?;
                let (group_arn, arn) = (Some(group), made.arn.clone());
                let others = tls.as_ref().map(|tls| tls.others.clone()).unwrap_or_default();
                resources.listeners.push(ObservedListener {
                    port,
                    protocol: protocol.to_owned(),
                    group_arn,
                    tags: tags.clone(),
                    tls: tls.map(|tls| Tls { others: BTreeSet::new(), ..tls }),
                    ..made
                });
                if !others.is_empty() {
                    self.add_certificates(&arn, others, resources, entry).await?;
                }
            }
            Step::AddCertificates { arn, certificates } => {
                self.add_certificates(&arn, certificates, resources, entry).await?;
            }
            Step::RemoveCertificates { arn, certificates } => {
                self.remove_certificates(&arn, certificates, resources, entry).await?;
            }
            Step::SwitchListener { arn, protocol, group: name, tls } => {
                let group = arn_of(resources, &name)?;
                let call = self.client.modify_listener(&arn, protocol, tls.as_ref(), &group);
                entry.unless_refused(&name, call).await?;
                if let Some(listener) = resources.listeners.iter_mut().find(|f| f.arn == arn) {
                    listener.protocol = protocol.map_or_else(|| listener.protocol.clone(), str::to_owned);
                    listener.group_arn = Some(group);
                    // AWS keeps the other certificates, unless the listener had no TLS.
                    let others = listener.tls.take().map(|tls| tls.others).unwrap_or_default();
                    listener.tls = tls.map(|tls| Tls { others, ..tls });
                }
            }
            Step::DeleteListener { arn } => {
                self.client.delete_listener(&arn).await?;
                let gone = resources.listeners.iter().filter(|f| f.arn == arn);
                entry.freed.extend(gone.map(|listener| (listener.arn.clone(), listener.port)));
                resources.listeners.retain(|f| f.arn != arn);
            }
            Step::DeleteGroup { name, .. } => {
                entry.leaving.entry(name).or_insert_with(Instant::now);
            }
        }
        Ok(())
    }
}
