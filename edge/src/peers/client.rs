// SPDX-License-Identifier: Apache-2.0
//! Tells the other edge hosts this host's flow exceptions: a task for each host, which connects again and again. What is told is for
//! `exchange`.

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::time::Duration;

use tokio::net::TcpSocket;
use tokio::sync::{mpsc, watch};
use tokio::task::AbortHandle;
use tokio::time::timeout;

use super::items::{Command, Item};
use super::message::{Message, WANTS_LIST};
use super::session::Session;
use super::{MOST_PEERS, Shared, TOO_MANY_HOSTS};
use crate::host::EdgePeer;
use crate::link::mac::{Mac, display_mac};
use crate::link::membership::Membership;

/// What may wait for a host; then it gets a complete list later.
const QUEUE: usize = 16;
const CONNECT_LIMIT: Duration = Duration::from_secs(1);
const FIRST_WAIT: Duration = Duration::from_millis(200);
const LONGEST_WAIT: Duration = Duration::from_secs(5);
/// A host that hears nothing for longer ends the session.
const KEEP_ALIVE: Duration = Duration::from_secs(3);

/// Runs a task for each host, until the heartbeats end.
pub(super) async fn run(shared: Shared, mut membership: watch::Receiver<Membership>) {
    let mut tasks = HashMap::<Mac, Task>::new();
    let mut is_logged = false;
    loop {
        let peers = membership.borrow_and_update().peers.clone();
        let (peers, is_cut) = chosen(peers, |mac| tasks.contains_key(&mac));
        if is_cut && !std::mem::replace(&mut is_logged, true) {
            tracing::warn!("{TOO_MANY_HOSTS}");
        }
        tasks.retain(|mac, _| peers.iter().any(|peer| peer.mac == *mac));
        for EdgePeer { mac, addresses, .. } in peers {
            if let Some(task) = tasks.get(&mac) {
                crate::channel::send_if_changed(&task.addresses, addresses);
            } else {
                let (sender, receiver) = watch::channel(addresses);
                let task = tokio::spawn(send_to(shared.clone(), mac, receiver));
                tasks.insert(mac, Task { addresses: sender, abort: task.abort_handle() });
            }
        }
        if membership.changed().await.is_err() {
            return;
        }
    }
}

/// Ends with this value.
struct Task {
    addresses: watch::Sender<Vec<IpAddr>>,
    abort: AbortHandle,
}

impl Drop for Task {
    fn drop(&mut self) {
        self.abort.abort();
    }
}

/// The hosts that are told, at most [`MOST_PEERS`], and whether others are left out. `is_told`: those that are now.
fn chosen(mut peers: Vec<EdgePeer>, is_told: impl Fn(Mac) -> bool) -> (Vec<EdgePeer>, bool) {
    let is_cut = peers.len() > MOST_PEERS;
    // The lowest keys come first. Those that are told now stay, among equals.
    peers.sort_by_key(|peer| (peer.liveness, !is_told(peer.mac)));
    peers.truncate(MOST_PEERS);
    (peers, is_cut)
}

/// Those that most hosts have a route to come first.
fn in_order(mut addresses: Vec<IpAddr>) -> Vec<IpAddr> {
    addresses.sort_by_key(|address| match address {
        IpAddr::V4(address) if !address.is_link_local() => 0,
        IpAddr::V6(address) if !address.is_unicast_link_local() => 1,
        _ => 2,
    });
    addresses
}

/// Tells one host, at its addresses in turn.
async fn send_to(shared: Shared, mac: Mac, addresses: watch::Receiver<Vec<IpAddr>>) {
    let (mut attempt, mut wait) = (0, FIRST_WAIT);
    loop {
        let known = in_order(addresses.borrow().clone());
        if let Some(address) = known.get(attempt % known.len().max(1)).copied() {
            let mut was_connected = false;
            if let Err(error) = send_to_address(&shared, mac, address, &mut was_connected).await {
                shared.on_end(address, &error, || true);
            }
            if was_connected {
                (attempt, wait) = (0, FIRST_WAIT);
            } else {
                attempt += 1;
            }
        }
        tokio::time::sleep(wait).await;
        wait = (wait * 2).min(LONGEST_WAIT);
    }
}

/// Ends when the host is gone.
async fn send_to_address(
    shared: &Shared,
    mac: Mac,
    address: IpAddr,
    was_connected: &mut bool,
) -> io::Result<()> {
    // A key that cannot be read is logged elsewhere.
    let Ok(key) = shared.key() else { return Ok(()) };
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.bind_device(Some(shared.interface.as_bytes()))?;
    let connecting = timeout(CONNECT_LIMIT, socket.connect(shared.socket_address(address)));
    let stream = connecting.await.map_err(|_| io::ErrorKind::TimedOut)??;
    let mut session = Session::connect(stream, &key).await?;
    ask(&mut session).await?;
    *was_connected = true;
    let id = shared.new_session();
    let (items, mut received) = mpsc::channel(QUEUE);
    let _ = shared.commands.send(Command::Connected(id, items));
    let _connection = Connection { shared, id, mac };
    tracing::info!(peer = %address, mac = %display_mac(mac), "connected to an edge host; sending it the flow exceptions");
    loop {
        let item = match timeout(KEEP_ALIVE, received.recv()).await {
            Ok(Some(item)) => Some(item),
            Ok(None) => return Ok(()),
            Err(_) => None,
        };
        for message in item.iter().flat_map(Item::messages) {
            session.send(&message.encode()).await?;
        }
        if ask(&mut session).await? {
            let _ = shared.commands.send(Command::WantsList(id));
        }
        match item {
            Some(Item::List(_)) => shared.inform(mac),
            // The one who waits may have given up.
            Some(Item::Barrier(done)) => drop(done.send(()).await),
            _ => {}
        }
    }
}

/// Returns once the host has applied all messages, and whether it wants a complete list.
async fn ask(session: &mut Session) -> io::Result<bool> {
    session.send(&Message::Ping.encode()).await?;
    Ok(session.receive().await? == WANTS_LIST)
}

/// Tells the exchange when it ends, and then counts the host as informed no longer, also when the task is aborted.
struct Connection<'a> {
    shared: &'a Shared,
    id: u64,
    mac: Mac,
}

impl Drop for Connection<'_> {
    fn drop(&mut self) {
        let _ = self.shared.commands.send(Command::Disconnected(self.id));
        self.shared.forget(self.mac);
    }
}

impl Shared {
    fn inform(&self, mac: Mac) {
        self.informed.send_if_modified(|informed| informed.insert(mac));
        self.count_informed();
    }

    fn forget(&self, mac: Mac) {
        self.informed.send_if_modified(|informed| informed.remove(&mac));
        self.count_informed();
    }

    fn count_informed(&self) {
        self.metrics.peers.set(i64::try_from(self.informed.borrow().len()).unwrap_or(i64::MAX));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use steerage_requirements::requires;
    use tokio::net::TcpListener;

    use super::*;
    use crate::host::PeerLiveness;
    use crate::peers::tests::{shared, shared_key};

    /// Its task is aborted when its heartbeats end.
    #[tokio::test]
    async fn host_whose_task_ends_does_not_count_as_informed() {
        requires!(Root);
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
        let address = listener.local_addr().expect("address");
        let (shared, commands) = shared(address.port());
        let mut informed = shared.informed.subscribe();
        let (addresses, receiver) = watch::channel(vec![address.ip()]);
        let mac = [2, 0, 0, 0, 0, 1];
        let task = tokio::spawn(send_to(shared.clone(), mac, receiver));
        let task = Task { addresses, abort: task.abort_handle() };
        let stream = listener.accept().await.expect("accept").0;
        let mut session = Session::accept(stream, &shared_key()).await.expect("session");
        let acknowledging = tokio::spawn(async move {
            while session.receive().await.is_ok() && session.send(&[]).await.is_ok() {}
        });
        let commands = tokio::task::spawn_blocking(move || (commands.recv(), commands));
        let (Ok(Command::Connected(_, items)), _commands) = commands.await.expect("commands") else {
            panic!("not connected")
        };
        items.send(Item::List(std::sync::Arc::default())).await.expect("send");
        informed.wait_for(|informed| informed.contains(&mac)).await.expect("informed");
        drop(task);
        let forgotten = informed.wait_for(BTreeSet::is_empty);
        tokio::time::timeout(Duration::from_secs(30), forgotten).await.expect("forgotten").expect("informed");
        assert_eq!(shared.metrics.peers.get(), 0);
        drop(acknowledging);
    }

    #[test]
    fn live_hosts_are_told_before_dead_ones() {
        let peer = |number: u8, liveness| EdgePeer { mac: [number; 6], addresses: Vec::new(), liveness };
        let dead = (0..64).map(|number| peer(number, PeerLiveness::Dead));
        let live = (100..110).map(|number| peer(number, PeerLiveness::Live));
        let (told, is_cut) = chosen(dead.clone().chain(live.clone()).collect(), |mac| mac == [63; 6]);
        assert_eq!((told.len(), is_cut), (64, true));
        assert!(live.clone().all(|live| told.contains(&live)));
        assert!(told.iter().any(|peer| peer.mac == [63; 6]), "those that are told stay");
        // Hosts that are told do not make room for others that are alive, too.
        let many = (0..100).map(|number| peer(number, PeerLiveness::Live));
        let (told, _) = chosen(many.collect(), |mac| mac[0] >= 36);
        assert!(told.iter().all(|peer| peer.mac[0] >= 36));
        assert!(!chosen(live.collect(), |_| false).1);
    }

    #[test]
    fn routed_addresses_come_first() {
        let addresses =
            |texts: [&str; 4]| texts.map(|text| text.parse::<IpAddr>().expect("address")).to_vec();
        assert_eq!(
            in_order(addresses(["fe80::1", "fd00::1", "169.254.0.1", "10.0.0.1"])),
            addresses(["10.0.0.1", "fd00::1", "fe80::1", "169.254.0.1"])
        );
    }
}
