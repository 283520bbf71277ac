// SPDX-License-Identifier: Apache-2.0
//! One agent in a network namespace. Two would undo each other's work.
//!
//! The lock is an empty table of nftables with an owner: only a process with `CAP_NET_ADMIN` can make it, and the kernel deletes it
//! with its owner's socket, however the process ends. Any process of the host's network can take a unix socket's name.

use steerage_nft::{Batch, Error, Nft, Table};

use crate::kernel::FAMILIES;

/// The name of the table.
pub(crate) const NAME: &str = "steerage-agent-lock";

/// The lock, until it is dropped.
#[derive(Debug)]
pub struct InstanceLock {
    _owner: Nft,
    /// Whether it takes the place of a table that no process owns, as after a restored ruleset.
    pub replaced_table: bool,
}

impl InstanceLock {
    /// Takes the lock in the network namespace of the calling thread. `None` if another process has it.
    pub fn take() -> Result<Option<Self>, Error> {
        let mut unsupported = None;
        for (_, family) in FAMILIES {
            let mut nft = Nft::open()?;
            let mut batch = Batch::new();
            let table = Table::new(family, NAME);
            batch.add_owned_table(&table);
            match nft.commit(batch) {
                Ok(()) => return Ok(Some(Self { _owner: nft, replaced_table: false })),
                // The listing fails without CAP_NET_ADMIN.
                Err(error) if error.is_taken() => match nft.table(&table)? {
                    Some(info) if info.is_owned => return Ok(None),
                    Some(_) => return take_over(nft, &table),
                    // Its owner has just ended.
                    None => return Err(error),
                },
                // A kernel without the family, or before Linux 5.12.
                Err(error) if error.is_unsupported() => unsupported = Some(error),
                Err(error) => return Err(error),
            }
        }
        unsupported.map_or(Ok(None), Err)
    }
}

/// Takes the place of a table that no process owns, as `nft -f` makes it from a saved ruleset. Of several agents one succeeds: the kernel
/// refuses to delete a table that has an owner.
fn take_over(mut nft: Nft, table: &Table) -> Result<Option<InstanceLock>, Error> {
    let mut batch = Batch::new();
    batch.delete_table(table).add_owned_table(table);
    match nft.commit(batch) {
        Ok(()) => Ok(Some(InstanceLock { _owner: nft, replaced_table: true })),
        Err(error) if error.is_taken() => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use steerage_requirements::{in_new_netns, requires};

    use super::*;

    #[test]
    fn table_without_an_owner_is_no_lock() {
        requires!(NetworkNamespace);
        in_new_netns(|| {
            let (mut other, table) = (Nft::open().unwrap(), Table::new(FAMILIES[0].1, NAME));
            let mut batch = Batch::new();
            batch.add_table(&table, None);
            other.commit(batch).unwrap();
            let lock = InstanceLock::take().unwrap().expect("nobody has it");
            assert!(lock.replaced_table && InstanceLock::take().unwrap().is_none());
            let mut batch = Batch::new();
            batch.delete_table(&table);
            assert!(other.commit(batch).is_err_and(|error| error.is_taken()), "it has an owner now");
        });
    }

    #[test]
    fn lock_is_held_once_per_network_namespace_and_freed() {
        requires!(NetworkNamespace);
        in_new_netns(|| {
            let first = InstanceLock::take().unwrap();
            assert!(first.is_some());
            assert!(InstanceLock::take().unwrap().is_none());
            in_new_netns(|| assert!(InstanceLock::take().unwrap().is_some()));
            drop(first);
            // A process that another test has just forked has the socket too, until it executes its program.
            let dropped = Instant::now();
            while InstanceLock::take().unwrap().is_none() {
                assert!(dropped.elapsed() < Duration::from_secs(30), "the lock outlives its owner");
                std::thread::sleep(Duration::from_millis(1));
            }
        });
    }
}
