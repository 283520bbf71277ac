// SPDX-License-Identifier: Apache-2.0
//! The administration server of a steerage-edge process in its host's namespace: address and readiness. `contender`, `edge_nodes` and
//! `edge_loss` ask it; it starts nothing.

use std::net::{Ipv4Addr, SocketAddrV4};

use anyhow::{Context as _, Result};
use steerage_lab::netns;

use crate::traffic;

/// Its address.
pub(crate) const ADMIN: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::LOCALHOST, 10_359);

/// Whether the edge in this namespace says that it is ready. It is not while it does not listen.
pub(crate) fn is_ready(netns: &str) -> Result<bool> {
    let answer = netns::in_netns(netns, || traffic::get(ADMIN, "/readyz"))?;
    Ok(answer.is_ok_and(|(status, _)| status == 200))
}

/// The value of a metric without labels of the edge in this namespace.
pub(crate) fn metric(netns: &str, name: &str) -> Result<f64> {
    let (_, text) = netns::in_netns(netns, || traffic::get(ADMIN, "/metrics"))??;
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok());
    value.with_context(|| format!("the edge of {netns} has no metric {name}"))
}
