// SPDX-License-Identifier: Apache-2.0
//! A provider for tests of reconciles: what it answers is set, and its calls are counted.

use std::future::pending;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use futures::stream::BoxStream;
use steerage_model::{Ingress, IpMode};
use steerage_provider_api::{
    AdmittedSources, Capabilities, Compare, Error, GroupTargets, Health, LoadBalancer, Outcome, Owner,
    Progress, Provider, RequestedSources, TargetHealth, TargetSet,
};

use super::Silent;

/// A provider whose calls succeed at once and are counted. It refuses a target, and does not notify of health.
#[derive(Default)]
pub(crate) struct Polled {
    pub(crate) applied: AtomicUsize,
    pub(crate) targets: Mutex<String>,
    pub(crate) health_read: AtomicUsize,
    /// Whether health is due only after a minute.
    pub(crate) is_slow: AtomicBool,
    /// Denies changes of the structure.
    pub(crate) denies: AtomicBool,
    /// Changes of the structure meet those of somebody else, or panic.
    pub(crate) conflicts: AtomicBool,
    pub(crate) panics: AtomicBool,
    /// Changes of targets alone meet those of somebody else.
    pub(crate) conflicts_targets: AtomicBool,
    /// Whether the last change of the structure compared everything.
    pub(crate) compared: AtomicBool,
    /// Rejects the structure, for a quota or this reason.
    pub(crate) rejects: AtomicBool,
    pub(crate) rejection: Mutex<Option<&'static str>>,
    /// Calls that set targets alone.
    pub(crate) targets_set: AtomicUsize,
    /// The pods of the last such call.
    pub(crate) pods: AtomicUsize,
    /// Throttles all changes.
    pub(crate) throttles: AtomicBool,
    /// Deletions are in progress. Otherwise they never answer.
    pub(crate) deletes: AtomicBool,
    /// Whether a part of the load balancer is not in place.
    pub(crate) is_incomplete: AtomicBool,
    /// The health of the targets, and whether reads of it fail.
    pub(crate) health: Mutex<Vec<TargetHealth>>,
    pub(crate) hides_health: AtomicBool,
    /// How long a failing read of health waits.
    pub(crate) health_hangs: Mutex<Duration>,
    /// Whether changes get no answer.
    pub(crate) is_down: AtomicBool,
    /// Whether changes of Services whose names begin with `hanging` get none after half a minute.
    pub(crate) hangs: AtomicBool,
    /// The ranges to which refused Services were restricted, and what the next calls answer.
    pub(crate) restricted: Mutex<Vec<String>>,
    pub(crate) restrictions: Mutex<std::vec::IntoIter<Restriction>>,
}

pub(crate) type Restriction = Result<Option<AdmittedSources>, Error>;

impl Polled {
    /// Whether the provider answers no call.
    pub(crate) fn set_down(&self, is_down: bool) {
        self.is_down.store(is_down, Ordering::Release);
        self.hides_health.store(is_down, Ordering::Release);
    }

    pub(crate) fn applied_count(&self) -> usize {
        self.applied.load(Ordering::Acquire)
    }

    pub(crate) fn set_rejecting(&self, rejects: bool) {
        self.rejects.store(rejects, Ordering::Release);
    }

    pub(crate) fn set_slow(&self) {
        self.is_slow.store(true, Ordering::Release);
    }

    fn take(&self, set: &TargetSet) {
        let nodes = set.targets.iter().map(|target| target.node.as_str()).collect();
        *self.targets.lock().expect("lock") = nodes;
    }
}

#[async_trait]
impl Provider for Polled {
    fn name(&self) -> &'static str {
        "edge"
    }

    fn capabilities(&self) -> Capabilities {
        Silent::default().capabilities()
    }

    fn replaced_finalizers(&self) -> &'static [&'static str] {
        &["example.com/replaced"]
    }

    async fn apply(&self, lb: &LoadBalancer, compare: Compare) -> Result<Outcome, Error> {
        self.applied.fetch_add(1, Ordering::AcqRel);
        self.compared.store(compare == Compare::InPlace, Ordering::Release);
        if self.hangs.load(Ordering::Acquire) && lb.owner.service.name().starts_with("hanging") {
            tokio::time::sleep(Duration::from_secs(30)).await;
            return Err(Error::Unavailable("no answer".to_owned()));
        }
        if self.is_down.load(Ordering::Acquire) {
            return Err(Error::Unavailable("no answer".to_owned()));
        }
        assert!(!self.panics.load(Ordering::Acquire), "a panic that the test asked for");
        if self.conflicts.load(Ordering::Acquire) {
            let number = self.applied_count();
            return Err(Error::Conflict(format!("request {number}")));
        }
        if self.denies.load(Ordering::Acquire) {
            return Err(Error::denied("AddTags"));
        }
        if self.throttles.load(Ordering::Acquire) {
            return Err(Error::Throttled { after: None, message: "ModifyListener".to_owned() });
        }
        if self.rejects.load(Ordering::Acquire) {
            let reason = self.rejection.lock().expect("lock").unwrap_or("QuotaExceeded");
            return Err(Error::invalid(reason, "the quota"));
        }
        self.take(&lb.nodes());
        let ip = "10.9.0.1".parse().ok();
        let done = Outcome {
            progress: Progress::Done,
            ingress: vec![Ingress { ip, hostname: None, ip_mode: Some(IpMode::Vip) }],
            refused: vec![("node".to_owned(), "stopped".to_owned())],
            retry_refused: Some(Duration::from_mins(1)),
            ..Outcome::done()
        };
        if !self.is_incomplete.load(Ordering::Acquire) {
            return Ok(done);
        }
        let incomplete = Some(("ProviderUnavailable", "EC2 does not answer.".to_owned()));
        Ok(Outcome { progress: Progress::Again(Duration::from_mins(1)), incomplete, ..done })
    }

    async fn set_targets(&self, _: &Owner, targets: &GroupTargets) -> Result<Outcome, Error> {
        self.targets_set.fetch_add(1, Ordering::AcqRel);
        if self.throttles.load(Ordering::Acquire) {
            return Err(Error::Throttled { after: None, message: "DeregisterTargets".to_owned() });
        }
        if self.conflicts_targets.load(Ordering::Acquire) {
            return Err(Error::Conflict("the target group".to_owned()));
        }
        if let Some(nodes) = &targets.nodes {
            self.take(nodes);
        }
        self.pods.store(targets.pods.values().map(|pods| pods.len()).sum(), Ordering::Release);
        // Most providers do not say when a quota may have room.
        let has_bad_targets = *self.rejection.lock().expect("lock") == Some("AllTargetsRefused");
        let is_rejecting = self.rejects.load(Ordering::Acquire);
        let retry_refused = (is_rejecting && has_bad_targets).then_some(Duration::from_mins(1));
        Ok(Outcome { retry_refused, ..Outcome::done() })
    }

    async fn restrict_sources(&self, _: &Owner, requested: &RequestedSources) -> Restriction {
        let ranges: Vec<String> = requested.ranges.iter().map(ToString::to_string).collect();
        self.restricted.lock().expect("lock").push(ranges.join(" "));
        self.restrictions.lock().expect("lock").next().unwrap_or(Ok(None))
    }

    async fn target_health(&self, _: &Owner) -> Result<Health, Error> {
        self.health_read.fetch_add(1, Ordering::AcqRel);
        if self.hides_health.load(Ordering::Acquire) {
            let hangs = *self.health_hangs.lock().expect("lock");
            tokio::time::sleep(hangs).await;
            return Err(Error::Unavailable("no answer".to_owned()));
        }
        let due = if self.is_slow.load(Ordering::Acquire) { 60 } else { 10 };
        let targets = self.health.lock().expect("lock").clone();
        Ok(Health { targets, due: Some(Duration::from_secs(due)), ..Health::default() })
    }

    async fn delete(&self, _: &Owner) -> Result<Progress, Error> {
        if self.deletes.load(Ordering::Acquire) {
            return Ok(Progress::Again(Duration::from_secs(5)));
        }
        pending().await
    }

    async fn owned(&self) -> Result<Vec<Owner>, Error> {
        pending().await
    }

    fn changes(&self) -> BoxStream<'static, Owner> {
        Box::pin(futures::stream::pending())
    }
}
