// SPDX-License-Identifier: Apache-2.0
//! Connections whose other side has not proven the key yet. `server` owns it; it reads and sends nothing.
//!
//! Whoever sends from the address of an edge host can open such connections. Where nodes are edge hosts, each pod can whose packets to
//! other nodes have its node's address. A host proves the key at once, so the newest connections stay, and a host is not kept out by
//! those that wait.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::task::{AbortHandle, JoinSet};

/// Connections of one address. A host has one, and another one while it does not know yet that the first one is gone.
const MOST_OF_ADDRESS: usize = 16;
/// Of all addresses: hosts know 256 others.
const MOST: usize = 512;

/// The connections, the oldest first. Clones are the same.
#[derive(Clone, Debug, Default)]
pub(super) struct UnprovenConnections(Arc<Mutex<Connections>>);

#[derive(Debug, Default)]
struct Connections {
    next: u64,
    tasks: VecDeque<(u64, IpAddr, AbortHandle)>,
}

/// One of the connections, until it is dropped.
#[derive(Debug)]
pub(super) struct UnprovenConnection {
    all: UnprovenConnections,
    number: u64,
}

impl UnprovenConnections {
    /// Runs the task of a new connection, and ends the oldest one if there are too many.
    pub(super) fn spawn<F>(
        &self,
        tasks: &mut JoinSet<()>,
        from: IpAddr,
        task: impl FnOnce(UnprovenConnection) -> F,
    ) where
        F: Future<Output = ()> + Send + 'static,
    {
        let displaced = self.with(|connections| {
            let number = connections.next;
            connections.next += 1;
            let task = tasks.spawn(task(UnprovenConnection { all: self.clone(), number }));
            connections.tasks.push_back((number, from, task));
            connections.displace(from)
        });
        // Outside of the lock, which its end takes.
        if let Some(task) = displaced {
            task.abort();
        }
    }

    fn with<T>(&self, work: impl FnOnce(&mut Connections) -> T) -> T {
        work(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Connections {
    fn displace(&mut self, from: IpAddr) -> Option<AbortHandle> {
        let of_address = self.tasks.iter().filter(|(_, address, _)| *address == from).count();
        let oldest = if of_address > MOST_OF_ADDRESS {
            self.tasks.iter().position(|(_, address, _)| *address == from)
        } else if self.tasks.len() > MOST {
            self.position_of_busiest()
        } else {
            None
        };
        self.tasks.remove(oldest?).map(|(.., task)| task)
    }

    /// The oldest connection of the address that has most.
    fn position_of_busiest(&self) -> Option<usize> {
        let mut counts = HashMap::<IpAddr, usize>::new();
        for (_, address, _) in &self.tasks {
            *counts.entry(*address).or_default() += 1;
        }
        let busiest = counts.into_iter().max_by_key(|(address, count)| (*count, *address))?.0;
        self.tasks.iter().position(|(_, address, _)| *address == busiest)
    }
}

impl Drop for UnprovenConnection {
    fn drop(&mut self) {
        self.all.with(|connections| connections.tasks.retain(|(number, ..)| *number != self.number));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn oldest_connection_of_an_address_makes_room() {
        let (all, mut tasks) = (UnprovenConnections::default(), JoinSet::new());
        let address = |last: u8| IpAddr::from([10, 0, last, 1]);
        let mut open = |from| {
            all.spawn(&mut tasks, from, |connection| async move {
                std::future::pending::<()>().await;
                drop(connection);
            });
        };
        let numbers = |from| {
            all.with(|connections| {
                let of_address = connections.tasks.iter().filter(|(_, address, _)| *address == from);
                of_address.map(|(number, ..)| *number).collect::<Vec<_>>()
            })
        };
        open(address(0));
        for _ in 0..2 * MOST_OF_ADDRESS {
            open(address(1));
        }
        let last = 2 * u64::try_from(MOST_OF_ADDRESS).expect("few");
        assert_eq!(numbers(address(0)), [0]);
        assert_eq!(numbers(address(1)), (last / 2 + 1..=last).collect::<Vec<_>>());
        for host in 2..=255 {
            for _ in 0..3 {
                open(address(host));
            }
        }
        assert_eq!(all.with(|connections| connections.tasks.len()), MOST);
        assert_eq!(numbers(address(0)), [0], "those of busy addresses end first");
    }

    #[tokio::test]
    async fn connection_that_ends_or_proves_the_key_is_forgotten() {
        let (all, mut tasks) = (UnprovenConnections::default(), JoinSet::new());
        all.spawn(&mut tasks, [10, 0, 0, 1].into(), |connection| async { drop(connection) });
        assert_eq!(all.with(|connections| connections.tasks.len()), 1);
        tasks.join_next().await;
        assert_eq!(all.with(|connections| connections.tasks.len()), 0);
    }
}
