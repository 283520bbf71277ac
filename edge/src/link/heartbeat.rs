// SPDX-License-Identifier: Apache-2.0
//! The format of the heartbeats between edge hosts: frames of a local experimental ethertype to a group address. Pure.
//!
//! They are not IP: no router forwards them, and they need no configured address. They are not signed, because a host that can
//! send them can also answer ARP for any address.
//!
//! Hosts of different versions hear each other. After the addresses come fields of a kind, a length and a value. A version skips
//! the kinds that it does not know, and the first one skips all of them as padding. Kind 0 is padding.

use std::net::IpAddr;

use super::ability::Ability;
use crate::hash;
use crate::link::mac::Mac;
use crate::shards::Shards;

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
/// The kind of the field with the sender's ability: a byte for `can_serve`, and `healthy_vips`.
const ABILITY: u8 = 1;
/// The kind of the field with the hash of the cluster's UID.
const CLUSTER: u8 = 2;
/// The kind of the field with the shards: 16 bytes for those that the host answers for, and 16 for those that it offers.
const SHARDS: u8 = 3;

/// How the sender shares out the VIPs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HeartbeatShards {
    /// The shards that it answers for.
    pub(crate) active: Shards,
    /// Those of them that it wants others to take.
    pub(crate) offered: Shards,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Heartbeat {
    /// The id of the sender's group; heartbeats of other groups are ignored.
    pub(crate) group: u64,
    /// The hash of the UID of the sender's cluster; `None` if it is not known, and from hosts of earlier versions.
    pub(crate) cluster: Option<u64>,
    pub(crate) host: String,
    /// Whether the host answers for any VIP.
    pub(crate) active: bool,
    /// `None` from hosts of earlier versions, which have all VIPs or none.
    pub(crate) shards: Option<HeartbeatShards>,
    /// Whether the host wants another one to take over.
    pub(crate) leaving: bool,
    /// Counts takeovers of all hosts. Of two hosts that are active for a shard the one with the higher term stays active.
    pub(crate) term: u64,
    /// The host's own addresses.
    pub(crate) addresses: Vec<IpAddr>,
    /// How well the host can serve; `None` from hosts of earlier versions.
    pub(crate) ability: Option<Ability>,
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
    if let Some(ability) = heartbeat.ability {
        frame.extend_from_slice(&[ABILITY, 5, u8::from(ability.can_serve)]);
        frame.extend_from_slice(&ability.healthy_vips.to_be_bytes());
    }
    if let Some(cluster) = heartbeat.cluster {
        frame.extend_from_slice(&[CLUSTER, 8]);
        frame.extend_from_slice(&cluster.to_be_bytes());
    }
    if let Some(HeartbeatShards { active, offered }) = heartbeat.shards {
        frame.extend_from_slice(&[SHARDS, 32]);
        frame.extend_from_slice(&active.to_bytes());
        frame.extend_from_slice(&offered.to_bytes());
    }
    frame.resize(frame.len().max(MIN_FRAME), 0);
    frame
}

/// The value of the first field of a kind.
fn field(mut rest: &[u8], kind: u8) -> Option<&[u8]> {
    loop {
        let (head, body) = rest.split_at_checked(2)?;
        let (value, after) = body.split_at_checked(usize::from(head[1]))?;
        match head[0] {
            0 => return None,
            found if found == kind => return Some(value),
            _ => rest = after,
        }
    }
}

fn ability(value: &[u8]) -> Option<Ability> {
    let can_serve = *value.first()? != 0;
    Some(Ability { can_serve, healthy_vips: u32::from_be_bytes(value.get(1..5)?.try_into().ok()?) })
}

fn shards(value: &[u8]) -> Option<HeartbeatShards> {
    let of = |bytes: &[u8]| bytes.try_into().ok().map(Shards::from_bytes);
    Some(HeartbeatShards { active: of(value.get(..16)?)?, offered: of(value.get(16..32)?)? })
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
    let fields = frame.get(end + 1 + count * 16..)?;
    let heartbeat = Heartbeat {
        group: number(24)?,
        cluster: field(fields, CLUSTER).and_then(|value| Some(u64::from_be_bytes(value.try_into().ok()?))),
        host,
        active: flags & ACTIVE != 0,
        shards: field(fields, SHARDS).and_then(shards),
        leaving: flags & LEAVING != 0,
        term: number(32)?,
        addresses,
        ability: field(fields, ABILITY).and_then(ability),
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
                                 cluster: Option<u64>, four: [u8; 4], six: [u8; 14], can_serve: bool, healthy_vips: u32,
                                 shards: Option<([u8; 16], [u8; 16])>) {
            let mut octets = [0xfd; 16];
            octets[2..].copy_from_slice(&six);
            let ability = Some(Ability { can_serve, healthy_vips });
            let addresses = vec![four.into(), octets.into()];
            let of = Shards::from_bytes;
            let shards = shards.map(|(active, offered)| HeartbeatShards { active: of(active), offered: of(offered) });
            let heartbeat = Heartbeat { group, cluster, host, active, shards, leaving, term, addresses, ability };
            let from = [2, 0, 0, 0, 0, 1];
            prop_assert_eq!(decode(&encode(from, &heartbeat)), Some((from, heartbeat)));
        }

        #[test]
        fn random_bytes_are_no_heartbeat(frame in proptest::collection::vec(any::<u8>(), 0..200)) {
            prop_assert_eq!(decode(&frame), None);
        }

        #[test]
        fn truncated_or_changed_heartbeat_never_panics(cut in 0_usize..110, at in 22_usize..100, byte: u8) {
            let mut frame = encode([2; 6], &example());
            if let Some(place) = frame.get_mut(at) {
                *place = byte;
            }
            let _ = decode(&frame[..cut.min(frame.len())]);
        }
    }

    fn example() -> Heartbeat {
        let ability = Some(Ability { can_serve: true, healthy_vips: 7 });
        let addresses = vec![[1; 4].into()];
        Heartbeat {
            group: 1,
            cluster: Some(9),
            host: "a".repeat(20),
            active: true,
            shards: Some(HeartbeatShards { active: Shards::ALL, offered: Shards::NONE }),
            leaving: false,
            term: 3,
            addresses,
            ability,
        }
    }

    /// A frame of the first version: `example` without the fields.
    fn of_first_version() -> Vec<u8> {
        let mut frame = Vec::new();
        frame.extend_from_slice(&GROUP);
        frame.extend_from_slice(&[2; 6]);
        frame.extend_from_slice(b"\x88\xb5SteerEdg\x01\x01");
        frame.extend_from_slice(&1_u64.to_be_bytes());
        frame.extend_from_slice(&3_u64.to_be_bytes());
        frame.push(20);
        frame.extend_from_slice(&[b'a'; 20]);
        frame.push(1);
        frame.extend_from_slice(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 1, 1, 1, 1]);
        frame
    }

    #[test]
    fn hosts_of_the_first_version_hear_and_are_heard() {
        let old = of_first_version();
        let heard = Heartbeat { ability: None, cluster: None, shards: None, ..example() };
        assert_eq!(decode(&old), Some(([2; 6], heard.clone())));
        let padded = [&old[..], &[0; 9]].concat();
        assert_eq!(decode(&padded), Some(([2; 6], heard)));
        // The first version ignores what comes after the addresses.
        assert_eq!(encode([2; 6], &example())[..old.len()], old);
    }

    #[test]
    fn unknown_fields_are_skipped() {
        let mut frame = of_first_version();
        frame.extend_from_slice(&[77, 3, 1, 1, 1, ABILITY, 5, 1, 0, 0, 0, 7, 78, 0]);
        frame.extend_from_slice(&[CLUSTER, 8, 0, 0, 0, 0, 0, 0, 0, 9]);
        assert_eq!(decode(&frame), Some(([2; 6], Heartbeat { shards: None, ..example() })));
    }
}
