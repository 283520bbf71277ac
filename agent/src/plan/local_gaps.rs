// SPDX-License-Identifier: Apache-2.0
//! Which ports of Services a policy Local leaves without endpoints on this node: a metric of kube-proxy counts them.

use std::collections::BTreeSet;

use steerage_model::{Family, Protocol};

use super::{Action, ServicePlan};

/// A Service's port in one family: the family, the protocol and the Service's own number of the port.
type FamilyPort = (Family, Protocol, u16);

/// The ports of Services that a policy Local leaves without endpoints on this node, though the cluster has some.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LocalGaps {
    /// For traffic to cluster IPs.
    pub internal: BTreeSet<FamilyPort>,
    /// For traffic to the other frontends.
    pub external: BTreeSet<FamilyPort>,
}

impl LocalGaps {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.internal.is_empty() && self.external.is_empty()
    }

    /// How many there are in a family: internal and external ones.
    pub fn count(&self, family: Family) -> (usize, usize) {
        let count = |ports: &BTreeSet<FamilyPort>| ports.iter().filter(|(of, ..)| *of == family).count();
        (count(&self.internal), count(&self.external))
    }
}

impl ServicePlan {
    /// Where a policy Local finds endpoints, but none on this node.
    pub fn local_gaps(&self) -> LocalGaps {
        let ports = |lacks: fn(&Action) -> bool| {
            let lacking = self.frontends.iter().filter(|(_, action)| !action.reject && lacks(action));
            lacking.map(|(frontend, action)| (frontend.family(), frontend.protocol, action.port)).collect()
        };
        LocalGaps {
            internal: ports(|action| action.targets.is_empty()),
            external: ports(|action| action.local.as_ref().is_some_and(|l| l.is_empty())),
        }
    }
}
