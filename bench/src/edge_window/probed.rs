// SPDX-License-Identifier: Apache-2.0
//! The probed nodes: servers that answer health checks as kube-proxy does, for each Service by whether the node has an endpoint, and
//! for the node itself always well.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context as _, Result};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::runtime::Runtime;

use super::cell::{self, Cell, Signal};
use crate::edge_nodes::cluster::{node_at, port};

/// Where a node answers for itself.
const NODE_HEALTH: u16 = 10_256;
const BACKLOG: u32 = 1024;
/// The longest head of a request.
const MAX_HEAD: usize = 4096;

/// The running servers. They end with this value.
pub(super) struct Answers {
    has_endpoint: Arc<Vec<AtomicBool>>,
    _runtime: Runtime,
}

impl Answers {
    /// Starts them in the namespace of the calling thread.
    pub(super) fn start(cells: &[Cell]) -> Result<Self> {
        let count = usize::try_from(cell::nodes(cells))?;
        let has_endpoint: Arc<Vec<_>> = Arc::new((0..count).map(|_| AtomicBool::new(false)).collect());
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        // Of this runtime.
        let entered = runtime.enter();
        let probed = cells.iter().filter(|cell| cell.signal != Signal::Statements);
        let ports = probed.map(|cell| (port(cell.service), true)).chain([(NODE_HEALTH, false)]);
        for (port, is_of_service) in ports {
            let listener = listen(port).with_context(|| format!("cannot listen on port {port}"))?;
            runtime.spawn(serve(listener, is_of_service.then(|| Arc::clone(&has_endpoint))));
        }
        drop(entered);
        let answers = Self { has_endpoint, _runtime: runtime };
        for cell in cells {
            answers.set(cell.nodes()[0], true);
        }
        Ok(answers)
    }

    /// What a node answers from now on.
    pub(super) fn set(&self, node: u32, has_endpoint: bool) {
        if let Some(answer) = usize::try_from(node).ok().and_then(|at| self.has_endpoint.get(at)) {
            answer.store(has_endpoint, Ordering::SeqCst);
        }
    }
}

fn listen(port: u16) -> io::Result<TcpListener> {
    let socket = TcpSocket::new_v4()?;
    socket.set_reuseaddr(true)?;
    socket.bind(SocketAddr::from((Ipv4Addr::UNSPECIFIED, port)))?;
    socket.listen(BACKLOG)
}

async fn serve(listener: TcpListener, has_endpoint: Option<Arc<Vec<AtomicBool>>>) {
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let has_endpoint = has_endpoint.clone();
                tokio::spawn(async move { answer(stream, has_endpoint.as_ref().map(|all| &all[..])).await });
            }
            // Most likely no descriptor is free.
            Err(_) => tokio::time::sleep(std::time::Duration::from_millis(10)).await,
        }
    }
}

/// One request on one connection: the edge makes no second one.
async fn answer(mut stream: TcpStream, has_endpoint: Option<&[AtomicBool]>) -> Option<()> {
    let mut head = Vec::with_capacity(512);
    while !head.windows(4).any(|window| window == b"\r\n\r\n") {
        if head.len() > MAX_HEAD || stream.read_buf(&mut head).await.ok()? == 0 {
            return None;
        }
    }
    let SocketAddr::V4(local) = stream.local_addr().ok()? else { return None };
    let has = match has_endpoint {
        Some(all) => all.get(usize::try_from(node_at(*local.ip())?).ok()?)?.load(Ordering::SeqCst),
        None => true,
    };
    let (status, count) = if has { ("200 OK", 1) } else { ("503 Service Unavailable", 0) };
    let text = format!(
        "HTTP/1.1 {status}\r\nx-load-balancing-endpoint-weight: {count}\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
    );
    stream.write_all(text.as_bytes()).await.ok()?;
    stream.shutdown().await.ok()
}
