// SPDX-License-Identifier: Apache-2.0
//! Removes what versions of the edge have left that forwarded by nftables: their table, and VIPs as addresses of interfaces.
//!
//! Called by `engine` once the kernel's program forwards, so that no packet is lost, and by the command `cleanup`.

use steerage_nft::{Batch, Family, Nft, Table};

use crate::link::route::Rtnetlink;

/// Removes both; none of either is success.
pub(crate) fn remove(netlink: &mut Rtnetlink) -> anyhow::Result<()> {
    let mut batch = Batch::new();
    batch.destroy_table(&Table::new(Family::Netdev, "steerage-edge"));
    Nft::open()?.commit(batch)?;
    for (index, address) in netlink.marked()? {
        if !address.is_multicast() {
            netlink.remove(index, address)?;
        }
    }
    Ok(())
}
