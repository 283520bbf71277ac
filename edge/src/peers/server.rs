// SPDX-License-Identifier: Apache-2.0
//! Hears what the other edge hosts tell. It listens on the host's own addresses on the link alone, and only to hosts that send
//! heartbeats. What is believed is for `session` and `exchange`.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, Once, PoisonError};
use std::time::{Duration, Instant};

use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{Semaphore, oneshot, watch};
use tokio::task::AbortHandle;

use super::confirmed::SessionId;
use super::items::Command;
use super::message::{Message, WANTS_LIST};
use super::session::Session;
use super::unproven::{UnprovenConnection, UnprovenConnections};
use super::{MOST_PEERS, Shared, TOO_MANY_HOSTS};
use crate::link::mac::Mac;
use crate::link::membership::Membership;

/// An address on which the kernel does not listen yet is tried again.
const RETRY: Duration = Duration::from_secs(1);
const BACKLOG: u32 = 128;
/// A host sends its first message at once.
const PROOF_LIMIT: Duration = Duration::from_secs(5);
/// Between two warnings of connections that failed: anyone who sends from a host's address causes them.
const WARNING_INTERVAL: Duration = Duration::from_secs(10);

/// Listens on each own address, until the engine is gone.
pub(super) async fn run(
    shared: Shared,
    mut addresses: watch::Receiver<Vec<IpAddr>>,
    membership: watch::Receiver<Membership>,
) {
    let sessions = Arc::new(Sessions::default());
    let mut listeners = HashMap::<IpAddr, Listening>::new();
    loop {
        let own = addresses.borrow_and_update().clone();
        listeners.retain(|address, _| own.contains(address));
        for address in own {
            listeners.entry(address).or_insert_with(|| {
                let (shared, membership) = (shared.clone(), membership.clone());
                let task = tokio::spawn(listen(shared, address, membership, Arc::clone(&sessions)));
                Listening(task.abort_handle())
            });
        }
        if addresses.changed().await.is_err() {
            return;
        }
    }
}

/// The sessions of all listeners.
struct Sessions {
    unproven: UnprovenConnections,
    /// For those that have proven the key.
    free: Semaphore,
    /// Whether it was logged that none was free.
    is_full: Once,
    warned: Mutex<Option<Instant>>,
}

impl Default for Sessions {
    fn default() -> Self {
        let free = Semaphore::new(MOST_PEERS);
        Self {
            unproven: UnprovenConnections::default(),
            free,
            is_full: Once::new(),
            warned: Mutex::default(),
        }
    }
}

impl Sessions {
    /// Whether a failure is logged as a warning.
    fn may_warn(&self) -> bool {
        let mut warned = self.warned.lock().unwrap_or_else(PoisonError::into_inner);
        let is_due = warned.is_none_or(|at| at.elapsed() >= WARNING_INTERVAL);
        if is_due {
            *warned = Some(Instant::now());
        }
        is_due
    }
}

/// Ends with this value. Sessions go on until their hosts or the process end.
struct Listening(AbortHandle);

impl Drop for Listening {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn listen(
    shared: Shared,
    address: IpAddr,
    membership: watch::Receiver<Membership>,
    sessions: Arc<Sessions>,
) {
    let mut is_failing = false;
    // Aborted with the listener, and so at the end of the process.
    let mut tasks = tokio::task::JoinSet::new();
    loop {
        let listener = match bind(&shared, address) {
            Ok(listener) => listener,
            Err(error) => {
                if !std::mem::replace(&mut is_failing, true) {
                    tracing::warn!(%address, port = shared.port, %error, "flow exceptions of other hosts not received at this address; retrying");
                }
                tokio::time::sleep(RETRY).await;
                continue;
            }
        };
        is_failing = false;
        while let Ok((stream, from)) = listener.accept().await {
            while tasks.try_join_next().is_some() {}
            let Some(host) = peer(&membership.borrow(), from) else {
                tracing::debug!(%from, "a host that sends no heartbeats has connected; closing");
                continue;
            };
            let (shared, all) = (shared.clone(), Arc::clone(&sessions));
            sessions.unproven.spawn(&mut tasks, from.ip().to_canonical(), |unproven| async move {
                if let Err(error) = receive_from(&shared, &all, stream, host, unproven).await {
                    shared.on_end(from.ip(), &error, || all.may_warn());
                }
            });
        }
        tokio::time::sleep(RETRY).await;
    }
}

/// The host that has an address.
fn peer(membership: &Membership, from: SocketAddr) -> Option<Mac> {
    let from = from.ip().to_canonical();
    membership.peers.iter().find(|peer| peer.addresses.contains(&from)).map(|peer| peer.mac)
}

fn bind(shared: &Shared, address: IpAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_reuseaddr(true)?;
    socket.bind_device(Some(shared.interface.as_bytes()))?;
    socket.bind(shared.socket_address(address))?;
    socket.listen(BACKLOG)
}

/// Applies the messages of a host, one after the other, until it is gone.
async fn receive_from(
    shared: &Shared,
    sessions: &Sessions,
    stream: TcpStream,
    host: Mac,
    unproven: UnprovenConnection,
) -> io::Result<()> {
    // A key that cannot be read is logged elsewhere.
    let Ok(key) = shared.key() else { return Ok(()) };
    let proving = async {
        let mut session = Session::accept(stream, &key).await?;
        let first = session.receive().await?;
        io::Result::Ok((session, first))
    };
    let (mut session, mut bytes) =
        tokio::time::timeout(PROOF_LIMIT, proving).await.map_err(|_| io::ErrorKind::TimedOut)??;
    drop(unproven);
    let Ok(_permit) = sessions.free.try_acquire() else {
        sessions.is_full.call_once(|| tracing::warn!("{TOO_MANY_HOSTS}"));
        return Ok(());
    };
    let receiver = ReceiverSession { shared, id: shared.new_session() };
    let _ = shared.commands.send(Command::Began(receiver.id, host));
    loop {
        let message =
            Message::decode(&bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        match message {
            Some(Message::Ping) => {
                let wants_list = receiver.apply(Message::Ping).await?;
                session.send(if wants_list { WANTS_LIST } else { &[] }).await?;
            }
            Some(message) => drop(receiver.apply(message).await?),
            // Of a later version.
            None => {}
        }
        bytes = session.receive().await?;
    }
}

/// Tells the exchange when it ends, also when the task is aborted.
struct ReceiverSession<'a> {
    shared: &'a Shared,
    id: SessionId,
}

impl ReceiverSession<'_> {
    /// Waits until it is applied, so that a host cannot fill the memory. Returns whether this host wants a complete list. Fails if
    /// nobody applies messages any more: the other host must not be told that it was done.
    async fn apply(&self, message: Message) -> io::Result<bool> {
        let (done, applied) = oneshot::channel();
        let _ = self.shared.commands.send(Command::Received(self.id, message, done));
        applied.await.map_err(|_| io::Error::other("the thread of the flow exchange has ended"))
    }
}

impl Drop for ReceiverSession<'_> {
    fn drop(&mut self) {
        let _ = self.shared.commands.send(Command::Ended(self.id));
    }
}

#[cfg(test)]
mod tests {
    use steerage_requirements::requires;

    use super::*;
    use crate::host::{EdgePeer, PeerLiveness};
    use crate::peers::tests::{shared, shared_key};

    /// A pod on a node that is an edge host may send from the node's address.
    #[tokio::test]
    async fn connections_without_the_key_keep_no_host_out() {
        requires!(Root);
        let free = TcpListener::bind("127.0.0.1:0").await.expect("bind");
        let to = free.local_addr().expect("address");
        drop(free);
        let (shared, commands) = shared(to.port());
        let applying = tokio::task::spawn_blocking(move || {
            while let Ok(command) = commands.recv() {
                if let Command::Received(_, Message::Ping, done) = command {
                    let _ = done.send(false);
                }
            }
        });
        let peer = EdgePeer { mac: [2; 6], addresses: vec![to.ip()], liveness: PeerLiveness::Live };
        let (_members, membership) =
            watch::channel(Membership { peers: vec![peer], ..Membership::default() });
        let (_own, own) = watch::channel(vec![to.ip()]);
        let server = tokio::spawn(run(shared, own, membership));
        let connect = || async {
            loop {
                if let Ok(stream) = TcpStream::connect(to).await {
                    return stream;
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let mut waiting = Vec::new();
        for _ in 0..2 * MOST_PEERS {
            waiting.push(connect().await);
        }
        let asked = async {
            let mut session = Session::connect(connect().await, &shared_key()).await?;
            for _ in 0..3 {
                session.send(&Message::Ping.encode()).await?;
                session.receive().await?;
            }
            io::Result::Ok(())
        };
        asked.await.expect("a session");
        server.abort();
        let _ = server.await;
        drop(waiting);
        applying.await.expect("applied");
    }

    /// A host that has nobody who applies messages, or no longer, acknowledges none.
    #[tokio::test]
    async fn session_ends_when_messages_are_not_applied() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
        let to = listener.local_addr().expect("address");
        let (shared, commands) = shared(to.port());
        drop(commands);
        let client = async {
            let mut session =
                Session::connect(TcpStream::connect(to).await.expect("connect"), &shared_key()).await?;
            session.send(&Message::Ping.encode()).await?;
            session.receive().await
        };
        let (sessions, mut tasks) = (Sessions::default(), tokio::task::JoinSet::new());
        let (sender, unproven) = oneshot::channel();
        sessions.unproven.spawn(&mut tasks, to.ip(), |unproven| async { drop(sender.send(unproven)) });
        let unproven = unproven.await.expect("unproven");
        let serving = async {
            let stream = listener.accept().await.expect("accept").0;
            receive_from(&shared, &sessions, stream, [2; 6], unproven).await
        };
        let (heard, answer) = tokio::join!(serving, client);
        assert!(answer.is_err(), "{answer:?}");
        assert!(heard.is_err());
    }
}
