// SPDX-License-Identifier: Apache-2.0
//! The nodes' servers: they answer the meter's requests, over HTTP and by datagram, as the e2e suite's pods do, and health checks.
//! A node that is a target no longer goes on serving its connections, as a pod does until its grace period ends.

use std::env;
use std::io::{BufRead as _, BufReader, Write as _, stdin};
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context as _, Result, ensure};
use socket2::SockRef;
use steerage_lab::netns;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::runtime::Runtime;

use super::service::SERVICE;
use crate::edge::load::receive_at;
use crate::edge_bed::addresses::{any, vip};
use crate::edge_bed::{Bed, CHECK, FAMILIES, PORT, node_netns};
use crate::host;
use crate::traffic::listen_at;

/// Port of the Service's own health check, as its healthCheckNodePort: only nodes with an endpoint pass it.
pub(super) const OWN_CHECK: u16 = 30_900;
/// Longest request that is read.
const MOST: usize = 4096;

/// The servers, in a process of their own: each has only so many open files. They end with this value.
pub(super) struct Servers {
    process: Child,
    answers: BufReader<ChildStdout>,
}

impl Servers {
    /// Starts them. No node has an endpoint.
    pub(super) fn start(bed: &Bed) -> Result<Self> {
        for node in 0..bed.size.nodes {
            for family in FAMILIES {
                let vip = vip(family, SERVICE);
                // A route to the VIPs lets a node take their packets, and IPv6 sockets take addresses alone.
                let length = if vip.is_ipv4() { 32 } else { 128 };
                bed.shell(&node_netns(node), &format!("ip addr add {vip}/{length} dev lo"))?;
            }
        }
        let mut process = Command::new("setpriv")
            .args(["--pdeathsig", "KILL"])
            .arg(env::current_exe()?)
            .args(["edge-loss-nodes", &bed.size.nodes.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start the nodes' servers")?;
        let answers = BufReader::new(process.stdout.take().context("no output")?);
        let mut servers = Self { process, answers };
        servers.set_endpoints(&[])?;
        Ok(servers)
    }

    /// From now on exactly these nodes pass the Service's own health check.
    pub(super) fn set_endpoints(&mut self, nodes: &[u8]) -> Result<()> {
        let input = self.process.stdin.as_mut().context("no input")?;
        writeln!(input, "{}", serde_json::to_string(nodes)?)?;
        let mut answer = String::new();
        self.answers.read_line(&mut answer)?;
        ensure!(!answer.is_empty(), "the nodes' servers have ended");
        Ok(())
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The command of the process that serves.
#[derive(Debug, clap::Args)]
pub(crate) struct NodesFlags {
    nodes: u8,
}

impl NodesFlags {
    /// Serves until its input ends. A line has the nodes with an endpoint, and is answered once they have it.
    pub(crate) fn run(self) -> Result<()> {
        host::allow_descriptors(host::MOST_DESCRIPTORS)?;
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
        let mut endpoints = Vec::new();
        for node in 0..self.nodes {
            let has_endpoint = Arc::<AtomicBool>::default();
            for family in FAMILIES {
                let at = |port| SocketAddr::new(any(family), port);
                let (listeners, datagrams) = netns::in_netns(&node_netns(node), || -> Result<_> {
                    let listeners: Result<Vec<_>> =
                        [PORT, CHECK, OWN_CHECK].into_iter().map(|port| listen_at(at(port))).collect();
                    // Bound to the VIP: answers come from there.
                    Ok((listeners?, receive_at(SocketAddr::new(vip(family, SERVICE), PORT))?))
                })??;
                let name = format!("node{node}");
                for listener in listeners {
                    serve(&runtime, listener, &name, Arc::clone(&has_endpoint))?;
                }
                answer_datagrams(&runtime, datagrams)?;
            }
            endpoints.push(has_endpoint);
        }
        for line in stdin().lines() {
            let nodes: Vec<u8> = serde_json::from_str(&line?)?;
            for (node, has_endpoint) in (0_u8..).zip(&endpoints) {
                has_endpoint.store(nodes.contains(&node), Ordering::SeqCst);
            }
            println!("done");
        }
        Ok(())
    }
}

fn serve(runtime: &Runtime, listener: TcpListener, name: &str, has_endpoint: Arc<AtomicBool>) -> Result<()> {
    let is_own_check = listener.local_addr()?.port() == OWN_CHECK;
    listener.set_nonblocking(true)?;
    let _inside = runtime.enter();
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let name: Arc<str> = name.into();
    runtime.spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (name, has_endpoint) = (Arc::clone(&name), Arc::clone(&has_endpoint));
            tokio::spawn(async move {
                let passes = || !is_own_check || has_endpoint.load(Ordering::SeqCst);
                let _ = answer(stream, &name, passes).await;
            });
        }
    });
    Ok(())
}

/// Answers one request after the other, until the client or a request ends the connection.
async fn answer(mut stream: TcpStream, name: &str, passes: impl Fn() -> bool) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut request = Vec::new();
    loop {
        while !request.windows(4).any(|end| end == b"\r\n\r\n") {
            if stream.read_buf(&mut request).await? == 0 || request.len() > MOST {
                return Ok(());
            }
        }
        let text = String::from_utf8_lossy(&request);
        let is_last = text.contains("Connection: close") || text.contains("connection: close");
        let status = if passes() { "200 OK" } else { "503 Service Unavailable" };
        let body = body(&text, name);
        let response = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n\r\n{body}", body.len());
        if is_last {
            // The answer and the end are one segment. As two, one could overtake the other on its way through the kernel.
            SockRef::from(&stream).set_tcp_cork(true)?;
        }
        stream.write_all(response.as_bytes()).await?;
        if is_last {
            return stream.shutdown().await;
        }
        // The meter sends the next request after the answer.
        request.clear();
    }
}

/// What a pod of the e2e suite answers.
fn body(request: &str, name: &str) -> String {
    let path = request.split(' ').nth(1).unwrap_or_default();
    match path.strip_prefix("/echo?msg=") {
        Some(text) => text.to_owned(),
        None => name.to_owned(),
    }
}

fn answer_datagrams(runtime: &Runtime, socket: UdpSocket) -> Result<()> {
    socket.set_nonblocking(true)?;
    let _inside = runtime.enter();
    let socket = tokio::net::UdpSocket::from_std(socket)?;
    runtime.spawn(async move {
        let mut bytes = [0; 512];
        loop {
            // An ICMP error of an earlier answer.
            let Ok((length, client)) = socket.recv_from(&mut bytes).await else { continue };
            if let Some(text) = bytes[..length].strip_prefix(b"echo ") {
                let _ = socket.send_to(text, client).await;
            }
        }
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_answer_as_the_meter_expects() {
        assert_eq!(body("GET /hostname HTTP/1.1\r\n\r\n", "node3"), "node3");
        assert_eq!(body("GET /echo?msg=abc HTTP/1.1\r\n\r\n", "node3"), "abc");
    }
}
