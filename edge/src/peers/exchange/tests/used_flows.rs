// SPDX-License-Identifier: Apache-2.0
//! Flows whose packets come to a host that does not answer for their VIP, as where routers spread packets over all hosts.

use super::*;

/// The first host answers for the VIPs, and the second one gets the packets. The claim is old, so that each packet is seen long after
/// it began. Returns the flows of the second host.
fn second_host_is_used() -> (Host, Host, BTreeMap<FlowKey<V6>, IpAddr>) {
    let (first, mut second) = two_hosts();
    second.exchange.confirmed.make_older(HOUR);
    let opened = second.open(CLIENTS);
    (first, second, opened)
}

/// The exceptions among the flows, as the first host knows and tells them.
fn exceptions_of(host: &Host) -> Vec<Exception> {
    let now = flow_time();
    let mut found = Vec::new();
    let scanned = host.exchange.flows.scan(now, |key, pinned| {
        found.extend(host.exchange.exception(key, &pinned, now));
    });
    scanned.expect("scan");
    found
}

/// As if the host had not seen a packet of them for so long that they have ended: it says so, or sends a list without them.
fn end_flows(host: &mut Host, flows: &BTreeMap<FlowKey<V6>, IpAddr>, by_list: bool) {
    let keys: Vec<_> = flows.keys().copied().collect();
    host.exchange.flows.delete(&keys).expect("delete");
    if by_list {
        host.exchange.sent.clear();
        host.exchange.handle(Command::WantsList(1));
        host.exchange.send_lists(Instant::now());
    } else {
        host.exchange.recheck();
    }
}

#[test]
fn flows_that_this_host_sees_are_neither_offered_nor_forgotten() {
    requires!(Root);
    let (mut first, mut second, opened) = second_host_is_used();
    move_slots([&mut first, &mut second]);
    for _ in 0..3 {
        second.work();
    }
    assert!(second.exchange.offered.is_empty());
    assert_eq!(second.continued(CLIENTS), opened);
    // Nor once the other host knows all that it is told.
    settle(&mut first, &mut second);
    assert_eq!(second.continued(CLIENTS), opened);
}

/// The other host was told of a flow, has never seen a packet of it, and says after its time that it is over.
#[test]
fn other_host_cannot_end_flows_that_this_host_sees() {
    requires!(Root);
    for by_list in [false, true] {
        let (mut first, mut second, opened) = second_host_is_used();
        move_slots([&mut first, &mut second]);
        let told = exceptions_of(&second);
        assert!(told.len() > opened.len() / 2, "{}", told.len());
        // As in an offer of a time when this host had not seen a packet.
        first.exchange.receive(9, Message::Offers(told.clone()));
        settle(&mut first, &mut second);
        let idle = told.iter().map(|exception| Exception { idle: 100, ..*exception }).collect();
        second.exchange.receive(1, Message::Exceptions(idle));
        assert_eq!(second.continued(CLIENTS), opened);
        end_flows(&mut first, &opened, by_list);
        assert!(first.tell(&mut second) > 0);
        assert_eq!(second.continued(CLIENTS), opened, "{by_list}");
    }
}

#[test]
fn other_host_cannot_move_flows_that_this_host_sees() {
    requires!(Root);
    let (_, mut second, opened) = second_host_is_used();
    let of = |key, target| Exception { key, target, idle: 0, is_closing: false };
    let other = |target| if target == node(1) { node(2) } else { node(1) };
    let told = opened.iter().map(|(key, target)| of(*key, other(*target))).collect();
    second.exchange.receive(1, Message::Exceptions(told));
    assert_eq!(second.continued(CLIENTS), opened);
    assert!(opened.keys().all(|key| !second.exchange.confirmed.contains(key)));
    assert!(second.exchange.metrics.refused("known") > 50);
    // What another host tells of the same target does not make a flow older.
    let told = opened.iter().map(|(key, target)| Exception { idle: 100, ..of(*key, *target) }).collect();
    second.exchange.receive(1, Message::Exceptions(told));
    let now = flow_time();
    let flows = second.dataplane.flows().expect("flows");
    assert!(flows.iter().all(|(_, flow)| flow.idle(now) < 100));
}

/// Of a flow that a host has told, this host knows from packets alone that they come here.
#[test]
fn told_flows_of_which_no_packet_comes_end_with_the_word_of_the_other_host() {
    requires!(Root);
    for by_list in [false, true] {
        let (mut first, mut second) = two_hosts();
        second.exchange.confirmed.make_older(HOUR);
        let opened = first.open(CLIENTS);
        move_slots([&mut first, &mut second]);
        settle(&mut first, &mut second);
        assert!(second.dataplane.flows().expect("flows").len() > 50);
        end_flows(&mut first, &opened, by_list);
        first.tell(&mut second);
        assert!(second.dataplane.flows().expect("flows").is_empty(), "{by_list}");
    }
}

/// The last packet of a connection in use may be from before the claim.
#[test]
fn flows_stay_until_it_is_clear_whether_their_packets_come_here() {
    requires!(Root);
    let (mut first, mut second) = (Host::new(0), Host::new(30));
    second.set_answers(true);
    let opened = second.open(CLIENTS);
    second.set_answers(false);
    first.set_answers(true);
    first.connect();
    second.connect();
    move_slots([&mut first, &mut second]);
    first.work();
    first.tell(&mut second);
    for _ in 0..3 {
        second.scan_later();
    }
    let moved = second.exchange.offered.len();
    assert!(moved > opened.len() / 2, "{moved}");
    assert_eq!(second.dataplane.flows().expect("flows").len(), opened.len());
    // No packet has come since: they are of the time in which this host answered.
    second.exchange.confirmed.settle();
    second.scan_later();
    assert_eq!(second.dataplane.flows().expect("flows").len(), opened.len() - moved);
}

/// A host that has connected has no list before it is scanned.
#[test]
fn host_without_a_list_is_offered_flows_as_well() {
    requires!(Root);
    let (mut first, mut second, idle) = second_host_has_idle_flows();
    second.connect();
    move_slots([&mut first, &mut second]);
    second.exchange.scan();
    assert!(second.exchange.followers.values().all(|follower| follower.listed.is_none()));
    second.tell(&mut first);
    first.work();
    first.tell(&mut second);
    second.exchange.confirmed.settle();
    second.scan_later();
    assert_eq!(second.continued(CLIENTS), idle);
}

/// Slots move again and again before the host that answers has read the offers.
#[test]
fn offered_flows_stay_until_they_could_have_been_confirmed() {
    requires!(Root);
    let (mut first, mut second, idle) = second_host_has_idle_flows();
    move_slots([&mut first, &mut second]);
    for _ in 0..20 {
        second.exchange.scan();
    }
    assert_eq!(second.dataplane.flows().expect("flows").len(), idle.len());
    second.tell(&mut first);
    first.work();
    first.tell(&mut second);
    second.scan_later();
    assert_eq!(second.continued(CLIENTS), idle);
    // What is not confirmed in its time is forgotten.
    let (mut first, mut second, idle) = second_host_has_idle_flows();
    move_slots([&mut first, &mut second]);
    second.exchange.scan();
    let offered = second.exchange.offered.len();
    second.scan_later();
    assert_eq!(second.dataplane.flows().expect("flows").len(), idle.len() - offered);
}

#[test]
fn host_that_connects_is_offered_what_others_were_offered() {
    requires!(Root);
    let (mut first, mut second, idle) = second_host_has_idle_flows();
    move_slots([&mut first, &mut second]);
    // To a host that does not answer.
    second.exchange.scan();
    let offered = |host: &Host| host.exchange.offered.keys().copied().collect::<HashSet<_>>();
    let before = offered(&second);
    assert!(before.len() > idle.len() / 2, "{}", before.len());
    second.connect();
    second.exchange.scan();
    assert_eq!(offered(&second), before);
    settle(&mut first, &mut second);
    assert_eq!(second.continued(CLIENTS), idle);
}

#[test]
fn flows_that_no_host_could_be_offered_stay() {
    requires!(Root);
    let (mut first, mut second, idle) = second_host_has_idle_flows();
    while second.exchange.followers.values_mut().all(|follower| follower.send(Item::List(Arc::default()))) {}
    move_slots([&mut first, &mut second]);
    for _ in 0..3 {
        second.scan_later();
        assert!(second.exchange.offered.is_empty());
    }
    assert_eq!(second.dataplane.flows().expect("flows").len(), idle.len());
    settle(&mut first, &mut second);
    assert_eq!(second.continued(CLIENTS), idle);
}

#[test]
fn without_a_host_to_offer_to_flows_are_forgotten_only_while_one_answers() {
    requires!(Root);
    for is_live in [true, false] {
        let (mut first, mut second, idle) = second_host_has_idle_flows();
        second.exchange.handle(Command::Disconnected(1));
        if !is_live {
            second.exchange.handle(Command::Ended(1));
        }
        move_slots([&mut first, &mut second]);
        for _ in 0..3 {
            second.scan_later();
        }
        let left = second.dataplane.flows().expect("flows").len();
        assert_eq!(left == idle.len(), !is_live, "{left}");
    }
}
