// SPDX-License-Identifier: Apache-2.0
//! The projection of an `EndpointSlice`.

use std::net::IpAddr;
use std::time::SystemTime;

use crate::{Family, Key, Object, Protocol};

/// `endpoints[].hints`: for which consumers an endpoint is meant. Empty lists mean that there is no such hint.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hints {
    /// Names of nodes.
    pub nodes: Vec<String>,
    /// Names of zones.
    pub zones: Vec<String>,
}

/// One endpoint of a slice. Absent conditions are already filled in as the API says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// The first of the endpoint's addresses, the only one that the API lets consumers rely on.
    pub addr: IpAddr,
    /// The node that it runs on; `None` is local to no node.
    pub node: Option<String>,
    /// The zone that it runs in.
    pub zone: Option<String>,
    /// Takes new connections (absent: true).
    pub ready: bool,
    /// Would take connections were it not terminating (absent: same as ready).
    pub serving: bool,
    /// Is being shut down (absent: false).
    pub terminating: bool,
    /// Topology hints.
    pub hints: Hints,
}

impl Endpoint {
    /// A ready endpoint on `node`.
    pub fn ready(addr: IpAddr, node: &str) -> Self {
        Self {
            addr,
            node: Some(node.to_owned()),
            zone: None,
            ready: true,
            serving: true,
            terminating: false,
            hints: Hints::default(),
        }
    }

    /// Whether it is the fallback of last resort: shutting down, but still answering.
    pub fn is_serving_terminating(&self) -> bool {
        self.serving && self.terminating
    }

    /// Whether it runs on `node`.
    pub fn is_on(&self, node: &str) -> bool {
        self.node.as_deref() == Some(node)
    }
}

/// One port of a slice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointPort {
    /// The name, equal to that of the Service port it belongs to; empty for an unnamed port.
    pub name: String,
    /// The transport protocol.
    pub protocol: Protocol,
    /// The port that the pods listen on.
    pub port: u16,
}

/// What Steerage uses of an `EndpointSlice`. Slices of type FQDN and slices without a Service are not projected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointSlice {
    /// Namespace and name.
    pub key: Key,
    /// The Service that the slice belongs to.
    pub service: Key,
    /// `addressType`.
    pub family: Family,
    /// The ports, those with a number.
    pub ports: Vec<EndpointPort>,
    /// The endpoints.
    pub endpoints: Vec<Endpoint>,
    /// When that began which the last change of the slice reflects, by its controller's clock.
    pub triggered: Option<SystemTime>,
}

impl Object for EndpointSlice {
    type Key = Key;

    fn key(&self) -> Key {
        self.key.clone()
    }
}
