// SPDX-License-Identifier: Apache-2.0
//! Tables of single judgements, and hosts whose flows, clients and routers are a model.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

const X: SessionId = 1;
const Y: SessionId = 2;
const LISTS: Duration = Duration::from_mins(2);

fn key(port: u32) -> FlowKey<V6> {
    FlowKey { ports: port, protocol: 6, ..FlowKey::default() }
}

fn pinned(target: u32, seen: u32) -> Pinned {
    Pinned { target, seen, is_established: true }
}

fn with_hosts() -> RoutedFlows {
    let mut flows = RoutedFlows::new(LISTS);
    flows.begin_session(X, [1; 6]);
    flows.begin_session(Y, [2; 6]);
    flows
}

/// Idle times are whole units and take time to arrive, so the same time is told as an earlier one.
#[test]
fn flow_that_is_told_again_with_an_earlier_time_is_not_used_here() {
    let (mut flows, now) = (with_hosts(), Instant::now());
    flows.note(X, key(1), 500, now);
    flows.note(X, key(1), 499, now);
    assert!(flows.is_told_by_other(&key(1), 500));
    assert_eq!(flows.recheck(now, |_| Some(pinned(1, 500))), RoutedChanges::default());
    flows.note(X, key(1), 510, now);
    assert!(flows.is_told_by_other(&key(1), 510));
    assert_eq!(flows.recheck(now, |_| Some(pinned(1, 511))).used, [(key(1), pinned(1, 511))]);
}

#[test]
fn host_that_has_seen_the_last_packet_is_right() {
    use Judgement::{New, Outdated, Refused, Replaces};
    let flows = with_hosts();
    let judge = |own: Option<Pinned>, target, seen| {
        flows.judge(X, ToldFlow { key: &key(1), seen, target: Some(target) }, own)
    };
    assert_eq!(judge(None, 1, 500), New);
    for (own, seen, wanted) in [
        (pinned(2, 500), 500, Refused),
        (pinned(2, 500), 500 + UNSURE, Refused),
        (pinned(2, 500), 501 + UNSURE, Replaces),
        (pinned(2, 500), 500 - UNSURE, Refused),
        (pinned(2, 500), 499 - UNSURE, Outdated),
        // Both say the same.
        (pinned(1, 500), 400, Refused),
        (pinned(1, 500), 600, Replaces),
        // One packet may have come by mistake.
        (Pinned { is_established: false, ..pinned(2, 500) }, 400, Refused),
    ] {
        assert_eq!(judge(Some(own), 1, seen), wanted, "{own:?}, {seen}");
    }
    let unknown = ToldFlow { key: &key(1), seen: 400, target: None };
    assert_eq!(flows.judge(X, unknown, Some(pinned(2, 500))), Refused);
}

#[test]
fn of_two_hosts_that_tell_a_flow_the_later_packet_decides() {
    let mut flows = with_hosts();
    flows.note(X, key(1), 500, Instant::now());
    let judge = |flows: &RoutedFlows, session, seen, own| {
        flows.judge(session, ToldFlow { key: &key(1), seen, target: Some(1) }, Some(pinned(2, own)))
    };
    assert_eq!(judge(&flows, Y, 500 + UNSURE, 500), Judgement::Refused);
    assert_eq!(judge(&flows, Y, 501 + UNSURE, 500), Judgement::Replaces);
    assert_eq!(judge(&flows, X, 400, 500), Judgement::Replaces, "the same host knows what it says");
    // A packet has come here.
    assert_eq!(judge(&flows, X, 501, 501), Judgement::Refused);
    assert!(flows.is_told_by_other(&key(1), 500) && !flows.is_told_by_other(&key(1), 501));
    assert!(!flows.is_told_by_other(&key(2), 500));
    flows.end_session(X);
    assert!(!flows.is_told_by_other(&key(1), 500), "a host that comes has it from nobody else");
}

#[test]
fn flow_ends_when_its_host_is_connected_and_tells_it_no_more() {
    let start = Instant::now();
    let at = |lists: u32| start + LISTS * lists;
    let look = |_: &FlowKey<V6>| Some(pinned(1, 500));
    let mut flows = with_hosts();
    flows.note(X, key(1), 500, start);
    assert_eq!(flows.recheck(at(2), look), RoutedChanges::default(), "one list may be late");
    flows.note(X, key(1), 500, at(2));
    assert_eq!(flows.recheck(at(4), look), RoutedChanges::default());
    flows.end_session(X);
    assert_eq!(flows.recheck(at(9), look), RoutedChanges::default(), "its host is gone");
    flows.begin_session(3, [1; 6]);
    assert_eq!(flows.recheck(at(9), look).ended, [key(1)], "another session of the same host");
    assert_eq!(flows.len(), 0);
}

#[test]
fn flow_whose_packets_come_is_this_hosts_own() {
    let mut flows = with_hosts();
    let now = Instant::now();
    for port in 1..=3 {
        flows.note(X, key(port), 500, now);
    }
    let changes = flows.recheck(now + LISTS * 9, |flow| match flow.ports {
        1 => Some(pinned(7, 501)),
        2 => Some(Pinned { is_established: false, ..pinned(7, 501) }),
        _ => None,
    });
    assert_eq!(changes, RoutedChanges { used: vec![(key(1), pinned(7, 501))], ended: vec![] });
    assert!(!flows.contains(&key(1)) && flows.contains(&key(2)) && !flows.contains(&key(3)));
    flows.remove_vips(|_| true);
    assert_eq!(flows.len(), 0);
}

/// What happens to the hosts and clients of the model.
#[derive(Clone, Debug)]
enum Step {
    /// A client opens a connection from a port, also from one that it has used.
    Open(u32),
    /// Packets of all connections but of this port's.
    PacketsBut(u32),
    MoveSlots,
    /// The router moves the flow of a port to a host.
    Route(u32, usize),
    /// A host dies, and routers move its flows to others.
    Kill(usize),
    /// It comes back with the flows of its kernel.
    Start(usize),
    Wait(u32),
}

const HOSTS: usize = 3;
const PORTS: u32 = 4;

struct Host {
    is_alive: bool,
    flows: BTreeMap<u32, Pinned>,
    routed: RoutedFlows,
    /// The exceptions that it has told, and their targets.
    sent: BTreeMap<u32, u32>,
}

/// A told flow: port, target and time.
type Exceptions = Vec<(u32, Pinned)>;

struct World {
    start: Instant,
    now: u32,
    /// Changes with the slots.
    tables: u32,
    hosts: Vec<Host>,
    /// The host that the router sends each port to.
    routes: BTreeMap<u32, usize>,
    /// The target of each connection.
    connections: BTreeMap<u32, u32>,
}

impl World {
    fn new() -> Self {
        let host = |_| Host {
            is_alive: true,
            flows: BTreeMap::new(),
            routed: RoutedFlows::new(LISTS),
            sent: BTreeMap::new(),
        };
        let mut world = Self {
            start: Instant::now(),
            now: 1000,
            tables: 0,
            hosts: (0..HOSTS).map(host).collect(),
            routes: (0..PORTS).map(|port| (port, 0)).collect(),
            connections: BTreeMap::new(),
        };
        (0..HOSTS).for_each(|host| world.connect(host));
        world
    }

    fn connect(&mut self, host: usize) {
        let mac = |host: usize| [u8::try_from(host).expect("few"); 6];
        let session = |host: usize| u64::try_from(host).expect("few");
        for other in (0..HOSTS).filter(|other| *other != host) {
            self.hosts[host].routed.begin_session(session(other), mac(other));
            self.hosts[other].routed.begin_session(session(host), mac(host));
        }
    }

    fn slot(&self, port: u32) -> u32 {
        (port + self.tables) % 5
    }

    fn instant(&self) -> Instant {
        self.start + Duration::from_secs(self.now.into())
    }

    /// As the program does.
    fn packet(&mut self, port: u32, opens: bool) -> u32 {
        let (slot, now) = (self.slot(port), self.now);
        let flow = self.hosts[self.routes[&port]].flows.entry(port);
        if opens {
            return flow.insert_entry(pinned(slot, now)).get().target;
        }
        let flow = flow.or_insert(pinned(slot, now));
        if now - flow.seen >= TOUCH {
            flow.seen = now;
        }
        flow.target
    }

    /// All that are alive tell the others, until nobody has news.
    fn settle(&mut self) {
        for _ in 0..3 {
            for host in (0..HOSTS).filter(|host| self.hosts[*host].is_alive).collect::<Vec<_>>() {
                let slots: BTreeMap<_, _> = (0..PORTS).map(|port| (port, self.slot(port))).collect();
                let instant = self.instant();
                let Host { flows, routed, sent, .. } = &mut self.hosts[host];
                let changes = routed.recheck(instant, |key| flows.get(&key.ports).copied());
                for key in changes.ended {
                    flows.remove(&key.ports);
                }
                let own = flows.iter().map(|(port, pinned)| (*port, *pinned));
                let own = own.filter(|(port, pinned)| !routed.is_told_by_other(&key(*port), pinned.seen));
                // Exceptions, and what was one until the client used its port again.
                let is_news = |(port, pinned): &(u32, Pinned)| {
                    pinned.target != slots[port] || sent.get(port).is_some_and(|told| *told != pinned.target)
                };
                let mut told: Exceptions = own.filter(is_news).collect();
                let exceptions = told.iter().filter(|(port, pinned)| pinned.target != slots[port]);
                *sent = exceptions.map(|(port, pinned)| (*port, pinned.target)).collect();
                told.extend(changes.used.into_iter().map(|(key, own)| (key.ports, own)));
                self.tell(host, &told);
            }
        }
    }

    fn tell(&mut self, from: usize, told: &Exceptions) {
        let session = u64::try_from(from).expect("few");
        let instant = self.instant();
        for other in (0..HOSTS).filter(|other| *other != from) {
            if !self.hosts[other].is_alive {
                continue;
            }
            let mut outdated = Exceptions::new();
            let Host { flows, routed, .. } = &mut self.hosts[other];
            for (port, pinned) in told {
                let own = flows.get(port).copied();
                let flow = ToldFlow { key: &key(*port), seen: pinned.seen, target: Some(pinned.target) };
                match routed.judge(session, flow, own) {
                    Judgement::New | Judgement::Replaces => {
                        flows.insert(*port, *pinned);
                        routed.note(session, key(*port), pinned.seen, instant);
                    }
                    Judgement::Refused => {}
                    Judgement::Outdated => outdated.extend(own.map(|own| (*port, own))),
                }
            }
            if !outdated.is_empty() {
                self.tell(other, &outdated);
            }
        }
    }

    fn step(&mut self, step: &Step) {
        match *step {
            Step::Open(port) => {
                // Clients use a port again later than that.
                self.now += UNSURE + TOUCH + 1;
                let target = self.packet(port, true);
                self.connections.insert(port, target);
            }
            Step::PacketsBut(port) => {
                self.now += TOUCH;
                let open: Vec<_> = self.connections.iter().map(|(port, target)| (*port, *target)).collect();
                for (port, target) in open.into_iter().filter(|(open, _)| *open != port) {
                    assert_eq!(self.packet(port, false), target, "a packet of port {port}");
                }
            }
            Step::MoveSlots => {
                // Idle connections that only a dead host knew are given up.
                let alive = || self.hosts.iter().filter(|host| host.is_alive);
                let is_known = |port: &u32, target: &mut u32| {
                    alive().any(|host| host.flows.get(port).is_some_and(|flow| flow.target == *target))
                };
                self.connections.retain(is_known);
                self.tables += 1;
                // A scan follows a change within moments.
                self.settle();
            }
            Step::Route(port, host) if self.hosts[host].is_alive => {
                self.settle();
                self.routes.insert(port, host);
            }
            Step::Kill(host) if self.hosts.iter().filter(|host| host.is_alive).count() > 1 => {
                self.settle();
                self.hosts[host].is_alive = false;
                for other in 0..HOSTS {
                    self.hosts[other].routed.end_session(u64::try_from(host).expect("few"));
                }
                let next = self.hosts.iter().position(|host| host.is_alive).expect("alive");
                for route in self.routes.values_mut().filter(|route| **route == host) {
                    *route = next;
                }
            }
            Step::Start(host) if !self.hosts[host].is_alive => {
                // Given up: a port that was used again while the host was dead, if those that saw the new connection are dead.
                let flows = &self.hosts[host].flows;
                let is_known = |port: &u32, target: u32| {
                    let mut alive = self.hosts.iter().filter(|host| host.is_alive);
                    alive.any(|host| host.flows.get(port).is_some_and(|flow| flow.target == target))
                };
                self.connections.retain(|port, target| {
                    flows.get(port).is_none_or(|old| old.target == *target) || is_known(port, *target)
                });
                self.hosts[host].is_alive = true;
                self.hosts[host].routed = RoutedFlows::new(LISTS);
                self.hosts[host].sent.clear();
                self.connect(host);
                self.settle();
            }
            Step::Wait(time) => self.now += time,
            Step::Route(..) | Step::Kill(_) | Step::Start(_) => {}
        }
    }
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (0..PORTS).prop_map(Step::Open),
        3 => (0..=PORTS).prop_map(Step::PacketsBut),
        2 => Just(Step::MoveSlots),
        4 => (0..PORTS, 0..HOSTS).prop_map(|(port, host)| Step::Route(port, host)),
        1 => (0..HOSTS).prop_map(Step::Kill),
        2 => (0..HOSTS).prop_map(Step::Start),
        1 => (0..900_u32).prop_map(Step::Wait),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Wherever routers send a connection's packets, whatever slots move, whoever dies, and whatever port is used again.
    #[test]
    fn connections_keep_their_targets(steps in prop::collection::vec(step(), 1..60)) {
        let mut world = World::new();
        for step in steps.iter().chain([&Step::PacketsBut(PORTS)]) {
            world.step(step);
        }
    }
}
