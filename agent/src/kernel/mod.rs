// SPDX-License-Identifier: Apache-2.0
//! Everything that talks to the kernel: nftables, connection tracking and the host's addresses, over netlink.

mod addresses;
mod bridges;
mod chain_scan;
mod dataplane;
mod edge_tunnel;
mod family;
mod features;
mod flow_schedule;
mod flows;
mod foreign_chains;
mod host_facts;
mod inspect;
mod load;
mod monitor;
mod next_hops;
mod repair;
mod repair_pause;
mod rule_changes;
mod scope;
mod trace;
mod trial;
mod unread_lists;

pub use addresses::{AddressWatch, host_addresses};
pub use dataplane::{Dataplane, FamilyWrite, Written, WrittenRules};
pub use edge_tunnel::{EdgeTunnelKeeper, remove_edge_tunnel};
pub use family::{FamilyTable, Synchronised};
pub use features::{KernelFeatures, kernel_features};
pub use flows::{FamilyWalk, FlowCleaner, FlowWalk};
pub use host_facts::host_facts;
pub use inspect::{CountedPackets, DroppedPackets, KernelTable, counted_packets, read_table};
pub use monitor::{Notice, Noticed};
pub use next_hops::NextHops;
pub use repair::ChainRules;
pub use scope::Scope;
pub use trace::trace_packet;

use addresses::has_ipv6;
use steerage_model::Family;
use steerage_nft::{Batch, Error, Nft, Table};

use crate::rules::TABLE;

/// The families as the model and as nftables name them.
pub(crate) const FAMILIES: [(Family, steerage_nft::Family); 2] =
    [(Family::V4, steerage_nft::Family::Ip), (Family::V6, steerage_nft::Family::Ip6)];

/// Deletes the agent's tables, and no others, and the devices of the edge's tunnel.
pub fn clean_up() -> Result<(), Error> {
    remove_edge_tunnel(&mut Nft::open()?);
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
