// SPDX-License-Identifier: Apache-2.0
//! The addresses of the testbed in each IP family. Pure.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use steerage_model::Family;

/// First of the IPv4 VIPs; there is one for each Service.
const FIRST_VIP: u32 = 0x0a40_0001;

/// The network of the VIPs.
pub fn vips(family: Family) -> &'static str {
    match family {
        Family::V4 => "10.64.0.0/16",
        Family::V6 => "fd00:64::/112",
    }
}

/// The address of a Service, counted from 0.
pub fn vip(family: Family, service: u32) -> IpAddr {
    match family {
        Family::V4 => Ipv4Addr::from(FIRST_VIP + service).into(),
        Family::V6 => {
            let first = Ipv6Addr::new(0xfd00, 0x64, 0, 0, 0, 0, 0, 1);
            Ipv6Addr::from(u128::from(first) + u128::from(service)).into()
        }
    }
}

/// An address of the link between router, load-balancer hosts and nodes.
pub fn on_link(family: Family, last: u8) -> IpAddr {
    match family {
        Family::V4 => [10, 0, 0, last].into(),
        Family::V6 => [0xfd00, 0, 0, 0, 0, 0, 0, last.into()].into(),
    }
}

/// The address of the router on that link.
pub fn router(family: Family) -> IpAddr {
    on_link(family, 1)
}

/// The address of a node, counted from 0.
pub fn node_address(family: Family, node: u8) -> IpAddr {
    on_link(family, 21 + node)
}

/// An address of the client's link: the router has number 1, the client those from 2 on.
pub fn of_client_link(family: Family, number: u16) -> IpAddr {
    let [high, low] = number.to_be_bytes();
    match family {
        Family::V4 => [10, 1, high, low].into(),
        Family::V6 => [0xfd00, 1, 0, 0, 0, 0, 0, number].into(),
    }
}

/// One of the client's addresses, counted from 0.
pub fn client(family: Family, number: u16) -> IpAddr {
    of_client_link(family, 2 + number)
}

/// Bits of the network part of the client's link.
pub fn client_prefix(family: Family) -> u8 {
    match family {
        Family::V4 => 16,
        Family::V6 => 64,
    }
}

/// Bits of the network part of the link with hosts and nodes.
pub fn prefix(family: Family) -> u8 {
    match family {
        Family::V4 => 24,
        Family::V6 => 64,
    }
}

/// All addresses of a family.
pub fn any(family: Family) -> IpAddr {
    match family {
        Family::V4 => Ipv4Addr::UNSPECIFIED.into(),
        Family::V6 => Ipv6Addr::UNSPECIFIED.into(),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_service_has_an_address_of_the_network_of_vips() {
        for (family, first, last) in
            [(Family::V4, "10.64.0.1", "10.64.78.32"), (Family::V6, "fd00:64::1", "fd00:64::4e20")]
        {
            assert_eq!(
                [vip(family, 0), vip(family, 19_999)],
                [first, last].map(|text| text.parse::<IpAddr>().unwrap())
            );
        }
    }

    #[test]
    fn addresses_of_hosts_differ() {
        for family in [Family::V4, Family::V6] {
            let nodes = (0..12).map(|node| node_address(family, node));
            let clients = (0..256).map(|number| client(family, number));
            let all: BTreeSet<_> = nodes.chain(clients).chain([router(family), any(family)]).collect();
            assert_eq!(all.len(), 12 + 256 + 2);
        }
    }
}
