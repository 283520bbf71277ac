// SPDX-License-Identifier: Apache-2.0
//! Says what becomes of a packet, and why: the rules of `crate::rules` walked in mind, over what the agent knows. Pure.
//!
//! For people. `steerage-agent explain` prints it; the packet tests hold it against what packets meet.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;
use std::sync::Arc;

use ipnet::IpNet;
use steerage_model::{Family, Key, Protocol, Service, ServiceKind, ServicePort, backends, names};
use steerage_watch::Index;

use crate::local_node::{LocalNode, LocalPods};
use crate::plan::{Action, Desired, Frontend, Masquerade, serves};

impl fmt::Display for Frontend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", SocketAddr::new(self.addr, self.port), self.protocol)
    }
}

impl FromStr for Frontend {
    type Err = String;

    /// `IP:PORT/PROTO`, an IPv6 address in brackets.
    fn from_str(text: &str) -> Result<Self, String> {
        let wanted =
            || format!("`{text}` is not IP:PORT/PROTO, such as 10.96.0.10:53/UDP or [fd00::10]:80/TCP");
        let (end, protocol) = text.split_once('/').ok_or_else(wanted)?;
        let end: SocketAddr = end.parse().map_err(|_| wanted())?;
        let protocol = [Protocol::Tcp, Protocol::Udp, Protocol::Sctp]
            .into_iter()
            .find(|known| known.to_string().eq_ignore_ascii_case(protocol))
            .ok_or_else(wanted)?;
        Ok(Self { addr: end.ip(), protocol, port: end.port() })
    }
}

/// What is asked: a packet's destination, and its source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PacketQuery {
    /// Where it is sent to.
    pub frontend: Frontend,
    /// Who sends it; `None`: somebody outside the node.
    pub from: Option<IpAddr>,
}

impl PacketQuery {
    /// A question whose addresses are of one family.
    pub fn new(frontend: Frontend, from: Option<IpAddr>) -> Result<Self, String> {
        if from.is_some_and(|from| Family::of(from) != frontend.family()) {
            return Err(format!("{frontend} and its sender are of different families"));
        }
        Ok(Self { frontend, from })
    }
}

/// What the agent knows.
#[derive(Debug, Clone, Copy)]
pub struct ExplainContext<'a> {
    /// What is, or is being, written to the kernel.
    pub desired: &'a Desired,
    /// What the cluster said.
    pub index: &'a Index,
    /// This node's place.
    pub local_node: &'a LocalNode,
    /// What tells this node's pods from others.
    pub pods: &'a LocalPods,
    /// The host's own addresses.
    pub host: &'a [IpAddr],
    /// Networks of which only what a Service has may be reached.
    pub unserved: &'a [IpNet],
}

/// Where a packet comes from, as the rules tell it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PacketOrigin {
    /// This host.
    Host,
    /// A pod of this node.
    LocalPod,
    /// Anybody else.
    Outside,
}

/// What becomes of the packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PacketVerdict {
    /// It goes to one of these endpoints.
    Forwarded(Arc<[SocketAddr]>),
    /// It is dropped without a word.
    Dropped,
    /// Its sender is told that there is nothing.
    Rejected,
    /// The agent's rules do not touch it.
    Untouched,
}

/// The answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Explanation {
    /// What was asked.
    pub question: PacketQuery,
    /// Where the packet comes from.
    pub sender: PacketOrigin,
    /// The Service that has the frontend, and what the frontend is to it.
    pub service: Option<(Key, &'static str)>,
    /// The chains that the packet walks.
    pub path: Vec<&'static str>,
    /// What becomes of it.
    pub verdict: PacketVerdict,
    /// Why.
    pub why: String,
    /// Whether the endpoint sees the node's address in local_node of the sender's. An endpoint that meets itself always does.
    pub masqueraded: bool,
    /// Seconds for which a client keeps its endpoint.
    pub affinity: Option<u32>,
    /// All endpoints of the Service port with their states.
    pub endpoints: Vec<(SocketAddr, String)>,
    /// What else is worth knowing.
    pub notes: Vec<String>,
}

/// Answers.
pub fn explain(question: PacketQuery, known: ExplainContext<'_>) -> Explanation {
    let sender = known.sender(question.from);
    let first = if sender == PacketOrigin::Host { "output" } else { "prerouting" };
    let mut answer = Explanation {
        question,
        sender,
        service: None,
        path: vec![first],
        verdict: PacketVerdict::Untouched,
        why: String::new(),
        masqueraded: false,
        affinity: None,
        endpoints: Vec::new(),
        notes: Vec::new(),
    };
    match known.desired.action(&question.frontend) {
        Some(action) => known.served(action, &mut answer),
        None => known.not_served(&mut answer),
    }
    answer
}

impl ExplainContext<'_> {
    fn sender(&self, from: Option<IpAddr>) -> PacketOrigin {
        let Some(from) = from else { return PacketOrigin::Outside };
        let pod = match self.pods {
            LocalPods::Networks(nets) => nets.iter().any(|net| net.contains(&from)),
            // Of a packet we would know; of an address we know whether an endpoint of this node has it.
            LocalPods::Interface(_) | LocalPods::InterfacePrefix(_) => {
                self.desired.is_hairpin(&from) && !self.local_node.addresses.contains(&from)
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

    fn served(&self, action: &Action, answer: &mut Explanation) {
        let PacketQuery { frontend, from } = answer.question;
        let mut owners = self.desired.owners(&frontend);
        let owner = owners.next().and_then(|key| self.index.service(key));
        let also: Vec<_> = owners.map(Key::to_string).collect();
        if !also.is_empty() {
            answer.notes.push(format!("{} asks for it too; the first by name has it", also.join(", ")));
        }
        if let Some((service, (what, port))) = owner.and_then(|s| Some((s, frontend_role(s, &frontend)?))) {
            answer.service = Some((service.key.clone(), what));
            answer.endpoints = self.endpoints(service, port, frontend.family());
        }
        answer.path.push("services");
        answer.affinity = action.affinity;
        if let (LocalPods::Interface(name) | LocalPods::InterfacePrefix(name), PacketOrigin::Outside) =
            (self.pods, answer.sender)
        {
            answer.notes.push(format!("a sender whose packets come in by {name} is a pod of this node; this address is of none known"));
        }
        if let Some(sources) = &action.sources {
            let nets: Vec<_> = sources.iter().map(IpNet::to_string).collect();
            let nets = if nets.is_empty() { "nobody of this family".to_owned() } else { nets.join(", ") };
            if from.is_some_and(|from| !sources.iter().any(|net| net.contains(&from))) {
                answer.verdict = PacketVerdict::Dropped;
                answer.why = format!("its loadBalancerSourceRanges let in {nets}");
                return;
            }
            answer.notes.push(format!("its loadBalancerSourceRanges let in {nets}"));
        }
        if action.reject {
            answer.verdict = PacketVerdict::Rejected;
            answer.why = "no endpoint in the cluster is ready, nor terminating and still serving".into();
            return;
        }
        let mut targets = &action.targets;
        if let Some(local) = &action.local {
            answer.path.push("to-split");
            if answer.sender == PacketOrigin::Outside {
                targets = local;
                answer.path.push("to-local");
                answer.why =
                    "externalTrafficPolicy Local: who comes from outside gets this node's endpoints".into();
            } else {
                answer.why =
                    "externalTrafficPolicy Local, but the sender is on this node: any endpoint will do"
                        .into();
            }
        }
        if answer.path.last() != Some(&"to-local") {
            answer.path.push("to-cluster");
        }
        if targets.is_empty() {
            answer.verdict = PacketVerdict::Dropped;
            answer.why = "its traffic policy is Local, and no endpoint on this node is usable".into();
            return;
        }
        answer.verdict = PacketVerdict::Forwarded(Arc::clone(targets));
        answer.masqueraded = match (action.masquerade, answer.sender) {
            (Masquerade::All, _) | (_, PacketOrigin::Host) => true,
            (Masquerade::NotPods, PacketOrigin::Outside) => self.tells_pods(frontend.family()),
            _ => false,
        };
        answer.path.push("postrouting");
    }

    /// Whether this node's pods can be told from others.
    fn tells_pods(&self, family: Family) -> bool {
        match self.pods {
            LocalPods::Networks(nets) => nets.iter().any(|net| Family::of(net.addr()) == family),
            LocalPods::Interface(_) | LocalPods::InterfacePrefix(_) => true,
        }
    }

    fn not_served(&self, answer: &mut Explanation) {
        let frontend = answer.question.frontend;
        let claims = |service: &&Service| has_address(service, frontend.addr);
        let holders: Vec<_> = self.index.services().filter(claims).collect();
        answer.notes.extend(holders.iter().map(|service| self.left_out(service)));
        if self.desired.is_cluster_address(&frontend.addr) {
            answer.path.extend(["services", "to-cluster"]);
            answer.verdict = PacketVerdict::Rejected;
            answer.why = "a cluster IP that is served, but not at this port and protocol".into();
            return;
        }
        answer.why = "the agent serves nothing here".into();
        let elsewhere = !self.host.contains(&frontend.addr);
        if elsewhere && self.unserved.iter().any(|net| net.contains(&frontend.addr)) {
            answer.path.extend(["postrouting", "unserved"]);
            answer.verdict = PacketVerdict::Dropped;
            answer.why = "of a network for Services only, and nobody on this node translates it".into();
        }
        let node_ports = self.index.services().filter(|service| {
            serves(service, self.local_node.all_services)
                && service
                    .ports
                    .iter()
                    .any(|port| port.node_port == Some(frontend.port) && port.protocol == frontend.protocol)
        });
        for service in node_ports.filter(|_| !self.local_node.node_port_addresses.contains(&frontend.addr)) {
            let served: Vec<_> = self.local_node.node_port_addresses.iter().map(IpAddr::to_string).collect();
            answer.notes.push(format!(
                "{} of {} is the node port of {}, which this node serves at {}",
                frontend.port,
                frontend.protocol,
                service.key,
                if served.is_empty() { "no address".to_owned() } else { served.join(", ") }
            ));
        }
    }

    /// Why a Service that has the address does not serve it there.
    fn left_out(&self, service: &Service) -> String {
        let key = &service.key;
        if serves(service, self.local_node.all_services) {
            let port = |port: &ServicePort| format!("{}/{}", port.port, port.protocol);
            let ports: Vec<_> = service.ports.iter().map(port).collect();
            return format!("{key} has the address, and the ports {}", ports.join(", "));
        }
        let why = match service.proxy_name.as_deref() {
            _ if service.headless_label => "it is labelled headless".to_owned(),
            Some(name) if name != names::PROXY_NAME => {
                format!("it is labelled for the service proxy `{name}`")
            }
            None if !self.local_node.all_services => {
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
            let local_node = match &endpoint.node {
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
            format!("{local_node}, {state}")
        };
        all.iter().map(|b| (SocketAddr::new(b.endpoint.addr, b.port), describe(b.endpoint))).collect()
    }
}

fn has_address(service: &Service, addr: IpAddr) -> bool {
    service.cluster_ips.contains(&addr)
        || service.external_ips.contains(&addr)
        || service.kind == ServiceKind::LoadBalancer && service.vips().any(|vip| vip == addr)
}

/// What a frontend is to a Service, and by which of its ports.
fn frontend_role<'s>(service: &'s Service, frontend: &Frontend) -> Option<(&'static str, &'s ServicePort)> {
    let by = |number: fn(&ServicePort) -> Option<u16>| {
        let fits =
            |port: &&ServicePort| port.protocol == frontend.protocol && number(port) == Some(frontend.port);
        service.ports.iter().find(fits)
    };
    let addr = frontend.addr;
    let what = if service.cluster_ips.contains(&addr) {
        "its cluster IP"
    } else if service.kind == ServiceKind::LoadBalancer && service.vips().any(|vip| vip == addr) {
        "the address of its load balancer"
    } else if service.external_ips.contains(&addr) {
        "its external IP"
    } else {
        return Some(("its node port", by(|port| port.node_port)?));
    };
    by(|port| Some(port.port))
        .map(|port| (what, port))
        .or_else(|| Some(("its node port", by(|port| port.node_port)?)))
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line = |name: &str, value: &str| writeln!(f, "{name:<10}{value}");
        let sender = match self.sender {
            PacketOrigin::Host => "this host",
            PacketOrigin::LocalPod => "a pod of this node",
            PacketOrigin::Outside => "outside this node",
        };
        let from = self.question.from.map_or_else(|| sender.to_owned(), |from| format!("{from}, {sender}"));
        line("to", &self.question.frontend.to_string())?;
        line("from", &from)?;
        if let Some((service, what)) = &self.service {
            line("service", &format!("{service}: {what}"))?;
        }
        line("path", &self.path.join(" > "))?;
        let verdict = match &self.verdict {
            PacketVerdict::Forwarded(targets) => {
                format!("sent to {} endpoint(s), each as likely", targets.len())
            }
            PacketVerdict::Dropped => "dropped".to_owned(),
            PacketVerdict::Rejected => "rejected".to_owned(),
            PacketVerdict::Untouched => "left as it is".to_owned(),
        };
        let why = if self.why.is_empty() { String::new() } else { format!(": {}", self.why) };
        line("verdict", &format!("{verdict}{why}"))?;
        let used = match &self.verdict {
            PacketVerdict::Forwarded(targets) => targets,
            _ => &Arc::from([]),
        };
        for (endpoint, state) in &self.endpoints {
            let mark = if used.contains(endpoint) { "used" } else { "not used" };
            line("endpoint", &format!("{endpoint} {state}, {mark}"))?;
        }
        if let PacketVerdict::Forwarded(_) = self.verdict {
            let source = if self.masqueraded { "replaced by the node's" } else { "kept" };
            line("source", &format!("{source}; an endpoint that meets itself sees the node's"))?;
        }
        if let Some(seconds) = self.affinity {
            line("affinity", &format!("a client keeps its endpoint for {seconds} s"))?;
        }
        self.notes.iter().try_for_each(|note| line("note", note))
    }
}
