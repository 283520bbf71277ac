// SPDX-License-Identifier: Apache-2.0
//! Whose connections the health-check servers hold: so many a server and so many in all. When it is full, the oldest goes, so
//! that whoever holds connections open or opens ever new ones keeps no prober out: a prober is done within milliseconds.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::task::AbortHandle;

/// Connections to one server at a time.
pub(super) const OF_SERVER: usize = 32;
/// Connections to all servers that share the table.
pub(super) const IN_ALL: usize = 1024;

/// The table. Clones are the same.
#[derive(Debug, Clone, Default)]
pub(super) struct Guests(Arc<Mutex<Table>>);

#[derive(Debug, Default)]
struct Table {
    next: u64,
    /// By age; without a handle until the task runs.
    seats: BTreeMap<u64, (u64, Option<AbortHandle>)>,
    of_server: BTreeMap<u64, BTreeSet<u64>>,
}

impl Table {
    fn leave(&mut self, seat: u64) -> Option<AbortHandle> {
        let (server, task) = self.seats.remove(&seat)?;
        if let Some(seats) = self.of_server.get_mut(&server) {
            seats.remove(&seat);
            if seats.is_empty() {
                self.of_server.remove(&server);
            }
        }
        task
    }
}

impl Guests {
    /// A server that takes guests. Its guests go with it.
    pub(super) fn host(&self) -> Host {
        let mut table = self.lock();
        table.next += 1;
        Host { guests: self.clone(), server: table.next }
    }

    /// How many there are.
    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        self.lock().seats.len()
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One server's part of the table.
#[derive(Debug)]
pub(super) struct Host {
    guests: Guests,
    server: u64,
}

impl Host {
    /// Seats a guest; who was there for longest goes if there is no seat. `spawn` starts the guest's task, which keeps the seat
    /// as long as it runs.
    pub(super) fn seat(&self, spawn: impl FnOnce(Seat) -> AbortHandle) {
        let (number, evicted) = {
            let mut table = self.guests.lock();
            let of_server = table.of_server.get(&self.server);
            let own_oldest =
                of_server.filter(|seats| seats.len() >= OF_SERVER).and_then(BTreeSet::first).copied();
            let oldest = (table.seats.len() >= IN_ALL).then(|| table.seats.keys().next().copied()).flatten();
            let evicted = own_oldest.or(oldest).and_then(|seat| table.leave(seat));
            table.next += 1;
            let number = table.next;
            table.seats.insert(number, (self.server, None));
            table.of_server.entry(self.server).or_default().insert(number);
            (number, evicted)
        };
        if let Some(task) = evicted {
            task.abort();
        }
        let task = spawn(Seat { guests: self.guests.clone(), number });
        // It may have left already.
        if let Some((_, handle)) = self.guests.lock().seats.get_mut(&number) {
            *handle = Some(task);
        }
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        let tasks: Vec<_> = {
            let mut table = self.guests.lock();
            let seats = table.of_server.get(&self.server).cloned().unwrap_or_default();
            seats.into_iter().filter_map(|seat| table.leave(seat)).collect()
        };
        tasks.iter().for_each(AbortHandle::abort);
    }
}

/// A guest's place; dropped, it is free.
#[derive(Debug)]
pub(super) struct Seat {
    guests: Guests,
    number: u64,
}

impl Drop for Seat {
    fn drop(&mut self) {
        let gone = self.guests.lock().leave(self.number);
        drop(gone);
    }
}
