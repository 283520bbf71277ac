// SPDX-License-Identifier: Apache-2.0
//! What a node's agent states, on threads of their own.

use std::sync::{Condvar, Mutex, MutexGuard};

use steerage_model::{Statement, TunnelReceiver};

use super::{Arc, Duration, Node, Read, TcpListener, TcpStream, Write, net, thread};

/// Where agents state.
const PORT: u16 = 10356;
/// The health-check node port that they state. Nothing listens there.
pub(crate) const STATED: u16 = 30_001;

#[derive(Debug, Default)]
struct Stated {
    revision: u64,
    endpoints: u32,
    edge_tunnel: Option<TunnelReceiver>,
}

/// An agent that states the number of local endpoints of one Service.
pub(crate) struct Agent(Arc<(Mutex<Stated>, Condvar)>);

impl Agent {
    pub(crate) fn start(node: &Node, endpoints: u32) -> Self {
        Self::start_in(&node.netns, endpoints)
    }

    pub(crate) fn start_in(netns: &str, endpoints: u32) -> Self {
        let listener = net::within(netns, || TcpListener::bind(("::", PORT)).expect("bind"));
        let agent = Self(Arc::default());
        agent.set(endpoints);
        let shared = Arc::clone(&agent.0);
        thread::spawn(move || {
            for stream in listener.incoming() {
                let (Ok(stream), agent) = (stream, Self(Arc::clone(&shared))) else { continue };
                thread::spawn(move || agent.answer(stream));
            }
        });
        agent
    }

    pub(crate) fn set(&self, endpoints: u32) {
        self.change(|stated| stated.endpoints = endpoints);
    }

    /// What it states of its end of the tunnel.
    pub(crate) fn set_tunnel(&self, edge_tunnel: Option<TunnelReceiver>) {
        self.change(|stated| stated.edge_tunnel = edge_tunnel);
    }

    fn change(&self, change: impl FnOnce(&mut Stated)) {
        let mut stated = self.stated();
        stated.revision += 1;
        change(&mut stated);
        self.0.1.notify_all();
    }

    fn stated(&self) -> MutexGuard<'_, Stated> {
        self.0.0.lock().expect("no panic")
    }

    /// Holds the request while the client knows all.
    fn answer(&self, mut stream: TcpStream) {
        let mut request = [0; 1024];
        let length = stream.read(&mut request).unwrap_or(0);
        let request = String::from_utf8_lossy(&request[..length]).into_owned();
        let parameter = |name: &str| -> Option<u64> {
            let (_, rest) = request.split_once(&format!("{name}="))?;
            rest.split([' ', '&']).next()?.parse().ok()
        };
        let (known, wait) = (parameter("after"), Duration::from_millis(parameter("wait").unwrap_or(0)));
        let stated = self.stated();
        let knows_all = |stated: &mut Stated| known == Some(stated.revision);
        let (stated, _) = self.0.1.wait_timeout_while(stated, wait, knows_all).expect("no panic");
        let statement = Statement {
            revision: stated.revision.to_string(),
            complete: known.is_none(),
            healthy: true,
            ports: [(STATED, Some(stated.endpoints))].into(),
            edge_tunnel: stated.edge_tunnel,
        };
        drop(stated);
        let body = serde_json::to_string(&statement).expect("JSON");
        let _ = stream
            .write_all(format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len()).as_bytes());
    }
}
