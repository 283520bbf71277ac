// SPDX-License-Identifier: Apache-2.0
//! What is remembered of a Service.

use std::collections::BTreeSet;
use std::net::IpAddr;

use steerage_model::Ingress;
use steerage_provider_api::Owner;

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
