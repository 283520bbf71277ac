// SPDX-License-Identifier: Apache-2.0
//! The sizes of tables, and who is served where the maps have no room for all.

use super::*;

fn size(plan: &Plan, vip: &str) -> usize {
    listener(plan, vip, 6, 80).1.slots.len()
}

#[test]
fn table_without_a_healthy_target_stays_small() {
    let targets: Vec<_> = (1..=100).map(|number| target(number, 1)).collect();
    let load_balancers = [load_balancer("a", "10.0.0.100", &targets)];
    let open = plan(&load_balancers, &host(), &HealthByProbe::default());
    assert_eq!(
        (size(&open, "10.0.0.100"), reached(&open, "10.0.0.100", 6, 80).len()),
        (1021, 32),
        "not tried"
    );
    let all: Vec<_> = (1..=100).map(|number| format!("10.0.0.{number}")).collect();
    let all: Vec<_> = all.iter().map(String::as_str).collect();
    let failed = plan(&load_balancers, &host(), &health(&open, &all));
    assert_eq!((size(&failed, "10.0.0.100"), reached(&failed, "10.0.0.100", 6, 80).len()), (1021, 100));
    let healthy = plan(&load_balancers, &host(), &health(&open, &[]));
    assert_eq!(size(&healthy, "10.0.0.100"), 8191);
    let all_but_two: Vec<_> = (3..=100).map(|number| format!("10.0.0.{number}")).collect();
    let all_but_two: Vec<_> = all_but_two.iter().map(String::as_str).collect();
    let two = plan(&load_balancers, &host(), &health(&open, &all_but_two));
    assert_eq!((size(&two, "10.0.0.100"), reached(&two, "10.0.0.100", 6, 80).len()), (251, 2));
}

#[test]
fn largest_tables_get_less_if_there_is_no_room_for_all() {
    let many: Vec<_> = (1..=100).map(|number| target(number, 1)).collect();
    let load_balancers = [
        load_balancer("a", "10.0.0.100", &many),
        load_balancer("b", "10.0.0.101", &many[..50]),
        load_balancer("c", "10.0.0.102", &many[..2]),
    ];
    let first = plan(&load_balancers, &host(), &HealthByProbe::default());
    let all: Vec<_> = probes(&first).iter().map(|probe| probe.address.to_string()).collect();
    let failed = health(&first, &all.iter().map(String::as_str).collect::<Vec<_>>());
    let (index, endpoints) = (index(&load_balancers), EndpointNodes::default());
    let sizes = |room| {
        let inputs = PlanInputs {
            index: &index,
            host: &host(),
            health: &failed,
            endpoints: &endpoints,
            room,
            now: Instant::now(),
        };
        let plan = crate::plan::plan(&inputs, &Assignments::default());
        ["10.0.0.100", "10.0.0.101", "10.0.0.102"]
            .map(|vip| (size(&plan, vip), reached(&plan, vip, 6, 80).len()))
    };
    assert_eq!(sizes(ROOM), [(1021, 100), (1021, 50), (251, 2)]);
    assert_eq!(sizes(Room { slots: 1500, ..ROOM }), [(509, 100), (509, 50), (251, 2)]);
    assert_eq!(sizes(Room { members: 62, ..ROOM }), [(1021, 30), (1021, 30), (251, 2)]);
    assert_eq!(sizes(Room { members: 1, ..ROOM }), [(1021, 1), (1021, 1), (251, 1)], "each has one");
}

/// A load balancer with as many listeners and source ranges.
fn sized(namespace: &str, name: &str, last: u8, created: u8, ports: u16) -> Value {
    let mut load_balancer = load_balancer(name, &format!("10.0.0.{last}"), &[target(1, 1)]);
    load_balancer["metadata"]["creationTimestamp"] = json!(format!("2026-01-01T00:00:{created:02}Z"));
    load_balancer["spec"]["service"]["namespace"] = json!(namespace);
    load_balancer["spec"]["listeners"] =
        (1..=ports).map(|port| json!({"protocol": "TCP", "port": port})).collect();
    load_balancer["spec"]["sourceRanges"] =
        (1..=ports).map(|number| json!(format!("10.{}.0.0/16", 2 * number))).collect();
    load_balancer
}

fn served_vips(plan: &Plan) -> Vec<String> {
    plan.state.vips.keys().map(|vip| vip.to_string().rsplit('.').next().expect("octet").to_owned()).collect()
}

#[test]
fn what_is_new_gets_what_is_left_the_smallest_namespace_first() {
    let load_balancers = [
        sized("greedy", "a", 100, 1, 30),
        sized("greedy", "b", 101, 2, 30),
        sized("modest", "c", 102, 3, 10),
        sized("greedy", "d", 103, 4, 5),
    ];
    for (room, wanted) in [
        (Room { listeners: 60, ..ROOM }, ["100", "102", "103"]),
        (Room { prefixes: 60, ..ROOM }, ["100", "102", "103"]),
        (Room { slots: 800, ..ROOM }, ["100", "101", "102"]),
    ] {
        let plan = plan_in(room, &load_balancers);
        assert_eq!(served_vips(&plan), wanted, "{room:?}");
        let refused = if wanted.contains(&"101") { "d" } else { "b" };
        let problem = &plan.statuses[refused].problem;
        assert!(problem.contains("no room for its"), "{problem}");
    }
}

#[test]
fn what_is_served_stays_and_what_grows_does_not_take_its_place() {
    let room = Room { listeners: 60, ..ROOM };
    let old = [sized("old", "a", 100, 1, 20), sized("old", "b", 101, 2, 20), sized("new", "c", 102, 3, 10)];
    let before = plan_in(room, &old);
    assert_eq!(served_vips(&before).len(), 3);
    for adopted in [before.assignments, Assignments::adopt(&before.state)] {
        // An older object grows; a younger one is added, with the first of all names.
        let grown = [
            sized("old", "a", 100, 1, 20),
            sized("old", "b", 101, 2, 20),
            sized("new", "c", 102, 3, 40),
            sized("old", "0", 103, 4, 20),
        ];
        let after = plan_in_after(room, &grown, &adopted);
        assert_eq!(served_vips(&after), ["100", "101", "103"], "the one that has grown lost only itself");
        let fewer = [grown[0].clone(), grown[1].clone(), sized("new", "c", 102, 3, 10), grown[3].clone()];
        assert_eq!(served_vips(&plan_in_after(room, &fewer, &adopted)), ["100", "101", "102"]);
    }
}
