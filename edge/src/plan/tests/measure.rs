// SPDX-License-Identifier: Apache-2.0
//! How long a plan takes. `cargo test --release -p steerage-edge -- --ignored --nocapture measure_plans`

use super::amending::parsed;
use super::*;

fn milliseconds(mut values: Vec<Duration>) -> String {
    values.sort();
    let of = |at: usize| values.get(at).map_or(0.0, |value| value.as_secs_f64() * 1000.0);
    format!("{:.1} ({:.1}..{:.1})", of(values.len() / 2), of(0), of(values.len() - 1))
}

/// The times of load balancers that are added, changed and deleted without a plan, in turn, with what follows for health checks.
fn amended(
    index: &mut Index,
    host: &HostNetwork,
    health: &mut HealthByProbe,
    plan: &mut Plan,
    forms: [&Value; 2],
) -> [Vec<Duration>; 3] {
    let [mut added, mut changed, mut deleted] = [const { Vec::new() }; 3];
    let name = forms[0]["metadata"]["name"].as_str().expect("a name").to_owned();
    let forms = forms.map(parsed);
    let endpoints = EndpointNodes::default();
    for _ in 0..11 {
        let [first, second] = forms.clone();
        let deletion = Event::Delete { key: name.clone(), version: String::new() };
        let events = [Event::Apply(first), Event::Apply(second), deletion];
        for (event, times) in events.into_iter().zip([&mut added, &mut changed, &mut deleted]) {
            apply(index, IndexEvent::LoadBalancer(event));
            let begun = Instant::now();
            let inputs = PlanInputs { index, host, health, endpoints: &endpoints, room: ROOM, now: begun };
            let amended = plan.groups.amend(&inputs, &mut plan.assignments, &[name.clone()].into());
            amended.expect("no plan is needed");
            for (address, sets) in &plan.groups.take_changed_checks() {
                health.set_checks_of(*address, sets);
            }
            times.push(begun.elapsed());
        }
    }
    [added, changed, deleted]
}

#[test]
#[ignore = "a measurement"]
fn measure_plans() {
    const ROUNDS: usize = 11;
    for services in [1_000_u16, 10_000] {
        let load_balancers: Vec<_> = (0..services)
            .map(|number| {
                let of = |step: u16| target(u8::try_from((number + step) % 250).expect("small") + 1, 1);
                let [high, low] = number.to_be_bytes();
                let mut one = load_balancer(&format!("lb{number}"), "10.0.0.1", &[of(0), of(1), of(2)]);
                let vips = [format!("10.7.{high}.{low}"), format!("fd00::7:{number:x}")];
                one["spec"]["addresses"] = json!(vips);
                one
            })
            .collect();
        let mut index = index(&load_balancers);
        let begun = Instant::now();
        let first = plan_next(&index, &host(), &HealthByProbe::default(), begun, &Assignments::default());
        let all = begun.elapsed();
        let mut health = health(&first, &[]);
        let mut last = plan_next(&index, &host(), &health, Instant::now(), &first.assignments);
        let probe =
            probes(&last).iter().find(|probe| probe.address == ip("10.0.0.7")).expect("probe").clone();
        let (mut times, mut followed) = (Vec::new(), Vec::new());
        for round in 0..ROUNDS {
            let state = if round % 2 == 0 { TargetState::Unhealthy } else { TargetState::Healthy };
            health.insert(
                probe.clone(),
                TargetHealth { state, reason: String::new(), ..TargetHealth::default() },
            );
            let begun = Instant::now();
            last = plan_next(&index, &host(), &health, begun, &last.assignments);
            times.push(begun.elapsed());
        }
        for round in 0..ROUNDS {
            let state = if round % 2 == 0 { TargetState::Healthy } else { TargetState::Unhealthy };
            health.insert(
                probe.clone(),
                TargetHealth { state, reason: String::new(), ..TargetHealth::default() },
            );
            let begun = Instant::now();
            let endpoints = EndpointNodes::default();
            let inputs =
                HealthInputs { health: &health, endpoints: &endpoints, room: ROOM, now: Instant::now() };
            let changed = Changed { probes: std::slice::from_ref(&probe), ..Changed::default() };
            let result =
                last.groups.retarget(inputs, &mut last.assignments, changed).expect("no plan is needed");
            followed.push(begun.elapsed());
            assert!(!result.tables.is_empty());
        }
        let new = |numbers: &[u8]| {
            let targets: Vec<_> = numbers.iter().map(|number| target(*number, 1)).collect();
            let mut one = load_balancer("new", "10.0.0.1", &targets);
            one["spec"]["addresses"] = json!(["10.7.255.1", "fd00::8:1"]);
            one
        };
        let forms = [&new(&[1, 2, 3]), &new(&[2, 3, 4])];
        let [added, changed, deleted] = amended(&mut index, &host(), &mut health, &mut last, forms);
        println!(
            "one load balancer added {} ms, its targets changed {} ms, deleted {} ms",
            milliseconds(added),
            milliseconds(changed),
            milliseconds(deleted)
        );
        println!(
            "{services} Services, two families, three targets: all {:.1} ms; one target's health by a plan {} ms, without {} ms",
            all.as_secs_f64() * 1000.0,
            milliseconds(times),
            milliseconds(followed)
        );
    }
}

/// The shape of a large cluster under `health-check` steering: every node is a target of every Service, and states the ports of all.
#[test]
#[ignore = "a measurement"]
fn measure_plans_of_many_nodes() {
    const ROUNDS: usize = 11;
    for (services, nodes) in [(1_000_u16, 500_u16), (10_000, 5_000)] {
        let address = |node: u16| {
            let [high, low] = node.to_be_bytes();
            IpAddr::from([10, 1, high, low])
        };
        let load_balancers: Vec<_> = (0..services)
            .map(|number| {
                let [high, low] = number.to_be_bytes();
                let mut one = load_balancer(&format!("lb{number}"), &format!("10.7.{high}.{low}"), &[]);
                one["spec"]["nodeSet"] = json!("eligible");
                one["spec"]["healthCheck"]["port"] = json!(30_000 + number);
                one
            })
            .collect();
        let mut index = index(&load_balancers);
        let targets: Vec<_> = (0..nodes)
            .map(|node| json!({"node": format!("node{node}"), "addresses": [address(node)], "weight": 1}))
            .collect();
        let set = json!({"metadata": {"name": "eligible"}, "spec": {"targets": targets}});
        let set: EdgeNodeSet = serde_json::from_value(set).expect("set");
        let set = NodeSet { name: set.name_any(), uid: "set-uid".into(), spec: set.spec.into() };
        apply(&mut index, IndexEvent::NodeSet(Event::Apply(set)));
        let mut host = host();
        let mut routes: Vec<_> = host.routes.iter().cloned().collect();
        routes[0].net = "10.0.0.0/8".parse().expect("net");
        host.routes = routes.into();
        let begun = Instant::now();
        let mut health = HealthByProbe::default();
        let first = plan_next(&index, &host, &health, begun, &Assignments::default());
        let unknown = begun.elapsed();
        let check = |service: u16| {
            let mut check = index.load_balancers().next().expect("one").spec.health_check.clone();
            check.port = 30_000 + service;
            check
        };
        let ports: Arc<crate::port_set::PortSet> =
            Arc::new((0..services).map(|number| 30_000 + number).collect());
        for node in 0..nodes {
            health.set_stated(address(node), Arc::clone(&ports));
        }
        let healthy =
            TargetHealth { state: TargetState::Healthy, reason: String::new(), ..TargetHealth::default() };
        for service in 0..services {
            for endpoint in 0..3_u16 {
                let node = (u32::from(service) * 7 + u32::from(endpoint) * 1001) % u32::from(nodes);
                let probe =
                    Probe { address: address(u16::try_from(node).expect("small")), check: check(service) };
                health.insert(probe, healthy.clone());
            }
        }
        let (mut last, mut times, mut checks, mut followed) = (first, Vec::new(), Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            let begun = Instant::now();
            last = plan_next(&index, &host, &health, begun, &last.assignments);
            times.push(begun.elapsed());
            let begun = Instant::now();
            health.set_checks(&last.checks);
            checks.push(begun.elapsed());
        }
        assert!(last.is_tried);
        for round in 0..ROUNDS {
            let probe = Probe { address: address(7), check: check(1) };
            let health_now = if round % 2 == 0 { healthy.clone() } else { TargetHealth::without_endpoint() };
            health.insert(probe.clone(), health_now);
            let begun = Instant::now();
            let endpoints = EndpointNodes::default();
            let inputs = HealthInputs { health: &health, endpoints: &endpoints, room: ROOM, now: begun };
            let changed = Changed { probes: std::slice::from_ref(&probe), ..Changed::default() };
            last.groups.retarget(inputs, &mut last.assignments, changed).expect("no plan is needed");
            followed.push(begun.elapsed());
        }
        let new = |port: u16| {
            let mut one = load_balancer("new", "10.7.255.1", &[]);
            one["spec"]["nodeSet"] = json!("eligible");
            one["spec"]["healthCheck"]["port"] = json!(port);
            one["spec"]["listeners"][0]["port"] = json!(port);
            one
        };
        // Another port of the health check would wait for probes.
        let mut second = new(29_999);
        second["spec"]["affinity"] = json!({"timeoutSeconds": 10_800});
        let forms = [&new(29_999), &second];
        let [added, changed, deleted] = amended(&mut index, &host, &mut health, &mut last, forms);
        println!(
            "one load balancer added {} ms, changed {} ms, deleted {} ms",
            milliseconds(added),
            milliseconds(changed),
            milliseconds(deleted)
        );
        let status = std::fs::read_to_string("/proc/self/status").expect("status");
        let peak = status.lines().find(|line| line.starts_with("VmHWM")).unwrap_or_default();
        println!(
            "{services} Services on {nodes} nodes: nothing known {:.1} ms; a plan {} ms, its checks {} ms; one target's health {} ms; {peak}",
            unknown.as_secs_f64() * 1000.0,
            milliseconds(times),
            milliseconds(checks),
            milliseconds(followed)
        );
    }
}
