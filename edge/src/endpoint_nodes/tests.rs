// SPDX-License-Identifier: Apache-2.0
//! The join of a node's own word and the list, as a table and against a model of the whole history.

use proptest::prelude::{Just, Strategy, any, prop_assert, prop_assert_eq, prop_oneof, proptest};
use steerage_edge_api::{EdgeLoadBalancerSpec, HealthCheck, HealthCheckProtocol};

use super::*;
use crate::health::{HealthTracker, ProbeResult};
use crate::probe_schedule::EXPECTED_FOR;

fn check() -> HealthCheck {
    HealthCheck {
        protocol: HealthCheckProtocol::Http,
        port: 30_001,
        path: None,
        interval_milliseconds: 1000,
        timeout_milliseconds: 1000,
        healthy_threshold: 3,
        unhealthy_threshold: 2,
    }
}

fn load_balancer(uid: &str, nodes: Option<&[&str]>) -> LoadBalancer {
    let spec = serde_json::json!({
        "service": {"namespace": "default", "name": "web", "uid": "s"}, "addresses": [], "listeners": [],
        "healthCheck": check(),
    });
    let spec: EdgeLoadBalancerSpec = serde_json::from_value(spec).expect("a specification");
    LoadBalancer {
        name: "lb".to_owned(),
        uid: uid.to_owned(),
        generation: 1,
        created: 0,
        spec: Arc::new(spec),
        endpoint_nodes: nodes.map(|nodes| nodes.iter().map(|node| (*node).to_owned()).collect()),
    }
}

#[test]
fn first_signal_that_has_a_say_decides() {
    let health = |state, lacks_endpoint, is_stated| {
        let (reason, weight) = (format!("{state:?}"), Some(3));
        TargetHealth { state, reason, weight, lacks_endpoint, is_stated }
    };
    let (healthy, unhealthy, initial) = (TargetState::Healthy, TargetState::Unhealthy, TargetState::Initial);
    // The node's own word, whether a statement has brought it, whether it has left the list; and what holds.
    for (state, lacks, is_stated, is_masked, expected, lacks_endpoint, is_of_list) in [
        (healthy, false, true, false, healthy, false, false),
        (healthy, false, true, true, healthy, false, false),
        (unhealthy, true, true, true, unhealthy, true, false),
        (unhealthy, false, true, true, unhealthy, false, false),
        (healthy, false, false, false, healthy, false, false),
        (healthy, false, false, true, unhealthy, true, true),
        (unhealthy, false, false, false, unhealthy, false, false),
        (unhealthy, false, false, true, unhealthy, true, true),
        (unhealthy, true, false, true, unhealthy, true, true),
        (initial, false, false, false, initial, false, false),
        (initial, false, false, true, unhealthy, true, true),
    ] {
        let own = health(state, lacks, is_stated);
        let joined = join(own.clone(), is_masked);
        assert_eq!((joined.state, joined.lacks_endpoint), (expected, lacks_endpoint), "{own:?} {is_masked}");
        assert_eq!(joined.reason == NO_ENDPOINT, is_of_list, "{own:?} {is_masked}");
        assert_eq!(joined == own, !is_of_list);
    }
}

#[test]
fn lists_of_gone_and_new_load_balancers_are_no_news() {
    let now = Instant::now();
    let mut endpoints = EndpointNodes::default();
    assert_eq!(endpoints.update(&load_balancer("u", Some(&["a", "b"])), now), None, "the first one");
    let change = endpoints.update(&load_balancer("u", Some(&["b", "c"])), now).expect("a change");
    assert_eq!((change.joined, change.left), (vec!["c".to_owned()], vec!["a".to_owned()]));
    assert!(endpoints.of("lb").expect("a list").masked_until("a", now).is_some());
    assert_eq!(endpoints.update(&load_balancer("u", Some(&["b", "c"])), now), None, "the same");
    assert_eq!(endpoints.update(&load_balancer("v", Some(&["c"])), now), None, "another one of the name");
    let list = endpoints.of("lb").expect("a list");
    assert!(["a", "b", "c"].iter().all(|node| list.masked_until(node, now).is_none()));
    assert_eq!(endpoints.update(&load_balancer("v", None), now), None);
    assert!(endpoints.of("lb").is_none(), "another steering");
    assert_eq!(endpoints.update(&load_balancer("v", Some(&[])), now), None);
    assert_eq!(endpoints.sync(&Index::default(), now), []);
    assert!(endpoints.of("lb").is_none(), "it is gone");
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Probe(bool),
    /// Whether the node is in the list.
    List(bool),
    Stated(bool),
    Wait(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => any::<bool>().prop_map(Step::Probe),
        3 => any::<bool>().prop_map(Step::List),
        1 => any::<bool>().prop_map(Step::Stated),
        2 => prop_oneof![Just(1_u64), 1..20_u64, 20..70_u64].prop_map(Step::Wait),
    ];
    proptest::collection::vec(step, 0..60)
}

/// All that happened and when, in seconds, looked at anew each time.
#[derive(Default)]
struct History(Vec<(u64, Step)>);

impl History {
    /// The position of the last change of the list before this one, and whether the node has joined. The first list is no change.
    fn last_change(&self, before: usize) -> Option<(usize, bool)> {
        let (mut listed, mut last) = (None, None);
        for (position, (_, step)) in self.0.iter().enumerate().take(before) {
            if let Step::List(is_in) = step {
                if listed.is_some_and(|listed| listed != *is_in) {
                    last = Some((position, *is_in));
                }
                listed = Some(*is_in);
            }
        }
        last
    }

    fn is_soon_after(&self, change: usize, now: u64) -> bool {
        now < self.0[change].0 + 30
    }

    fn is_masked(&self, now: u64) -> bool {
        self.last_change(self.0.len())
            .is_some_and(|(change, has_joined)| !has_joined && self.is_soon_after(change, now))
    }

    /// Whether a probe at this position is the first one to pass since the node joined, and soon enough.
    fn is_first_after_join(&self, position: usize) -> bool {
        let Some((change, true)) = self.last_change(position) else { return false };
        let passed = self.0[change..position].iter().any(|(_, step)| matches!(step, Step::Probe(true)));
        !passed && self.is_soon_after(change, self.0[position].0)
    }

    /// Whether the node is healthy by its own word, if it has spoken, and whether that was a statement.
    fn own(&self) -> (Option<bool>, bool) {
        let (mut healthy, mut was_healthy, mut contrary, mut is_stated) = (None, false, 0, false);
        for (position, (_, step)) in self.0.iter().enumerate() {
            match *step {
                Step::Stated(says) => (healthy, contrary, is_stated) = (Some(says), 0, true),
                Step::Probe(passes) => {
                    is_stated = false;
                    let needed = match (healthy, passes) {
                        (None, _) => 1,
                        (_, true) if !was_healthy || self.is_first_after_join(position) => 1,
                        (_, true) => 3,
                        (_, false) => 2,
                    };
                    contrary = if healthy == Some(passes) { 0 } else { contrary + 1 };
                    if contrary >= needed {
                        (healthy, contrary) = (Some(passes), 0);
                    }
                }
                Step::List(_) | Step::Wait(_) => {}
            }
            was_healthy |= healthy == Some(true);
        }
        (healthy, is_stated)
    }
}

proptest! {
    /// The joined health is what the whole history says, never better than the node's own word, and the node's own word once the list
    /// has not changed for a while. That is what `health-check` steering says, as soon as a few probes agree.
    #[test]
    fn joined_health_is_what_the_history_says(steps in steps()) {
        let (start, mut seconds) = (Instant::now(), 0);
        let (mut fused, mut plain) = (HealthTracker::new(None, start), HealthTracker::new(None, start));
        let (mut endpoints, mut history, mut agreeing) = (EndpointNodes::default(), History::default(), (None, 0));
        for step in steps {
            let now = start + Duration::from_secs(seconds);
            match step {
                Step::Probe(passes) => {
                    let result = || if passes { ProbeResult::Passed(None) } else { ProbeResult::NoEndpoint };
                    fused.record(&check(), result(), now);
                    plain.record(&check(), result(), now);
                    agreeing = (Some(passes), if agreeing.0 == Some(passes) { agreeing.1 + 1 } else { 1 });
                }
                Step::Stated(passes) => {
                    let result = || if passes { ProbeResult::Passed(None) } else { ProbeResult::NoEndpoint };
                    fused.obey(result(), now);
                    plain.obey(result(), now);
                    agreeing = (None, 0);
                }
                Step::List(is_in) => {
                    let listed: &[&str] = if is_in { &["node"] } else { &[] };
                    if let Some(change) = endpoints.update(&load_balancer("u", Some(listed)), now) {
                        fused.expect((!change.joined.is_empty()).then_some(now + EXPECTED_FOR));
                    }
                }
                Step::Wait(more) => seconds += more,
            }
            history.0.push((seconds, step));
            let now = start + Duration::from_secs(seconds);
            let masked = endpoints.of("lb").and_then(|list| list.masked_until("node", now)).is_some();
            let (own, joined) = (fused.health().clone(), join(fused.health().clone(), masked));
            let (says, is_stated) = history.own();
            let is_masked = history.is_masked(seconds) && !is_stated;
            prop_assert_eq!(joined.is_healthy(), says == Some(true) && !is_masked);
            prop_assert_eq!(joined.lacks_endpoint, says == Some(false) || is_masked);
            prop_assert!(own.is_healthy() || !joined.is_healthy(), "never better than the node's own word");
            let changed = history.last_change(history.0.len());
            if changed.is_none_or(|(change, _)| !history.is_soon_after(change, seconds)) {
                prop_assert_eq!(&joined, &own);
                if agreeing.1 >= 3 {
                    prop_assert_eq!(&joined, plain.health());
                }
            }
        }
    }
}
