// SPDX-License-Identifier: Apache-2.0
//! What an agent says of its node for all health-check node ports at once. The agent answers requests with it; the edge asks and
//! obeys. Only the value and its form as JSON.

use std::collections::BTreeMap;

use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer, Serialize};

/// The path at which an agent states, on its health port (`--healthz-port`).
///
/// Query parameters: `after`, a revision, asks for what has changed since; `wait`, in milliseconds, holds the request open until
/// something has changed, at most so long. An agent that does not know the revision states all.
pub const STATEMENT_PATH: &str = "/statement";

/// The longest `wait` of a request, in milliseconds. A longer one is shortened to this.
pub const MAX_STATEMENT_WAIT: u64 = 10_000;

/// One answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Statement {
    /// The `after` of the next request. Only the agent understands it; a restarted agent does not know the revisions of its
    /// predecessor.
    pub revision: String,
    /// Whether `ports` lists all ports of the node. Otherwise it lists those that have changed.
    pub complete: bool,
    /// Whether load balancers may rely on the node's data plane. If not, no port has an endpoint for them, whatever its count.
    pub healthy: bool,
    /// By health-check node port, the number of the Service's local endpoints of the family of the address that was asked; `null`
    /// where the agent does not serve the port any more.
    pub ports: BTreeMap<u16, Option<u32>>,
    /// Whether the node receives from edge hosts' tunnel, in packets of the family of the address that was asked. Absent before the agent
    /// has looked, and from agents that know no tunnel.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "tunnel_receiver")]
    pub edge_tunnel: Option<TunnelReceiver>,
}

/// A node's end of edge hosts' tunnel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "camelCase")]
pub enum TunnelReceiver {
    /// It receives this virtual network at this UDP port.
    Receives {
        /// The number of the virtual network.
        vni: u32,
        /// The UDP port.
        port: u16,
    },
    /// It does not receive: the agent has no flag for it.
    Off,
    /// It does not receive: the device of an edge host on the node has the UDP port.
    EdgeHost,
    /// It does not receive: its device or the rules for it are missing. The agent's log says why.
    Failed,
    /// What an agent of a later version says.
    #[serde(other)]
    Unknown,
}

/// What an agent of a later version says may have any form. The rest of its statement counts all the same.
fn tunnel_receiver<'de, D: Deserializer<'de>>(input: D) -> Result<Option<TunnelReceiver>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Form {
        Known(TunnelReceiver),
        Other(IgnoredAny),
    }
    let form = Option::<Form>::deserialize(input)?;
    Ok(form.map(|form| match form {
        Form::Known(receiver) => receiver,
        Form::Other(IgnoredAny) => TunnelReceiver::Unknown,
    }))
}
