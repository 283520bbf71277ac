// SPDX-License-Identifier: Apache-2.0
//! Whose connections the health-check servers hold: so many a server and so many in all. When it is full, the oldest goes, so
//! that whoever holds connections open or opens ever new ones keeps no prober out: a prober is done within milliseconds.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::task::AbortHandle;

/// Connections to one server at a time.
pub(super) const MAX_PER_SERVER: usize = 32;
/// Connections to all servers that share the table.
pub(super) const MAX_TOTAL: usize = 1024;

/// The table. Clones are the same.
#[derive(Debug, Clone, Default)]
pub(super) struct ConnectionLimiter(Arc<Mutex<ConnectionTable>>);

#[derive(Debug, Default)]
struct ConnectionTable {
    next: u64,
    /// By age; without a handle until the task runs.
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
    /// A server that takes connections. Its connections go with it.
    pub(super) fn server(&self) -> ServerConnections {
        let mut table = self.lock();
        table.next += 1;
        ServerConnections { limiter: self.clone(), server: table.next }
    }

    /// How many there are.
    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        self.lock().slots.len()
    }

    fn lock(&self) -> MutexGuard<'_, ConnectionTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One server's part of the table.
#[derive(Debug)]
pub(super) struct ServerConnections {
    limiter: ConnectionLimiter,
    server: u64,
}

impl ServerConnections {
    /// Seats a guest; who was there for longest goes if there is no slot. `spawn` starts the guest's task, which keeps the slot
    /// as long as it runs.
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
        // It may have left already.
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

/// A guest's place; dropped, it is free.
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
