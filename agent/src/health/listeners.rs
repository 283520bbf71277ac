// SPDX-License-Identifier: Apache-2.0
//! Servers on the health-check node ports: opens and closes them as [`HealthCheckPorts`] says.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};

use bytes::Bytes;
use http::Response;
use http::header::HeaderValue;
use http_body_util::Full;
use serde::Serialize;
use steerage_model::{Family, Key};
use steerage_process::connection_limiter::ConnectionLimiter;
use tokio::runtime::Handle;
use tokio::task::AbortHandle;

use super::http::{WEIGHT, json, listen, listen_at_vip, serve};
use super::ports::{HealthCheckPorts, PortStatus};
use super::proxy_health::ProxyHealth;

/// A port that could not be opened.
#[derive(Debug)]
pub struct BusyPort {
    /// The Service that needs it.
    pub service: Key,
    /// The address.
    pub address: SocketAddr,
    /// Why it could not be opened.
    pub error: std::io::Error,
}

/// The running servers; they end when dropped.
#[derive(Debug)]
pub struct Listeners {
    ports: HealthCheckPorts,
    proxy_health: ProxyHealth,
    runtime: Handle,
    open: BTreeMap<SocketAddr, AbortHandle>,
    /// Already reported as busy.
    busy: BTreeSet<(SocketAddr, Key)>,
    connections: ConnectionLimiter,
}

impl Listeners {
    /// Servers on `runtime` that respond as `ports` and `proxy_health` say. Opens none.
    pub fn new(ports: HealthCheckPorts, proxy_health: ProxyHealth, runtime: Handle) -> Self {
        let (open, busy, connections) = (BTreeMap::new(), BTreeSet::new(), ConnectionLimiter::default());
        Self { ports, proxy_health, runtime, open, busy, connections }
    }

    /// Opens missing servers on these addresses of the node and on the VIPs of each Service, and closes others. Returns ports that are
    /// newly busy; the next call retries them. A VIP need not be the node's: a cloud's agent may add a route for it later, and without
    /// one no packet arrives.
    pub fn reconcile(&mut self, addresses: &[IpAddr]) -> Vec<BusyPort> {
        let _entered = self.runtime.enter();
        let mut wanted = BTreeMap::new();
        for (port, answer) in self.ports.all() {
            let has_count = |addr: &&IpAddr| answer.count(Family::of(**addr)).is_some();
            for address in answer.vips.iter().filter(has_count) {
                wanted.insert(SocketAddr::new(*address, port), (answer.service.clone(), true));
            }
            for address in addresses.iter().filter(has_count) {
                wanted.insert(SocketAddr::new(*address, port), (answer.service.clone(), false));
            }
        }
        self.open.retain(|address, server| {
            let kept = wanted.contains_key(address);
            if !kept {
                tracing::info!(%address, "health-check port closed");
                server.abort();
            }
            kept
        });
        self.busy.retain(|(address, service)| wanted.get(address).is_some_and(|(of, _)| of == service));
        let mut busy = Vec::new();
        for (address, (service, is_vip)) in wanted {
            if self.open.contains_key(&address) {
                continue;
            }
            match if is_vip { listen_at_vip(address) } else { listen(address) } {
                Ok(listener) => {
                    tracing::info!(%address, service = %service, "health-check port opened");
                    self.busy.remove(&(address, service));
                    let (ports, proxy_health) = (self.ports.clone(), self.proxy_health.clone());
                    let family = Family::of(address.ip());
                    let answer = move |_| {
                        let status = ports.answer(address.port());
                        std::future::ready(respond(status, family, proxy_health.is_healthy()))
                    };
                    let serving = serve(listener, &self.connections, answer);
                    let server = tokio::spawn(async move {
                        serving.await;
                    });
                    self.open.insert(address, server.abort_handle());
                }
                Err(error) => {
                    if self.busy.insert((address, service.clone())) {
                        busy.push(BusyPort { service, address, error });
                    }
                }
            }
        }
        let of_node = self.busy.iter().filter(|(address, _)| addresses.contains(&address.ip()));
        let unserved = of_node.map(|(address, _)| (Family::of(address.ip()), address.port())).collect();
        self.ports.set_unserved(unserved);
        busy
    }

    /// Whether a port could not be opened.
    pub fn has_busy_ports(&self) -> bool {
        !self.busy.is_empty()
    }
}

impl Drop for Listeners {
    fn drop(&mut self) {
        self.open.values().for_each(AbortHandle::abort);
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Body<'a> {
    service: Name<'a>,
    local_endpoints: usize,
    service_proxy_healthy: bool,
}

#[derive(Serialize)]
struct Name<'a> {
    namespace: &'a str,
    name: &'a str,
}

/// The response to any path and method.
fn respond(answer: Option<PortStatus>, family: Family, healthy: bool) -> Response<Full<Bytes>> {
    let Some(answer) = answer else { return json(false, Vec::new()) };
    let count = answer.count(family).unwrap_or(0);
    let body = Body {
        service: Name { namespace: answer.service.namespace(), name: answer.service.name() },
        local_endpoints: count,
        service_proxy_healthy: healthy,
    };
    let mut text = Vec::new();
    let indented = serde_json::ser::PrettyFormatter::with_indent(b"\t");
    // Serializing plain values to memory cannot fail.
    let _ = body.serialize(&mut serde_json::Serializer::with_formatter(&mut text, indented));
    let mut response = json(healthy && count > 0, text);
    response.headers_mut().insert(WEIGHT, HeaderValue::from(count));
    response
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    use super::super::http::HEADER_TIMEOUT;
    use super::super::tests::free_ports;
    use super::*;
    use crate::plan::HealthPort;
    use steerage_process::connection_limiter::{MAX_PER_SERVER, MAX_TOTAL};

    const LOOPBACKS: [&str; 2] = ["127.0.0.1", "::1"];

    fn addresses() -> Vec<IpAddr> {
        LOOPBACKS.map(|addr| addr.parse().unwrap()).to_vec()
    }

    fn free_port() -> u16 {
        free_ports(1)[0]
    }

    async fn ask(address: SocketAddr, request: &str) -> std::io::Result<String> {
        let mut stream = TcpStream::connect(address).await?;
        stream
            .write_all(format!("{request} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").as_bytes())
            .await?;
        let mut text = String::new();
        stream.read_to_string(&mut text).await?;
        Ok(text)
    }

    #[tokio::test]
    async fn health_response_equals_kube_proxys() {
        let (ports, proxy_health) = (HealthCheckPorts::default(), ProxyHealth::default());
        let port = free_port();
        let key = Key::new("shop", "web");
        ports.publish(
            &[(key.clone(), HealthPort { port, v4: Some(2), v6: Some(0), vips: Arc::default() })].into(),
        );
        // A node that is about to go serves as long as it can: only the node's own health says so.
        proxy_health.set_eligible(false);
        let mut listeners = Listeners::new(ports.clone(), proxy_health, Handle::current());
        assert!(listeners.reconcile(&addresses()).is_empty());
        let [v4, v6] = LOOPBACKS.map(|addr| SocketAddr::new(addr.parse().unwrap(), port));
        for request in ["GET /healthz", "POST /", "DELETE /anything"] {
            let text = ask(v4, request).await.unwrap();
            assert!(text.starts_with("HTTP/1.1 200 "), "{text}");
            for header in [
                "content-type: application/json",
                "x-content-type-options: nosniff",
                "x-load-balancing-endpoint-weight: 2",
            ] {
                assert!(text.contains(header), "{text}");
            }
            let body = "{\n\t\"service\": {\n\t\t\"namespace\": \"shop\",\n\t\t\"name\": \"web\"\n\t},\n\
                        \t\"localEndpoints\": 2,\n\t\"serviceProxyHealthy\": true\n}";
            assert!(text.ends_with(body), "{text}");
        }
        let text = ask(v6, "GET /healthz").await.unwrap();
        assert!(text.starts_with("HTTP/1.1 503 ") && text.contains("weight: 0"), "{text}");
        ports.withdraw(&key, None, false);
        let begun = std::time::Instant::now();
        assert!(listeners.reconcile(&addresses()).is_empty());
        while ask(v4, "GET /healthz").await.is_ok() {
            assert!(begun.elapsed() < Duration::from_mins(1), "still open");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Services `first..` with a health-check port each, served on the IPv4 loopback address.
    fn many(count: usize) -> (Listeners, Vec<SocketAddr>) {
        let (ports, loopback) = (HealthCheckPorts::default(), addresses()[0]);
        let mut wanted = BTreeMap::new();
        let mut at = Vec::new();
        for (number, port) in free_ports(count).into_iter().enumerate() {
            wanted.insert(
                Key::new("shop", number.to_string()),
                HealthPort { port, v4: Some(1), v6: None, vips: Arc::default() },
            );
            at.push(SocketAddr::new(loopback, port));
        }
        ports.publish(&wanted);
        let mut listeners = Listeners::new(ports, ProxyHealth::default(), Handle::current());
        assert!(listeners.reconcile(&[loopback]).is_empty());
        (listeners, at)
    }

    async fn is_answered(address: SocketAddr) {
        let answer = tokio::time::timeout(Duration::from_mins(1), ask(address, "GET /healthz")).await;
        let text = answer.expect("in time").expect("an answer");
        assert!(text.starts_with("HTTP/1.1 200 "), "{text}");
    }

    /// Whether the other side has closed the connection.
    async fn is_over(stream: &mut TcpStream) -> bool {
        let mut rest = Vec::new();
        tokio::time::timeout(Duration::from_millis(1), stream.read_to_end(&mut rest)).await.is_ok()
    }

    /// Waits until the other side has closed the connection.
    async fn ends(stream: &mut TcpStream) {
        let mut rest = Vec::new();
        let end = tokio::time::timeout(Duration::from_mins(1), stream.read_to_end(&mut rest)).await;
        // Also a reset is an end.
        assert!(end.is_ok(), "still open");
    }

    #[tokio::test]
    async fn slow_and_malformed_probers_do_not_block_others() {
        let (listeners, at) = many(2);
        let [victim, other] = at[..] else { panic!("{at:?}") };
        let mut hostile = Vec::new();
        let endless = format!("GET /{} HTTP/1.1\r\n", "x".repeat(100_000));
        let lines: [&[u8]; 5] = [
            b"",
            b"GET /healthz HTTP/1.1\r\nhost:",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03garbage\xff\xfe",
            b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\nhalf",
            endless.as_bytes(),
        ];
        for number in 0..40 * lines.len() {
            let mut stream = TcpStream::connect(victim).await.unwrap();
            // It may be cut off before it has said all.
            let _ = stream.write_all(lines[number % lines.len()]).await;
            hostile.push(stream);
            if number % 50 == 0 {
                is_answered(victim).await;
            }
        }
        is_answered(victim).await;
        is_answered(other).await;
        assert!(listeners.connections.count() <= MAX_PER_SERVER, "{}", listeners.connections.count());
        ends(&mut hostile[0]).await;
        drop(hostile);
        is_answered(victim).await;
    }

    #[tokio::test]
    async fn ten_thousand_connections_to_all_ports_together_are_bounded() {
        crate::health::allow_many_connections();
        let servers = MAX_TOTAL / MAX_PER_SERVER + 8;
        let (listeners, at) = many(servers);
        let (mut held, mut begun) = (Vec::new(), Instant::now());
        for address in at.iter().cycle().take(10_000) {
            begun = Instant::now();
            held.push(TcpStream::connect(address).await.unwrap());
        }
        for address in &at {
            is_answered(*address).await;
        }
        assert!(listeners.connections.count() <= MAX_TOTAL, "{}", listeners.connections.count());
        ends(&mut held[0]).await;
        let is_over = is_over(held.last_mut().unwrap()).await;
        assert!(begun.elapsed() >= HEADER_TIMEOUT || !is_over);
        drop(listeners);
        ends(held.last_mut().unwrap()).await;
    }

    #[tokio::test]
    async fn a_prober_may_keep_its_connection() {
        let (_listeners, at) = many(1);
        let mut stream = TcpStream::connect(at[0]).await.unwrap();
        for _ in 0..3 {
            stream.write_all(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
            let mut answer = [0; 1024];
            let length = stream.read(&mut answer).await.unwrap();
            assert!(answer[..length].starts_with(b"HTTP/1.1 200 "));
        }
    }

    #[test]
    fn stuck_data_plane_fails_health_checks_with_the_real_count() {
        let answer =
            PortStatus { service: Key::new("shop", "web"), v4: Some(3), v6: Some(0), vips: Arc::default() };
        let status = |healthy, family| {
            let response = respond(Some(answer.clone()), family, healthy);
            (response.status().as_u16(), response.headers()[WEIGHT].to_str().unwrap().to_owned())
        };
        assert_eq!(status(true, Family::V4), (200, "3".to_owned()));
        assert_eq!(status(false, Family::V4), (503, "3".to_owned()));
        assert_eq!(status(true, Family::V6), (503, "0".to_owned()));
        assert_eq!(respond(None, Family::V4, true).status().as_u16(), 503, "a port that has just gone");
    }

    #[tokio::test]
    async fn both_families_answer_for_a_single_family_service() {
        let (ports, proxy_health) = (HealthCheckPorts::default(), ProxyHealth::default());
        let port = free_port();
        ports.publish(
            &[(Key::new("shop", "web"), HealthPort { port, v4: None, v6: Some(1), vips: Arc::default() })]
                .into(),
        );
        let mut listeners = Listeners::new(ports, proxy_health, Handle::current());
        assert!(listeners.reconcile(&addresses()).is_empty());
        for address in LOOPBACKS {
            let text = ask(SocketAddr::new(address.parse().unwrap(), port), "GET /healthz").await.unwrap();
            assert!(text.starts_with("HTTP/1.1 200 ") && text.contains("weight: 1"), "{text}");
        }
    }

    #[tokio::test]
    async fn busy_port_is_reported_once_and_opened_later() {
        let (ports, proxy_health) = (HealthCheckPorts::default(), ProxyHealth::default());
        let port = free_port();
        let squatter = TcpListener::bind(("127.0.0.1", port)).await.unwrap();
        let key = Key::new("shop", "web");
        ports.publish(
            &[(key.clone(), HealthPort { port, v4: Some(1), v6: None, vips: Arc::default() })].into(),
        );
        let mut listeners = Listeners::new(ports.clone(), proxy_health, Handle::current());
        let stated = |family| ports.stated_since(family, None).map(|stated| stated.ports);
        assert_eq!(stated(Family::V4), None, "before servers are open");
        let busy = listeners.reconcile(&addresses());
        assert_eq!(busy.iter().map(|busy| &busy.service).collect::<Vec<_>>(), [&key]);
        assert!(listeners.reconcile(&addresses()).is_empty() && listeners.has_busy_ports());
        let served = Some([(port, Some(1))].into());
        assert_eq!((stated(Family::V4), stated(Family::V6)), (Some(BTreeMap::new()), served.clone()));
        drop(squatter);
        assert!(listeners.reconcile(&addresses()).is_empty() && !listeners.has_busy_ports());
        assert_eq!((stated(Family::V4), stated(Family::V6)), (served.clone(), served));
        let text = ask(SocketAddr::new(LOOPBACKS[0].parse().unwrap(), port), "GET /").await.unwrap();
        assert!(text.starts_with("HTTP/1.1 200 "), "{text}");
    }
}
