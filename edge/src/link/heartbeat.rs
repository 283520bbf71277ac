// SPDX-License-Identifier: Apache-2.0
//! The format of the heartbeats between edge hosts: frames of a local experimental ethertype to a group address. Pure.
//!
//! They are not IP: no router forwards them, and they need no configured address. They are not signed, because a host that can
//! send them can also answer ARP for any address.

use std::net::IpAddr;

use crate::forward::Mac;
use crate::hash;

/// IEEE 802's "local experimental ethertype 1".
pub(crate) const ETHERTYPE: u16 = 0x88b5;
/// A locally administered group address.
pub(crate) const GROUP: Mac = [0x03, 0x53, 0x54, 0x45, 0x45, 0x52];
const MAGIC: [u8; 8] = *b"SteerEdg";
const VERSION: u8 = 1;
const ACTIVE: u8 = 1;
const LEAVING: u8 = 2;
/// A host has few addresses, and the frame is short.
const MAX_ADDRESSES: usize = 8;
/// The shortest Ethernet frame, without its checksum.
const MIN_FRAME: usize = 60;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Heartbeat {
    /// The id of the sender's group; heartbeats of other groups are ignored.
    pub(crate) group: u64,
    pub(crate) host: String,
    /// Whether the host has the VIPs.
    pub(crate) active: bool,
    /// Whether the host wants another one to take over.
    pub(crate) leaving: bool,
    /// Counts takeovers. Of two active hosts the one with the higher term stays active.
    pub(crate) term: u64,
    /// The host's own addresses.
    pub(crate) addresses: Vec<IpAddr>,
}

pub(crate) fn group_id(name: &str) -> u64 {
    hash::bytes(name.as_bytes())
}

pub(crate) fn encode(from: Mac, heartbeat: &Heartbeat) -> Vec<u8> {
    let mut frame = Vec::with_capacity(128);
    frame.extend_from_slice(&GROUP);
    frame.extend_from_slice(&from);
    frame.extend_from_slice(&ETHERTYPE.to_be_bytes());
    frame.extend_from_slice(&MAGIC);
    frame.push(VERSION);
    frame.push((u8::from(heartbeat.active) * ACTIVE) | (u8::from(heartbeat.leaving) * LEAVING));
    frame.extend_from_slice(&heartbeat.group.to_be_bytes());
    frame.extend_from_slice(&heartbeat.term.to_be_bytes());
    let host = heartbeat.host.as_bytes();
    let host = &host[..host.len().min(usize::from(u8::MAX))];
    frame.push(u8::try_from(host.len()).unwrap_or(u8::MAX));
    frame.extend_from_slice(host);
    let addresses = &heartbeat.addresses[..heartbeat.addresses.len().min(MAX_ADDRESSES)];
    frame.push(u8::try_from(addresses.len()).unwrap_or(0));
    for address in addresses {
        match address {
            IpAddr::V4(four) => frame.extend_from_slice(&four.to_ipv6_mapped().octets()),
            IpAddr::V6(six) => frame.extend_from_slice(&six.octets()),
        }
    }
    frame.resize(frame.len().max(MIN_FRAME), 0);
    frame
}

/// The sender and its heartbeat; `None` for any other frame.
pub(crate) fn decode(frame: &[u8]) -> Option<(Mac, Heartbeat)> {
    let from: Mac = frame.get(6..12)?.try_into().ok()?;
    if frame.get(12..14)? != ETHERTYPE.to_be_bytes()
        || frame.get(14..22)? != MAGIC
        || *frame.get(22)? != VERSION
    {
        return None;
    }
    let flags = *frame.get(23)?;
    let number = |at: usize| Some(u64::from_be_bytes(frame.get(at..at + 8)?.try_into().ok()?));
    let end = 41 + usize::from(*frame.get(40)?);
    let host = String::from_utf8(frame.get(41..end)?.to_vec()).ok()?;
    let count = usize::from(*frame.get(end)?).min(MAX_ADDRESSES);
    let addresses = (0..count)
        .map(|index| {
            let at = end + 1 + index * 16;
            let octets: [u8; 16] = frame.get(at..at + 16)?.try_into().ok()?;
            Some(std::net::Ipv6Addr::from(octets).to_canonical())
        })
        .collect::<Option<_>>()?;
    let heartbeat = Heartbeat {
        group: number(24)?,
        host,
        active: flags & ACTIVE != 0,
        leaving: flags & LEAVING != 0,
        term: number(32)?,
        addresses,
    };
    Some((from, heartbeat))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn heartbeat_round_trips(host in "[a-z0-9.-]{1,60}", active: bool, leaving: bool, term: u64, group: u64,
                                 four: [u8; 4], six: [u8; 14]) {
            let mut octets = [0xfd; 16];
            octets[2..].copy_from_slice(&six);
            let heartbeat = Heartbeat { group, host, active, leaving, term, addresses: vec![four.into(), octets.into()] };
            let from = [2, 0, 0, 0, 0, 1];
            prop_assert_eq!(decode(&encode(from, &heartbeat)), Some((from, heartbeat)));
        }

        #[test]
        fn random_bytes_are_no_heartbeat(frame in proptest::collection::vec(any::<u8>(), 0..200)) {
            prop_assert_eq!(decode(&frame), None);
        }

        #[test]
        fn truncated_heartbeat_never_panics(cut in 0_usize..90) {
            let heartbeat = Heartbeat { group: 1, host: "a".repeat(20), active: true, leaving: false, term: 3, addresses: vec![[1; 4].into()] };
            let frame = encode([2; 6], &heartbeat);
            let _ = decode(&frame[..cut.min(frame.len())]);
        }
    }
}
