// SPDX-License-Identifier: Apache-2.0
//! Limits the connections of servers that everybody can reach, per server and in total. When a limit is reached, a new connection
//! replaces the oldest one of the client with the most. So a client that holds connections open, or opens them without end, locks
//! out no prober, which needs its own for milliseconds only.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::task::AbortHandle;

/// Open connections of one server.
pub const MAX_PER_SERVER: usize = 32;
/// Open connections of all servers that share a limiter.
pub const MAX_TOTAL: usize = 1024;

/// The open connections. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct ConnectionLimiter(Arc<Mutex<ConnectionTable>>);

#[derive(Debug, Default)]
struct ConnectionTable {
    next: u64,
    /// By age.
    slots: BTreeMap<u64, Slot>,
    of_server: BTreeMap<u64, BTreeSet<u64>>,
}

#[derive(Debug)]
struct Slot {
    server: u64,
    client: IpAddr,
    /// Once it runs.
    task: Option<AbortHandle>,
}

impl ConnectionTable {
    /// The oldest connection of the client that has the most of these.
    fn evictable(&self, slots: impl Iterator<Item = u64> + Clone) -> Option<u64> {
        let client = |slot: &u64| self.slots.get(slot).map(|slot| slot.client);
        let mut counts: BTreeMap<IpAddr, usize> = BTreeMap::new();
        for client in slots.clone().filter_map(|slot| client(&slot)) {
            *counts.entry(client).or_default() += 1;
        }
        let most = counts.values().copied().max()?;
        slots.into_iter().find(|slot| client(slot).is_some_and(|client| counts.get(&client) == Some(&most)))
    }

    fn remove(&mut self, slot: u64) -> Option<AbortHandle> {
        let Slot { server, task, .. } = self.slots.remove(&slot)?;
        if let Some(slots) = self.of_server.get_mut(&server) {
            slots.remove(&slot);
            if slots.is_empty() {
                self.of_server.remove(&server);
            }
        }
        task
    }
}

impl ConnectionLimiter {
    /// Adds a server. Its connections end when it is dropped.
    pub fn server(&self) -> ServerConnections {
        let mut table = self.lock();
        table.next += 1;
        ServerConnections { limiter: self.clone(), server: table.next }
    }

    /// The number of open connections.
    pub fn count(&self) -> usize {
        self.lock().slots.len()
    }

    fn lock(&self) -> MutexGuard<'_, ConnectionTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One server's connections.
#[derive(Debug)]
pub struct ServerConnections {
    limiter: ConnectionLimiter,
    server: u64,
}

impl ServerConnections {
    /// Admits a connection, in place of another one if a limit is reached. `spawn` starts its task, which holds the slot while it runs.
    pub fn admit(&self, client: IpAddr, spawn: impl FnOnce(ConnectionSlot) -> AbortHandle) {
        let client = site(client);
        let (number, evicted) = {
            let mut table = self.limiter.lock();
            let of_server = table.of_server.get(&self.server).filter(|slots| slots.len() >= MAX_PER_SERVER);
            let own = of_server.and_then(|slots| table.evictable(slots.iter().copied()));
            let any = (table.slots.len() >= MAX_TOTAL).then(|| table.evictable(table.slots.keys().copied()));
            let evicted = own.or(any.flatten());
            let evicted = evicted.and_then(|slot| table.remove(slot));
            table.next += 1;
            let number = table.next;
            table.slots.insert(number, Slot { server: self.server, client, task: None });
            table.of_server.entry(self.server).or_default().insert(number);
            (number, evicted)
        };
        if let Some(task) = evicted {
            task.abort();
        }
        let task = spawn(ConnectionSlot { limiter: self.limiter.clone(), number });
        // The task may have ended already.
        if let Some(slot) = self.limiter.lock().slots.get_mut(&number) {
            slot.task = Some(task);
        }
    }
}

impl Drop for ServerConnections {
    fn drop(&mut self) {
        let tasks: Vec<_> = {
            let mut table = self.limiter.lock();
            let slots = table.of_server.get(&self.server).cloned().unwrap_or_default();
            slots.into_iter().filter_map(|slot| table.remove(slot)).collect()
        };
        tasks.iter().for_each(AbortHandle::abort);
    }
}

/// An admitted connection; frees its slot when dropped.
#[derive(Debug)]
pub struct ConnectionSlot {
    limiter: ConnectionLimiter,
    number: u64,
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        let gone = self.limiter.lock().remove(self.number);
        drop(gone);
    }
}

/// A client may have all addresses of an IPv6 network of 64 bits.
fn site(client: IpAddr) -> IpAddr {
    match client.to_canonical() {
        IpAddr::V4(address) => address.into(),
        IpAddr::V6(address) => {
            let [a, b, c, d, ..] = address.segments();
            std::net::Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0).into()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn client_with_the_most_connections_loses_its_oldest() {
        let limiter = ConnectionLimiter::default();
        let server = limiter.server();
        let open = |client: &str| {
            let mut task = None;
            server.admit(client.parse().unwrap(), |slot| {
                let handle = tokio::spawn(async move {
                    std::future::pending::<()>().await;
                    drop(slot);
                });
                let abort = handle.abort_handle();
                task = Some(handle);
                abort
            });
            task.expect("started")
        };
        let prober = open("10.0.0.1");
        let mut greedy: Vec<_> = (1..MAX_PER_SERVER).map(|n| open(&format!("fd00::{n}"))).collect();
        for n in 0..1000 {
            greedy.push(open(&format!("fd00::1:{n}")));
        }
        tokio::task::yield_now().await;
        assert!(!prober.is_finished() && limiter.count() == MAX_PER_SERVER);
        let first = greedy.remove(0);
        assert!(first.await.is_err_and(|error| error.is_cancelled()));
        let late = open("10.0.0.2");
        tokio::task::yield_now().await;
        assert!(!late.is_finished() && !prober.is_finished());
        drop(server);
        assert!(prober.await.is_err());
        assert_eq!(limiter.count(), 0);
    }
}
