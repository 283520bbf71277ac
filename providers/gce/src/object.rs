// SPDX-License-Identifier: Apache-2.0
//! The kinds of resources that a load balancer consists of, and where each lies. Pure.

use std::fmt;

use crate::config::Config;

/// A kind of resource. In the order in which the resources of a load balancer depend on each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// A reserved address.
    Address,
    HealthCheck,
    /// A zonal network endpoint group of type `GCE_VM_IP`.
    Group,
    BackendService,
    Firewall,
    ForwardingRule,
}

impl Kind {
    pub(crate) const ALL: [Self; 6] = [
        Self::Address,
        Self::HealthCheck,
        Self::Group,
        Self::BackendService,
        Self::Firewall,
        Self::ForwardingRule,
    ];

    /// The collection in a path, and in the names of methods and permissions.
    pub(crate) fn collection(self) -> &'static str {
        match self {
            Self::Address => "addresses",
            Self::HealthCheck => "healthChecks",
            Self::Group => "networkEndpointGroups",
            Self::BackendService => "backendServices",
            Self::Firewall => "firewalls",
            Self::ForwardingRule => "forwardingRules",
        }
    }

    /// What users call it.
    fn title(self) -> &'static str {
        match self {
            Self::Address => "address",
            Self::HealthCheck => "health check",
            Self::Group => "network endpoint group",
            Self::BackendService => "backend service",
            Self::Firewall => "firewall rule",
            Self::ForwardingRule => "forwarding rule",
        }
    }
}

/// A resource.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Id {
    pub(crate) kind: Kind,
    /// The zone of a group.
    pub(crate) zone: Option<String>,
    pub(crate) name: String,
}

impl Id {
    pub(crate) fn new(kind: Kind, name: impl Into<String>) -> Self {
        Self { kind, zone: None, name: name.into() }
    }

    pub(crate) fn zonal(kind: Kind, zone: &str, name: impl Into<String>) -> Self {
        Self { kind, zone: Some(zone.to_owned()), name: name.into() }
    }

    /// The path of its collection.
    pub(crate) fn collection(&self, config: &Config) -> String {
        let scope = match (self.kind, &self.zone) {
            (Kind::Firewall, _) => format!("projects/{}/global", config.network_project()),
            (_, Some(zone)) => format!("projects/{}/zones/{zone}", config.project),
            (_, None) => format!("projects/{}/regions/{}", config.project, config.region),
        };
        format!("{scope}/{}", self.kind.collection())
    }

    /// Its path.
    pub(crate) fn path(&self, config: &Config) -> String {
        format!("{}/{}", self.collection(config), self.name)
    }
}

/// Where resources are, in what refers to them: GCE does not take a path for all.
const SERVER: &str = "https://www.googleapis.com/compute/v1";

impl Id {
    /// Its URL, by which other resources refer to it.
    pub(crate) fn url(&self, config: &Config) -> String {
        url(&self.path(config))
    }
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind.title(), self.name)?;
        self.zone.as_ref().map_or(Ok(()), |zone| write!(f, " in {zone}"))
    }
}

/// The URL of a path.
pub(crate) fn url(path: &str) -> String {
    format!("{SERVER}/{path}")
}

/// The path of a resource from its URL: what follows the version of the API.
pub(crate) fn relative(url: &str) -> &str {
    url.find("projects/").map_or(url, |at| url.get(at..).unwrap_or(url))
}

/// The last part of a URL.
pub(crate) fn last(url: &str) -> &str {
    url.rsplit('/').next().unwrap_or(url)
}
