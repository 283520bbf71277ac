// SPDX-License-Identifier: Apache-2.0
//! The Services of the tests: made from a sensible default by saying what differs, and what their status says.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context as _, Result};
use k8s_openapi::api::core::v1::Service;
use kube::ResourceExt as _;
use serde_json::{Value, json};
use steerage_model::Family;

/// The class of load balancers that our edge serves.
pub const CLASS: &str = "steerage.dev/edge";
/// The port of the tests' Services, over TCP and UDP.
pub const PORT: u16 = 80;

/// A Service to be: a dual-stack load balancer of our class under policy Local, with port 80 over TCP and UDP.
#[derive(Clone, Debug)]
pub struct ServiceBuilder(Value);

impl ServiceBuilder {
    /// A Service in front of the pods labelled `app`.
    pub fn new(name: &str, app: &str) -> Self {
        Self(json!({
            "metadata": { "name": name, "annotations": {} },
            "spec": {
                "type": "LoadBalancer",
                "loadBalancerClass": CLASS,
                "externalTrafficPolicy": "Local",
                "ipFamilyPolicy": "RequireDualStack",
                "selector": { "app": app },
                "ports": [
                    { "name": "tcp", "protocol": "TCP", "port": PORT, "targetPort": 8080 },
                    { "name": "udp", "protocol": "UDP", "port": PORT, "targetPort": 8081 },
                ],
            },
        }))
    }

    /// With a field of `spec` set; null takes it away.
    #[must_use]
    pub fn with(mut self, field: &str, value: impl Into<Value>) -> Self {
        self.0["spec"][field] = value.into();
        self
    }

    /// Under policy Cluster.
    #[must_use]
    pub fn cluster(self) -> Self {
        self.with("externalTrafficPolicy", "Cluster")
    }

    /// With an annotation.
    #[must_use]
    pub fn annotated(mut self, key: &str, value: &str) -> Self {
        self.0["metadata"]["annotations"][key] = value.into();
        self
    }

    /// With a label.
    #[must_use]
    pub fn labelled(mut self, key: &str, value: &str) -> Self {
        self.0["metadata"]["labels"][key] = value.into();
        self
    }

    /// Steered in this mode.
    #[must_use]
    pub fn steered(self, mode: &str) -> Self {
        self.annotated(steerage_model::names::STEERING, mode)
    }

    /// The typed object.
    pub fn build(&self) -> Result<Service> {
        serde_json::from_value(self.0.clone()).with_context(|| format!("no Service: {:#}", self.0))
    }
}

/// The addresses of a load balancer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Vips {
    /// The IPv4 address.
    pub ipv4: IpAddr,
    /// The IPv6 address.
    pub ipv6: IpAddr,
}

impl Vips {
    /// What a Service publishes, if it publishes both families.
    pub fn of(service: &Service) -> Result<Self> {
        let published = published(service);
        let find = |family| published.iter().copied().find(|address| Family::of(*address) == family);
        let seen =
            || format!("{} publishes {published:?}, conditions {}", service.name_any(), conditions(service));
        Ok(Self { ipv4: find(Family::V4).with_context(seen)?, ipv6: find(Family::V6).with_context(seen)? })
    }

    /// The address of one family and a port.
    pub fn at(self, family: Family, port: u16) -> SocketAddr {
        let address = match family {
            Family::V4 => self.ipv4,
            Family::V6 => self.ipv6,
        };
        SocketAddr::new(address, port)
    }

    /// The addresses of both families.
    pub fn both(self) -> [IpAddr; 2] {
        [self.ipv4, self.ipv6]
    }
}

/// The host name in a Service's status.
pub fn hostname(service: &Service) -> Option<&str> {
    let ingress = service.status.as_ref()?.load_balancer.as_ref()?.ingress.as_ref()?;
    ingress.iter().find_map(|entry| entry.hostname.as_deref())
}

/// The addresses in a Service's status.
pub fn published(service: &Service) -> Vec<IpAddr> {
    let ingress = service.status.as_ref().and_then(|status| status.load_balancer.as_ref()?.ingress.as_ref());
    ingress.into_iter().flatten().filter_map(|entry| entry.ip.as_ref()?.parse().ok()).collect()
}

/// The status, reason and message of a condition.
pub fn condition(service: &Service, kind: &str) -> Option<(String, String, String)> {
    let conditions = service.status.as_ref()?.conditions.as_ref()?;
    let found = conditions.iter().find(|condition| condition.type_ == kind)?;
    Some((found.status.clone(), found.reason.clone(), found.message.clone()))
}

/// All conditions, in short.
pub fn conditions(service: &Service) -> String {
    let conditions = service.status.as_ref().and_then(|status| status.conditions.as_ref());
    let lines = conditions.into_iter().flatten();
    let words: Vec<_> =
        lines.map(|c| format!("{}={} {}: {}", c.type_, c.status, c.reason, c.message)).collect();
    format!("{words:?}")
}

/// The health-check port of a Service.
pub fn health_port(service: &Service) -> Result<u16> {
    let port = service.spec.as_ref().and_then(|spec| spec.health_check_node_port);
    port.and_then(|port| u16::try_from(port).ok())
        .with_context(|| format!("{} has no healthCheckNodePort", service.name_any()))
}
