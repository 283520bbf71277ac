// SPDX-License-Identifier: Apache-2.0
//! Public IPs: those that Steerage creates for a Service, and those of users. One list of a resource group serves all Services.

mod known;
mod of_users;
mod repair;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::json;
use steerage_model::Family;
use steerage_provider_api::{Error, Owner};
use tokio::time::Instant;

use self::known::KnownPublicIps;
pub(crate) use self::repair::FailureExtent;
use self::repair::{ChangeHistories, NotTried, REPAIR_REST};
use crate::client::{Call, Calls, list, object, read};
use crate::config::Config;
use crate::desired::NewPublicIp;
use crate::error::CallError;
use crate::marks::{self, Mark};
use crate::operation::{Operation, Running};
use crate::reasons;
use crate::types::{Provisioning, PublicIp, PublicIpProperties, Ref};

const GET: &str = "GET publicIPAddresses";
const PUT: &str = "PUT publicIPAddresses";
const DELETE: &str = "DELETE publicIPAddresses";

/// Azure takes no change of a load balancer while a public IP in it changes: until the next change of one in use.
const REST: Duration = Duration::from_mins(1);

/// A load balancer lets a public IP go within seconds. Then it is told what has it.
const IN_USE: Duration = Duration::from_mins(1);

/// A public IP that can be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Usable {
    pub(crate) id: String,
    pub(crate) address: IpAddr,
    /// Whether its tags say whose it is.
    pub(crate) is_ours: bool,
    /// What was written and is not there: Azure's policies may take it away.
    pub(crate) lost: Vec<String>,
    /// Until what it should have besides can be written: its Service need not wait for that.
    pub(crate) rest: Option<Duration>,
    /// Why its tags or its DNS label are not as they should be, until they are tried again.
    pub(crate) failed: Option<FailedSettings>,
}

impl Usable {
    fn new(id: String, address: IpAddr, is_ours: bool) -> Self {
        Self { id, address, is_ours, lost: Vec::new(), rest: None, failed: None }
    }
}

/// A change of a public IP that failed, and its condition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FailedSettings {
    pub(crate) reason: &'static str,
    pub(crate) message: String,
    pub(crate) retry: Duration,
}

/// How far a public IP is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Prepared {
    Again(Duration),
    Ready(Usable),
}

/// Changes of public IPs that run, by name. They are a Service's.
pub(crate) type Operations = BTreeMap<String, Operation>;

/// The public IPs of the resource group.
pub(crate) struct PublicIps {
    config: Config,
    known: KnownPublicIps,
    /// What was written last and did not show yet, by name. It is not written again.
    written: std::sync::Mutex<BTreeMap<String, NewPublicIp>>,
    /// When those in use were written last, by name.
    changed: std::sync::Mutex<BTreeMap<String, Instant>>,
    histories: ChangeHistories,
    /// Since when Azure does not delete them, because they are in use, by name.
    in_use: std::sync::Mutex<BTreeMap<String, Instant>>,
    /// The names of public IPs of other resource groups, by group and address.
    names: std::sync::Mutex<BTreeMap<(String, IpAddr), String>>,
}

impl PublicIps {
    pub(crate) fn new(config: Config) -> Self {
        Self {
            config,
            known: KnownPublicIps::default(),
            written: std::sync::Mutex::default(),
            changed: std::sync::Mutex::default(),
            histories: ChangeHistories::default(),
            in_use: std::sync::Mutex::default(),
            names: std::sync::Mutex::default(),
        }
    }

    /// Those of the resource group by name, as they are, or were at most so long ago.
    pub(crate) async fn all(
        &self,
        calls: &dyn Calls,
        age: Duration,
    ) -> Result<Arc<BTreeMap<String, PublicIp>>, Error> {
        Ok(self.known.all(calls, &self.config, age).await?)
    }

    /// Those that Steerage created for the Service, of whatever incarnation.
    pub(crate) async fn of_service(
        &self,
        calls: &dyn Calls,
        owner: &Owner,
        age: Duration,
    ) -> Result<Vec<(Owner, PublicIp)>, Error> {
        let all = self.all(calls, age).await?;
        let of = |ip: &PublicIp| {
            let found = marks::owner(&self.config.cluster, &ip.tags)?;
            (found.service == owner.service).then(|| (found, ip.clone()))
        };
        Ok(all.values().filter_map(of).collect())
    }

    /// The address of a public IP, of which the list that is at most so old knows most.
    pub(crate) async fn known_address(
        &self,
        calls: &dyn Calls,
        of: &Ref,
        age: Duration,
    ) -> Result<Option<IpAddr>, Error> {
        let is_it = |ip: &&PublicIp| Ref::to(self.config.public_ip_path(None, &ip.name)) == *of;
        let all = self.all(calls, age).await?;
        if let Some(address) = all.get(of.id.name()).filter(is_it).and_then(|ip| ip.properties.ip_address) {
            return Ok(Some(address));
        }
        let ip: Option<PublicIp> = read(calls, GET, &of.id.0).await?;
        Ok(ip.and_then(|ip| ip.properties.ip_address))
    }

    /// Brings a public IP of Steerage's in place.
    pub(crate) async fn ensure(
        &self,
        calls: &dyn Calls,
        (owner, family): (&Owner, Family),
        wanted: &NewPublicIp,
        operations: &mut Operations,
        age: Duration,
    ) -> Result<Prepared, Error> {
        let name = Mark::new(&self.config.cluster, owner).part(marks::suffix(family));
        let written = self.written().get(&name).cloned();
        match self.finish(calls, &name, operations).await {
            Ok(Some(wait)) => return Ok(Prepared::Again(wait)),
            Ok(None) => {}
            Err(error) => {
                let has_ended = !operations.contains_key(&name);
                let Some(written) = written.filter(|_| has_ended) else { return Err(error) };
                if !self.note_failure(calls, (owner, &name), written, &error, age).await? {
                    return Err(error);
                }
            }
        }
        let mut present = self.all(calls, age).await?.get(&name).cloned();
        if present.is_none() {
            // The list may be old: one that somebody made since is kept.
            let expected = self.known.expect_answer(&name);
            present = read(calls, GET, &self.path(&name)).await?;
            expected.note_answer(present.clone()).await;
        }
        if let Some(ip) = &present {
            if let Err(error) = self.check_owned(owner, &name, ip) {
                // It may be gone by the next try.
                self.known.read_again(&name);
                return Err(error);
            }
            check_prefix(ip, wanted)?;
            let state = ip.properties.provisioning_state.unwrap_or_default();
            if state.is_busy() {
                return Ok(Prepared::Again(self.begin_unknown(&name, operations)));
            }
            let is_in_use = ip.properties.ip_configuration.is_some();
            if state.is_failed() && (is_in_use || self.histories.is_being_repaired(&name)) {
                return self.ensure_repaired(calls, &name, ip.properties.ip_address).await;
            }
            if !state.is_failed() {
                self.histories.note_usable(&name);
            }
            if !state.is_failed()
                && let Some(address) = ip.properties.ip_address
            {
                let usable = Usable::new(self.path(&name), address, true);
                if let Some(lost) = self.lost(owner, (&name, ip), wanted) {
                    return Ok(Prepared::Ready(Usable { lost, ..usable }));
                }
                if let Some(refusal) = self.histories.refusal(&name, wanted) {
                    let failed = Some(not_tried(&name, &refusal));
                    return Ok(Prepared::Ready(Usable { failed, ..usable }));
                }
                // The list may be older than its use.
                if let Some(rest) = self.must_rest(&name) {
                    return Ok(Prepared::Ready(Usable { rest: Some(rest), ..usable }));
                }
            }
            self.histories.note_before(ip);
        }
        let etag = present.as_ref().and_then(|ip| ip.etag.clone());
        let is_new = present.is_none();
        let body = self.wanted(owner, family, present.unwrap_or_default(), wanted);
        let (path, body) = (self.path(&name), serde_json::to_value(body).unwrap_or_default());
        let call = if is_new { Call::create(PUT, path, body) } else { Call::put(PUT, path, etag, body) };
        let expected = self.known.expect_answer(&name);
        let answer = calls.send(call).await?;
        tracing::info!(service = %owner.service, name, "public IP changed");
        self.written().insert(name.clone(), wanted.clone());
        let ip: PublicIp = object(PUT, answer.body.clone())?;
        // Whoever looks for what is the Service's finds it, also if nobody asks for its operation any more.
        expected.note_answer(Some(ip.clone())).await;
        let is_ready =
            answer.operation.is_none() && !answer.is_accepted && ip.properties.ip_address.is_some();
        if let (true, Some(address)) = (is_ready, ip.properties.ip_address) {
            let lost = self.lost(owner, (&name, &ip), wanted).unwrap_or_default();
            return Ok(Prepared::Ready(Usable { lost, ..Usable::new(self.path(&name), address, true) }));
        }
        operations.insert(name, Operation::begun(PUT, &answer, self.config.poll));
        Ok(Prepared::Again(answer.after.unwrap_or(self.config.poll)))
    }

    /// One of Steerage's whose last change failed while it is in use. Its Service goes on with it while the load balancer refers to it.
    async fn ensure_repaired(
        &self,
        calls: &dyn Calls,
        name: &str,
        address: Option<IpAddr>,
    ) -> Result<Prepared, Error> {
        let (extent, _) = self.repair(calls, &self.path(name)).await?;
        let why = self.histories.last_error(name).map_or(String::new(), |error| format!(" {error}"));
        if let Some(address) = address.filter(|_| extent != FailureExtent::GivenUp) {
            let message = format!(
                "The Service is served. Azure's last change of its public IP {name} failed, and Azure takes no change of the load balancer \
                 until it is written again. Steerage writes it without the tags and the DNS label that failed. Check the Service's \
                 annotations azure-dns-label-name and azure-pip-tags.{why}"
            );
            let failed =
                Some(FailedSettings { reason: reasons::PUBLIC_IP_NOT_READY, message, retry: REPAIR_REST });
            let usable = Usable { failed, ..Usable::new(self.path(name), address, true) };
            return Ok(Prepared::Ready(usable));
        }
        Err(Error::Unavailable(format!(
            "Azure's last change of the public IP {name} failed, and so did each write without what failed. Azure takes no change of a load \
             balancer with it, so the load balancer is written without this Service. Steerage tries again. Look at the activity log of the \
             public IP.{why}"
        )))
    }

    /// For how long a public IP in use is not written. Notes that it is, if it may be.
    fn must_rest(&self, name: &str) -> Option<Duration> {
        let mut changed = self.changed.lock().unwrap_or_else(PoisonError::into_inner);
        changed.retain(|_, at| at.elapsed() < REST);
        let wait = changed.get(name).map(|at| REST.saturating_sub(at.elapsed()));
        if wait.is_none() {
            changed.insert(name.to_owned(), Instant::now());
        }
        wait
    }

    fn path(&self, name: &str) -> String {
        self.config.public_ip_path(None, name)
    }

    fn begin_unknown(&self, name: &str, operations: &mut Operations) -> Duration {
        let operation = Operation::unknown(PUT, Instant::now(), self.config.poll);
        operations.insert(name.to_owned(), operation);
        self.config.poll
    }

    /// Asks whether the change of a public IP is complete, and reads it then. `None` if none runs.
    async fn finish(
        &self,
        calls: &dyn Calls,
        name: &str,
        operations: &mut Operations,
    ) -> Result<Option<Duration>, Error> {
        let Some(operation) = operations.get_mut(name) else { return Ok(None) };
        let running = operation.ask(calls, self.config.poll).await?;
        if matches!(running, Running::Lost | Running::Failed(_)) {
            self.written().remove(name);
        }
        match running {
            Running::For(wait) => Ok(Some(wait)),
            Running::Succeeded if operation.action() == DELETE => {
                operations.remove(name);
                self.known.expect_answer(name).note_answer(None).await;
                Ok(None)
            }
            Running::Succeeded | Running::Lost => {
                let expected = self.known.expect_answer(name);
                let ip: Option<PublicIp> = read(calls, GET, &self.path(name)).await?;
                expected.note_answer(ip.clone()).await;
                if ip
                    .as_ref()
                    .is_some_and(|ip| ip.properties.provisioning_state.unwrap_or_default().is_busy())
                {
                    *operation = Operation::unknown(GET, operation.began(), self.config.poll);
                    if operation.is_stuck() {
                        return Err(Error::Unavailable(format!(
                            "The public IP {name} has been changing for more than ten minutes. Steerage asks again. Look at its activity \
                             log."
                        )));
                    }
                    return Ok(Some(self.config.poll));
                }
                operations.remove(name);
                Ok(None)
            }
            Running::Failed(failure) => {
                operations.remove(name);
                self.known.read_again(name);
                Err(failure.into())
            }
        }
    }

    fn check_owned(&self, owner: &Owner, name: &str, ip: &PublicIp) -> Result<(), Error> {
        if marks::owner(&self.config.cluster, &ip.tags).as_ref() == Some(owner) {
            return Ok(());
        }
        let message = format!(
            "The public IP {name} exists, and its tags are not those of this Service. Steerage does not use it. If Steerage made it for this \
             Service, put these tags back: {}. Delete it only if nothing uses it.",
            marks::shown(&marks::of_public_ip(&self.config.cluster, owner))
        );
        Err(Error::invalid(reasons::OBJECT_NOT_OWNED, message))
    }

    fn in_use(&self) -> MutexGuard<'_, BTreeMap<String, Instant>> {
        self.in_use.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn written(&self) -> MutexGuard<'_, BTreeMap<String, NewPublicIp>> {
        self.written.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is not there of what was written; `None` if it has to be written.
    fn lost(
        &self,
        owner: &Owner,
        (name, ip): (&str, &PublicIp),
        wanted: &NewPublicIp,
    ) -> Option<Vec<String>> {
        let missing = self.missing(owner, ip, wanted);
        let mut written = self.written();
        if missing.is_empty() {
            written.remove(name);
            self.histories.note_complete(name);
            return Some(missing);
        }
        (written.get(name) == Some(wanted)).then_some(missing)
    }

    /// What it should have and does not.
    fn missing(&self, owner: &Owner, ip: &PublicIp, wanted: &NewPublicIp) -> Vec<String> {
        // Azure ignores the case of tags' names.
        let has = |(key, value): (&String, &String)| {
            ip.tags.iter().any(|(found, is)| found.eq_ignore_ascii_case(key) && is == value)
        };
        let tags = self.tags(owner, wanted);
        let mut missing: Vec<String> =
            tags.iter().filter(|tag| !has(*tag)).map(|(key, _)| format!("the tag {key}")).collect();
        if label(&ip.properties) != wanted.dns_label.as_deref() {
            missing.push("the DNS label".to_owned());
        }
        missing
    }

    fn tags(&self, owner: &Owner, wanted: &NewPublicIp) -> BTreeMap<String, String> {
        let mut tags = wanted.tags.clone();
        tags.extend(marks::of_public_ip(&self.config.cluster, owner));
        tags
    }

    fn wanted(&self, owner: &Owner, family: Family, present: PublicIp, wanted: &NewPublicIp) -> PublicIp {
        let mut ip = present;
        let is_new = ip.id.is_none();
        ip.location = Some(ip.location.unwrap_or_else(|| self.config.location.clone()));
        ip.sku = Some(ip.sku.unwrap_or_else(|| json!({ "name": "Standard" })));
        let tags = self.tags(owner, wanted);
        ip.tags.retain(|found, _| tags.keys().all(|key| !key.eq_ignore_ascii_case(found)));
        ip.tags.extend(tags);
        if is_new && !self.config.zones.is_empty() && wanted.prefix.is_none() {
            ip.rest.insert("zones".to_owned(), self.config.zones.clone().into());
        }
        let of: &mut PublicIpProperties = &mut ip.properties;
        of.provisioning_state = None;
        of.allocation = Some("Static".to_owned());
        of.version = Some(family.to_string());
        of.prefix = of.prefix.take().or_else(|| wanted.prefix.as_ref().map(Ref::to));
        if label(of) != wanted.dns_label.as_deref() {
            of.dns_settings = wanted.dns_label.as_ref().map(|label| json!({ "domainNameLabel": label }));
        }
        ip
    }

    /// Deletes public IPs of Steerage's. When to call again; `None` if they are gone.
    pub(crate) async fn delete(
        &self,
        calls: &dyn Calls,
        names: &BTreeSet<String>,
        operations: &mut Operations,
    ) -> Result<Option<Duration>, Error> {
        let mut again: Option<Duration> = None;
        for name in names {
            self.written().remove(name);
            self.histories.forget(name);
            match self.finish(calls, name, operations).await {
                Ok(None) => {}
                Ok(Some(wait)) => {
                    again = Some(again.map_or(wait, |other| other.min(wait)));
                    continue;
                }
                Err(error) => return Err(error),
            }
            let Some(mut ip) = self.all(calls, Duration::MAX).await?.get(name).cloned() else {
                self.in_use().remove(name);
                continue;
            };
            if ip.properties.provisioning_state.unwrap_or_default().is_busy() {
                again = Some(self.begin_unknown(name, operations));
                continue;
            }
            // What somebody changed meanwhile, and what the load balancer has just let go, is read again, and is still Steerage's.
            let expected = self.known.expect_answer(name);
            match calls.send(Call::delete(DELETE, self.path(name), ip.etag.clone())).await {
                Ok(answer) => {
                    tracing::info!(name, "public IP deleted");
                    ip.properties.provisioning_state = Some(Provisioning::Deleting);
                    // Azure may give it to another Service at once.
                    ip.properties.ip_address = None;
                    expected.note_answer(Some(ip)).await;
                    self.in_use().remove(name);
                    operations.insert(name.clone(), Operation::begun(DELETE, &answer, self.config.poll));
                    again = Some(answer.after.unwrap_or(self.config.poll));
                }
                Err(failure) if failure.is_not_found() => expected.note_answer(None).await,
                Err(failure) if failure.is_stale() || is_in_use(&failure) => {
                    let since = *self.in_use().entry(name.clone()).or_insert_with(Instant::now);
                    if is_in_use(&failure) && since.elapsed() >= IN_USE {
                        let of_ip = ip.properties.ip_configuration.as_ref();
                        let user = of_ip.map_or("what Azure does not name", |user| user.id.0.as_str());
                        return Err(Error::Unavailable(format!(
                            "The public IP {name} is used by {user}, so Azure does not delete it. Remove the IP from there. Steerage retries."
                        )));
                    }
                    again = Some(self.config.poll);
                }
                Err(failure) => return Err(failure.into()),
            }
        }
        Ok(again)
    }

    /// The owners of all that Steerage created.
    pub(crate) async fn owners(&self, calls: &dyn Calls) -> Result<BTreeSet<Owner>, Error> {
        let all = self.all(calls, Duration::ZERO).await?;
        Ok(all.values().filter_map(|ip| marks::owner(&self.config.cluster, &ip.tags)).collect())
    }
}

/// Those of a resource group, or of Steerage's.
async fn by_name(
    calls: &dyn Calls,
    config: &Config,
    group: Option<&str>,
) -> Result<BTreeMap<String, PublicIp>, CallError> {
    let path = config.public_ip_path(group, "");
    let all: Vec<PublicIp> = list(calls, GET, path.trim_end_matches('/')).await?;
    Ok(all.into_iter().map(|ip| (ip.name.clone(), ip)).collect())
}

/// The condition of a Service whose tags or DNS label Azure does not take, or whose earlier ones it did not.
fn not_tried(name: &str, refusal: &NotTried) -> FailedSettings {
    let NotTried { error, is_same, wait } = refusal;
    let message = if *is_same {
        format!(
            "The Service is served. Azure accepted the tags and the DNS label of its public IP {name}, and then failed to write them. The \
             public IP has those that it had before, or none, and all else is in place. Steerage tries the new ones again, at first after \
             a minute. Correct the annotation azure-dns-label-name or azure-pip-tags. {error}"
        )
    } else {
        format!(
            "The Service is served. The tags and the DNS label of its public IP {name} are not written yet, because Azure failed to write \
             earlier ones. Steerage writes them after a time, which is longer after each different one that fails, and an hour at most. \
             All else is in place. The earlier failure: {error}"
        )
    };
    FailedSettings { reason: error.reason(), message, retry: *wait }
}

fn is_in_use(failure: &CallError) -> bool {
    let text = failure.text();
    failure.is_code("PublicIPAddressCannotBeDeleted")
        || failure.is_code("InUseResourceCannotBeDeleted")
        || text.contains("allocated to resource")
}

fn label(ip: &PublicIpProperties) -> Option<&str> {
    ip.dns_settings.as_ref()?.get("domainNameLabel")?.as_str()
}

/// A public IP stays in the prefix from which it was taken.
fn check_prefix(ip: &PublicIp, wanted: &NewPublicIp) -> Result<(), Error> {
    let wanted = wanted.prefix.as_ref().map(Ref::to);
    if wanted.is_none() || ip.properties.prefix == wanted {
        return Ok(());
    }
    let message = format!(
        "The public IP {} is not of the requested prefix, which Azure cannot change. The present one is kept. Restore the annotation, or \
         create the Service again.",
        ip.name
    );
    Err(Error::invalid(reasons::ADDRESS_NOT_AVAILABLE, message))
}
