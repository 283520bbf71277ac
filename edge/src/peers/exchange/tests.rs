// SPDX-License-Identifier: Apache-2.0
//! Hosts with the real program and its maps, whose messages are passed on by hand.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::ops::Range;
use std::sync::Arc;

use aya::{TestRun as _, TestRunOptions};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use steerage_edge_dataplane::maglev::Member;
use steerage_edge_dataplane::packet::frames::Frame;
use steerage_edge_dataplane::packet::hash::mix64;
use steerage_edge_dataplane::packet::maps::ListenerKey;
use steerage_edge_dataplane::{Dataplane, Listener, Options, Path, Sizes, State, Table, TargetState};
use steerage_requirements::requires;
use tokio::sync::{mpsc, oneshot};

use super::*;
use crate::peers::message::Message;
use crate::peers::message::tests::any_message;

mod routed;
mod used_flows;

const SYN: u8 = 2;
const ACK: u8 = 16;
const FIN_ACK: u8 = 17;
const PORT: u16 = 443;
const CLIENTS: std::ops::Range<u16> = 1000..1100;
/// The lease of all VIPs, and another one.
const LEASE: u32 = 0;
const OTHER_LEASE: u32 = 5;
/// In the units of flows.
const HOUR: u32 = 3600;

fn ip(text: &str) -> IpAddr {
    text.parse().expect("address")
}

fn vips() -> [IpAddr; 2] {
    [ip("10.0.0.100"), ip("fd00::100")]
}

fn node(number: u32) -> IpAddr {
    IpAddr::from([10, 0, 0, 20 + u8::try_from(number).expect("number")])
}

fn frame(vip: IpAddr, port: u16, flags: u8) -> Vec<u8> {
    let client = if vip.is_ipv4() { "192.0.2.7" } else { "2001:db8::7" };
    Frame::tcp((ip(client), port), (vip, PORT), flags).bytes()
}

fn key(vip: IpAddr, port: u16) -> FlowKey<V6> {
    use steerage_edge_dataplane::packet::transport::ports;
    let client = if vip.is_ipv4() { "192.0.2.7" } else { "2001:db8::7" };
    FlowKey { client: ip(client).into(), vip: vip.into(), ports: ports(port, PORT), protocol: 6 }
}

/// An edge host, whose numbers of targets begin after `offset`.
struct Host {
    dataplane: Dataplane,
    exchange: Exchange,
    state: State,
    offset: u32,
    items: Option<mpsc::Receiver<Item>>,
}

impl Host {
    fn new(offset: u32) -> Self {
        Self::with(offset, 4096)
    }

    /// With room for so many flows.
    fn with(offset: u32, flows: u32) -> Self {
        Self::make(offset, flows, false)
    }

    /// Routers send it packets.
    fn with_routes(offset: u32) -> Self {
        Self::make(offset, 4096, true)
    }

    fn make(offset: u32, flows: u32, has_routes: bool) -> Self {
        let sizes = Sizes {
            services: 64,
            slots: 1 << 16,
            members: 1024,
            prefixes: 1024,
            targets: 64,
            flows,
            recent_flows: 4096,
        };
        let mac = [2, 0, 0, 0, 0, 1];
        let options =
            Options { interface: "lo".to_owned(), mac, tunnel: None, pins: None, sizes, hook: None };
        let mut dataplane = Dataplane::load(options).expect("load");
        let mut state = State::default();
        for number in 1..=9 {
            let target = TargetState { address: node(number), path: Path::Neighbour };
            state.targets.insert(offset + number, target);
        }
        for vip in vips() {
            state.vips.insert(vip, LEASE);
            let listener = Listener { table: 1, has_affinity: false, ranges: None };
            state.listeners.insert(ListenerKey::new(vip, 6, PORT), listener);
        }
        state.tables.insert(1, Arc::default());
        dataplane.write(state.clone()).expect("write");
        let (table, leases) = (dataplane.flow_table(), dataplane.leases());
        let heard = watch::channel(BTreeSet::new()).0;
        let exchange = Exchange::new(table, leases, FlowMetrics::default(), has_routes, heard);
        let mut exchange = exchange.expect("exchange");
        exchange.handle(Command::Began(1, [2, 0, 0, 0, 0, 2]));
        let mut host = Self { dataplane, exchange, state, offset, items: None };
        host.set_nodes(8);
        host
    }

    fn change(&mut self, change: impl FnOnce(&mut State)) {
        change(&mut self.state);
        self.dataplane.write(self.state.clone()).expect("write");
        self.exchange.handle(Command::TablesChanged);
    }

    /// The first nodes are the targets: with nine instead of eight nearly all slots move.
    fn set_nodes(&mut self, count: u32) {
        let size = if count > 8 { 1021 } else { 509 };
        let member = |number| Member { target: number, seed: mix64(u64::from(number)), weight: 1 };
        let mut table = Table::new(size, &(1..=count).map(member).collect::<Vec<_>>());
        table.slots = table.slots.iter().map(|number| number + self.offset).collect();
        table.members = table.members.iter().map(|number| number + self.offset).collect();
        self.change(|state| drop(state.tables.insert(1, Arc::new(table))));
    }

    fn set_answers(&mut self, answers: bool) {
        let until = if answers { Duration::MAX } else { Duration::ZERO };
        assert!(self.dataplane.leases().set(LEASE, until));
        self.exchange.read_leases();
    }

    /// The address of the target that the packet goes to.
    fn target(&self, frame: &[u8]) -> IpAddr {
        let numbers = || {
            let counts = self.dataplane.counts();
            let count = |number| counts.target(number).expect("count").packets;
            self.state.targets.keys().map(|number| (*number, count(*number))).collect::<BTreeMap<_, _>>()
        };
        let before = numbers();
        let mut out = vec![0_u8; frame.len() + 256];
        let mut options = TestRunOptions::new();
        options.data_in = Some(frame);
        options.data_out = Some(&mut out);
        self.dataplane.program().expect("program").test_run(options).expect("test run");
        let after = numbers();
        let counted = after.iter().find(|(number, count)| before[number] != **count);
        self.state.targets[counted.expect("forwarded").0].address
    }

    /// Opens connections of these ports, each by two packets.
    fn open(&self, ports: Range<u16>) -> BTreeMap<FlowKey<V6>, IpAddr> {
        let open = |(vip, port)| {
            let target = self.target(&frame(vip, port, SYN));
            assert_eq!(self.target(&frame(vip, port, ACK)), target);
            (key(vip, port), target)
        };
        ports.flat_map(|port| vips().map(|vip| (vip, port))).map(open).collect()
    }

    /// The targets that the next packets of these connections go to.
    fn continued(&self, ports: Range<u16>) -> BTreeMap<FlowKey<V6>, IpAddr> {
        let next = |(vip, port)| (key(vip, port), self.target(&frame(vip, port, ACK)));
        ports.flat_map(|port| vips().map(|vip| (vip, port))).map(next).collect()
    }

    fn connect(&mut self) {
        let (items, received) = mpsc::channel(16);
        self.exchange.handle(Command::Connected(1, items));
        self.items = Some(received);
    }

    /// Does what is due, and what comes later.
    fn work(&mut self) {
        self.exchange.confirmed.settle();
        self.scan_later();
        self.exchange.recheck();
        self.exchange.send_lists(Instant::now());
    }

    /// When the time of all offers is over.
    fn scan_later(&mut self) {
        for at in self.exchange.offered.values_mut() {
            *at = at.checked_sub(OFFERED_FOR).expect("the machine has run for longer");
        }
        self.exchange.scan();
    }

    /// Passes on what this host has told.
    fn tell(&mut self, other: &mut Host) -> usize {
        let mut count = 0;
        while let Some(Ok(item)) = self.items.as_mut().map(mpsc::Receiver::try_recv) {
            for message in item.messages() {
                let message = Message::decode(&message.encode()).expect("well-formed").expect("known");
                other.exchange.receive(1, message);
                count += 1;
            }
        }
        count
    }
}

/// Both have met, and the first one answers.
fn two_hosts() -> (Host, Host) {
    let (mut first, mut second) = (Host::new(0), Host::new(30));
    first.set_answers(true);
    first.connect();
    second.connect();
    settle(&mut first, &mut second);
    (first, second)
}

/// Both find and hear all that there is.
fn settle(first: &mut Host, second: &mut Host) {
    for _ in 0..3 {
        for host in [&mut *first, &mut *second] {
            host.work();
        }
        first.tell(second);
        second.tell(first);
    }
}

fn take_over(from: &mut Host, to: &mut Host) {
    from.set_answers(false);
    to.set_answers(true);
}

/// A ninth node comes.
fn move_slots(hosts: [&mut Host; 2]) {
    for host in hosts {
        host.set_nodes(9);
    }
}

/// The first host answers, and has not seen a packet of the flows of the second one, which answered before. Returns these flows.
fn second_host_has_idle_flows() -> (Host, Host, BTreeMap<FlowKey<V6>, IpAddr>) {
    let (mut first, mut second) = two_hosts();
    take_over(&mut first, &mut second);
    settle(&mut first, &mut second);
    let idle = second.open(CLIENTS);
    take_over(&mut second, &mut first);
    settle(&mut first, &mut second);
    (first, second, idle)
}

#[test]
fn connections_survive_a_takeover_although_their_slots_have_moved() {
    requires!(Root);
    let (mut first, mut second) = two_hosts();
    let opened = first.open(CLIENTS);
    move_slots([&mut first, &mut second]);
    let moved = |host: &Host| {
        let now = host.continued(CLIENTS);
        opened.iter().filter(|(key, target)| now[*key] != **target).count()
    };
    assert!(moved(&Host::new(3)) == 0, "the slots before are the same on all hosts");
    settle(&mut first, &mut second);
    assert!(first.exchange.sent.count() > opened.len() / 2, "{}", first.exchange.sent.count());
    take_over(&mut first, &mut second);
    assert_eq!(second.continued(CLIENTS), opened);
    // The one that has taken over tells the next.
    let mut third = Host::new(20);
    third.set_nodes(9);
    assert!(moved(&third) > opened.len() / 2, "without the exchange");
    let mut third = Host::new(20);
    third.set_nodes(9);
    third.connect();
    second.connect();
    settle(&mut second, &mut third);
    take_over(&mut second, &mut third);
    assert_eq!(third.continued(CLIENTS), opened);
}

#[test]
fn target_that_was_removed_keeps_its_connections_after_a_takeover() {
    requires!(Root);
    let (mut first, mut second) = two_hosts();
    let opened = first.open(CLIENTS);
    for host in [&mut first, &mut second] {
        host.set_nodes(4);
    }
    settle(&mut first, &mut second);
    take_over(&mut first, &mut second);
    assert_eq!(second.continued(CLIENTS), opened);
}

/// The second host has served a port, the client has opened another connection from it through the first one.
#[test]
fn flow_that_no_host_has_confirmed_is_forgotten() {
    requires!(Root);
    let (mut first, mut second) = two_hosts();
    take_over(&mut first, &mut second);
    settle(&mut first, &mut second);
    second.open(CLIENTS);
    take_over(&mut second, &mut first);
    settle(&mut first, &mut second);
    move_slots([&mut first, &mut second]);
    // By their slots, so no exceptions.
    let opened = first.open(CLIENTS);
    settle(&mut first, &mut second);
    assert_eq!(first.exchange.sent.count(), 0);
    take_over(&mut first, &mut second);
    assert_eq!(second.continued(CLIENTS), opened);
}

/// The same if the second host was not connected while the slots moved.
#[test]
fn complete_list_makes_a_host_forget_what_it_does_not_confirm() {
    requires!(Root);
    let (mut first, mut second) = (Host::new(0), Host::new(30));
    second.set_answers(true);
    second.open(CLIENTS);
    second.set_answers(false);
    first.set_answers(true);
    move_slots([&mut first, &mut second]);
    let opened = first.open(CLIENTS);
    first.connect();
    settle(&mut first, &mut second);
    take_over(&mut first, &mut second);
    assert_eq!(second.continued(CLIENTS), opened);
}

#[test]
fn exception_ends_on_other_hosts_when_its_port_is_used_again() {
    requires!(Root);
    let (mut first, mut second) = two_hosts();
    first.open(CLIENTS);
    move_slots([&mut first, &mut second]);
    settle(&mut first, &mut second);
    assert!(first.exchange.sent.count() > 50);
    // No table changes.
    let opened = first.open(CLIENTS);
    first.exchange.recheck();
    first.tell(&mut second);
    assert_eq!(first.exchange.sent.count(), 0);
    take_over(&mut first, &mut second);
    assert_eq!(second.continued(CLIENTS), opened);
}

/// The first host has not seen a packet of them.
#[test]
fn idle_connections_of_an_earlier_host_stay_while_their_slots_move() {
    requires!(Root);
    let (mut first, mut second, idle) = second_host_has_idle_flows();
    // One has ended, and another one has the port.
    let again = CLIENTS.start;
    first.target(&frame(vips()[0], again, ACK));
    first.target(&frame(vips()[0], again, FIN_ACK));
    move_slots([&mut first, &mut second]);
    let reopened = first.target(&frame(vips()[0], again, SYN));
    assert_eq!(first.target(&frame(vips()[0], again, ACK)), reopened);
    settle(&mut first, &mut second);
    let others = CLIENTS.start + 1..CLIENTS.end;
    let wanted: BTreeMap<_, _> = first.continued(others.clone());
    assert!(wanted.iter().all(|(key, target)| idle[key] == *target));
    assert_eq!(first.target(&frame(vips()[0], again, ACK)), reopened);
    // And the second host has them again.
    take_over(&mut first, &mut second);
    assert_eq!(second.continued(others), wanted);
    assert_eq!(second.target(&frame(vips()[0], again, ACK)), reopened);
}

#[test]
fn host_that_answers_keeps_its_own_flows() {
    requires!(Root);
    let (mut first, mut second) = two_hosts();
    first.open(CLIENTS);
    move_slots([&mut first, &mut second]);
    // Both answer, as while one hands over.
    second.set_answers(true);
    let opened = second.open(CLIENTS);
    settle(&mut first, &mut second);
    assert_eq!(second.continued(CLIENTS), opened);
    assert!(second.exchange.metrics.refused("known") > 50);
}

#[test]
fn lease_of_each_vip_decides() {
    requires!(Root);
    let (mut first, mut second) = two_hosts();
    let [v4, v6] = vips();
    for host in [&mut first, &mut second] {
        host.change(|state| state.vips.extend([(v6, OTHER_LEASE)]));
    }
    // Each host answers for one VIP.
    second.dataplane.leases().set(OTHER_LEASE, Duration::MAX);
    second.exchange.read_leases();
    let open = |host: &Host, vip| {
        let open = |port| {
            let target = host.target(&frame(vip, port, SYN));
            host.target(&frame(vip, port, ACK));
            (port, target)
        };
        CLIENTS.map(open).collect::<BTreeMap<_, _>>()
    };
    let (of_v4, of_v6) = (open(&first, v4), open(&second, v6));
    move_slots([&mut first, &mut second]);
    settle(&mut first, &mut second);
    assert!(first.exchange.sent.count() > 50 && second.exchange.sent.count() > 50);
    assert!(first.exchange.sent.all().all(|(key, _)| key.vip == v4.into()));
    let next = |host: &Host, vip| {
        CLIENTS.map(|port| (port, host.target(&frame(vip, port, ACK)))).collect::<BTreeMap<_, _>>()
    };
    assert_eq!((next(&second, v4), next(&first, v6)), (of_v4, of_v6));
}

#[test]
fn flush_is_answered_once_all_is_told() {
    requires!(Root);
    let (mut first, mut second) = two_hosts();
    let opened = first.open(CLIENTS);
    move_slots([&mut first, &mut second]);
    let (done, mut answers) = mpsc::channel(1);
    first.exchange.handle(Command::Flush(done));
    assert!(matches!(answers.try_recv(), Err(mpsc::error::TryRecvError::Empty)));
    let items = first.items.as_mut().expect("connected");
    let mut items: Vec<_> = std::iter::from_fn(|| items.try_recv().ok()).collect();
    assert!(matches!(items.pop(), Some(Item::Barrier(_))), "after all else");
    for message in items.iter().flat_map(Item::messages) {
        second.exchange.receive(1, message);
    }
    drop(items);
    assert!(matches!(answers.try_recv(), Err(mpsc::error::TryRecvError::Disconnected)));
    take_over(&mut first, &mut second);
    assert_eq!(second.continued(CLIENTS), opened);
}

#[test]
fn host_that_takes_nothing_gets_a_complete_list_later() {
    requires!(Root);
    let (mut first, mut second) = two_hosts();
    let mut opened = BTreeMap::new();
    for round in 0..40_u16 {
        opened = first.open(2000 + round * 10..2010 + round * 10);
        let nodes = if round % 2 == 0 { 9 } else { 8 };
        first.set_nodes(nodes);
        second.set_nodes(nodes);
        first.exchange.scan();
    }
    // More than what may wait: only the last list is complete.
    first.tell(&mut second);
    settle(&mut first, &mut second);
    take_over(&mut first, &mut second);
    assert_eq!(second.continued(2390..2400), opened);
}

/// A host that has just started has no listeners when it is told.
#[test]
fn host_asks_for_a_list_once_it_has_what_it_lacked() {
    requires!(Root);
    let (mut first, _) = two_hosts();
    let opened = first.open(CLIENTS);
    first.set_nodes(9);
    let mut second = Host::new(30);
    second.set_nodes(9);
    let state = second.state.clone();
    for part in 0..3 {
        match part {
            0 => second.change(|state| state.listeners.clear()),
            1 => second.change(|state| state.targets.clear()),
            _ => second.change(|state| {
                state.listeners.clear();
                state.vips.clear();
            }),
        }
        second.exchange.scan();
        first.connect();
        first.work();
        first.tell(&mut second);
        let wishes = |host: &mut Host| {
            let (done, mut applied) = oneshot::channel();
            host.exchange.handle(Command::Received(1, Message::Ping, done));
            applied.try_recv().expect("applied")
        };
        assert!(!wishes(&mut second), "{part}");
        second.change(|all| all.clone_from(&state));
        second.exchange.vips_at = None;
        assert!(wishes(&mut second), "{part}");
        first.exchange.handle(Command::WantsList(1));
        first.work();
        first.tell(&mut second);
        assert!(!wishes(&mut second), "{part}");
    }
    take_over(&mut first, &mut second);
    assert_eq!(second.continued(CLIENTS), opened);
}

#[test]
fn only_flows_of_vips_of_the_state_are_remembered() {
    requires!(Root);
    let (_, mut second) = two_hosts();
    let foreign = V6::from(ip("10.9.9.9"));
    second.exchange.receive(9, Message::Begin);
    second.exchange.receive(9, Message::Vips(vec![foreign; 100]));
    let exception = Exception {
        key: FlowKey { vip: foreign, ..key(vips()[0], 1) },
        target: node(1),
        idle: 0,
        is_closing: false,
    };
    second.exchange.receive(9, Message::Exceptions(vec![exception; 10]));
    second.exchange.receive(9, Message::End);
    assert!(!second.exchange.confirmed.is_claimed(foreign));
    assert!(!second.exchange.confirmed.contains(&exception.key));
    assert_eq!(second.exchange.metrics.refused("unknown_listener"), 10);
    // Nor are flows deleted that no host has told.
    second.set_answers(true);
    let opened = second.open(CLIENTS);
    second.set_answers(false);
    let keys = opened.keys().copied().collect();
    second.exchange.receive(9, Message::Gone(keys));
    assert_eq!(second.dataplane.flows().expect("flows").len(), opened.len());
}

/// In any order, of any host.
#[test]
fn no_message_makes_a_host_fail() {
    requires!(Root);
    let messages = prop::collection::vec((0..3_u64, any_message()), 0..40);
    let mut runner = TestRunner::new(ProptestConfig::with_cases(100));
    let mut host = Host::new(0);
    host.set_answers(true);
    let opened = host.open(1000..1010);
    let host = std::cell::RefCell::new(host);
    let result = runner.run(&messages, |messages| {
        let mut host = host.borrow_mut();
        for (session, message) in messages {
            host.exchange.receive(session, message);
        }
        host.exchange.scan();
        prop_assert!(!host.exchange.has_failed);
        prop_assert_eq!(&host.continued(1000..1010), &opened);
        Ok(())
    });
    result.expect("no failure");
}

/// `cargo test -p steerage-edge --bin steerage-edge -- --ignored --nocapture measure_exchange`
#[tokio::test]
#[ignore = "a measurement"]
async fn measure_exchange() {
    use crate::peers::session::{Session, SharedKey};
    use tokio::net::{TcpListener, TcpStream};

    requires!(Root);
    let (mut first, mut second) = (Host::with(0, 1 << 17), Host::with(30, 1 << 17));
    first.set_answers(true);
    first.connect();
    settle(&mut first, &mut second);
    first.open(1000..8000);
    move_slots([&mut first, &mut second]);
    settle(&mut first, &mut second);
    let key = SharedKey::new(&[b'k'; 32]).expect("a key");
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
    let to = listener.local_addr().expect("address");
    let (client, server) = tokio::join!(
        async { Session::connect(TcpStream::connect(to).await.expect("connect"), &key).await },
        async { Session::accept(listener.accept().await.expect("accept").0, &key).await },
    );
    let (mut client, mut server) = (client.expect("client"), server.expect("server"));
    for round in 0..5 {
        first.connect();
        let began = Instant::now();
        first.exchange.send_lists(began);
        let item = first.items.as_mut().expect("connected").try_recv().expect("a list");
        let made = began.elapsed();
        let messages: Vec<_> = item.messages().map(|message| message.encode()).collect();
        let (count, bytes) = (messages.len(), messages.iter().map(Vec::len).sum::<usize>());
        let sending = async {
            for message in &messages {
                client.send(message).await.expect("send");
            }
        };
        let hearing = async {
            for _ in 0..count {
                let message = Message::decode(&server.receive().await.expect("receive"));
                second.exchange.receive(1, message.expect("well-formed").expect("known"));
            }
        };
        tokio::join!(sending, hearing);
        println!(
            "round {round}: {} exceptions, {bytes} bytes: list made in {made:?}, sent and inserted after {:?}",
            first.exchange.sent.count(),
            began.elapsed()
        );
    }
}
