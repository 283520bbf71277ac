// SPDX-License-Identifier: Apache-2.0
//! The projection of a pod with Steerage's readiness gate.

use std::net::IpAddr;

use crate::{Endpoint, Key};

/// What Steerage's readiness gate of a pod says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodGate {
    /// Whether the gate is met.
    pub is_met: bool,
    /// The reason.
    pub reason: String,
}

/// What Steerage uses of a pod. Pods without Steerage's readiness gate are not projected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// Namespace and name.
    pub key: Key,
    /// The UID.
    pub uid: String,
    /// The pod's addresses.
    pub addresses: Vec<IpAddr>,
    /// Whether the pod could take traffic, apart from Steerage's gate: its containers are ready, its other gates are met, and nobody
    /// deletes it. It stays so while the kubelet has yet to see that the last gate is met.
    pub can_serve: bool,
    /// The condition of Steerage's gate, if the pod has it.
    pub gate: Option<PodGate>,
}

impl Pod {
    /// Whether the pod could take traffic if Steerage's gate were met.
    pub fn is_waiting(&self) -> bool {
        self.can_serve && !self.gate.as_ref().is_some_and(|gate| gate.is_met)
    }

    /// Whether this pod is behind the endpoint, and not an earlier one of its name or address.
    pub fn is_behind(&self, endpoint: &Endpoint) -> bool {
        let is_named = endpoint.unready_pod.as_ref().is_some_and(|pod| pod.uid == self.uid);
        is_named && self.addresses.contains(&endpoint.addr)
    }
}
