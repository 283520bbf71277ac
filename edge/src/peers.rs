// SPDX-License-Identifier: Apache-2.0
//! The exchange of flow exceptions with the other edge hosts, so that connections survive a takeover although their slots have moved.
//!
//! `exchange` decides what is told and believed, in a thread of its own. `client` tells each other host, `server` hears them; `session`
//! knows whom to believe, and `message` the bytes. The engine says when tables have changed, and waits for a flush before it leaves.
//! Nothing here decides about targets, slots or leases, and nothing waits for another host but that flush.

mod client;
mod confirmed;
mod exchange;
mod heard;
mod items;
mod key;
mod message;
mod missed;
mod pace;
mod routed;
mod sent_exceptions;
mod server;
mod session;
mod unproven;

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc as std_mpsc};
use std::time::Duration;

use anyhow::Context as _;
use steerage_edge_dataplane::Dataplane;
use steerage_process::Process;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::link::mac::Mac;
use crate::link::membership::Membership;
use crate::link::route::Link;
use crate::metrics::{FlowMetrics, Metrics};
use exchange::Exchange;
use items::Command;
pub(crate) use key::{KeySource, read_secret};
pub(crate) use session::SharedKey;

/// Hosts that are told, and sessions of hosts that tell: each has one. Anyone on the link can send heartbeats of new hosts.
const MOST_PEERS: usize = 64;
/// Logged once.
const TOO_MANY_HOSTS: &str = "more than 64 edge hosts; flow exceptions are not exchanged with the others";

/// A key that cannot be read is read again after this time.
const KEY_RETRY: Duration = Duration::from_secs(10);

/// The flags.
#[derive(Clone, Debug)]
pub(crate) struct PeerOptions {
    pub(crate) port: u16,
    /// None without a cluster and a file.
    pub(crate) key: Option<KeySource>,
    /// Whether this host exports routes, so that routers send it packets of all VIPs.
    pub(crate) has_routes: bool,
}

/// What the exchange needs of the rest.
#[derive(Debug)]
pub(crate) struct PeerInputs {
    /// The interface's name and index.
    interface: String,
    index: u32,
    /// The host's own addresses.
    addresses: watch::Receiver<Vec<IpAddr>>,
    membership: watch::Receiver<Membership>,
    /// Gets the hosts that have this host's complete list.
    informed: watch::Sender<BTreeSet<Mac>>,
    /// Gets the hosts whose complete list this host has.
    heard: watch::Sender<BTreeSet<Mac>>,
    metrics: FlowMetrics,
}

impl PeerInputs {
    pub(crate) fn new(
        link: &Link,
        addresses: watch::Receiver<Vec<IpAddr>>,
        membership: &watch::Receiver<Membership>,
        informed: watch::Sender<BTreeSet<Mac>>,
        heard: watch::Sender<BTreeSet<Mac>>,
        metrics: &Metrics,
    ) -> Self {
        Self {
            interface: link.name.clone(),
            index: link.index,
            addresses,
            membership: membership.clone(),
            informed,
            heard,
            metrics: metrics.flows.clone(),
        }
    }
}

/// The engine's side. The exchange ends with this value.
#[derive(Debug)]
pub(crate) struct FlowExchange(Option<Running>);

#[derive(Debug)]
struct Running {
    commands: std_mpsc::Sender<Command>,
    _stop: DropGuard,
}

/// What clients and servers share.
#[derive(Clone, Debug)]
struct Shared {
    interface: String,
    index: u32,
    port: u16,
    key_source: KeySource,
    commands: std_mpsc::Sender<Command>,
    metrics: FlowMetrics,
    /// The hosts that have this host's complete list.
    informed: watch::Sender<BTreeSet<Mac>>,
    last_session: Arc<AtomicU64>,
}

impl Shared {
    fn new_session(&self) -> confirmed::SessionId {
        self.last_session.fetch_add(1, Ordering::Relaxed)
    }

    /// Read for each session, so that a new key needs no restart.
    fn key(&self) -> io::Result<SharedKey> {
        let key = self.key_source.key();
        self.metrics.enabled.set(key.is_ok().into());
        key
    }

    /// The same address, with what link-local ones need.
    fn socket_address(&self, address: IpAddr) -> SocketAddr {
        match address {
            IpAddr::V6(address) if address.is_unicast_link_local() => {
                SocketAddrV6::new(address, self.port, 0, self.index).into()
            }
            _ => SocketAddr::new(address, self.port),
        }
    }

    /// Counts the end of a session if it is more than a host that has gone, and logs it if it may.
    fn on_end(&self, peer: IpAddr, error: &io::Error, may_warn: impl FnOnce() -> bool) {
        let is_failure = error.kind() == io::ErrorKind::InvalidData;
        if is_failure {
            self.metrics.session_failures.inc();
        }
        if is_failure && may_warn() {
            tracing::warn!(%peer, %error, "flow exceptions not exchanged with an edge host; compare keys and versions; retrying");
        } else {
            tracing::debug!(%peer, %error, "session for flow exceptions ended");
        }
    }
}

impl FlowExchange {
    /// Starts the exchange, if the flags allow it.
    pub(crate) fn start(
        options: PeerOptions,
        inputs: PeerInputs,
        dataplane: &Dataplane,
        process: &Process,
    ) -> anyhow::Result<Self> {
        let PeerOptions { port, key, has_routes } = options;
        let PeerInputs { interface, index, addresses, membership, informed, heard, metrics } = inputs;
        let Some(key_source) = key.filter(|_| port != 0) else {
            let reason = if port == 0 { "--peers-port is 0" } else { "no cluster and no --peers-key-file" };
            tracing::warn!(
                reason,
                "flow exceptions are not exchanged with other edge hosts; connections whose slots have moved break at a takeover"
            );
            return Ok(Self(None));
        };
        let (flows, leases) = (dataplane.flow_table(), dataplane.leases());
        let exchange = Exchange::new(flows, leases, metrics.clone(), has_routes, heard)?;
        let (commands, received) = std_mpsc::channel();
        std::thread::Builder::new()
            .name("flow-exchange".to_owned())
            .spawn(move || exchange.run(&received))
            .context("cannot start the thread of the flow exchange")?;
        let shared = Shared {
            interface,
            index,
            port,
            key_source,
            commands: commands.clone(),
            metrics,
            informed,
            last_session: Arc::default(),
        };
        let stop = CancellationToken::new();
        let (clients, servers, keys) = (shared.clone(), shared.clone(), shared);
        let (peers, until) = (membership.clone(), stop.clone());
        process.spawn("flow exchange clients", async move {
            until.run_until_cancelled(client::run(clients, peers)).await;
            Ok(())
        });
        let until = stop.clone();
        process.spawn("flow exchange server", async move {
            until.run_until_cancelled(server::run(servers, addresses, membership)).await;
            Ok(())
        });
        let until = stop.clone();
        process.spawn("flow exchange key", async move {
            until.run_until_cancelled(watch_key(keys)).await;
            Ok(())
        });
        Ok(Self(Some(Running { commands, _stop: stop.drop_guard() })))
    }

    /// Slots, targets, listeners or VIPs were written.
    pub(crate) fn tables_changed(&self) {
        if let Some(running) = &self.0 {
            // The thread is gone only when the process ends.
            let _ = running.commands.send(Command::TablesChanged);
        }
    }

    /// Tells the other hosts all exceptions. What it returns waits until they have these, or for `limit`, and says how many hosts have
    /// them; `None` without the exchange.
    pub(crate) fn flush(&self, limit: Duration) -> impl Future<Output = Option<usize>> + Send + use<> {
        let answers = self.0.as_ref().map(|running| {
            let (done, answers) = mpsc::channel(64);
            let _ = running.commands.send(Command::Flush(done));
            answers
        });
        async move {
            let mut answers = answers?;
            let mut count = 0;
            let all = async {
                while answers.recv().await.is_some() {
                    count += 1;
                }
            };
            // Its caller says how many do not have them.
            let _ = tokio::time::timeout(limit, all).await;
            Some(count)
        }
    }
}

/// Says whether the key can be used: without another host nothing else reads it.
async fn watch_key(shared: Shared) {
    let mut last = None;
    loop {
        let problem = shared.key().err().map(|error| error.to_string());
        if last.as_ref() != Some(&problem) {
            let source = &shared.key_source;
            match &problem {
                None => tracing::info!(key = %source, "flow exceptions are exchanged with other edge hosts"),
                // Its reader says why.
                Some(_) if source.is_secret() => {}
                Some(error) => tracing::warn!(
                    key = %source,
                    error,
                    "flow exceptions are not exchanged: the key cannot be used; retrying"
                ),
            }
            last = Some(problem);
        }
        tokio::time::sleep(KEY_RETRY).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn shared_key() -> SharedKey {
        SharedKey::new(&[b'k'; 32]).expect("a key")
    }

    /// For sessions at this port of the loopback interface. The commands go to the receiver.
    pub(super) fn shared(port: u16) -> (Shared, std_mpsc::Receiver<Command>) {
        let (commands, received) = std_mpsc::channel();
        let (_, key) = watch::channel(Some(shared_key()));
        let shared = Shared {
            interface: "lo".to_owned(),
            index: 1,
            port,
            key_source: KeySource::Secret(key),
            commands,
            metrics: FlowMetrics::default(),
            informed: watch::channel(BTreeSet::new()).0,
            last_session: Arc::default(),
        };
        (shared, received)
    }
}
