// SPDX-License-Identifier: Apache-2.0
//! Says what happens to a packet and why: follows the chains of `crate::rules` over what the agent knows. Pure.
//!
//! `steerage-agent explain` prints it. Packet tests compare it with what happens to real packets.

mod text;
mod traced;

pub use traced::{KnownRules, TracedPacket};

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use ipnet::IpNet;
use steerage_model::{Family, Key, Service, ServiceKind, ServicePort, backends, names};
use steerage_watch::Index;

use crate::local_node::{LocalNode, LocalPods};
use crate::plan::{Action, Desired, Frontend, Masquerade, Reduced, serves};
use crate::rules::Ruleset;

/// A packet to explain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PacketQuery {
    /// Its destination.
    pub frontend: Frontend,
    /// Its source; `None`: somewhere outside the node.
    pub from: Option<IpAddr>,
}

impl PacketQuery {
    /// Fails unless both addresses are of one family.
    pub fn new(frontend: Frontend, from: Option<IpAddr>) -> Result<Self, String> {
        if from.is_some_and(|from| Family::of(from) != frontend.family()) {
            return Err(format!("{frontend} and the source are of different address families"));
        }
        Ok(Self { frontend, from })
    }
}

/// What the agent knows.
#[derive(Debug, Clone, Copy)]
pub struct ExplainContext<'a> {
    /// What is in the kernel, or is being written to it.
    pub ruleset: &'a Ruleset,
    /// The Services, slices and nodes.
    pub index: &'a Index,
    /// This node.
    pub local_node: &'a LocalNode,
    /// How local pods are recognised.
    pub pods: &'a LocalPods,
    /// The host's own addresses.
    pub host: &'a [IpAddr],
}

/// Where a packet comes from, as far as the rules distinguish it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PacketOrigin {
    /// This host.
    Host,
    /// A pod of this node.
    LocalPod,
    /// Anywhere else.
    Outside,
}

/// What happens to a packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PacketVerdict {
    /// It is sent to one of these endpoints.
    Forwarded(Arc<[SocketAddr]>),
    /// It is forwarded unchanged to one of these nodes.
    ForwardedToNodes(BTreeSet<IpAddr>),
    /// It is dropped silently.
    Dropped,
    /// It is rejected by ICMP.
    Rejected,
    /// The agent's rules do not touch it.
    Untouched,
}

/// What happens to one packet, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Explanation {
    /// The packet.
    pub query: PacketQuery,
    /// Where it comes from.
    pub origin: PacketOrigin,
    /// The frontend's owner, and what the frontend is to it.
    pub service: Option<(Key, &'static str)>,
    /// The chains that the packet passes.
    pub path: Vec<&'static str>,
    /// What happens to it.
    pub verdict: PacketVerdict,
    /// Why.
    pub why: String,
    /// The endpoint sees the node's address. An endpoint that reaches itself always does.
    pub masqueraded: bool,
    /// Seconds for which a client keeps its endpoint.
    pub affinity: Option<u32>,
    /// All endpoints of the Service port with their states.
    pub endpoints: Vec<(SocketAddr, String)>,
    /// Anything else worth knowing.
    pub notes: Vec<String>,
}

/// Explains a packet.
pub fn explain(query: PacketQuery, context: ExplainContext<'_>) -> Explanation {
    let origin = context.origin(query.from);
    let first = if origin == PacketOrigin::Host { "output" } else { "prerouting" };
    let mut explanation = Explanation {
        query,
        origin,
        service: None,
        path: vec![first],
        verdict: PacketVerdict::Untouched,
        why: String::new(),
        masqueraded: false,
        affinity: None,
        endpoints: Vec::new(),
        notes: Vec::new(),
    };
    match context.desired().action(&query.frontend) {
        Some(action) => context.served(action, &mut explanation),
        None => context.not_served(&mut explanation),
    }
    explanation
}

impl ExplainContext<'_> {
    fn desired(&self) -> &Desired {
        self.ruleset.desired()
    }

    fn origin(&self, from: Option<IpAddr>) -> PacketOrigin {
        let Some(from) = from else { return PacketOrigin::Outside };
        let pod = match self.pods {
            LocalPods::Networks(nets) => nets.iter().any(|net| net.contains(&from)),
            // The rules see the interface. An address tells only whether an endpoint of this node has it.
            LocalPods::Interface(_) | LocalPods::InterfacePrefix(_) => {
                self.desired().is_hairpin(&from) && !self.local_node.addresses.contains(&from)
            }
        };
        if pod {
            PacketOrigin::LocalPod
        } else if self.host.contains(&from) || self.local_node.addresses.contains(&from) {
            PacketOrigin::Host
        } else {
            PacketOrigin::Outside
        }
    }

    fn served(&self, action: &Action, explanation: &mut Explanation) {
        let PacketQuery { frontend, from } = explanation.query;
        let mut owners = self.desired().owners(&frontend);
        let owner = owners.next().and_then(|key| self.index.service(key));
        let also: Vec<_> = owners.map(Key::to_string).collect();
        if !also.is_empty() {
            explanation.notes.push(format!(
                "also requested by {}; the first Service by role, age and name is served",
                also.join(", ")
            ));
        }
        if let Some((service, (role, port))) = owner.and_then(|s| Some((s, frontend_role(s, &frontend)?))) {
            explanation.service = Some((service.key.clone(), role));
            explanation.endpoints = self.endpoints(service, port, frontend.family());
            let reduced = self.desired().reduced(&service.key);
            explanation.notes.extend(reduced.filter(|reduced| reduced.sources > 0).map(|reduced| {
                let Reduced { sources, .. } = reduced;
                format!(
                    "{} of the source ranges of {} are left out for the same reason",
                    sources, service.key
                )
            }));
            explanation.notes.extend(reduced.map(|reduced| {
                let why = if reduced.needs > reduced.limit {
                    format!("needs {} elements of nftables, and may have {}", reduced.needs, reduced.limit)
                } else {
                    "has more endpoints than a list".to_owned()
                };
                format!(
                    "{} {why}: at most {} of its endpoints are used on this node",
                    service.key, reduced.endpoints
                )
            }));
        }
        explanation.path.push("services");
        explanation.affinity = action.affinity;
        if let (LocalPods::Interface(name) | LocalPods::InterfacePrefix(name), PacketOrigin::Outside) =
            (self.pods, explanation.origin)
        {
            explanation.notes.push(format!(
                "packets that arrive by {name} come from a local pod; no local pod with this address is known"
            ));
        }
        if let Some(sources) = &action.sources {
            let nets: Vec<_> = sources.iter().map(IpNet::to_string).collect();
            let nets = if nets.is_empty() { "no address of this family".to_owned() } else { nets.join(", ") };
            if from.is_some_and(|from| !sources.iter().any(|net| net.contains(&from))) {
                explanation.verdict = PacketVerdict::Dropped;
                explanation.why = format!("its loadBalancerSourceRanges allow {nets}");
                return;
            }
            explanation.notes.push(format!("its loadBalancerSourceRanges allow {nets}"));
        }
        if action.reject {
            explanation.verdict = PacketVerdict::Rejected;
            explanation.why = "no endpoint in the cluster is ready, or terminating and still serving".into();
            return;
        }
        let mut targets = &action.targets;
        if let Some(local) = &action.local {
            explanation.path.push("to-split");
            if explanation.origin == PacketOrigin::Outside {
                targets = local;
                explanation.path.push("to-local");
                explanation.why =
                    "externalTrafficPolicy Local: clients outside the node reach its local endpoints".into();
            } else {
                explanation.why =
                    "externalTrafficPolicy Local, but the client is on this node: it reaches all endpoints"
                        .into();
            }
        }
        if let (Some(peers), Some(&"to-local")) = (&action.peers, explanation.path.last()) {
            explanation.path = vec!["received", "to-peer"];
            explanation.verdict = PacketVerdict::ForwardedToNodes(peers.iter().copied().collect());
            explanation.why = "externalTrafficPolicy Local, and no endpoint on this node is usable (--forward-without-local-endpoints)".into();
            explanation.notes.push("a packet that another node has forwarded here is dropped".to_owned());
            return;
        }
        if explanation.path.last() != Some(&"to-local") {
            explanation.path.push("to-cluster");
        }
        if targets.is_empty() {
            explanation.verdict = PacketVerdict::Dropped;
            explanation.why = "the traffic policy is Local, and no endpoint on this node is usable".into();
            return;
        }
        explanation.verdict = PacketVerdict::Forwarded(Arc::clone(&targets.list));
        explanation.masqueraded = match (action.masquerade, explanation.origin) {
            (Masquerade::All, _) | (_, PacketOrigin::Host) => true,
            (Masquerade::AllButLocalPods, PacketOrigin::Outside) => self.recognises_pods(frontend.family()),
            _ => false,
        };
        explanation.path.push("postrouting");
    }

    fn recognises_pods(&self, family: Family) -> bool {
        match self.pods {
            LocalPods::Networks(nets) => nets.iter().any(|net| Family::of(net.addr()) == family),
            LocalPods::Interface(_) | LocalPods::InterfacePrefix(_) => true,
        }
    }

    fn not_served(&self, explanation: &mut Explanation) {
        let frontend = explanation.query.frontend;
        let has_it = |service: &&Service| has_address(service, frontend.addr);
        let holders: Vec<_> = self.index.services().filter(has_it).collect();
        explanation.notes.extend(holders.iter().map(|service| self.unserved_reason(service, &frontend)));
        if let Some(service) = self.desired().reserved_at(&frontend) {
            explanation.notes.push(format!("it belongs to {service}, so that no external IP is served here"));
        }
        if self.desired().is_cluster_address(&frontend.addr) {
            explanation.path.extend(["services", "to-cluster"]);
            explanation.verdict = PacketVerdict::Rejected;
            explanation.why = "no Service has this port and protocol of the cluster IP".into();
            return;
        }
        explanation.why = "no frontend of this node".into();
        let elsewhere = !self.host.contains(&frontend.addr);
        if elsewhere && self.ruleset.config().unassigned.iter().any(|net| net.contains(&frontend.addr)) {
            explanation.path.extend(["postrouting", "unassigned"]);
            explanation.verdict = PacketVerdict::Dropped;
            explanation.why =
                "unassigned VIP or cluster IP: no Service has it (--drop-unassigned-vips, ServiceCIDR)"
                    .into();
        }
        let node_ports = self.index.services().filter(|service| {
            serves(service, self.local_node.kube_proxy_replacement)
                && service
                    .ports
                    .iter()
                    .any(|port| port.node_port == Some(frontend.port) && port.protocol == frontend.protocol)
        });
        for service in node_ports.filter(|_| !self.local_node.node_port_addresses.contains(&frontend.addr)) {
            let served: Vec<_> = self.local_node.node_port_addresses.iter().map(IpAddr::to_string).collect();
            explanation.notes.push(format!(
                "{}/{} is the node port of {}, which this node serves at {}",
                frontend.port,
                frontend.protocol,
                service.key,
                if served.is_empty() { "no address".to_owned() } else { served.join(", ") }
            ));
        }
    }

    /// Why a Service that has the address has no frontend there.
    fn unserved_reason(&self, service: &Service, frontend: &Frontend) -> String {
        let key = &service.key;
        if serves(service, self.local_node.kube_proxy_replacement) {
            if self.desired().reduced(key).is_some_and(|reduced| reduced.frontends > 0) {
                return format!(
                    "{key} needs more elements of nftables than it may have: some of its ports are not served"
                );
            }
            let refusal = self.local_node.external_ips.refusal(frontend.addr, frontend.port);
            if let Some(refusal) = refusal.filter(|_| service.external_ips.contains(&frontend.addr)) {
                return format!("{key} has the address as an external IP, which is not served: {refusal}");
            }
            let port = |port: &ServicePort| format!("{}/{}", port.port, port.protocol);
            let ports: Vec<_> = service.ports.iter().map(port).collect();
            return format!("{key} has the address, and the ports {}", ports.join(", "));
        }
        let why = match service.proxy_name.as_deref() {
            _ if service.headless_label => "it is labelled headless".to_owned(),
            Some(name) if name != names::PROXY_NAME => {
                format!("it is labelled for the service proxy `{name}`")
            }
            None if !self.local_node.kube_proxy_replacement => {
                format!(
                    "it is not labelled {}={}: kube-proxy serves it",
                    names::PROXY_NAME_LABEL,
                    names::PROXY_NAME
                )
            }
            _ => "it has no cluster IP".to_owned(),
        };
        format!("{key} has the address, but is not served: {why}")
    }

    fn endpoints(&self, service: &Service, port: &ServicePort, family: Family) -> Vec<(SocketAddr, String)> {
        let all = backends(self.index.slices(&service.key), family, &port.name, port.protocol);
        let describe = |endpoint: &steerage_model::Endpoint| {
            let location = match &endpoint.node {
                Some(node) if **node == *self.local_node.node => "on this node".to_owned(),
                Some(node) => format!("on {node}"),
                None => "on no node".to_owned(),
            };
            let state = match (endpoint.ready, endpoint.serving, endpoint.terminating) {
                (true, _, _) => "ready",
                (false, true, true) => "terminating, still serving",
                (false, false, true) => "terminating",
                _ => "not ready",
            };
            format!("{location}, {state}")
        };
        all.iter().map(|b| (SocketAddr::new(b.endpoint.addr, b.port), describe(b.endpoint))).collect()
    }
}

fn has_address(service: &Service, addr: IpAddr) -> bool {
    service.cluster_ips.contains(&addr)
        || service.external_ips.contains(&addr)
        || service.kind == ServiceKind::LoadBalancer && service.vips().any(|vip| vip == addr)
}

/// What a frontend is to its owner, and the port of the owner that it leads to.
fn frontend_role<'s>(service: &'s Service, frontend: &Frontend) -> Option<(&'static str, &'s ServicePort)> {
    let by = |number: fn(&ServicePort) -> Option<u16>| {
        let fits =
            |port: &&ServicePort| port.protocol == frontend.protocol && number(port) == Some(frontend.port);
        service.ports.iter().find(fits)
    };
    let addr = frontend.addr;
    let role = if service.cluster_ips.contains(&addr) {
        "its cluster IP"
    } else if service.kind == ServiceKind::LoadBalancer && service.vips().any(|vip| vip == addr) {
        "the address of its load balancer"
    } else if service.external_ips.contains(&addr) {
        "its external IP"
    } else {
        return Some(("its node port", by(|port| port.node_port)?));
    };
    by(|port| Some(port.port))
        .map(|port| (role, port))
        .or_else(|| Some(("its node port", by(|port| port.node_port)?)))
}
