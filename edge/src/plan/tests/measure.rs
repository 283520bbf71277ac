// SPDX-License-Identifier: Apache-2.0
//! How long a plan takes. `cargo test --release -p steerage-edge -- --ignored --nocapture measure_plans`

use super::*;

fn milliseconds(mut values: Vec<Duration>) -> String {
    values.sort();
    let of = |at: usize| values.get(at).map_or(0.0, |value| value.as_secs_f64() * 1000.0);
    format!("{:.1} ({:.1}..{:.1})", of(values.len() / 2), of(0), of(values.len() - 1))
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
        let index = index(&load_balancers);
        let begun = Instant::now();
        let first = plan_next(&index, &host(), &HealthByProbe::default(), begun, &Assignments::default());
        let all = begun.elapsed();
        let mut health = health(&first, &[]);
        let mut last = plan_next(&index, &host(), &health, Instant::now(), &first.assignments);
        let probe = last.probes.iter().find(|probe| probe.address == ip("10.0.0.7")).expect("probe").clone();
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
        let host = host();
        for round in 0..ROUNDS {
            let state = if round % 2 == 0 { TargetState::Healthy } else { TargetState::Unhealthy };
            health.insert(
                probe.clone(),
                TargetHealth { state, reason: String::new(), ..TargetHealth::default() },
            );
            let begun = Instant::now();
            let inputs = HealthInputs { host: &host, health: &health, room: ROOM, now: Instant::now() };
            let changed = std::slice::from_ref(&probe);
            let result =
                last.groups.retarget(inputs, &mut last.assignments, changed).expect("no plan is needed");
            followed.push(begun.elapsed());
            assert!(!result.tables.is_empty());
        }
        println!(
            "{services} Services, two families, three targets: all {:.1} ms; one target's health by a plan {} ms, without {} ms",
            all.as_secs_f64() * 1000.0,
            milliseconds(times),
            milliseconds(followed)
        );
    }
}
