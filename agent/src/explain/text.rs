// SPDX-License-Identifier: Apache-2.0
//! Frontends and explanations as text.

use std::fmt;
use std::net::SocketAddr;
use std::str::FromStr;
use std::sync::Arc;

use steerage_model::Protocol;

use super::{Explanation, PacketOrigin, PacketVerdict};
use crate::plan::Frontend;

impl fmt::Display for Frontend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", SocketAddr::new(self.addr, self.port), self.protocol)
    }
}

impl FromStr for Frontend {
    type Err = String;

    /// `IP:PORT/PROTO`, an IPv6 address in brackets.
    fn from_str(text: &str) -> Result<Self, String> {
        let expected =
            || format!("`{text}` is not IP:PORT/PROTO; write 10.96.0.10:53/UDP or [fd00::10]:80/TCP");
        let (end, protocol) = text.split_once('/').ok_or_else(expected)?;
        let end: SocketAddr = end.parse().map_err(|_| expected())?;
        let protocol = [Protocol::Tcp, Protocol::Udp, Protocol::Sctp]
            .into_iter()
            .find(|known| known.to_string().eq_ignore_ascii_case(protocol))
            .ok_or_else(expected)?;
        Ok(Self { addr: end.ip(), protocol, port: end.port() })
    }
}

impl fmt::Display for Explanation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line = |name: &str, value: &str| writeln!(f, "{name:<10}{value}");
        let origin = match self.origin {
            PacketOrigin::Host => "this host",
            PacketOrigin::LocalPod => "a pod on this node",
            PacketOrigin::Outside => "outside this node",
        };
        let from = self.query.from.map_or_else(|| origin.to_owned(), |from| format!("{from}, {origin}"));
        line("to", &self.query.frontend.to_string())?;
        line("from", &from)?;
        if let Some((service, what)) = &self.service {
            line("service", &format!("{service}: {what}"))?;
        }
        line("path", &self.path.join(" > "))?;
        let verdict = match &self.verdict {
            PacketVerdict::Forwarded(targets) => match targets.len() {
                1 => "sent to 1 endpoint".to_owned(),
                count => format!(
                    "sent to one of {count} endpoints, chosen by a hash of the client's address and port"
                ),
            },
            PacketVerdict::ForwardedToNodes(nodes) => {
                let nodes: Vec<_> = nodes.iter().map(ToString::to_string).collect();
                format!("forwarded unchanged to one of the nodes {}", nodes.join(", "))
            }
            PacketVerdict::Dropped => "dropped".to_owned(),
            PacketVerdict::Rejected => "rejected".to_owned(),
            PacketVerdict::Untouched => "not translated".to_owned(),
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
            line("source", &format!("{source}; an endpoint that reaches itself sees the node's"))?;
        }
        if let Some(seconds) = self.affinity {
            line("affinity", &format!("a client keeps its endpoint for {seconds}s"))?;
        }
        self.notes.iter().try_for_each(|note| line("note", note))
    }
}
