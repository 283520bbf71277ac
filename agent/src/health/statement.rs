// SPDX-License-Identifier: Apache-2.0
//! Answers requests for the node's statement, and holds them until there is news. The node's health server calls it. It only reads
//! what the health-check ports answer; it changes nothing.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use http::{Response, StatusCode};
use http_body_util::Full;
use steerage_model::{Family, MAX_STATEMENT_WAIT, Statement, TunnelReceiver};
use tokio::time::Instant;

use super::http::{json, text};
use super::ports::HealthCheckPorts;
use super::proxy_health::ProxyHealth;
use super::stated_ports::StatedDelta;
use super::stated_tunnel::{StatedReceiver, StatedTunnel};
use crate::metrics::{StatementKind, StatementMetrics};

/// How often a held request looks whether the node's health has changed, which time alone can do.
const HEALTH_INTERVAL: Duration = Duration::from_secs(1);

/// Answers a request with this query at an address of this family.
pub(super) async fn respond(
    query: Option<&str>,
    family: Family,
    ports: &HealthCheckPorts,
    tunnel: &StatedTunnel,
    proxy_health: &ProxyHealth,
    counts: &StatementMetrics,
) -> Response<Full<Bytes>> {
    let query = match StatementQuery::parse(query) {
        Ok(query) => query,
        Err(reason) => return text(StatusCode::BAD_REQUEST, reason),
    };
    let origin = Origin { instance: ports.instance(), family };
    let known = query.after.and_then(|after| origin.parse(after));
    let is_healthy = || proxy_health.is_healthy();
    let Some((statement, kind)) = news(origin, known, query.wait, ports, tunnel, is_healthy).await else {
        return text(StatusCode::SERVICE_UNAVAILABLE, "the rules are not in the kernel yet\n");
    };
    counts.count(kind);
    // Fails only for maps whose keys are not strings or numbers.
    json(true, serde_json::to_vec(&statement).unwrap_or_default())
}

/// What differs from what the client knows, as soon as something does, or nothing after `wait`. `None` before servers were opened
/// for the first time.
async fn news(
    origin: Origin,
    known: Option<Revision>,
    wait: Duration,
    ports: &HealthCheckPorts,
    tunnel: &StatedTunnel,
    is_healthy: impl Fn() -> bool,
) -> Option<(Statement, StatementKind)> {
    let end = Instant::now() + wait;
    loop {
        let healthy = is_healthy();
        let delta = ports.stated_since(origin.family, known.map(|known| known.change))?;
        let StatedReceiver { change: tunnel_change, receiver } = tunnel.get(origin.family);
        let revision = Revision { change: delta.change, tunnel_change, healthy };
        let left = end.saturating_duration_since(Instant::now());
        let kind = match known {
            _ if delta.complete => StatementKind::Complete,
            Some(known) if known == revision => StatementKind::Unchanged,
            _ => StatementKind::Changes,
        };
        if kind != StatementKind::Unchanged || left.is_zero() {
            return Some((origin.statement(revision, delta, receiver), kind));
        }
        // A change, a look at the node's health, or the end.
        tokio::select! {
            () = ports.changed_since(origin.family, revision.change) => {}
            () = tunnel.changed_since(origin.family, tunnel_change) => {}
            () = tokio::time::sleep(left.min(HEALTH_INTERVAL)) => {}
        }
    }
}

/// The query of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct StatementQuery<'q> {
    /// What the client knows.
    after: Option<&'q str>,
    /// How long to wait for news.
    wait: Duration,
}

impl<'q> StatementQuery<'q> {
    /// Parses it. Unknown parameters are refused: their sender expects something that it would not get.
    fn parse(query: Option<&'q str>) -> Result<Self, &'static str> {
        let (mut after, mut wait) = (None, None);
        for parameter in query.unwrap_or_default().split('&').filter(|parameter| !parameter.is_empty()) {
            let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
            let field = match name {
                "after" => &mut after,
                "wait" => &mut wait,
                _ => return Err("unknown parameter: use after and wait\n"),
            };
            if field.replace(value).is_some() {
                return Err("the query has a parameter twice\n");
            }
        }
        let wait = wait.map_or(Ok(0), str::parse::<u64>);
        let wait = wait.map_err(|_| "wait is not a number of milliseconds\n")?;
        Ok(Self { after, wait: Duration::from_millis(wait.min(MAX_STATEMENT_WAIT)) })
    }
}

/// Whose revisions these are. Those of other processes are unknown, and so are those of the other family, whose counts differ.
#[derive(Debug, Clone, Copy)]
struct Origin {
    instance: u64,
    family: Family,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let family = match self.family {
            Family::V4 => '4',
            Family::V6 => '6',
        };
        write!(f, "{:016x}-{family}", self.instance)
    }
}

/// What a client knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Revision {
    /// The last change of a port.
    change: u64,
    /// The last change of the node's end of the tunnel.
    tunnel_change: u64,
    /// What it was told of the node's health. That has no number of its changes: time alone changes it, and it is only evaluated
    /// when a client asks.
    healthy: bool,
}

impl Origin {
    /// Only characters that a URL may have as they are.
    fn revision(self, revision: Revision) -> String {
        let Revision { change, tunnel_change, healthy } = revision;
        format!("{self}-{change}-{tunnel_change}-{healthy}")
    }

    fn parse(self, text: &str) -> Option<Revision> {
        let (change, rest) = text.strip_prefix(&self.to_string())?.strip_prefix('-')?.split_once('-')?;
        let (tunnel_change, healthy) = rest.split_once('-')?;
        Some(Revision {
            change: change.parse().ok()?,
            tunnel_change: tunnel_change.parse().ok()?,
            healthy: healthy.parse().ok()?,
        })
    }

    fn statement(
        self,
        revision: Revision,
        delta: StatedDelta,
        edge_tunnel: Option<TunnelReceiver>,
    ) -> Statement {
        let StatedDelta { complete, ports, change: _ } = delta;
        Statement {
            revision: self.revision(revision),
            complete,
            healthy: revision.healthy,
            ports,
            edge_tunnel,
        }
    }
}

#[cfg(test)]
mod server_tests;
#[cfg(test)]
mod tests;
