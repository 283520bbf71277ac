// SPDX-License-Identifier: Apache-2.0
//! Which clients the maps of session affinity have to forget, on a kernel whose rules cannot: see [`Feature::Deletion`]. Pure;
//! [`crate::kernel`] lists the maps, and deletes what is not kept.
//!
//! [`Feature::Deletion`]: super::Feature::Deletion

use std::net::{IpAddr, SocketAddr};

use steerage_model::Protocol;
use steerage_nft::{Data, Element};

use super::affinity::{AFFINITY, CANDIDATES};
use crate::hash::endpoint_hash;
use crate::plan::{Desired, Frontend};

/// The maps from a client of a frontend to the hash of its endpoint.
pub const CLIENT_MAPS: [&str; 2] = [AFFINITY, CANDIDATES];

/// Whether an element of such a map leads to an endpoint that its frontend has.
pub fn is_kept(desired: &Desired, element: &Element) -> bool {
    let Some((frontend, hash)) = decode(element) else { return false };
    let Some(action) = desired.action(&frontend).filter(|action| action.affinity.is_some()) else {
        return false;
    };
    let has = |targets: &[SocketAddr]| targets.iter().any(|target| endpoint_hash(*target) == hash);
    has(&action.targets) || action.local.as_ref().is_some_and(|local| has(local))
}

/// The frontend and the endpoint's hash.
fn decode(element: &Element) -> Option<(Frontend, u32)> {
    let Some(Data::Value(hash)) = &element.data else { return None };
    // Address, protocol, port and client; protocol and port take a word each.
    let length = element.key.len().checked_sub(8)? / 2;
    let (addr, rest) = element.key.split_at_checked(length)?;
    let v4 = <[u8; 4]>::try_from(addr).map(IpAddr::from);
    let addr = v4.or_else(|_| <[u8; 16]>::try_from(addr).map(IpAddr::from)).ok()?;
    let [number, _, _, _, high, low, ..] = *rest else { return None };
    let protocol = [Protocol::Tcp, Protocol::Udp, Protocol::Sctp]
        .into_iter()
        .find(|protocol| protocol.number() == number)?;
    let frontend = Frontend { addr, protocol, port: u16::from_be_bytes([high, low]) };
    Some((frontend, u32::from_ne_bytes(hash.as_slice().try_into().ok()?)))
}

#[cfg(test)]
mod tests {
    use steerage_nft::{Field, concat};

    use super::*;

    #[test]
    fn elements_decode_to_what_rules_write() {
        for (addr, client) in [("192.0.2.1", "10.0.0.1"), ("2001:db8::1", "fd00::1")] {
            let [addr, client]: [IpAddr; 2] = [addr, client].map(|text| text.parse().expect("an address"));
            let key = concat(&[addr.into(), Field::Proto(17), Field::Port(53), client.into()]);
            let element = Element::entry(key, concat(&[Field::Number(7)]));
            let frontend = Frontend { addr, protocol: Protocol::Udp, port: 53 };
            assert_eq!(decode(&element), Some((frontend, 7)));
            assert!(!is_kept(&Desired::default(), &element), "no Service has the frontend");
        }
        assert_eq!(decode(&Element::key(vec![0; 16])), None);
        assert_eq!(decode(&Element::entry(vec![0; 3], vec![0; 4])), None);
    }
}
