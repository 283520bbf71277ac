// SPDX-License-Identifier: Apache-2.0
//! Plans of a namespace keep to its budget, whichever way they come.

use std::net::Ipv4Addr;

use steerage_model::{EndpointPort, EndpointSlice, Family, Protocol, Service, ServicePort};

use super::*;
use crate::plan::ElementLimits;

const LIMITS: ElementLimits = ElementLimits { service: 2_500, namespace: 10_000 };

/// A Service of ten ports with 200 endpoints.
fn add(planner: &mut Planner, number: u8) -> Key {
    let key = Key::new("tenant", number.to_string());
    let port = |n: u16| ServicePort::new(n.to_string(), Protocol::Tcp, n, None);
    let ports: Vec<_> = (1..=10).map(port).collect();
    let slice_port = |port: &ServicePort| EndpointPort {
        name: port.name.clone(),
        protocol: Protocol::Tcp,
        port: port.port,
    };
    let endpoint = |n: u32| Endpoint::ready(Ipv4Addr::from_bits(0x0af4_0000 + n).into(), "there");
    planner.index.apply_slice(Event::Apply(EndpointSlice {
        ports: ports.iter().map(slice_port).collect(),
        endpoints: (0..200).map(endpoint).collect(),
        ..EndpointSlice::new(Key::new("tenant", format!("{number}-1")), key.clone(), Family::V4)
    }));
    planner.index.apply_service(Event::Apply(Service {
        cluster_ips: vec![IpAddr::from([10, 96, 0, number])],
        ports,
        ..Service::new(key.clone())
    }));
    key
}

#[test]
fn plans_of_a_namespace_are_reduced_whether_they_come_together_or_not() {
    let local_node =
        LocalNode { kube_proxy_replacement: true, element_limits: LIMITS, ..LocalNode::default() };
    let mut together = Planner::new(Vec::new(), Budgets::new(LIMITS));
    let keys: BTreeSet<_> = (0..20).map(|number| add(&mut together, number)).collect();
    let plans = together.plan_all(&keys, &local_node, 0, Instant::now());
    assert_eq!(plans.len(), 20);
    let needs: usize = plans.values().map(ServicePlan::cost).sum();
    assert!((LIMITS.namespace / 2..=LIMITS.namespace).contains(&needs), "{needs}");

    let mut one_by_one = Planner::new(Vec::new(), Budgets::new(LIMITS));
    let mut last: BTreeMap<Key, ServicePlan> = BTreeMap::new();
    for number in 0..20 {
        let key = add(&mut one_by_one, number);
        last.extend(one_by_one.plan_all(&[key].into(), &local_node, 0, Instant::now()));
        let needs: usize = last.values().map(ServicePlan::cost).sum();
        assert!(needs <= LIMITS.namespace, "{needs}");
    }
    assert_eq!(last, plans);
}
