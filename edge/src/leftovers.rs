// SPDX-License-Identifier: Apache-2.0
//! Removes what versions of the edge have left that forwarded by nftables: their table, and VIPs as addresses of interfaces.
//!
//! Called by `engine` once the kernel's program forwards, so that no packet is lost, and by the command `cleanup`.

use steerage_nft::{Batch, Family, Nft, Table};

use crate::link::route::Rtnetlink;

/// Removes both; none of either is success, and a kernel without nftables.
pub(crate) fn remove(netlink: &mut Rtnetlink) -> anyhow::Result<()> {
    match Nft::open() {
        Ok(mut nft) => {
            let mut batch = Batch::new();
            batch.destroy_table(&Table::new(Family::Netdev, "steerage-edge"));
            nft.commit(batch)?;
        }
        Err(error) => tracing::debug!(%error, "no nftables, so no table of an earlier version"),
    }
    for (index, address) in netlink.marked()? {
        if !address.is_multicast() {
            netlink.remove(index, address)?;
        }
    }
    Ok(())
}
