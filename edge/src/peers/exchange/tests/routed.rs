// SPDX-License-Identifier: Apache-2.0
//! Hosts with routes: routers send each flow to either of them, and to the other one later.

use super::*;

/// Both hosts have routes, and the first one answers for the VIPs.
fn two_routed_hosts() -> (Host, Host) {
    let (mut first, mut second) = (Host::with_routes(0), Host::with_routes(30));
    first.set_answers(true);
    first.connect();
    second.connect();
    settle(&mut first, &mut second);
    (first, second)
}

/// As if so much time had passed, in the units of flows, since a host has seen its flows.
fn age(host: &Host, by: u32) {
    let flows = host.dataplane.flows().expect("flows");
    let now = flow_time();
    let exceptions: Vec<_> = flows
        .into_iter()
        .map(|(key, flow)| Exception {
            key,
            target: host.exchange.flows.target(flow.target).expect("a target"),
            idle: flow.idle(now) + by,
            is_closing: false,
        })
        .collect();
    let keys: Vec<_> = exceptions.iter().map(|exception| exception.key).collect();
    host.exchange.flows.delete(&keys).expect("delete");
    host.exchange.flows.insert(&exceptions, now, |_| true, |_, _| false).expect("insert");
}

/// Flows that both hosts have seen no packet of for a while.
const LATER: u32 = 60;

#[test]
fn connections_survive_when_a_router_moves_them_to_any_host() {
    requires!(Root);
    for from_second in [false, true] {
        let (mut first, mut second) = two_routed_hosts();
        let (from, to) = if from_second { (&mut second, &mut first) } else { (&mut first, &mut second) };
        let opened = from.open(CLIENTS);
        move_slots([&mut *from, &mut *to]);
        settle(from, to);
        assert_eq!(to.continued(CLIENTS), opened, "the host that answers is the second one: {from_second}");
        // And back, after the slots have moved once more, which the new host tells.
        age(to, 0);
        for host in [&mut *from, &mut *to] {
            host.set_nodes(7);
        }
        settle(to, from);
        assert_eq!(from.continued(CLIENTS), opened);
    }
}

#[test]
fn host_that_dies_has_told_its_flows() {
    requires!(Root);
    let (mut first, mut second) = two_routed_hosts();
    let opened = second.open(CLIENTS);
    move_slots([&mut first, &mut second]);
    second.exchange.scan();
    second.exchange.send_lists(Instant::now());
    second.tell(&mut first);
    // The first one also answers, and sends what it answers for: its list ends no flow of another host.
    first.exchange.handle(Command::Ended(1));
    first.work();
    assert_eq!(first.continued(CLIENTS), opened);
}

/// The first host was told, its router now sends it the client's next connection from the same port, by the slots.
#[test]
fn next_connection_from_a_port_reaches_its_target_through_all_hosts() {
    requires!(Root);
    for from_second in [false, true] {
        let (mut first, mut second) = two_routed_hosts();
        let (from, to) = if from_second { (&mut second, &mut first) } else { (&mut first, &mut second) };
        from.open(CLIENTS);
        move_slots([&mut *from, &mut *to]);
        age(from, LATER);
        settle(from, to);
        let opened = to.open(CLIENTS);
        settle(from, to);
        assert_eq!(from.continued(CLIENTS), opened, "{from_second}");
    }
}

/// The host with the old flows was not connected when the ports were used again.
#[test]
fn host_that_returns_with_old_flows_learns_of_the_new_connections() {
    requires!(Root);
    let (mut first, mut second) = two_routed_hosts();
    second.open(CLIENTS);
    age(&second, LATER);
    move_slots([&mut first, &mut second]);
    let opened = first.open(CLIENTS);
    settle(&mut first, &mut second);
    assert_eq!(second.continued(CLIENTS), opened);
}

/// Its connection was busy when it should have heard of them.
#[test]
fn host_that_missed_new_connections_learns_of_them_with_the_next_list() {
    requires!(Root);
    let (mut first, mut second) = two_routed_hosts();
    second.open(CLIENTS);
    age(&second, LATER);
    move_slots([&mut first, &mut second]);
    first.open(CLIENTS);
    second.work();
    let items = first.exchange.followers[&1].items.clone();
    while items.try_send(Item::Changes(Arc::default())).is_ok() {}
    second.tell(&mut first);
    first.tell(&mut second);
    assert!(second.continued(1000..1001) != first.continued(1000..1001), "it has not heard of them");
    first.work();
    first.tell(&mut second);
    assert_eq!(second.continued(1001..CLIENTS.end), first.continued(1001..CLIENTS.end));
    assert!(first.exchange.untold.is_empty());
}

#[test]
fn flows_of_hosts_with_routes_are_not_offered_and_not_forgotten() {
    requires!(Root);
    let (mut first, mut second) = two_routed_hosts();
    let opened = second.open(CLIENTS);
    age(&second, LATER);
    move_slots([&mut first, &mut second]);
    second.exchange.handle(Command::Disconnected(1));
    for _ in 0..3 {
        second.work();
        assert!(second.exchange.offered.is_empty());
    }
    assert_eq!(second.dataplane.flows().expect("flows").len(), opened.len());
    second.connect();
    settle(&mut first, &mut second);
    assert_eq!(first.continued(CLIENTS), opened);
}

/// A host of an earlier version, or without the flag, tells as before, and is told as before.
#[test]
fn host_without_routes_is_asked_as_before() {
    requires!(Root);
    let (mut first, mut second) = (Host::new(0), Host::with_routes(30));
    second.set_answers(true);
    let idle = second.open(CLIENTS);
    second.set_answers(false);
    first.set_answers(true);
    first.connect();
    second.connect();
    settle(&mut first, &mut second);
    move_slots([&mut first, &mut second]);
    second.exchange.scan();
    assert!(second.exchange.offered.len() > idle.len() / 2);
    // What comes to the host with routes meanwhile is told as well.
    let (mut first, mut second) = (Host::new(0), Host::with_routes(30));
    first.set_answers(true);
    first.connect();
    second.connect();
    settle(&mut first, &mut second);
    second.exchange.confirmed.make_older(HOUR);
    let opened = second.open(CLIENTS);
    move_slots([&mut first, &mut second]);
    settle(&mut first, &mut second);
    assert_eq!(first.continued(CLIENTS), opened);
}

#[test]
fn flows_that_are_told_no_more_end() {
    requires!(Root);
    let (mut first, mut second) = two_routed_hosts();
    let opened = first.open(CLIENTS);
    move_slots([&mut first, &mut second]);
    settle(&mut first, &mut second);
    let told = second.exchange.routed.len();
    assert!(told > opened.len() / 2 && second.exchange.sent.is_empty(), "{told}");
    assert_eq!(second.dataplane.flows().expect("flows").len(), told);
    // Its clients have opened other connections by the slots, of which the first host says so.
    first.open(CLIENTS);
    settle(&mut first, &mut second);
    assert!(first.exchange.sent.is_empty());
    second.exchange.routed.make_older(LIST_INTERVAL * 4);
    second.work();
    assert_eq!(second.exchange.routed.len(), 0);
    assert!(second.dataplane.flows().expect("flows").is_empty());
}
