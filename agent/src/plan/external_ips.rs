// SPDX-License-Identifier: Apache-2.0
//! Which external IPs are served. Any user may name any address in `externalIPs`, and thereby take what others send there
//! (CVE-2020-8554). Pure.

use std::collections::BTreeSet;
use std::fmt;
use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use steerage_model::Key;

/// The addresses at which no external IP is served.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ExternalIps {
    /// None is served at all.
    pub denied: bool,
    /// The networks of cluster IPs.
    pub service_cidrs: Vec<IpNet>,
    /// The networks of this node's pods, and those of all pods that are known. A packet that another node translated to a pod passes
    /// this node's rules once more.
    pub pods: Vec<IpNet>,
    /// Addresses of this node.
    pub node: Vec<IpAddr>,
    /// Where API servers listen.
    pub api_servers: Vec<SocketAddr>,
}

/// Why an external IP is not served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Refusal {
    /// `--deny-service-external-ips`.
    Denied,
    /// It is in the networks of cluster IPs.
    ServiceCidr,
    /// It is in a network of pods.
    Pod,
    /// This node has it.
    Node,
    /// An API server listens there.
    ApiServer,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Denied => "--deny-service-external-ips is set",
            Self::ServiceCidr => "it is in a ServiceCIDR, whose addresses only the API server assigns",
            Self::Pod => "it is in a network of pods",
            Self::Node => "it is an address of this node",
            Self::ApiServer => "an API server listens there",
        })
    }
}

/// An external IP of a Service that is not served.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct RefusedExternalIp {
    /// The Service.
    pub service: Key,
    /// The address.
    pub addr: IpAddr,
    /// Why.
    pub refusal: Refusal,
}

impl ExternalIps {
    /// Why an external IP is not served at a port; `None` if it is.
    pub fn refusal(&self, addr: IpAddr, port: u16) -> Option<Refusal> {
        let is_api_server = || self.api_servers.contains(&SocketAddr::new(addr, port));
        self.refusal_everywhere(addr).or_else(|| is_api_server().then_some(Refusal::ApiServer))
    }

    /// Why an external IP is not served at one of these ports at least.
    pub fn refusal_at_any(&self, addr: IpAddr, ports: &BTreeSet<u16>) -> Option<Refusal> {
        let is_api_server =
            || self.api_servers.iter().any(|server| server.ip() == addr && ports.contains(&server.port()));
        self.refusal_everywhere(addr).or_else(|| is_api_server().then_some(Refusal::ApiServer))
    }

    /// Why an external IP is served at no port.
    pub fn refusal_everywhere(&self, addr: IpAddr) -> Option<Refusal> {
        let reasons = [
            (self.denied, Refusal::Denied),
            (self.service_cidrs.iter().any(|net| net.contains(&addr)), Refusal::ServiceCidr),
            (self.pods.iter().any(|net| net.contains(&addr)), Refusal::Pod),
            (self.node.contains(&addr), Refusal::Node),
        ];
        reasons.into_iter().find(|(applies, _)| *applies).map(|(_, refusal)| refusal)
    }
}
