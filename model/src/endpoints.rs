// SPDX-License-Identifier: Apache-2.0
//! The projection of an `EndpointSlice`.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::SystemTime;

use crate::{EndpointPorts, Family, Key};

/// `endpoints[].hints`: the clients that an endpoint should serve. An empty list means no hint.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hints {
    /// Names of nodes.
    pub nodes: Vec<Arc<str>>,
    /// Names of zones.
    pub zones: Vec<Arc<str>>,
}

/// A pod, in the namespace of the slice that names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodRef {
    /// The name.
    pub name: String,
    /// The UID.
    pub uid: String,
}

/// One endpoint of a slice. Absent conditions have the API's default.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// The first of the endpoint's addresses: the API defines no meaning for the others.
    pub addr: IpAddr,
    /// The node; `None` is local to no node.
    pub node: Option<Arc<str>>,
    /// The zone.
    pub zone: Option<Arc<str>>,
    /// Accepts new connections (absent: true).
    pub ready: bool,
    /// Ready, apart from termination (absent: same as ready).
    pub serving: bool,
    /// Is shutting down (absent: false).
    pub terminating: bool,
    /// Topology hints, if it has any; few endpoints do.
    pub hints: Option<Box<Hints>>,
    /// The pod, while it neither serves nor terminates: only then does it matter which one it is, and few endpoints are in that state.
    pub unready_pod: Option<Box<PodRef>>,
}

impl Endpoint {
    /// A ready endpoint on `node`.
    pub fn ready(addr: IpAddr, node: &str) -> Self {
        Self {
            addr,
            node: Some(node.into()),
            zone: None,
            ready: true,
            serving: true,
            terminating: false,
            hints: None,
            unready_pod: None,
        }
    }

    /// Whether it serves while it shuts down: the fallback where no endpoint is ready.
    pub fn is_serving_terminating(&self) -> bool {
        self.serving && self.terminating
    }

    /// Whether it runs on `node`.
    pub fn is_on(&self, node: &str) -> bool {
        self.node.as_deref() == Some(node)
    }

    /// The hinted nodes; empty without a hint.
    pub fn hinted_nodes(&self) -> &[Arc<str>] {
        self.hints.as_ref().map_or(&[], |hints| &hints.nodes)
    }

    /// The hinted zones; empty without a hint.
    pub fn hinted_zones(&self) -> &[Arc<str>] {
        self.hints.as_ref().map_or(&[], |hints| &hints.zones)
    }
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
    pub ports: EndpointPorts,
    /// The endpoints.
    pub endpoints: Vec<Endpoint>,
    /// Time of the change that triggered this slice's last update, by the clock of the slice's controller.
    pub last_change_trigger: Option<SystemTime>,
}

impl EndpointSlice {
    /// A slice without ports and endpoints, for building one field by field.
    pub fn new(key: Key, service: Key, family: Family) -> Self {
        Self {
            key,
            service,
            family,
            ports: EndpointPorts::default(),
            endpoints: Vec::new(),
            last_change_trigger: None,
        }
    }
}
