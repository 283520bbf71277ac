// SPDX-License-Identifier: Apache-2.0
//! The simulated nodes: one server in their namespace that answers requests for statements at each node's address as an agent does,
//! and counts them by edge host. It also answers as a node that is silent, which is: not at all.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, Result};
use steerage_model::{MAX_STATEMENT_WAIT, STATEMENT_PATH};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::runtime::Runtime;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until};

use super::cluster::{Cluster, Move, node_at, port};
use super::stated::{AnswerKind, Stated};
use super::world::{self, NODES, World, host_at};

/// The agents' port.
pub(crate) const STATEMENTS: u16 = 10_356;
/// Connections that wait to be accepted.
const BACKLOG: u32 = 16_384;
/// The longest head of a request.
const MAX_HEAD: usize = 8192;
/// A silent node keeps its connections as long: longer than any client waits.
const SILENCE: Duration = Duration::from_secs(30);

/// What one edge host has asked, as the nodes count it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Asked {
    /// Requests for statements that were answered.
    pub(crate) complete: u64,
    pub(crate) changes: u64,
    pub(crate) unchanged: u64,
    /// Requests that were no requests for a statement.
    pub(crate) others: u64,
    /// Requests that a silent node left without an answer.
    pub(crate) unanswered: u64,
    /// Bytes of the answers, with their heads.
    pub(crate) bytes: u64,
}

impl Asked {
    /// Answered requests for statements.
    pub(crate) fn statements(self) -> u64 {
        self.complete + self.changes + self.unchanged
    }

    pub(crate) fn since(self, before: Self) -> Self {
        Self {
            complete: self.complete - before.complete,
            changes: self.changes - before.changes,
            unchanged: self.unchanged - before.unchanged,
            others: self.others - before.others,
            unanswered: self.unanswered - before.unanswered,
            bytes: self.bytes - before.bytes,
        }
    }
}

/// The running server. It ends with this value.
pub(crate) struct Nodes {
    shared: Arc<Shared>,
    _runtime: Runtime,
}

struct Shared {
    stated: Mutex<Stated>,
    silent: Mutex<BTreeSet<u32>>,
    /// A port was opened on all nodes.
    opened: Notify,
    /// Something has changed on a node.
    changed: Vec<Notify>,
    counters: Vec<Counters>,
}

#[derive(Debug, Default)]
struct Counters {
    complete: AtomicU64,
    changes: AtomicU64,
    unchanged: AtomicU64,
    others: AtomicU64,
    unanswered: AtomicU64,
    bytes: AtomicU64,
}

impl Nodes {
    /// Starts it in the nodes' namespace.
    pub(crate) fn start(world: &World, cluster: &Cluster) -> Result<Self> {
        let mut stated = Stated::new(cluster.nodes);
        for service in 0..cluster.services() {
            stated.open(port(service));
            for node in cluster.nodes_of(service) {
                stated.set(node, port(service), 1);
            }
        }
        let shared = Arc::new(Shared {
            stated: Mutex::new(stated),
            silent: Mutex::default(),
            opened: Notify::new(),
            changed: (0..cluster.nodes).map(|_| Notify::new()).collect(),
            counters: (0..world.hosts).map(|_| Counters::default()).collect(),
        });
        let serving = Arc::clone(&shared);
        // The threads of the runtime inherit the namespace.
        let runtime = world::inside(NODES, move || -> Result<Runtime> {
            let runtime =
                tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
            // Of this runtime.
            let entered = runtime.enter();
            let listener = listen().context("cannot listen on the nodes' addresses")?;
            drop(entered);
            runtime.spawn(serve(listener, serving));
            Ok(runtime)
        })??;
        Ok(Self { shared, _runtime: runtime })
    }

    /// What a host has asked so far, counted from 0.
    pub(crate) fn asked(&self, host: usize) -> Asked {
        let Some(counters) = self.shared.counters.get(host) else { return Asked::default() };
        let value = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Asked {
            complete: value(&counters.complete),
            changes: value(&counters.changes),
            unchanged: value(&counters.unchanged),
            others: value(&counters.others),
            unanswered: value(&counters.unanswered),
            bytes: value(&counters.bytes),
        }
    }

    /// States an endpoint's move, on both nodes.
    pub(crate) fn move_endpoint(&self, change: Move) {
        let mut stated = self.shared.stated();
        stated.set(change.from, port(change.service), 0);
        stated.set(change.to, port(change.service), 1);
        drop(stated);
        self.shared.wake(change.from);
        self.shared.wake(change.to);
    }

    /// States that a node has an endpoint of a Service, or none.
    pub(crate) fn set_endpoint(&self, node: u32, service: u32, has_endpoint: bool) {
        self.shared.stated().set(node, port(service), has_endpoint.into());
        self.shared.wake(node);
    }

    /// All nodes open the port of a new Service; some have an endpoint.
    pub(crate) fn add_service(&self, cluster: &Cluster, service: u32) {
        let mut stated = self.shared.stated();
        stated.open(port(service));
        for node in cluster.nodes_of(service) {
            stated.set(node, port(service), 1);
        }
        drop(stated);
        self.shared.opened.notify_waiters();
    }

    /// Whether a node answers. Packets to it are dropped elsewhere.
    pub(crate) fn set_silent(&self, node: u32, silent: bool) {
        let mut all = self.shared.silent();
        if silent {
            all.insert(node);
        } else {
            all.remove(&node);
        }
    }
}

impl Shared {
    fn stated(&self) -> MutexGuard<'_, Stated> {
        self.stated.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn silent(&self) -> MutexGuard<'_, BTreeSet<u32>> {
        self.silent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self, node: u32) {
        if let Some(changed) = usize::try_from(node).ok().and_then(|at| self.changed.get(at)) {
            changed.notify_waiters();
        }
    }

    /// The answer to a request, held as it asks. `None` if there is no such node.
    async fn statement(&self, node: u32, request: &Request<'_>) -> Option<(AnswerKind, String)> {
        let end = Instant::now() + request.wait;
        let changed = self.changed.get(usize::try_from(node).ok()?)?;
        loop {
            let (mut of_node, mut of_all) =
                (std::pin::pin!(changed.notified()), std::pin::pin!(self.opened.notified()));
            // Before the look at what is stated: what changes after it wakes this request.
            of_node.as_mut().enable();
            of_all.as_mut().enable();
            let (kind, body) = self.stated().answer(node, request.after)?;
            if kind != AnswerKind::Unchanged || Instant::now() >= end {
                return Some((kind, body));
            }
            tokio::select! {
                () = of_node => {}
                () = of_all => {}
                () = sleep_until(end) => {}
            }
        }
    }
}

fn listen() -> std::io::Result<TcpListener> {
    let socket = TcpSocket::new_v4()?;
    socket.set_reuseaddr(true)?;
    socket.bind(SocketAddr::from((Ipv4Addr::UNSPECIFIED, STATEMENTS)))?;
    socket.listen(BACKLOG)
}

async fn serve(listener: TcpListener, shared: Arc<Shared>) {
    loop {
        match listener.accept().await {
            Ok((stream, client)) => {
                let shared = Arc::clone(&shared);
                tokio::spawn(async move { attend(stream, client, &shared).await });
            }
            // Most likely no descriptor is free.
            Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    }
}

/// One request on one connection: the edge makes no second one.
async fn attend(mut stream: TcpStream, client: SocketAddr, shared: &Shared) -> Option<()> {
    let counters = shared.counters.get(host_at(client.ip())?)?;
    let count = |counter: &AtomicU64, by| counter.fetch_add(by, Ordering::Relaxed);
    let SocketAddr::V4(local) = stream.local_addr().ok()? else { return None };
    let node = node_at(*local.ip())?;
    let mut head = Vec::with_capacity(512);
    while !head.windows(4).any(|window| window == b"\r\n\r\n") {
        if head.len() > MAX_HEAD || stream.read_buf(&mut head).await.ok()? == 0 {
            return None;
        }
    }
    let text = String::from_utf8(head).ok()?;
    let answer = match Request::parse(&text) {
        Some(request) => shared.statement(node, &request).await,
        None => None,
    };
    if shared.silent().contains(&node) {
        count(&counters.unanswered, 1);
        tokio::time::sleep(SILENCE).await;
        return None;
    }
    let Some((kind, body)) = answer else {
        count(&counters.others, 1);
        return stream.write_all(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n").await.ok();
    };
    let response = response(&body);
    let counter = match kind {
        AnswerKind::Complete => &counters.complete,
        AnswerKind::Changes => &counters.changes,
        AnswerKind::Unchanged => &counters.unchanged,
    };
    stream.write_all(response.as_bytes()).await.ok()?;
    count(counter, 1);
    count(&counters.bytes, u64::try_from(response.len()).unwrap_or(0));
    stream.shutdown().await.ok()
}

/// With the headers of the agent's answers.
fn response(body: &str) -> String {
    format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nx-content-type-options: nosniff\r\nconnection: close\r\n\
         content-length: {}\r\ndate: Thu, 01 Jan 1970 00:00:00 GMT\r\n\r\n{body}",
        body.len()
    )
}

/// A request for a statement.
#[derive(Debug, PartialEq, Eq)]
struct Request<'a> {
    after: Option<&'a str>,
    wait: Duration,
}

impl<'a> Request<'a> {
    fn parse(head: &'a str) -> Option<Self> {
        let target = head.strip_prefix("GET ")?.split(' ').next()?;
        let query = target.strip_prefix(STATEMENT_PATH)?.trim_start_matches('?');
        let (mut after, mut wait) = (None, 0);
        for (name, value) in query.split('&').filter_map(|parameter| parameter.split_once('=')) {
            match name {
                "after" => after = Some(value),
                "wait" => wait = value.parse().ok()?,
                _ => return None,
            }
        }
        Some(Self { after, wait: Duration::from_millis(MAX_STATEMENT_WAIT.min(wait)) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_of_the_edge_are_parsed() {
        let parse = |target: &str| {
            let head = format!("GET {target} HTTP/1.1\r\nHost: x\r\n\r\n");
            Request::parse(&head).map(|request| (request.after.map(str::to_owned), request.wait.as_millis()))
        };
        assert_eq!(parse("/statement?wait=0"), Some((None, 0)));
        assert_eq!(
            parse("/statement?after=a-4-1-true&wait=1000"),
            Some((Some("a-4-1-true".to_owned()), 1000))
        );
        assert_eq!(parse("/statement?wait=20000"), Some((None, 10_000)));
        assert_eq!(parse("/healthz"), None);
    }
}
