// SPDX-License-Identifier: Apache-2.0
//! Health of the node as a whole: `/healthz` and `/livez` as kube-proxy serves them on port 10256 (KEP-3836), and the
//! node's statement of its health-check ports.
//!
//! Load balancers of Services with external policy Cluster probe `/healthz`. `/livez` says whether the data plane is current;
//! `/healthz` also fails on a node that is being deleted.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;
use std::time::Duration;

use bytes::Bytes;
use http::{Response, StatusCode, Uri};
use http_body_util::Full;
use jiff::Timestamp;
use serde::Serialize;
use steerage_model::{Family, STATEMENT_PATH};
use steerage_process::connection_limiter::ConnectionLimiter;

use super::http::{json, listen, serve};
use super::ports::HealthCheckPorts;
use super::proxy_health::ProxyHealth;
use super::stated_tunnel::StatedTunnel;
use super::statement;
use crate::metrics::{KubeProxyMetrics, StatementMetrics};

/// Time between two tries to open a busy port.
const RETRY: Duration = Duration::from_secs(5);

/// Where the node's health is served: a port of all addresses, or of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HealthAddress {
    /// The address; all of both families without one.
    pub ip: Option<IpAddr>,
    /// The port.
    pub port: u16,
}

impl HealthAddress {
    /// This port of all addresses.
    pub fn all(port: u16) -> Self {
        Self { ip: None, port }
    }

    fn sockets(&self) -> Vec<SocketAddr> {
        let all = || vec![Ipv4Addr::UNSPECIFIED.into(), Ipv6Addr::UNSPECIFIED.into()];
        let addresses = self.ip.map_or_else(all, |ip| vec![ip]);
        addresses.into_iter().map(|ip| SocketAddr::new(ip, self.port)).collect()
    }
}

impl FromStr for HealthAddress {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Ok(port) = text.parse() {
            return Ok(Self::all(port));
        }
        let socket: SocketAddr = text.parse().map_err(|_| "neither PORT nor IP:PORT")?;
        Ok(Self { ip: Some(socket.ip()), port: socket.port() })
    }
}

/// What [`serve_node_health`] answers from. Clones share it.
#[derive(Debug, Clone)]
pub struct NodeHealth {
    /// Whether load balancers may rely on this node.
    pub proxy_health: ProxyHealth,
    /// The families that this node serves.
    pub families: Vec<Family>,
    /// What health-check ports answer.
    pub ports: HealthCheckPorts,
    /// Whether the node receives from edge hosts' tunnel.
    pub tunnel: StatedTunnel,
    /// Counts answers.
    pub counts: KubeProxyMetrics,
    /// Counts statements.
    pub statements: StatementMetrics,
}

/// Serves at these addresses, until dropped. Retries busy ones.
pub async fn serve_node_health(listen: Vec<HealthAddress>, health: NodeHealth) {
    let connections = ConnectionLimiter::default();
    let addresses: BTreeSet<_> = listen.iter().flat_map(HealthAddress::sockets).collect();
    let servers = addresses.into_iter().map(|address| serve_on(address, &connections, &health));
    // None of them ends.
    futures::future::join_all(servers).await;
}

async fn serve_on(address: SocketAddr, connections: &ConnectionLimiter, health: &NodeHealth) -> Infallible {
    let mut warned = false;
    loop {
        match listen(address) {
            Ok(listener) => {
                let (health, family) = (health.clone(), Family::of(address.ip()));
                return serve(listener, connections, move |uri| respond_at(uri, family, health.clone()))
                    .await;
            }
            Err(error) if error.raw_os_error() == Some(nix::libc::EAFNOSUPPORT) => {
                tracing::info!(%address, "host lacks this address family; node health is not served on it");
                std::future::pending::<()>().await;
            }
            Err(error) => {
                if !std::mem::replace(&mut warned, true) {
                    tracing::warn!(%address, %error, "node health not served; retrying");
                }
                tokio::time::sleep(RETRY).await;
            }
        }
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Body {
    last_updated: String,
    current_time: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    node_eligible: Option<bool>,
    healthy: bool,
    status: BTreeMap<String, FamilyBody>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct FamilyBody {
    last_updated: String,
    healthy: bool,
}

/// The answer at an address of this family.
pub(super) async fn respond_at(uri: Uri, family: Family, health: NodeHealth) -> Response<Full<Bytes>> {
    if uri.path() == STATEMENT_PATH {
        let NodeHealth { proxy_health, families: _, ports, tunnel, counts: _, statements } = &health;
        return statement::respond(uri.query(), family, ports, tunnel, proxy_health, statements).await;
    }
    respond(uri.path(), &health)
}

fn respond(path: &str, health: &NodeHealth) -> Response<Full<Bytes>> {
    let NodeHealth { proxy_health, families, ports: _, tunnel: _, counts, statements: _ } = health;
    let (node_eligible, fit) = match path {
        "/livez" => (None, true),
        "/healthz" => (Some(proxy_health.is_eligible()), proxy_health.is_eligible()),
        _ => {
            let mut response = Response::new(Full::default());
            *response.status_mut() = StatusCode::NOT_FOUND;
            return response;
        }
    };
    // Watch silence does not fail /livez: a restart would not help.
    let healthy = if path == "/livez" { proxy_health.is_current() } else { proxy_health.is_healthy() };
    let now = Timestamp::now();
    // A healthy node was last updated now.
    let updated = if healthy && fit { Some(now) } else { proxy_health.last_updated() };
    let text = |time: Option<Timestamp>| time.unwrap_or(Timestamp::UNIX_EPOCH).to_string();
    let family = || FamilyBody { last_updated: text(proxy_health.last_updated()), healthy };
    let body = Body {
        last_updated: text(updated),
        current_time: text(Some(now)),
        node_eligible,
        healthy,
        status: families.iter().map(|of| (of.to_string(), family())).collect(),
    };
    // Fails only for maps whose keys are not strings.
    let response = json(healthy && fit, serde_json::to_vec(&body).unwrap_or_default());
    let code = response.status().as_u16();
    if path == "/livez" {
        counts.count_livez(code);
    } else {
        counts.count_healthz(code);
    }
    response
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use http_body_util::BodyExt;
    use steerage_model::Key;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;
    use crate::plan::HealthPort;

    fn node_health(proxy_health: &ProxyHealth) -> NodeHealth {
        NodeHealth {
            proxy_health: proxy_health.clone(),
            families: vec![Family::V4],
            ports: HealthCheckPorts::default(),
            tunnel: StatedTunnel::default(),
            counts: KubeProxyMetrics::default(),
            statements: StatementMetrics::default(),
        }
    }

    async fn ask(path: &str, proxy_health: &ProxyHealth) -> (u16, serde_json::Value) {
        let response = respond(path, &node_health(proxy_health));
        let status = response.status().as_u16();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        (status, serde_json::from_slice(&body).unwrap_or_default())
    }

    #[tokio::test]
    async fn every_port_of_the_node_answers_on_both_families() {
        let free = super::super::tests::free_ports(2);
        let proxy_health = ProxyHealth::default();
        proxy_health.set_eligible(true);
        let listen = free.iter().map(|port| HealthAddress::all(*port)).collect();
        let health = node_health(&proxy_health);
        let web = HealthPort { port: 30001, v4: Some(4), v6: Some(6), vips: Arc::default() };
        health.ports.publish(&[(Key::new("shop", "web"), web)].into());
        health.ports.set_unserved(BTreeSet::new());
        let server = tokio::spawn(serve_node_health(listen, health));
        let hosts = [("127.0.0.1", "{\"30001\":4}"), ("::1", "{\"30001\":6}")];
        for (port, (host, counts)) in free.into_iter().flat_map(|port| hosts.map(|host| (port, host))) {
            let mut stream = loop {
                match tokio::net::TcpStream::connect((host, port)).await {
                    Ok(stream) => break stream,
                    Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
                }
            };
            stream.write_all(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
            let mut answer = [0; 512];
            let length = stream.read(&mut answer).await.unwrap();
            assert!(answer[..length].starts_with(b"HTTP/1.1 200 "), "{host} {port}");
            let request = format!("GET {STATEMENT_PATH} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
            stream.write_all(request.as_bytes()).await.unwrap();
            let mut statement = String::new();
            stream.read_to_string(&mut statement).await.unwrap();
            assert!(
                statement.starts_with("HTTP/1.1 200 ") && statement.contains(counts),
                "{host} {statement}"
            );
        }
        server.abort();
    }

    #[test]
    fn health_addresses_are_ports_of_all_addresses_or_of_one() {
        let sockets = |text: &str| {
            let address = text.parse::<HealthAddress>().ok()?;
            Some(address.sockets().iter().map(ToString::to_string).collect::<Vec<_>>().join(" "))
        };
        assert_eq!(sockets("10256").as_deref(), Some("0.0.0.0:10256 [::]:10256"));
        assert_eq!(sockets("0.0.0.0:1").as_deref(), Some("0.0.0.0:1"));
        assert_eq!(sockets("[fd00::1]:1").as_deref(), Some("[fd00::1]:1"));
        for bad in ["", "10.0.0.1", "host:1", "70000"] {
            assert_eq!(sockets(bad), None, "{bad}");
        }
    }

    #[tokio::test]
    async fn max_watch_silence_fails_health_checks_only_if_set() {
        let silent_for = Arc::new(AtomicU64::new(0));
        let (trusting, wary) = (ProxyHealth::default(), ProxyHealth::default());
        for proxy_health in [&trusting, &wary] {
            proxy_health.updated();
            proxy_health.set_eligible(true);
        }
        let measured = Arc::clone(&silent_for);
        let silence = move || Some(Duration::from_secs(measured.load(Ordering::Relaxed)));
        wary.limit_watch_silence(Duration::from_mins(2), silence);
        assert_eq!(ask("/healthz", &wary).await.0, 200);
        silent_for.store(300, Ordering::Relaxed);
        assert_eq!(ask("/healthz", &trusting).await.0, 200);
        let (status, body) = ask("/healthz", &wary).await;
        assert_eq!((status, &body["healthy"]), (503, &false.into()));
        assert_eq!(ask("/livez", &wary).await.0, 200, "to be restarted would not help");
        silent_for.store(0, Ordering::Relaxed);
        assert_eq!(ask("/healthz", &wary).await.0, 200);
    }

    #[tokio::test]
    async fn node_being_deleted_fails_healthz_and_passes_livez() {
        let proxy_health = ProxyHealth::default();
        proxy_health.updated();
        proxy_health.set_eligible(true);
        let (status, body) = ask("/healthz", &proxy_health).await;
        assert_eq!((status, &body["nodeEligible"], &body["healthy"]), (200, &true.into(), &true.into()));
        assert_eq!(body["lastUpdated"], body["currentTime"]);
        assert_eq!(body["status"].as_object().unwrap().len(), 1, "the node's families only");
        assert_eq!(body["status"]["IPv4"]["healthy"], true);
        proxy_health.set_eligible(false);
        let (status, body) = ask("/healthz", &proxy_health).await;
        assert_eq!((status, &body["nodeEligible"], &body["healthy"]), (503, &false.into(), &true.into()));
        let (status, body) = ask("/livez", &proxy_health).await;
        assert_eq!((status, body.get("nodeEligible")), (200, None));
        assert_eq!(ask("/metrics", &proxy_health).await.0, 404);
    }
}
