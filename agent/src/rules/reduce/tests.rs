// SPDX-License-Identifier: Apache-2.0

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

use proptest::prelude::*;
use steerage_model::{Family, Key, Protocol};

use super::*;
use crate::plan::{Frontend, Masquerade, Role, Selection};
use crate::rules::Ruleset;

fn addresses(count: usize) -> Arc<[SocketAddr]> {
    let at = |n: usize| Ipv4Addr::from(u32::from_be_bytes([10, 244, 0, 0]) + u32::try_from(n).unwrap());
    (0..count).map(|n| SocketAddr::new(IpAddr::V4(at(n)), 8080)).collect()
}

fn networks(count: usize) -> Arc<[IpNet]> {
    addresses(count).iter().map(|at| IpNet::from(at.ip())).collect()
}

/// A Service of policy Local with these numbers of ports, endpoints, local ones and source networks.
fn plan(ports: u16, endpoints: usize, local: usize, affinity: bool, sources: usize) -> ServicePlan {
    let sources = (sources > 0).then(|| networks(sources));
    let mut plan = ServicePlan {
        hairpins: addresses(local).iter().map(SocketAddr::ip).collect(),
        ..ServicePlan::default()
    };
    for port in 1..=ports {
        let list = addresses(endpoints);
        let targets = Endpoints { selection: Selection::Cluster, list: Arc::clone(&list) };
        let local = Endpoints { selection: Selection::Local, list: addresses(local) };
        let external = Action {
            role: Role::Vip,
            created: 0,
            port,
            reject: list.is_empty() && local.is_empty(),
            targets,
            local: Some(local),
            peers: None,
            masquerade: Masquerade::HostOnly,
            sources: sources.clone(),
            affinity: affinity.then_some(60),
            serving: list,
        };
        let internal = Action {
            role: Role::ClusterIp,
            local: None,
            masquerade: Masquerade::AllButLocalPods,
            sources: None,
            ..external.clone()
        };
        for (last, action) in [(1, internal), (2, external.clone()), (3, external)] {
            let addr = IpAddr::from([10, 96, 0, last]);
            plan.frontends.push((Frontend { addr, protocol: Protocol::Tcp, port }, action));
        }
    }
    plan.frontends.sort_by_key(|(_, action)| action.role);
    plan
}

fn elements(plan: &ServicePlan) -> usize {
    let mut ruleset = Ruleset::default();
    ruleset.stage(BTreeMap::from([(Key::new("n", "s"), plan.clone())]));
    ruleset.all_elements(Family::V4).len()
}

#[test]
fn a_service_that_fits_is_left_alone() {
    let before = plan(3, 20, 2, true, 5);
    let mut after = before.clone();
    assert_eq!(after.reduce(before.cost(), 0), None);
    assert_eq!(after, before);
}

/// The shape that drove agents out of memory: a thousand ports and 129 pods.
#[test]
fn a_thousand_ports_with_many_endpoints_keep_as_many_as_fit() {
    let mut plan = plan(1000, 129, 0, false, 0);
    let reduced = plan.reduce(100_000, 7).expect("too large");
    assert!(reduced.needs > 129_000 && reduced.frontends == 0, "{reduced:?}");
    assert!((60..129).contains(&reduced.endpoints), "{reduced:?}");
    let kept = |plan: &ServicePlan| plan.frontends[0].1.targets.list.to_vec();
    assert_eq!(kept(&plan).len(), reduced.endpoints);
    let mut elsewhere = self::plan(1000, 129, 0, false, 0);
    elsewhere.reduce(100_000, 8).expect("too large");
    assert_ne!(kept(&plan), kept(&elsewhere), "nodes have different ones, so that none is without traffic");
    let mut fewer = self::plan(1000, 129, 0, false, 0);
    let less: Arc<[SocketAddr]> = addresses(129)[1..].into();
    let by_port: BTreeMap<u16, Arc<[SocketAddr]>> =
        (1..=1000).map(|port| (port, less.iter().copied().collect())).collect();
    for (_, action) in &mut fewer.frontends {
        action.targets.list = Arc::clone(&by_port[&action.port]);
    }
    fewer.reduce(100_000, 7).expect("too large");
    let stay = kept(&fewer).iter().filter(|endpoint| kept(&plan).contains(endpoint)).count();
    assert!(stay + 2 >= reduced.endpoints, "most endpoints stay");
}

#[test]
fn assigned_frontends_go_before_cluster_ips_and_sources_are_never_opened() {
    let mut plan = plan(1000, 3, 1, true, 10_000);
    let reduced = plan.reduce(2_000, 0).expect("too large");
    assert_eq!((reduced.endpoints, reduced.frontends), (1, 3000 - plan.frontends.len()));
    assert!(plan.frontends.iter().all(|(_, action)| action.role == Role::ClusterIp));
    assert!(elements(&plan) <= 2_000);
    let mut plan = self::plan(1, 3, 1, true, 10_000);
    plan.reduce(2_000, 0).expect("too large");
    let of = |(_, action): &(Frontend, Action)| action.sources.as_ref().map(|networks| networks.len());
    assert_eq!(plan.frontends.iter().map(of).collect::<Vec<_>>(), [None, Some(1965), Some(1965)]);
    let reduced = self::plan(1, 3, 1, true, 10_000).reduce(2_000, 0).expect("too large");
    assert_eq!(
        (reduced.endpoints, reduced.sources, reduced.frontends),
        (1, 8_035, 0),
        "and they are counted"
    );
}

#[test]
fn sources_are_cut_only_if_one_endpoint_does_not_fit() {
    let mut plan = plan(10, 300, 1, false, 500);
    let reduced = plan.reduce(1_000, 0).expect("too large");
    assert!(reduced.endpoints > 1 && (reduced.sources, reduced.frontends) == (0, 0), "{reduced:?}");
    let sources = plan.frontends.iter().filter_map(|(_, action)| action.sources.as_ref());
    assert!(sources.map(|networks| networks.len()).all(|networks| networks == 500));
}

#[test]
fn addresses_that_may_have_to_reach_themselves_are_those_of_the_endpoints_that_are_left() {
    let mut plan = plan(5, 600, 600, false, 0);
    plan.reduce(1_000, 0).expect("too large");
    let used = plan.frontends.iter().flat_map(|(_, action)| lists(action)).flat_map(|list| list.iter());
    let used: BTreeSet<_> = used.map(SocketAddr::ip).collect();
    assert_eq!(plan.hairpins.iter().copied().collect::<BTreeSet<_>>(), used);
}

proptest! {
    #[test]
    fn reduced_plans_keep_to_their_limit_and_lose_no_list(
        ports in 1_u16..30, endpoints in 0_usize..300, local in 0_usize..20, affinity: bool, sources in 0_usize..300,
        limit in 256_usize..20_000, forwards: bool,
    ) {
        let mut reduced = plan(ports, endpoints, local, affinity, sources);
        let external = reduced.frontends.iter_mut().filter(|(_, action)| forwards && action.local.is_some());
        external.for_each(|(_, action)| action.peers = Some([IpAddr::from([10, 0, 0, 1]); 8].into()));
        let before = reduced.clone();
        let cost = before.cost();
        prop_assert!(elements(&before) <= cost && cost <= elements(&before) + before.frontends.len() * FRONTEND_ELEMENTS);
        let result = reduced.reduce(limit, 1);
        prop_assert_eq!(result.is_some(), cost > limit);
        prop_assert!(elements(&reduced) <= limit, "{} of {}", elements(&reduced), limit);
        for ((at, after), (also, before)) in reduced.frontends.iter().zip(&before.frontends) {
            prop_assert_eq!(at, also);
            prop_assert_eq!(after.targets.is_empty(), before.targets.is_empty());
            let none = |action: &Action| action.local.as_ref().is_none_or(|local| local.is_empty());
            prop_assert_eq!(none(after), none(before));
            prop_assert_eq!(after.sources.is_some(), before.sources.is_some());
        }
    }
}
