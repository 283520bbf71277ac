// SPDX-License-Identifier: Apache-2.0
//! The administration server of a steerage-edge process in its host's namespace: address, readiness and metrics. `contender`, `edge_nodes` and
//! `edge_loss` ask it; it starts nothing.

use std::net::{Ipv4Addr, SocketAddrV4};

use anyhow::Result;
use steerage_lab::netns;

use crate::traffic;

/// Its address.
pub(crate) const ADMIN: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::LOCALHOST, 10_359);

/// Whether the edge in this namespace says that it is ready. It is not while it does not listen.
pub(crate) fn is_ready(netns: &str) -> Result<bool> {
    let answer = netns::in_netns(netns, || traffic::get(ADMIN, "/readyz"))?;
    Ok(answer.is_ok_and(|(status, _)| status == 200))
}

/// All metrics of the edge in this namespace.
pub(crate) fn metrics(netns: &str) -> Result<HostMetrics> {
    let (_, text) = netns::in_netns(netns, || traffic::get(ADMIN, "/metrics"))??;
    Ok(HostMetrics(text))
}

/// The text of `/metrics`.
pub(crate) struct HostMetrics(pub(crate) String);

impl HostMetrics {
    /// The value of a series.
    pub(crate) fn value(&self, series: &str) -> Option<f64> {
        self.0.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' ')?.parse().ok())
    }

    /// The sum of the values of a family.
    pub(crate) fn sum(&self, family: &str) -> f64 {
        let of_family = self.0.lines().filter_map(|line| line.strip_prefix(family)?.strip_prefix('{'));
        of_family.filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok()).sum()
    }
}
