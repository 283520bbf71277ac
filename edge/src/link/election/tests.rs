// SPDX-License-Identifier: Apache-2.0
//! Hosts on a simulated link. Each sends a heartbeat and decides every 200 ms; the tests partition the link and stop hosts.

use super::*;
use proptest::prelude::*;

mod known_peers;
mod offers;

const TIMING: HeartbeatTiming = HeartbeatTiming { interval: Duration::from_millis(200), misses: 3 };

const ABLE: Ability = Ability { can_serve: true, healthy_vips: 100 };
const UNABLE: Ability = Ability { can_serve: false, ..ABLE };

/// A shard for which the hosts are preferred in the order of their numbers.
fn first_shard() -> Shard {
    let preference = |shard: Shard, host: u8| shard.preference(&format!("edge-{host}"));
    let is_in_order =
        |shard: &Shard| (0..3).all(|host| preference(*shard, host) > preference(*shard, host + 1));
    Shard::all().find(is_in_order).expect("one of 24 is")
}

struct Link {
    now: Instant,
    hosts: Vec<Option<Election>>,
    /// Hosts hear only hosts of the same part.
    parts: Vec<u8>,
}

impl Link {
    fn new(hosts: u8) -> Self {
        let mut link = Self { now: Instant::now(), hosts: Vec::new(), parts: vec![0; hosts.into()] };
        link.hosts = (0..hosts).map(|host| Some(link.host(host))).collect();
        link
    }

    fn host(&self, number: u8) -> Election {
        let mut host = Election::new(format!("edge-{number}"), [2, 0, 0, 0, 0, number], 1, TIMING, self.now);
        host.set_ability(ABLE);
        host
    }

    fn set_ability(&mut self, host: usize, ability: Ability) {
        self.hosts[host].as_mut().expect("host").set_ability(ability);
    }

    fn beat(&mut self) {
        self.now += TIMING.interval;
        for from in 0..self.hosts.len() {
            let Some(beat) = self.hosts[from].as_ref().map(|host| (host.mac, host.heartbeat(Vec::new())))
            else {
                continue;
            };
            for to in (0..self.hosts.len()).filter(|to| *to != from) {
                if let (Some(host), true) = (&mut self.hosts[to], self.parts[to] == self.parts[from]) {
                    host.on_heartbeat(beat.0, beat.1.clone(), self.now);
                }
            }
        }
        for host in self.hosts.iter_mut().flatten() {
            host.evaluate(self.now);
        }
    }

    fn beats(&mut self, count: u32) {
        for _ in 0..count {
            self.beat();
        }
    }

    /// The hosts that are active for [`first_shard`].
    fn active(&self) -> Vec<usize> {
        self.active_for(first_shard())
    }

    fn active_for(&self, shard: Shard) -> Vec<usize> {
        let active =
            |host: &Option<Election>| host.as_ref().is_some_and(|host| host.active().contains(shard));
        (0..self.hosts.len()).filter(|host| active(&self.hosts[*host])).collect()
    }

    fn shards(&self) -> Vec<u32> {
        let shards = |host: &Option<Election>| host.as_ref().map_or(0, |host| host.active().len());
        self.hosts.iter().map(shards).collect()
    }

    /// Every host knows the flows of all others.
    fn inform(&mut self) {
        let macs: BTreeSet<Mac> = self.hosts.iter().flatten().map(Election::mac).collect();
        for host in self.hosts.iter_mut().flatten() {
            host.set_informed(macs.clone());
        }
    }
}

/// Two clusters share a link, and both use the default group.
#[test]
fn hosts_of_two_clusters_are_both_active() {
    let mut link = Link::new(3);
    // They become one group before they know their clusters.
    link.beats(5);
    assert_eq!(link.active(), [0]);
    for (host, cluster) in [(0, 7), (1, 8)] {
        link.hosts[host].as_mut().expect("host").set_cluster(Cluster::Known(cluster));
    }
    // The third host has an earlier version: it yields to both of them.
    link.beats(8);
    assert_eq!(link.active(), [0, 1]);
    assert_eq!(link.hosts[0].as_ref().expect("host").peers.len(), 1, "a host of another cluster is no peer");
    // A host that starts again hears the others before it knows its own cluster.
    link.hosts[1] = Some(link.host(1));
    link.beats(5);
    link.hosts[1].as_mut().expect("host").set_cluster(Cluster::Known(8));
    link.beats(8);
    assert_eq!(link.active(), [0, 1]);
}

/// The API server of a host's cluster does not answer, and a host of another cluster is active.
#[test]
fn host_that_does_not_know_its_cluster_is_in_doubt_about_hosts_of_one() {
    let mut link = Link::new(2);
    link.hosts[1].as_mut().expect("host").set_cluster(Cluster::Known(8));
    link.set_ability(0, UNABLE);
    link.hosts[0].as_mut().expect("host").set_cluster(Cluster::Unread);
    let in_doubt = |link: &Link| link.hosts[0].as_ref().expect("host").is_in_doubt(link.now);
    link.beats(8);
    assert_eq!(link.active(), [1]);
    assert!(in_doubt(&link), "its VIPs stay");
    for (own, doubt, active) in [
        (Cluster::Unreadable, false, &[1][..]),
        (Cluster::None, false, &[1]),
        (Cluster::Known(8), false, &[1]),
        (Cluster::Known(7), false, &[0, 1]),
    ] {
        link.hosts[0].as_mut().expect("host").set_cluster(own);
        link.beats(8);
        assert_eq!((in_doubt(&link), &link.active()[..]), (doubt, active), "{own:?}");
    }
}

#[test]
fn hosts_keep_their_roles_when_an_address_changes() {
    let mut link = Link::new(2);
    link.beats(5);
    assert_eq!(link.active(), [0]);
    let old = link.hosts[0].as_ref().expect("host").mac();
    // The greater address wins between equals: the host must not yield to its own frames.
    link.hosts[0].as_mut().expect("host").set_mac([2, 0, 0, 0, 0, 0]);
    let mut host = link.host(0);
    host.set_mac([2, 0, 0, 0, 0, 9]);
    host.set_mac([2, 0, 0, 0, 0, 1]);
    host.on_heartbeat([2, 0, 0, 0, 0, 9], host.heartbeat(Vec::new()), link.now);
    assert!(host.peers.is_empty(), "its own earlier frame");
    link.hosts[0].as_mut().expect("host").set_mac([2, 0, 0, 0, 0, 7]);
    link.beats(8);
    assert_eq!(link.active(), [0]);
    let peers: Vec<_> = link.hosts[1].as_ref().expect("host").peers.keys().copied().collect();
    assert_eq!(peers, [[2, 0, 0, 0, 0, 7]], "without the old address {old:?}");
}

#[test]
fn one_of_several_starting_hosts_becomes_active() {
    let mut link = Link::new(3);
    link.beats(2);
    assert_eq!(link.active(), Vec::<usize>::new(), "no host before it has listened");
    link.beats(10);
    assert_eq!(link.active(), [0]);
}

#[test]
fn single_host_becomes_active() {
    let mut link = Link::new(1);
    link.beats(3);
    assert_eq!(link.active(), [0]);
}

#[test]
fn standby_takes_over_and_a_returning_host_stays_standby() {
    let mut link = Link::new(2);
    link.beats(10);
    link.hosts[0] = None;
    link.beats(2);
    assert_eq!(link.active(), Vec::<usize>::new(), "two heartbeats may be lost");
    link.beats(2);
    assert_eq!(link.active(), [1]);
    link.hosts[0] = Some(link.host(0));
    link.beats(20);
    assert_eq!(link.active(), [1], "no preemption");
}

/// A process that is stopped, or starved of its processor, finds the others' heartbeats in its socket when it runs again.
#[test]
fn host_that_did_not_run_takes_nothing_over_before_it_has_listened() {
    for pause in [TIMING.interval * 5 / 2, TIMING.timeout() * 2, Duration::from_mins(5)] {
        let mut link = Link::new(3);
        link.beats(20);
        let before = link.hosts[2].as_ref().expect("host").active();
        assert!(!before.is_empty() && before.len() < 100, "{before:?}");
        let mut paused = link.hosts[2].take().expect("host");
        for _ in 0..pause.as_millis() / TIMING.interval.as_millis() {
            link.beat();
        }
        link.now += TIMING.interval / 2;
        paused.evaluate(link.now);
        assert!((paused.active() - before).is_empty(), "taken over after {pause:?}: {:?}", paused.active());
        // The first heartbeat of one host tells nothing of the other one.
        let first = link.hosts[0].as_ref().map(|host| (host.mac, host.heartbeat(Vec::new()))).expect("host");
        paused.on_heartbeat(first.0, first.1, link.now);
        paused.evaluate(link.now);
        assert!((paused.active() - before).is_empty(), "taken over after {pause:?}: {:?}", paused.active());
        link.hosts[2] = Some(paused);
        link.beats(5);
        assert_eq!(link.shards().iter().sum::<u32>(), 128, "each shard has one host");
        link.hosts[0] = None;
        link.beats(8);
        assert_eq!(link.shards().iter().sum::<u32>(), 128, "a death is found as before");
    }
}

#[test]
fn host_that_was_paused_while_it_listened_listens_on() {
    let begin = Instant::now();
    let mut host = Election::new("edge".to_owned(), [2; 6], 1, TIMING, begin);
    host.evaluate(begin + TIMING.interval);
    assert!(!host.has_listened());
    let resumed = begin + Duration::from_mins(1);
    host.evaluate(resumed);
    assert!(!host.has_listened(), "it has heard nothing meanwhile");
    host.evaluate(resumed + TIMING.interval);
    assert!(host.has_listened());
    host.evaluate(resumed + Duration::from_mins(1));
    assert!(host.has_listened(), "it knows the others");
}

#[test]
fn host_without_news_of_the_cluster_yields_to_one_that_has_them() {
    let mut link = Link::new(3);
    link.beats(20);
    let before = link.shards();
    for host in 0..3 {
        link.set_ability(host, ABLE.without_news());
    }
    link.beats(200);
    assert_eq!(link.shards(), before, "the API server answers no host");
    let badly_connected = Ability { healthy_vips: ABLE.healthy_vips / 4, ..ABLE };
    link.set_ability(1, badly_connected);
    link.beats(200);
    assert_eq!(link.shards(), before, "few VIPs have a healthy target there");
    for host in [0, 1] {
        link.set_ability(host, ABLE);
    }
    link.beats(100);
    assert_eq!((link.shards()[2], link.shards().iter().sum::<u32>()), (0, 128));
}

#[test]
fn leaving_host_is_replaced_at_once() {
    let mut link = Link::new(2);
    link.beats(10);
    link.hosts[0].as_mut().expect("host").leave();
    link.beats(2);
    assert_eq!(link.active(), [1]);
    assert!(link.hosts[0].as_ref().expect("host").others_active(link.now).contains(first_shard()));
}

#[test]
fn leaving_host_without_peers_stays_active() {
    let mut link = Link::new(1);
    link.beats(5);
    link.hosts[0].as_mut().expect("host").leave();
    link.beats(5);
    assert_eq!(link.active(), [0]);
}

#[test]
fn after_a_partition_the_higher_term_stays_active() {
    let mut link = Link::new(2);
    link.beats(10);
    link.parts[1] = 1;
    link.beats(10);
    assert_eq!(link.active(), [0, 1]);
    link.parts[1] = 0;
    link.beats(2);
    assert_eq!(link.active(), [1]);
}

#[test]
fn heartbeats_of_another_group_are_ignored() {
    let mut election = Link::new(1).host(0);
    let mut beat = election.heartbeat(Vec::new());
    beat.group = 2;
    election.on_heartbeat([2, 0, 0, 0, 0, 9], beat, Instant::now());
    assert!(election.peers.is_empty());
}

#[test]
fn starting_host_that_cannot_serve_leaves_the_vips_to_another() {
    let mut link = Link::new(3);
    link.set_ability(0, UNABLE);
    link.beats(10);
    assert_eq!(link.active(), [1]);
    link.set_ability(0, ABLE);
    link.beats(20);
    assert_eq!(link.active(), [1], "no preemption");
}

#[test]
fn active_host_that_cannot_serve_yields_to_one_that_can() {
    let mut link = Link::new(2);
    link.beats(10);
    link.set_ability(1, UNABLE);
    link.set_ability(0, UNABLE);
    link.beats(50);
    assert_eq!(link.active(), [0], "none can, so the active one stays");
    link.set_ability(1, ABLE);
    link.beats(8);
    assert_eq!(link.active(), [0], "one failed write, repeated after a second, is no reason");
    link.beats(6);
    assert_eq!(link.active(), [1]);
    link.set_ability(0, ABLE);
    link.beats(50);
    assert_eq!(link.active(), [1]);
}

#[test]
fn active_host_whose_targets_fail_yields_to_one_whose_targets_do_not() {
    let mut link = Link::new(2);
    link.beats(10);
    link.set_ability(0, Ability { healthy_vips: 50, ..ABLE });
    link.beats(45);
    assert_eq!(link.active(), [0], "the other may find the same a moment later");
    link.beats(10);
    assert_eq!(link.active(), [1]);
    link.set_ability(1, Ability { healthy_vips: 50, ..ABLE });
    link.beats(100);
    assert_eq!(link.active(), [1], "where both fail nothing moves");
}

/// The one reason has no part in the time of the other.
#[test]
fn failed_write_of_a_host_whose_targets_fail_is_no_reason_to_yield() {
    let mut link = Link::new(2);
    link.beats(10);
    let failing = Ability { healthy_vips: 50, ..ABLE };
    link.set_ability(0, failing);
    link.beats(40);
    link.set_ability(0, Ability { can_serve: false, ..failing });
    link.beats(5);
    assert_eq!(link.active(), [0]);
    link.set_ability(0, failing);
    link.beats(10);
    assert_eq!(link.active(), [1], "10 s after its targets began to fail");
}

/// The probes of now one host, now the other fail.
#[test]
fn vips_move_more_rarely_each_time_for_the_health_of_targets() {
    let mut link = Link::new(2);
    link.beats(10);
    let mut beats = Vec::new();
    for round in 0..4 {
        let from = round % 2;
        link.set_ability(from, Ability { healthy_vips: 50, ..ABLE });
        link.set_ability(1 - from, ABLE);
        let mut count = 0;
        while link.active() != [1 - from] {
            link.beat();
            count += 1;
            assert!(count < 300, "round {round}");
        }
        beats.push(count / 50);
    }
    assert_eq!(beats, [1, 1, 2, 2], "in units of 10 s; each host counts its own yields");
}

/// It watches another namespace, or its directory of objects is empty: all of its VIPs have a healthy target.
#[test]
fn host_with_an_empty_list_takes_no_vips_for_the_health_of_its_targets() {
    let mut link = Link::new(2);
    link.beats(10);
    link.set_ability(0, Ability { healthy_vips: 70, ..ABLE });
    link.set_ability(1, Ability { healthy_vips: 0, ..ABLE });
    link.beats(100);
    assert_eq!(link.active(), [0]);
}

#[test]
fn vips_of_a_leaving_host_are_not_taken_by_one_that_cannot_serve() {
    let mut link = Link::new(2);
    link.beats(10);
    link.set_ability(1, UNABLE);
    link.hosts[0].as_mut().expect("host").leave();
    link.beats(10);
    assert_eq!(link.active(), [0], "nobody takes over, so its kernel keeps the VIPs");
    link.set_ability(1, ABLE);
    link.beats(2);
    assert_eq!(link.active(), [1]);
}

#[test]
fn active_host_that_cannot_serve_does_not_make_others_remove_vips() {
    let mut link = Link::new(2);
    link.set_ability(0, UNABLE);
    link.set_ability(1, UNABLE);
    link.beats(10);
    assert_eq!(link.active(), [0]);
    assert!(link.hosts[1].as_ref().expect("host").others_active(link.now).is_empty());
}

#[test]
fn host_that_can_serve_wins_after_a_partition() {
    let mut link = Link::new(2);
    link.beats(10);
    link.parts[1] = 1;
    link.beats(10);
    link.set_ability(1, UNABLE);
    link.parts[1] = 0;
    link.beats(2);
    assert_eq!(link.active(), [0], "despite its lower term");
}

#[test]
fn host_of_an_earlier_version_counts_as_able() {
    let mut link = Link::new(2);
    link.set_ability(0, UNABLE);
    let old = Heartbeat { ability: None, shards: None, ..link.host(1).heartbeat(Vec::new()) };
    let mut host = link.hosts[0].take().expect("host");
    for _ in 0..3 {
        link.now += TIMING.interval;
        host.on_heartbeat([2, 0, 0, 0, 0, 1], old.clone(), link.now);
        host.evaluate(link.now);
    }
    assert!(host.active().is_empty(), "it goes first");
    let active = Heartbeat { active: true, term: 1, ..old };
    host.on_heartbeat([2, 0, 0, 0, 0, 1], active, link.now);
    assert_eq!(host.others_active(link.now), Shards::ALL);
}

#[test]
fn no_host_yields_to_one_of_an_earlier_version_for_the_health_of_targets() {
    let mut link = Link::new(1);
    let old = Heartbeat { ability: None, shards: None, ..link.host(1).heartbeat(Vec::new()) };
    link.beats(10);
    link.set_ability(0, Ability { healthy_vips: 0, ..ABLE });
    for _ in 0..100 {
        let now = link.now;
        link.hosts[0].as_mut().expect("host").on_heartbeat([2, 0, 0, 0, 0, 1], old.clone(), now);
        link.beat();
        assert_eq!(link.active(), [0]);
    }
}

#[test]
fn hosts_that_start_together_share_out_the_vips() {
    let mut link = Link::new(3);
    link.beats(10);
    let shards = link.shards();
    assert_eq!(shards.iter().sum::<u32>(), 128);
    assert!(shards.iter().all(|shards| (30..55).contains(shards)), "{shards:?}");
}

#[test]
fn shards_of_a_dead_host_go_to_all_others_at_once() {
    let mut link = Link::new(3);
    link.beats(10);
    let before = link.shards();
    link.hosts[0] = None;
    link.beats(3);
    let after = link.shards();
    assert_eq!(after.iter().sum::<u32>(), 128, "three heartbeats are missed, and nobody waits for another");
    assert!(after[1] > before[1] + 5 && after[2] > before[2] + 5, "{before:?} {after:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn exactly_one_host_is_active_for_each_shard_in_the_end(
        events in proptest::collection::vec((0_u8..4, 0_u8..8, 0_u32..12), 0..20)
    ) {
        let mut link = Link::new(4);
        for (host, event, beats) in events {
            let at = usize::from(host);
            match event {
                0 => link.hosts[at] = None,
                1 => link.hosts[at] = Some(link.host(host)),
                2 => link.parts[at] = 1,
                3 => link.parts[at] = 0,
                4 => link.hosts[at].iter_mut().for_each(|host| host.set_ability(UNABLE)),
                5 => link.hosts[at].iter_mut().for_each(|host| host.set_ability(ABLE)),
                6 => link.hosts[at].iter_mut().for_each(Election::leave),
                _ => link.inform(),
            }
            link.beats(beats);
        }
        // Leaving hosts end, and the link is whole again.
        link.parts = vec![0; 4];
        for host in &mut link.hosts {
            if host.as_ref().is_some_and(|host| host.leaving) {
                *host = None;
            }
        }
        link.beats(20);
        // A shard that is being handed over has two hosts for one beat.
        let is_shared = |link: &Link| Shard::all().any(|shard| link.active_for(shard).len() > 1);
        for _ in 0..5 {
            if is_shared(&link) {
                link.beat();
            }
        }
        let alive = link.hosts.iter().flatten().count();
        for shard in Shard::all() {
            prop_assert_eq!(link.active_for(shard).len(), alive.min(1));
            if let Some(active) = link.active_for(shard).first() {
                let can_serve = |host: &Election| host.ability.can_serve;
                let is_able = link.hosts[*active].as_ref().is_some_and(can_serve);
                prop_assert_eq!(is_able, link.hosts.iter().flatten().any(can_serve));
            }
        }
    }
}
