// SPDX-License-Identifier: Apache-2.0
//! Which hosts are known, and what forged heartbeats do.

use super::*;
use crate::host::PeerLiveness;

#[test]
fn dead_host_is_forgotten_after_an_hour() {
    let mut link = Link::new(2);
    link.beats(10);
    link.hosts[1] = None;
    let last = link.now;
    let host = link.hosts[0].as_mut().expect("host");
    let minutes = |minutes| last + Duration::from_mins(minutes);
    for (now, known) in [
        (last, Some(PeerLiveness::Live)),
        (last + TIMING.timeout(), Some(PeerLiveness::Recent)),
        (minutes(1), Some(PeerLiveness::Dead)),
        (minutes(59), Some(PeerLiveness::Dead)),
        (minutes(60), None),
    ] {
        while link.now < now {
            link.now = (link.now + TIMING.interval).min(now);
            host.evaluate(link.now);
        }
        assert_eq!(host.peers(now).first().map(|peer| peer.liveness), known, "{:?}", now - last);
    }
}

/// A forged heartbeat has the highest term that there is.
#[test]
fn hosts_agree_after_a_heartbeat_with_the_highest_term() {
    let mut link = Link::new(2);
    link.beats(10);
    let forged = Heartbeat {
        host: "zz".to_owned(),
        term: u64::MAX,
        shards: Some(HeartbeatShards { active: Shards::ALL, offered: Shards::NONE }),
        ..link.host(1).heartbeat(Vec::new())
    };
    let now = link.now;
    for host in link.hosts.iter_mut().flatten() {
        host.on_heartbeat([2, 0, 0, 0, 0, 9], forged.clone(), now);
    }
    link.beat();
    assert_eq!(link.shards(), [0, 0], "it is believed while it lives");
    link.beats(10);
    assert_eq!(link.active(), [0]);
    assert_eq!(link.shards().iter().sum::<u32>(), 128);
    // Both have the highest term then, and the name decides.
    link.parts[1] = 1;
    link.beats(10);
    assert_eq!(link.active(), [0, 1]);
    link.parts[1] = 0;
    link.beats(2);
    assert_eq!(link.shards(), [0, 128]);
    link.set_ability(1, UNABLE);
    link.beats(20);
    assert_eq!(link.shards(), [128, 0], "a host with the highest term yields as others do");
}

/// Any machine on the link can send heartbeats from any address.
#[test]
fn forged_hosts_do_not_displace_real_ones() {
    let mut link = Link::new(2);
    link.beats(10);
    let shards = link.shards();
    let forged = |link: &mut Link, from: std::ops::Range<u16>| {
        let beat = Heartbeat { active: false, ..Link::new(1).host(0).heartbeat(Vec::new()) };
        for number in from {
            let [high, low] = number.to_be_bytes();
            let (now, name) = (link.now, format!("forged-{number}"));
            for host in link.hosts.iter_mut().flatten() {
                host.on_heartbeat(
                    [6, 0, 0, 0, high, low],
                    Heartbeat { host: name.clone(), ..beat.clone() },
                    now,
                );
            }
        }
    };
    forged(&mut link, 0..1000);
    link.beat();
    forged(&mut link, 1000..2000);
    link.beats(20);
    forged(&mut link, 2000..2200);
    for (at, mac) in [(0, [2, 0, 0, 0, 0, 1]), (1, [2, 0, 0, 0, 0, 0])] {
        let host = link.hosts[at].as_ref().expect("host");
        assert!(host.peers.len() <= 256, "{}", host.peers.len());
        assert!(host.peers.contains_key(&mac));
    }
    assert_eq!(link.shards(), shards);
}

/// As where all nodes of a large cluster are edge hosts. A host that did not know who answers for a shard would answer for it, too.
#[test]
fn hosts_that_answer_are_known_among_any_number() {
    let mut link = Link::new(1);
    link.beats(10);
    let host = link.hosts[0].as_mut().expect("host");
    let beat = Link::new(1).host(0).heartbeat(Vec::new());
    let mut hear = |number: u16, active: Shards, now| {
        let [high, low] = number.to_be_bytes();
        let shards = Some(HeartbeatShards { active, offered: Shards::NONE });
        let (name, is_active) = (format!("node-{number}"), !active.is_empty());
        let beat = Heartbeat { host: name, active: is_active, shards, ..beat.clone() };
        host.on_heartbeat([6, 0, 0, 0, high, low], beat, now);
    };
    let (before, now) = (link.now, link.now + TIMING.interval);
    for (number, at) in (0..600).flat_map(|number| [(number, before), (number, now)]) {
        hear(number, Shards::NONE, at);
    }
    for (number, shard) in (600..).zip(Shard::all()) {
        hear(number, [shard].into_iter().collect(), now);
    }
    let with_shards = host.peers.values().filter(|peer| !peer.active.is_empty()).count();
    assert_eq!((host.peers.len(), with_shards), (256, 128));
}
