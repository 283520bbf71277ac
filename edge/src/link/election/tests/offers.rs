// SPDX-License-Identifier: Apache-2.0
//! Offers: how shards move to hosts that join or return.

use super::*;

/// A host that does not know the flows of the others could take nothing without loss.
#[test]
fn returning_host_gets_its_shards_once_it_knows_the_flows() {
    let mut link = Link::new(2);
    link.beats(10);
    let before = link.shards();
    link.hosts[0] = None;
    link.beats(10);
    assert_eq!(link.shards(), [0, 128]);
    link.hosts[0] = Some(link.host(0));
    link.beats(200);
    assert_eq!(link.shards(), [0, 128]);
    link.inform();
    let mut longest = 0;
    for _ in 0..100 {
        let had = link.shards()[0];
        link.beat();
        longest = longest.max(link.shards()[0] - had);
        for shard in Shard::all() {
            assert!(!link.active_for(shard).is_empty(), "no shard is without a host");
        }
    }
    assert_eq!(link.shards(), before);
    assert!(longest <= 16, "{longest} at once");
}

#[test]
fn host_that_fails_again_and_again_gets_its_shards_later_each_time() {
    let mut link = Link::new(2);
    link.beats(10);
    let mut waits = Vec::new();
    for _ in 0..4 {
        link.hosts[0] = None;
        link.beats(10);
        link.hosts[0] = Some(link.host(0));
        link.inform();
        let mut beats = 0;
        while link.shards()[0] == 0 {
            link.beat();
            beats += 1;
            assert!(beats < 1000);
        }
        waits.push(beats / 50);
    }
    assert_eq!(waits, [2, 4, 8, 16], "in units of 10 s");
}

#[test]
fn host_that_leaves_gets_its_shards_back_after_the_first_wait() {
    let mut link = Link::new(2);
    link.beats(10);
    for _ in 0..3 {
        link.hosts[0].as_mut().expect("host").leave();
        link.beats(4);
        link.hosts[0] = None;
        link.beats(10);
        link.hosts[0] = Some(link.host(0));
        link.inform();
        link.beats(60);
        assert!(link.shards()[0] > 0);
        link.beats(100);
    }
}

/// It is found much worse while it has an offer, or ignores it.
#[test]
fn offers_that_nobody_takes_end() {
    let mut link = Link::new(2);
    link.beats(10);
    link.hosts[0] = None;
    link.beats(10);
    let mut mute = link.host(0);
    mute.set_ability(ABLE);
    let beat = |mute: &Election| Heartbeat { term: 0, ..mute.heartbeat(Vec::new()) };
    let host = link.hosts[1].as_mut().expect("host");
    host.set_informed([mute.mac()].into());
    let (mut offered, mut now) = (Vec::new(), link.now);
    for _ in 0..300 {
        now += TIMING.interval;
        host.on_heartbeat(mute.mac(), beat(&mute), now);
        host.evaluate(now);
        offered.push(host.heartbeat(Vec::new()).shards.expect("shards").offered.len());
        assert_eq!(host.active(), Shards::ALL);
    }
    let changes: Vec<_> = offered.chunk_by(|a, b| a == b).map(|same| (same[0], same.len())).collect();
    assert!(matches!(changes[..], [(0, _), (16, 15), (0, 150), (16, 15), (0, _)]), "{changes:?}");
}

/// An offer has no recipient: the most preferred host takes the shard, also one that has just returned and may fail again.
#[test]
fn no_shard_is_offered_while_a_host_that_gets_none_would_take_it() {
    let mut link = Link::new(3);
    link.hosts[0] = None;
    link.hosts[1] = None;
    link.beats(10);
    assert_eq!(link.shards(), [0, 0, 128]);
    link.hosts[1] = Some(link.host(1));
    link.beats(60);
    link.hosts[0] = Some(link.host(0));
    link.beats(5);
    link.inform();
    for _ in 0..40 {
        link.beat();
        assert_eq!(link.shards()[0], 0, "it has not been able to serve for 10 s");
    }
    assert!(link.shards()[1] > 10, "it is the most preferred one for these");
    link.beats(300);
    let shards = link.shards();
    assert!(shards.iter().all(|shards| (30..55).contains(shards)), "{shards:?}");
}

/// It has all VIPs or none.
#[test]
fn hosts_share_a_link_with_one_of_an_earlier_version() {
    let mut link = Link::new(3);
    let (mac, mut now) = ([2, 0, 0, 0, 0, 9], link.now);
    let old = |active, term| Heartbeat {
        host: "edge-9".to_owned(),
        shards: None,
        active,
        term,
        ..link.host(1).heartbeat(Vec::new())
    };
    let (standby, active) = (old(false, 0), old(true, 7));
    let mut beats = |link: &mut Link, old: &Heartbeat, count: u32| {
        for _ in 0..count {
            now = link.now;
            for host in link.hosts.iter_mut().flatten() {
                host.on_heartbeat(mac, old.clone(), now);
            }
            link.beat();
        }
    };
    beats(&mut link, &active, 10);
    assert_eq!(link.shards(), [0, 0, 0], "it has all");
    beats(&mut link, &standby, 2);
    assert_eq!(link.shards().iter().sum::<u32>(), 128, "it has stepped down");
    link.inform();
    for host in link.hosts.iter_mut().flatten() {
        host.set_informed([mac].into());
    }
    let shards = link.shards();
    beats(&mut link, &standby, 200);
    assert_eq!(link.shards(), shards, "it gets no offer");
}
