// SPDX-License-Identifier: Apache-2.0
//! Addresses as the maps hold them, and what differs between the IP families.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::{Datagram, Packet, hash, ipv4, ipv6};

/// An IPv4 address, in the order of its bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct V4(pub u32);

/// An IPv6 address, in the order of its bytes.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct V6(pub [u32; 4]);

/// An address of either family.
pub trait Address: Copy + PartialEq {
    /// The address as one of IPv6: what maps of both families hold.
    fn mapped(self) -> V6;

    /// The hash that selects the slot of a client. All hosts and versions compute the same.
    fn flow_hash(self, port: u16) -> u32;

    /// Mixes the address into few bits, for [`crate::hash::gate`].
    fn fold(self) -> u32;

    /// The destination in the IP header at `offset`, also if the rest is malformed.
    fn destination<P: Packet + ?Sized>(packet: &P, offset: usize) -> Option<Self>;

    /// Parses the IP header at `offset`. `None` if it is malformed or longer than
    /// [`crate::MAX_HEADERS`] allows.
    fn datagram<P: Packet + ?Sized>(packet: &P, offset: usize) -> Option<Datagram<Self>>;

    /// The same for a header without extension headers: the path of most packets.
    fn plain<P: Packet + ?Sized>(packet: &P, offset: usize) -> Option<Datagram<Self>>;

    /// The same for a packet that an ICMP error quotes, which may be cut off anywhere.
    fn quoted<P: Packet + ?Sized>(packet: &P, offset: usize) -> Option<Datagram<Self>>;

    /// The protocol number of this family's ICMP.
    const ICMP: u8;
    /// The length of a header without options and extension headers.
    const HEADER: usize;
}

impl Address for V4 {
    #[inline(always)]
    fn mapped(self) -> V6 {
        V6([0, 0, u32::from_be(0xffff), self.0])
    }

    #[inline(always)]
    fn flow_hash(self, port: u16) -> u32 {
        hash::mix((u64::from(u32::from_be(self.0)) << 16) | u64::from(port))
    }

    #[inline(always)]
    fn fold(self) -> u32 {
        u32::from_be(self.0)
    }

    #[inline(always)]
    fn destination<P: Packet + ?Sized>(packet: &P, offset: usize) -> Option<Self> {
        ipv4::destination(packet, offset)
    }

    #[inline(always)]
    fn datagram<P: Packet + ?Sized>(packet: &P, offset: usize) -> Option<Datagram<Self>> {
        ipv4::datagram(packet, offset)
    }

    #[inline(always)]
    fn plain<P: Packet + ?Sized>(packet: &P, offset: usize) -> Option<Datagram<Self>> {
        ipv4::datagram(packet, offset)
    }

    #[inline(always)]
    fn quoted<P: Packet + ?Sized>(packet: &P, offset: usize) -> Option<Datagram<Self>> {
        ipv4::header(packet, offset)
    }

    const ICMP: u8 = crate::protocol::ICMP;
    const HEADER: usize = 20;
}

impl Address for V6 {
    #[inline(always)]
    fn mapped(self) -> V6 {
        self
    }

    #[inline(always)]
    fn flow_hash(self, port: u16) -> u32 {
        let [a, b, c, d] = self.0.map(|word| u64::from(u32::from_be(word)));
        // The second round depends on all bits of the first.
        let network = hash::mix64((a << 32) | b);
        hash::mix(network ^ ((c << 32) | d).rotate_left(16) ^ u64::from(port))
    }

    #[inline(always)]
    fn fold(self) -> u32 {
        let [a, b, c, d] = self.0.map(u32::from_be);
        a ^ b.rotate_left(7) ^ c.rotate_left(14) ^ d
    }

    #[inline(always)]
    fn destination<P: Packet + ?Sized>(packet: &P, offset: usize) -> Option<Self> {
        ipv6::destination(packet, offset)
    }

    #[inline(always)]
    fn datagram<P: Packet + ?Sized>(packet: &P, offset: usize) -> Option<Datagram<Self>> {
        ipv6::datagram(packet, offset)
    }

    #[inline(always)]
    fn plain<P: Packet + ?Sized>(packet: &P, offset: usize) -> Option<Datagram<Self>> {
        ipv6::plain(packet, offset)
    }

    #[inline(always)]
    fn quoted<P: Packet + ?Sized>(packet: &P, offset: usize) -> Option<Datagram<Self>> {
        ipv6::header(packet, offset)
    }

    const ICMP: u8 = crate::protocol::ICMP6;
    const HEADER: usize = 40;
}

impl From<Ipv4Addr> for V4 {
    fn from(address: Ipv4Addr) -> Self {
        Self(u32::from_ne_bytes(address.octets()))
    }
}

impl From<V4> for Ipv4Addr {
    fn from(address: V4) -> Self {
        address.0.to_ne_bytes().into()
    }
}

impl From<Ipv6Addr> for V6 {
    fn from(address: Ipv6Addr) -> Self {
        let octets = address.octets();
        Self([0, 4, 8, 12].map(|at| crate::read::word(&octets, at)))
    }
}

impl From<V6> for Ipv6Addr {
    fn from(address: V6) -> Self {
        let mut octets = [0; 16];
        for (bytes, word) in octets.chunks_exact_mut(4).zip(address.0) {
            bytes.copy_from_slice(&word.to_ne_bytes());
        }
        octets.into()
    }
}

/// Mapped, if it is an IPv4 address.
impl From<IpAddr> for V6 {
    fn from(address: IpAddr) -> Self {
        match address {
            IpAddr::V4(address) => V4::from(address).mapped(),
            IpAddr::V6(address) => address.into(),
        }
    }
}

impl From<V6> for IpAddr {
    fn from(address: V6) -> Self {
        Ipv6Addr::from(address).to_canonical()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_convert_and_convert_back() {
        for text in ["10.0.0.1", "fd00::1:2", "::", "255.255.255.255"] {
            let address: IpAddr = text.parse().expect("address");
            assert_eq!(IpAddr::from(V6::from(address)), address);
        }
        let v4: Ipv4Addr = "10.1.2.3".parse().expect("address");
        assert_eq!(V4::from(v4).mapped(), V6::from(v4.to_ipv6_mapped()));
        assert_eq!(Ipv4Addr::from(V4::from(v4)), v4);
    }

    /// Hosts of two versions would send one client to different nodes.
    #[test]
    fn flow_hashes_never_change() {
        let v4: Ipv4Addr = "10.1.2.3".parse().expect("address");
        let v6: Ipv6Addr = "fd00::1:2".parse().expect("address");
        let hashes = [
            V4::from(v4).flow_hash(0),
            V4::from(v4).flow_hash(40_000),
            V6::from(v6).flow_hash(0),
            V6::from(v6).flow_hash(40_000),
        ];
        assert_eq!(hashes, GOLDEN);
    }

    const GOLDEN: [u32; 4] = [689_600_760, 3_673_928_981, 810_439_173, 2_509_489_301];
}
