// SPDX-License-Identifier: Apache-2.0
//! One change: the request that makes it, and what it is called. Pure.

use std::collections::BTreeSet;
use std::fmt;

use http::Method;
use serde_json::{Value, json};

use crate::client::Call;
use crate::config::Config;
use crate::object::{Id, Kind};

/// A node's VM in a group.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Endpoint {
    /// The name of the VM.
    pub(crate) instance: String,
    /// Its IPv4 address in the group's subnet; empty if it has none.
    pub(crate) address: String,
}

impl Endpoint {
    fn body(&self) -> Value {
        match self.address.as_str() {
            "" => json!({ "instance": self.instance }),
            address => json!({ "instance": self.instance, "ipAddress": address }),
        }
    }
}

/// A change.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Step {
    Insert { id: Id, body: Value },
    Patch { id: Id, changes: Value },
    Delete { id: Id },
    Attach { id: Id, endpoints: BTreeSet<Endpoint> },
    Detach { id: Id, endpoints: BTreeSet<Endpoint> },
}

impl Step {
    /// What it changes.
    pub(crate) fn id(&self) -> &Id {
        match self {
            Self::Insert { id, .. }
            | Self::Patch { id, .. }
            | Self::Delete { id }
            | Self::Attach { id, .. }
            | Self::Detach { id, .. } => id,
        }
    }

    /// The request.
    pub(crate) fn call(&self, config: &Config) -> Call {
        let members = |method: &str, id: &Id, endpoints: &BTreeSet<Endpoint>| {
            let all: Vec<Value> = endpoints.iter().map(Endpoint::body).collect();
            let path = format!("{}/{method}", id.path(config));
            (path, json!({ "networkEndpoints": all }))
        };
        match self {
            Self::Insert { id, body } => {
                Call::new(Method::POST, insert_action(id.kind), id.collection(config)).with_body(body.clone())
            }
            Self::Patch { id, changes } => {
                Call::new(Method::PATCH, patch(id.kind), id.path(config)).with_body(changes.clone())
            }
            Self::Delete { id } => Call::new(Method::DELETE, delete(id.kind), id.path(config)),
            Self::Attach { id, endpoints } => {
                let (path, body) = members("attachNetworkEndpoints", id, endpoints);
                Call::new(Method::POST, "networkEndpointGroups.attachNetworkEndpoints", path).with_body(body)
            }
            Self::Detach { id, endpoints } => {
                let (path, body) = members("detachNetworkEndpoints", id, endpoints);
                Call::new(Method::POST, "networkEndpointGroups.detachNetworkEndpoints", path).with_body(body)
            }
        }
    }
}

pub(crate) fn insert_action(kind: Kind) -> &'static str {
    match kind {
        Kind::Address => "addresses.insert",
        Kind::HealthCheck => "regionHealthChecks.insert",
        Kind::Group => "networkEndpointGroups.insert",
        Kind::BackendService => "regionBackendServices.insert",
        Kind::Firewall => "firewalls.insert",
        Kind::ForwardingRule => "forwardingRules.insert",
    }
}

fn patch(kind: Kind) -> &'static str {
    match kind {
        // Neither an address nor a group can change: their names depend on all that they say.
        Kind::HealthCheck | Kind::Address | Kind::Group => "regionHealthChecks.patch",
        Kind::BackendService => "regionBackendServices.patch",
        Kind::Firewall => "firewalls.patch",
        Kind::ForwardingRule => "forwardingRules.patch",
    }
}

fn delete(kind: Kind) -> &'static str {
    match kind {
        Kind::Address => "addresses.delete",
        Kind::HealthCheck => "regionHealthChecks.delete",
        Kind::Group => "networkEndpointGroups.delete",
        Kind::BackendService => "regionBackendServices.delete",
        Kind::Firewall => "firewalls.delete",
        Kind::ForwardingRule => "forwardingRules.delete",
    }
}

/// The method that reads one.
pub(crate) fn get(kind: Kind) -> &'static str {
    match kind {
        Kind::Address => "addresses.get",
        Kind::HealthCheck => "regionHealthChecks.get",
        Kind::Group => "networkEndpointGroups.get",
        Kind::BackendService => "regionBackendServices.get",
        Kind::Firewall => "firewalls.get",
        Kind::ForwardingRule => "forwardingRules.get",
    }
}

/// The method that lists all.
pub(crate) fn list(kind: Kind) -> &'static str {
    match kind {
        Kind::Address => "addresses.list",
        Kind::HealthCheck => "regionHealthChecks.list",
        Kind::Group => "networkEndpointGroups.aggregatedList",
        Kind::BackendService => "regionBackendServices.list",
        Kind::Firewall => "firewalls.list",
        Kind::ForwardingRule => "forwardingRules.list",
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = |endpoints: &BTreeSet<Endpoint>| {
            endpoints.iter().map(|endpoint| endpoint.instance.as_str()).collect::<Vec<_>>().join(", ")
        };
        match self {
            Self::Insert { id, .. } => write!(f, "{id}: created"),
            Self::Patch { id, changes } => {
                let fields = changes.as_object().into_iter().flat_map(|all| all.keys());
                let fields: Vec<&str> =
                    fields.map(String::as_str).filter(|field| *field != "fingerprint").collect();
                write!(f, "{id}: {} changes", fields.join(", "))
            }
            Self::Delete { id } => write!(f, "{id}: deleted"),
            Self::Attach { id, endpoints } => write!(f, "{id}: {} attached", names(endpoints)),
            Self::Detach { id, endpoints } => write!(f, "{id}: {} detached", names(endpoints)),
        }
    }
}
