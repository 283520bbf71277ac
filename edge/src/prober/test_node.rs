// SPDX-License-Identifier: Apache-2.0
//! Servers that answer as nodes do, for the tests of the prober's parts.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use steerage_edge_api::{HealthCheck, HealthCheckProtocol};
use steerage_model::{Statement, TunnelReceiver};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::health::Probe;

/// Answers each connection with the next of `answers`, and from then on with the last.
pub(super) async fn server(answers: Vec<&'static str>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let address = listener.local_addr().expect("address");
    tokio::spawn(async move {
        let mut answers = answers.into_iter().peekable();
        while let Ok((mut stream, _)) = listener.accept().await {
            let answer = if answers.len() > 1 { answers.next() } else { answers.peek().copied() };
            let mut request = [0; 1024];
            let _ = stream.read(&mut request).await;
            let _ = stream.write_all(answer.unwrap_or_default().as_bytes()).await;
        }
    });
    address
}

pub(super) fn probe_of(address: SocketAddr, protocol: HealthCheckProtocol) -> Probe {
    let check = HealthCheck {
        protocol,
        port: address.port(),
        path: Some("/healthz".to_owned()),
        interval_milliseconds: 100,
        // The server answers at once, but may have no core.
        timeout_milliseconds: 30_000,
        healthy_threshold: 1,
        unhealthy_threshold: 2,
    };
    Probe { address: address.ip(), check }
}

/// An address on which nothing listens, and on which nothing else can.
pub(super) fn closed() -> (TcpSocket, SocketAddr) {
    let socket = TcpSocket::new_v4().expect("socket");
    socket.bind("127.0.0.1:0".parse().expect("address")).expect("bind");
    let address = socket.local_addr().expect("address");
    (socket, address)
}

/// A port that answers no packet, as one that a firewall drops: its queue of connections is full.
pub(super) async fn dropping() -> (TcpListener, Vec<TcpStream>, SocketAddr) {
    let socket = TcpSocket::new_v4().expect("socket");
    socket.bind("127.0.0.1:0".parse().expect("address")).expect("bind");
    let address = socket.local_addr().expect("address");
    let listener = socket.listen(1).expect("listen");
    let mut queue = Vec::new();
    while let Ok(stream) = tokio::time::timeout(Duration::from_millis(500), TcpStream::connect(address)).await
    {
        queue.push(stream.expect("a connection"));
    }
    (listener, queue, address)
}

/// How an agent answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Manner {
    States,
    /// With this status alone.
    Status(&'static str),
    /// It opens connections, and says nothing.
    Silent,
}

#[derive(Clone, Debug)]
struct AgentState {
    manner: Manner,
    instance: u32,
    tunnel: Option<TunnelReceiver>,
    /// The ports that changed with each revision.
    history: Vec<(u16, Option<u32>)>,
}

/// An agent that states, until dropped. It holds requests until something changes.
pub(super) struct TestAgent {
    pub(super) address: SocketAddr,
    state: watch::Sender<AgentState>,
    server: JoinSet<()>,
}

impl TestAgent {
    pub(super) async fn start(manner: Manner) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
        let state = watch::Sender::new(AgentState { manner, instance: 1, tunnel: None, history: Vec::new() });
        let address = listener.local_addr().expect("address");
        let mut agent = Self { address, state, server: JoinSet::new() };
        agent.serve(listener);
        agent
    }

    fn serve(&mut self, listener: TcpListener) {
        let state = self.state.subscribe();
        self.server.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                connections.spawn(answer(stream, state.clone()));
            }
        });
    }

    /// Closes all connections, and refuses others.
    pub(super) async fn stop(&mut self) {
        self.server.shutdown().await;
    }

    /// Begins anew with these ports.
    pub(super) async fn restart(&mut self, ports: &[(u16, Option<u32>)]) {
        let listener = TcpListener::bind(self.address).await.expect("bind");
        self.state.send_modify(|state| {
            state.instance += 1;
            state.history = ports.into();
        });
        self.serve(listener);
    }

    pub(super) fn set_manner(&self, manner: Manner) {
        self.state.send_modify(|state| state.manner = manner);
    }

    /// What it states of its end of the tunnel.
    pub(super) fn set_tunnel(&self, tunnel: Option<TunnelReceiver>) {
        self.state.send_modify(|state| {
            state.tunnel = tunnel;
            // Something has changed, and no check has this port.
            state.history.push((1, None));
        });
    }

    /// The number of local endpoints of a port; `None` where it is not served.
    pub(super) fn set(&self, port: u16, endpoints: Option<u32>) {
        self.state.send_modify(|state| state.history.push((port, endpoints)));
    }
}

async fn answer(mut stream: TcpStream, mut state: watch::Receiver<AgentState>) {
    let mut request = [0; 1024];
    let length = stream.read(&mut request).await.unwrap_or(0);
    let request = String::from_utf8_lossy(&request[..length]).into_owned();
    let target = request.split(' ').nth(1).unwrap_or_default();
    let parameter = |wanted: &str| {
        let mut parameters = target.split(['?', '&']).filter_map(|text| text.split_once('='));
        parameters.find(|(name, _)| *name == wanted).map(|(_, value)| value)
    };
    let wait = Duration::from_millis(parameter("wait").and_then(|text| text.parse().ok()).unwrap_or(0));
    let after = parameter("after").and_then(|text| text.split_once(':'));
    let instance = state.borrow().instance;
    let known =
        after.filter(|(of, _)| *of == instance.to_string()).and_then(|(_, at)| at.parse::<usize>().ok());
    let has_news = |state: &AgentState| {
        state.manner != Manner::States || known.is_none_or(|known| state.history.len() > known)
    };
    let _ = tokio::time::timeout(wait, state.wait_for(has_news)).await;
    let AgentState { manner, tunnel, history, .. } = state.borrow().clone();
    let text = match manner {
        Manner::Silent => std::future::pending().await,
        Manner::Status(status) => format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n"),
        Manner::States => {
            let ports: BTreeMap<_, _> = history.iter().skip(known.unwrap_or(0)).copied().collect();
            let revision = format!("{instance}:{}", history.len());
            let complete = known.is_none();
            let statement = Statement { revision, complete, healthy: true, ports, edge_tunnel: tunnel };
            let body = serde_json::to_string(&statement).expect("JSON");
            format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len())
        }
    };
    let _ = stream.write_all(text.as_bytes()).await;
}
