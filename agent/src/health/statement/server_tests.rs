// SPDX-License-Identifier: Apache-2.0
//! Statements by real connections to the node's health server.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use steerage_model::{Key, STATEMENT_PATH};
use steerage_process::connection_limiter::{ConnectionLimiter, MAX_PER_SERVER};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::JoinHandle;

use super::super::http::{listen, serve};
use super::super::node::{NodeHealth, respond_at};
use super::*;
use crate::metrics::KubeProxyMetrics;
use crate::plan::HealthPort;

/// Long, because other tests may load the machine.
const PATIENCE: Duration = Duration::from_mins(1);
/// Time in which nothing must happen.
const SILENCE: Duration = Duration::from_millis(200);
const PORT: u16 = 30001;

/// A node's health server with one Service that has two endpoints.
struct Node {
    health: NodeHealth,
    connections: ConnectionLimiter,
    address: SocketAddr,
    server: JoinHandle<()>,
}

impl Node {
    fn start() -> Self {
        let health = NodeHealth {
            proxy_health: ProxyHealth::default(),
            families: vec![Family::V4],
            ports: HealthCheckPorts::default(),
            tunnel: StatedTunnel::default(),
            counts: KubeProxyMetrics::default(),
            statements: StatementMetrics::default(),
        };
        let connections = ConnectionLimiter::default();
        let listener = listen(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let address = listener.local_addr().unwrap();
        let answered = health.clone();
        let serving = serve(listener, &connections, move |uri| respond_at(uri, Family::V4, answered.clone()));
        let server = tokio::spawn(async move {
            serving.await;
        });
        let node = Self { health, connections, address, server };
        node.publish(2);
        node
    }

    /// A node whose ports are open.
    fn opened() -> Self {
        let node = Self::start();
        node.health.ports.set_unserved(BTreeSet::new());
        node
    }

    fn publish(&self, v4: usize) {
        let port = HealthPort { port: PORT, v4: Some(v4), v6: None, vips: std::sync::Arc::default() };
        self.health.ports.publish(&[(Key::new("shop", "web"), port)].into());
    }

    async fn connect(&self) -> Connection {
        Connection(TcpStream::connect(self.address).await.unwrap())
    }

    async fn ask(&self, query: &str) -> (u16, String) {
        self.connect().await.ask(query).await
    }

    async fn statement(&self, query: &str) -> Statement {
        self.connect().await.statement(query).await
    }

    /// A request that is held.
    async fn hold(&self, revision: &str) -> JoinHandle<(Statement, Instant)> {
        let mut connection = self.connect().await;
        let query = format!("?after={revision}&wait={MAX_STATEMENT_WAIT}");
        let held = tokio::spawn(async move { (connection.statement(&query).await, Instant::now()) });
        tokio::time::sleep(SILENCE).await;
        assert!(!held.is_finished());
        held
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.server.abort();
    }
}

struct Connection(TcpStream);

impl Connection {
    async fn send(&mut self, query: &str) {
        let head = format!("GET {STATEMENT_PATH}{query} HTTP/1.1\r\nhost: x\r\n\r\n");
        self.0.write_all(head.as_bytes()).await.unwrap();
    }

    async fn ask(&mut self, query: &str) -> (u16, String) {
        self.send(query).await;
        tokio::time::timeout(PATIENCE, self.receive()).await.expect("an answer in time")
    }

    async fn receive(&mut self) -> (u16, String) {
        let mut bytes = Vec::new();
        loop {
            assert_ne!(self.0.read_buf(&mut bytes).await.unwrap(), 0, "the connection stays open");
            let text = String::from_utf8(bytes.clone()).unwrap();
            let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
            if body.len() == length.parse::<usize>().unwrap() {
                return (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned());
            }
        }
    }

    async fn statement(&mut self, query: &str) -> Statement {
        let (status, body) = self.ask(query).await;
        assert_eq!(status, 200, "{body}");
        serde_json::from_str(&body).unwrap()
    }
}

#[tokio::test]
async fn held_requests_are_answered_by_a_change_and_only_once() {
    let node = Node::opened();
    let first = node.statement("?wait=10000").await;
    assert_eq!((first.complete, first.healthy, first.ports), (true, true, [(PORT, Some(2))].into()));
    let held = [node.hold(&first.revision).await, node.hold(&first.revision).await];
    let changed = Instant::now();
    node.publish(1);
    let mut revisions = BTreeSet::new();
    for held in held {
        let (statement, at) = held.await.unwrap();
        assert!(at < changed + Duration::from_millis(MAX_STATEMENT_WAIT), "before the end of the wait");
        assert_eq!((statement.complete, statement.ports), (false, [(PORT, Some(1))].into()));
        revisions.insert(statement.revision);
    }
    let revision = revisions.pop_first().unwrap();
    assert!(revisions.is_empty(), "both have the same");
    // A change between two requests is stated at once, and the same connection serves them.
    node.publish(0);
    let mut connection = node.connect().await;
    let query = format!("?after={revision}&wait=10000");
    let third = connection.statement(&query).await;
    assert_eq!(third.ports, [(PORT, Some(0))].into());
    let silent = connection.statement(&format!("?after={}&wait=50", third.revision)).await;
    assert_eq!((silent.revision, silent.complete, silent.ports.len()), (third.revision, false, 0));
    assert_eq!(node.health.statements.counts(), [1, 3, 1]);
}

#[tokio::test]
async fn request_without_news_is_answered_when_it_has_waited_and_not_before() {
    let node = Node::opened();
    let first = node.statement("").await;
    let begun = Instant::now();
    let second = node.statement(&format!("?after={}&wait=300", first.revision)).await;
    assert!(begun.elapsed() >= Duration::from_millis(300));
    assert_eq!((second.revision, second.complete, second.ports.len()), (first.revision, false, 0));
}

#[tokio::test]
async fn held_request_notices_that_the_data_plane_is_stuck() {
    let node = Node::opened();
    let first = node.statement("").await;
    let held = node.hold(&first.revision).await;
    node.health.proxy_health.limit_watch_silence(Duration::ZERO, || Some(PATIENCE));
    let (statement, _) = held.await.unwrap();
    assert_eq!((statement.healthy, statement.complete, statement.ports.len()), (false, false, 0));
    assert_ne!(statement.revision, first.revision);
    // A client that was told something else hears of it at once.
    let late = node.statement(&format!("?after={}", first.revision)).await;
    assert_eq!((late.healthy, late.revision), (false, statement.revision));
}

#[tokio::test]
async fn request_ends_with_its_connection() {
    let node = Node::opened();
    let first = node.statement("").await;
    let mut connection = node.connect().await;
    connection.send(&format!("?after={}&wait={MAX_STATEMENT_WAIT}", first.revision)).await;
    tokio::time::sleep(SILENCE).await;
    assert_eq!(node.connections.count(), 1, "held");
    drop(connection);
    let begun = Instant::now();
    while node.connections.count() > 0 {
        assert!(begun.elapsed() < PATIENCE, "still open");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(node.health.statements.counts(), [1, 0, 0], "it was not held to its end");
}

#[tokio::test]
async fn unreasonable_requests_are_refused_with_a_reason() {
    let node = Node::opened();
    for (query, reason) in [
        ("?wait=soon", "wait is not a number of milliseconds\n"),
        ("?after=a&after=b", "the query has a parameter twice\n"),
        ("?since=1", "unknown parameter: use after and wait\n"),
    ] {
        assert_eq!(node.ask(query).await, (400, reason.to_owned()), "{query}");
    }
    assert_eq!(node.health.statements.counts(), [0; 3]);
}

#[tokio::test]
async fn agent_that_has_just_started_states_nothing() {
    let node = Node::start();
    let (status, reason) = node.ask("?wait=10000").await;
    assert_eq!((status, reason.as_str()), (503, "the rules are not in the kernel yet\n"));
    node.health.ports.set_unserved(BTreeSet::new());
    assert!(node.statement("?after=of-an-earlier-process&wait=10000").await.complete);
}

#[tokio::test]
async fn client_that_holds_many_requests_locks_out_no_other() {
    let node = Node::opened();
    let revision = node.statement("").await.revision;
    let other = TcpSocket::new_v4().unwrap();
    other.bind(SocketAddr::from(([127, 0, 0, 2], 0))).unwrap();
    let mut other = Connection(other.connect(node.address).await.unwrap());
    let query = format!("?after={revision}&wait={MAX_STATEMENT_WAIT}");
    other.send(&query).await;
    let mut greedy = Vec::new();
    for _ in 0..3 * MAX_PER_SERVER {
        let mut connection = node.connect().await;
        connection.send(&query).await;
        greedy.push(connection);
    }
    tokio::time::sleep(SILENCE).await;
    assert!(node.connections.count() <= MAX_PER_SERVER, "{}", node.connections.count());
    node.publish(1);
    let (status, body) = tokio::time::timeout(PATIENCE, other.receive()).await.unwrap();
    assert_eq!(status, 200, "{body}");
}
