// SPDX-License-Identifier: Apache-2.0
//! Limits the connections of health-check servers, per server and in total. A new connection replaces the oldest one when a limit
//! is reached. So a client that holds connections open locks out no prober, which needs its own for milliseconds only.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::task::AbortHandle;

/// Open connections of one server.
pub(super) const MAX_PER_SERVER: usize = 32;
/// Open connections of all servers that share a limiter.
pub(super) const MAX_TOTAL: usize = 1024;

/// The open connections. Clones share them.
#[derive(Debug, Clone, Default)]
pub(super) struct ConnectionLimiter(Arc<Mutex<ConnectionTable>>);

#[derive(Debug, Default)]
struct ConnectionTable {
    next: u64,
    /// By age: the server, and the task once it runs.
    slots: BTreeMap<u64, (u64, Option<AbortHandle>)>,
    of_server: BTreeMap<u64, BTreeSet<u64>>,
}

impl ConnectionTable {
    fn remove(&mut self, slot: u64) -> Option<AbortHandle> {
        let (server, task) = self.slots.remove(&slot)?;
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
    pub(super) fn server(&self) -> ServerConnections {
        let mut table = self.lock();
        table.next += 1;
        ServerConnections { limiter: self.clone(), server: table.next }
    }

    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        self.lock().slots.len()
    }

    fn lock(&self) -> MutexGuard<'_, ConnectionTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One server's connections.
#[derive(Debug)]
pub(super) struct ServerConnections {
    limiter: ConnectionLimiter,
    server: u64,
}

impl ServerConnections {
    /// Admits a connection, in place of the oldest one if a limit is reached. `spawn` starts its task, which holds the slot while
    /// it runs.
    pub(super) fn admit(&self, spawn: impl FnOnce(ConnectionSlot) -> AbortHandle) {
        let (number, evicted) = {
            let mut table = self.limiter.lock();
            let of_server = table.of_server.get(&self.server);
            let own_oldest =
                of_server.filter(|slots| slots.len() >= MAX_PER_SERVER).and_then(BTreeSet::first).copied();
            let oldest =
                (table.slots.len() >= MAX_TOTAL).then(|| table.slots.keys().next().copied()).flatten();
            let evicted = own_oldest.or(oldest).and_then(|slot| table.remove(slot));
            table.next += 1;
            let number = table.next;
            table.slots.insert(number, (self.server, None));
            table.of_server.entry(self.server).or_default().insert(number);
            (number, evicted)
        };
        if let Some(task) = evicted {
            task.abort();
        }
        let task = spawn(ConnectionSlot { limiter: self.limiter.clone(), number });
        // The task may have ended already.
        if let Some((_, handle)) = self.limiter.lock().slots.get_mut(&number) {
            *handle = Some(task);
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
pub(super) struct ConnectionSlot {
    limiter: ConnectionLimiter,
    number: u64,
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        let gone = self.limiter.lock().remove(self.number);
        drop(gone);
    }
}
