// SPDX-License-Identifier: Apache-2.0
//! What is remembered of a Service.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use steerage_model::Ingress;
use steerage_provider_api::{Outcome, Owner, Progress};
use tokio::time::Instant;

use crate::desired::Desired;
use crate::public_ips::Operations;

/// What is complete, and what was answered then.
#[derive(Clone, Debug)]
pub(crate) struct Complete {
    pub(crate) owner: Owner,
    pub(crate) wanted: Desired,
    pub(crate) ingress: Vec<Ingress>,
    pub(crate) incomplete: Option<(&'static str, String)>,
    /// Addresses of nodes that Azure refuses.
    pub(crate) refused: BTreeSet<IpAddr>,
    /// Paths of the public IPs that it uses, in lower case.
    pub(crate) used: BTreeSet<String>,
    /// What of its public IPs is left to do.
    pub(crate) left: Left,
}

impl Complete {
    /// What was answered then, with the targets of this outcome.
    pub(crate) fn answer(&self, outcome: Outcome) -> Outcome {
        let (ingress, incomplete) = (self.ingress.clone(), self.incomplete.clone());
        self.left.with_times(Outcome { ingress, incomplete, ..outcome })
    }
}

/// When tags and DNS labels of public IPs, for which the rest of the Service does not wait, are written.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Left {
    /// Those that wait.
    pub(crate) rest: Option<Instant>,
    /// Those that failed.
    pub(crate) retry: Option<Instant>,
}

impl Left {
    pub(crate) fn is_due(self) -> bool {
        [self.rest, self.retry].into_iter().flatten().any(|at| at <= Instant::now())
    }

    /// The same outcome, which says when to call again.
    pub(crate) fn with_times(self, mut outcome: Outcome) -> Outcome {
        let wait = |at: Instant| at.saturating_duration_since(Instant::now()).max(Duration::from_secs(1));
        if let Some(at) = self.rest {
            outcome.progress = Progress::Again(wait(at));
        }
        outcome.retry_refused = self.retry.map(wait).or(outcome.retry_refused);
        outcome
    }
}

/// Everything that is remembered of a Service.
#[derive(Debug, Default)]
pub(crate) struct ServiceState {
    pub(crate) complete: Option<Complete>,
    /// Changes of its public IPs.
    pub(crate) operations: Operations,
    /// The scheme of the only load balancer in which it has anything, if that is known: nobody but this process adds to it.
    pub(crate) alone: Option<bool>,
    /// The addresses that were handed over, while it still has old ones. They count where the Service's status has none.
    pub(crate) announced: Option<Vec<Ingress>>,
    /// The addresses last returned for this owner. They are published again while the Service is refused or incomplete.
    pub(crate) kept: Option<(Owner, Vec<Ingress>)>,
    /// The addresses that it had since the process began.
    pub(crate) vips: BTreeSet<IpAddr>,
    /// Of these, old ones that have no ports any more: they need no rules.
    pub(crate) silent: BTreeSet<IpAddr>,
}

impl ServiceState {
    /// What is in place may change, apart from its addresses.
    pub(crate) fn forget_complete(&mut self) {
        if let Some(complete) = self.complete.take() {
            self.kept = Some((complete.owner, complete.ingress));
        }
    }
}
