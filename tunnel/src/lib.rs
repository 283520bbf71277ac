// SPDX-License-Identifier: Apache-2.0
//! What both ends of the tunnel between edge hosts and nodes off their link must agree on, and the VXLAN devices of each end.
//!
//! `steerage-edge` sends through a device without a peer of its own ([`sender`]); `steerage-agent` receives by one device for each IP
//! family ([`receivers`]). Both call [`ensure`] again and again, and [`remove`] when the tunnel is no longer wanted. Which packets
//! may pass is not decided here: nftables on the node does that.

mod device;
mod netlink;

pub use device::{Device, Ensured, TunnelError, ensure, ensure_anew, is_up, remove};

/// A link-layer address.
pub type MacAddress = [u8; 6];

/// The UDP port of the tunnel, unless flags say otherwise. Network plug-ins use 4789 and 8472, and the kernel gives a port to VXLAN
/// devices of one kind only.
pub const DEFAULT_PORT: u16 = 10_361;
/// The greatest number of a virtual network.
pub const MAX_VNI: u32 = (1 << 24) - 1;
/// The edge host's device. It takes no packets in: another program's rules are not needed for that.
pub const SENDER: &str = "steerage-vx";
/// The node's devices, for packets that come by IPv4 and by IPv6.
pub const RECEIVERS: [&str; 2] = ["steerage-vx4", "steerage-vx6"];
/// The beginning of the link-layer addresses of all these devices, by which Steerage recognises its own: locally administered, unicast.
const PREFIX: [u8; 3] = [0x02, 0x53, 0x54];

/// The link-layer address to which an edge host sends inside the tunnel, and which the device of each node has. It follows from the
/// number of the virtual network, and not from the node: the outer address alone selects the node, and both ends need to know
/// nothing of each other.
pub fn mac(vni: u32) -> MacAddress {
    let mut mac = [0; 6];
    let (prefix, number) = mac.split_at_mut(PREFIX.len());
    prefix.copy_from_slice(&PREFIX);
    let [_, low @ ..] = vni.to_be_bytes();
    number.copy_from_slice(&low);
    mac
}

/// Bytes that the tunnel adds to a packet: the inner Ethernet header, those of VXLAN and UDP, and the outer IP header.
pub fn overhead(v6: bool) -> u16 {
    const INNER: u16 = 14 + 8 + 8;
    INNER + if v6 { 40 } else { 20 }
}

/// The device of an edge host. Targets say where each packet goes.
pub fn sender(port: u16) -> Device {
    Device { name: SENDER, port, vni: None, v6: false }
}

/// The devices of a node.
pub fn receivers(vni: u32, port: u16) -> [Device; 2] {
    let [v4, v6] = RECEIVERS;
    let device = |name, v6| Device { name, port, vni: Some(vni), v6 };
    [device(v4, false), device(v6, true)]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn address_is_unicast_locally_administered_and_distinct(a in 0..=MAX_VNI, b in 0..=MAX_VNI) {
            prop_assert_eq!(mac(a)[0] & 0b11, 0b10);
            prop_assert_eq!(mac(a) == mac(b), a == b);
            prop_assert!(mac(a).starts_with(&PREFIX));
        }
    }

    #[test]
    fn overhead_is_that_of_the_outer_family() {
        assert_eq!([overhead(false), overhead(true)], [50, 70]);
    }
}
