// SPDX-License-Identifier: Apache-2.0
//! Everything that talks to the kernel: nftables, connection tracking and the host's addresses, over netlink.

mod addresses;
mod dataplane;
mod doubts;
mod family;
mod flow_schedule;
mod flows;
mod host_facts;
mod inspect;
mod load;
mod monitor;
mod scope;

pub use addresses::{AddressWatch, host_addresses};
pub use dataplane::{Dataplane, Written};
pub use doubts::{Doubts, TableDoubts};
pub use family::{FamilyTable, Synchronised};
pub use flows::{FlowCleaner, FlowWalk};
pub use host_facts::host_facts;
pub use inspect::{DroppedPackets, KernelTable, dropped_packets, read_table};
pub use monitor::watch_foreign;
pub use scope::Scope;

use steerage_model::Family;
use steerage_nft::{Batch, Error, Nft, Table};

use crate::rules::TABLE;

/// The families as the model and as nftables name them.
pub(crate) const FAMILIES: [(Family, steerage_nft::Family); 2] =
    [(Family::V4, steerage_nft::Family::Ip), (Family::V6, steerage_nft::Family::Ip6)];

/// Deletes the agent's tables, and no others.
pub fn clean_up() -> Result<(), Error> {
    for (_, family) in FAMILIES {
        let mut nft = Nft::open()?;
        let table = Table::new(family, TABLE);
        match nft.table(&table) {
            Ok(None) => {}
            Ok(Some(_)) => {
                let mut batch = Batch::new();
                batch.delete_table(&table);
                nft.commit(batch)?;
                tracing::info!(%table, "table deleted");
            }
            Err(error) if error.is_unsupported() => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
