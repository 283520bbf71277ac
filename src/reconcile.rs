// SPDX-License-Identifier: Apache-2.0
//! One look at one load balancer: what it should be now, the calls and writes that make it so. Called by the workers, at most once
//! at a time for each.

use std::sync::Arc;
use std::time::Duration;

use steerage_model::Service;
use steerage_provider_api::{Error, Owner, Progress};
use steerage_watch::Staleness;
use steerage_watch::events::{Recorder, ServiceRecorder};
use tokio::time::Instant;

use crate::metrics::Metrics;
use crate::plan::{self, Config, Nodes, TargetPlan};
use crate::provider::Guarded;
use crate::queue::{Outcome, Work};
use crate::state::States;
use crate::world::World;
use crate::writer::{WriteError, Writer};

mod release;
mod serve;

/// Why a load balancer is looked at.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Need {
    /// When endpoints changed that it does not follow yet.
    pub(crate) since: Option<Instant>,
    /// Everything is to be compared, with the provider too.
    pub(crate) all: bool,
    /// The provider holds something for it, whether we remember it or not.
    pub(crate) owned: bool,
}

impl Work for Need {
    fn merge(&mut self, other: Self) {
        self.since = match (self.since, other.since) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
        self.all |= other.all;
        self.owned |= other.owned;
    }

    fn urgent(&self) -> bool {
        self.since.is_some()
    }
}

/// How it went.
#[derive(Debug)]
enum Went {
    /// Nothing is left to do.
    Done,
    /// The provider needs time.
    Again(Duration),
    /// The provider failed.
    Provider(Error),
    /// A write to the Service failed.
    Write(WriteError),
}

impl From<WriteError> for Went {
    fn from(error: WriteError) -> Self {
        Self::Write(error)
    }
}

/// Everything that a look needs.
pub(crate) struct Reconciler {
    pub(crate) provider: Guarded,
    pub(crate) world: Arc<World>,
    pub(crate) config: Config,
    pub(crate) writer: Writer,
    pub(crate) recorder: Recorder,
    pub(crate) metrics: Metrics,
    pub(crate) states: States,
    pub(crate) staleness: Staleness,
    /// Silence of a watch after which targets stay as they are; `None` for ever trusting.
    pub(crate) freeze_targets_after: Option<Duration>,
    /// Whether Services are changed to what their old annotations ask for.
    pub(crate) migrate: bool,
}

/// What the index says of a Service, at one moment.
struct Seen {
    service: Service,
    nodes: Arc<Nodes>,
}

impl Reconciler {
    /// Looks at one load balancer.
    pub(crate) async fn look(&self, owner: &Owner, need: Need) -> Outcome<Need> {
        let seen = self.world.read(|index, nodes| {
            let service = index.service(&owner.service).filter(|service| service.uid == owner.uid)?;
            Some(Seen { service: service.clone(), nodes: Arc::clone(nodes) })
        });
        let known = self.states.get(owner);
        let mut state = known.clone().unwrap_or_default();
        if need.all {
            state.doubt();
        }
        let (went, keep) = match seen {
            Some(seen) if plan::wants(&seen.service, &self.config.classes) => {
                state.fingerprint = Some(plan::fingerprint(&seen.service));
                (self.serve(&seen, &mut state, &need).await, true)
            }
            Some(seen) => {
                let held = known.is_some() || need.owned;
                let went = self.release(&seen.service, owner, &mut state, held).await;
                let keep = !matches!(went, Ok(Went::Done)) && known.is_some();
                (went, keep)
            }
            None if known.is_some() || need.owned => {
                let went = self.delete(owner).await;
                let keep = !matches!(went, Ok(Went::Done));
                (went, keep)
            }
            None => (Ok(Went::Done), false),
        };
        if keep {
            self.states.put(owner, state);
        } else {
            self.states.remove(owner);
        }
        self.metrics.load_balancers.set(i64::try_from(self.states.len()).unwrap_or(i64::MAX));
        self.outcome(owner, &need, went.unwrap_or_else(|went| went))
    }

    fn outcome(&self, owner: &Owner, need: &Need, went: Went) -> Outcome<Need> {
        match went {
            Went::Done => {
                self.metrics.reconciled("done");
                Outcome::Done
            }
            Went::Again(after) => {
                self.metrics.reconciled("again");
                Outcome::Again(after, Need { all: true, ..*need })
            }
            // No retry helps until the Service or the configuration changes, and both bring it back here.
            Went::Provider(Error::Invalid { reason, message }) => {
                self.metrics.reconciled("refused");
                tracing::warn!(service = %owner.service, reason, message, "refused");
                Outcome::Done
            }
            Went::Provider(error) => {
                self.metrics.reconciled("failed");
                tracing::warn!(service = %owner.service, %error, "failed, to be tried again");
                let after = if let Error::Throttled { after, .. } = &error { *after } else { None };
                Outcome::Failed(after, Need { all: true, ..*need })
            }
            Went::Write(error) => {
                self.metrics.reconciled("failed");
                tracing::warn!(service = %owner.service, %error, "cannot write to the Service, to be tried again");
                Outcome::Failed(None, Need { all: true, ..*need })
            }
        }
    }

    fn events<'a>(&'a self, service: &'a Service) -> ServiceRecorder<'a> {
        ServiceRecorder::new(&self.recorder, service)
    }

    /// Deletes what outlived its Service.
    async fn delete(&self, owner: &Owner) -> Result<Went, Went> {
        tracing::info!(service = %owner.service, uid = owner.uid, "deleting a load balancer whose Service is gone");
        match self.provider.delete(owner).await.map_err(Went::Provider)? {
            Progress::Done => Ok(Went::Done),
            Progress::Again(after) => Ok(Went::Again(after)),
        }
    }

    /// For how long the watches may already be telling old news, if that is too long.
    fn frozen(&self) -> Option<String> {
        let (kind, silence) = self.staleness.longest()?;
        let limit = self.freeze_targets_after.filter(|limit| silence > *limit)?;
        Some(format!("the watch of {kind} has been silent for more than {limit:?}: targets stay as they are"))
    }

    /// Logs why each node is a target or not, for those who ask for that much.
    fn explain(&self, seen: &Seen, targets: &TargetPlan) {
        if !tracing::enabled!(tracing::Level::DEBUG) {
            return;
        }
        let key = &seen.service.key;
        let reasons = self
            .world
            .read(|index, _| plan::target_reasons(&seen.service, index.slices(key), &seen.nodes, targets));
        for (node, reason) in reasons {
            tracing::debug!(service = %key, node, %reason, "target or not");
        }
    }

    /// Whether a Service of our provider's is one that we would have to be asked for by flag, and are not.
    fn is_left_to_others(&self, service: &Service) -> bool {
        let plain = service.kind == steerage_model::ServiceKind::LoadBalancer && !service.deleting;
        plain && service.class.is_none() && !self.config.classes.serve_unset
    }
}
