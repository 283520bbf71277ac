// SPDX-License-Identifier: Apache-2.0
//! Pods as targets: which Services have them, and which pods receive packets of which port.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use steerage_model::{Endpoint, EndpointSlice, Family, Key, Pod, Service, ServicePort, TargetPort, backends};
use steerage_provider_api::{PodPort, PodTarget};
use steerage_watch::Index;

use super::{Config, PlanError};

type ByAddress = BTreeMap<SocketAddr, PodTarget>;

/// The pods of each port.
pub(crate) type PodTargets = BTreeMap<PodPort, Arc<[PodTarget]>>;

/// Whether the targets are pods: by the provider's annotation.
pub(crate) fn has_pod_targets(service: &Service, config: &Config) -> Result<bool, PlanError> {
    let Some(annotation) = config.capabilities.pod_targets else { return Ok(false) };
    match service.annotations.get(annotation.name).map(|value| value.trim()) {
        None => Ok(false),
        Some(value) if value == annotation.nodes => Ok(false),
        Some(value) if value == annotation.pods => Ok(true),
        Some(value) => Err(PlanError::InvalidAnnotation {
            name: annotation.name,
            value: value.to_owned(),
            problem: format!("use {} or {}", annotation.nodes, annotation.pods),
        }),
    }
}

/// Whether the targets are pods, or may be: those of a Service whose annotation is unreadable stay what they were.
pub(crate) fn may_have_pod_targets(service: &Service, config: &Config) -> bool {
    has_pod_targets(service, config).unwrap_or(true)
}

/// The port on which the pods of a Service port receive packets. Where users write the `EndpointSlices`, `targetPort` means nothing: the
/// slices have a number for each port of the Service.
pub(super) fn pod_port(service: &Service, port: &ServicePort) -> PodPort {
    match &port.target_port {
        TargetPort::Number(number) if service.has_selector => PodPort::Number(*number),
        TargetPort::Name(name) if service.has_selector => PodPort::Name(name.clone(), port.protocol),
        _ => PodPort::Name(port.name.clone(), port.protocol),
    }
}

/// The endpoints of each port: the ready ones or, if none is ready, those that serve while they terminate. Besides, the pods that only
/// wait for Steerage's readiness gate: a load balancer finds a pod healthy only after it was registered. On which nodes they run, and
/// whether those are eligible, does not matter: no node forwards the packets. Slices that do not show a changed `targetPort` yet say
/// nothing.
pub(crate) fn pod_targets(service: &Service, index: &Index, config: &Config) -> PodTargets {
    #[derive(Default)]
    struct Found {
        ready: ByAddress,
        terminating: ByAddress,
        gated: ByAddress,
    }
    let mut all: BTreeMap<PodPort, Found> = BTreeMap::new();
    for port in &service.ports {
        let key = pod_port(service, port);
        let found = all.entry(key.clone()).or_default();
        for (address, endpoint) in endpoints_of(service, port, &key, index, config) {
            let is_gated = || index.pod_behind(&service.key, endpoint).is_some_and(|pod| pod.can_serve);
            let kind = if endpoint.ready {
                &mut found.ready
            } else if endpoint.is_serving_terminating() {
                &mut found.terminating
            } else if is_gated() {
                &mut found.gated
            } else {
                continue;
            };
            kind.insert(address, PodTarget { address, zone: endpoint.zone.clone() });
        }
    }
    let chosen = |Found { ready, terminating, gated }: Found| {
        let mut chosen = if ready.is_empty() { terminating } else { ready };
        chosen.extend(gated);
        chosen.into_values().collect()
    };
    all.into_iter().map(|(port, found)| (port, chosen(found))).collect()
}

/// The pods of this Service that wait for Steerage's readiness gate, each with the addresses at which it must be healthy.
pub(crate) fn waiting_pods<'a>(
    service: &Service,
    index: &'a Index,
    config: &Config,
) -> BTreeMap<&'a Key, (&'a Pod, BTreeSet<SocketAddr>)> {
    let mut waiting: BTreeMap<_, (_, BTreeSet<_>)> = BTreeMap::new();
    let is_waiting = |endpoint| index.pod_behind(&service.key, endpoint).is_some_and(Pod::is_waiting);
    // Once for all ports: most Services have none, and a tenant's may have many ports.
    if !index.slices(&service.key).any(|slice| slice.endpoints.iter().any(is_waiting)) {
        return waiting;
    }
    for port in &service.ports {
        let key = pod_port(service, port);
        for (address, endpoint) in endpoints_of(service, port, &key, index, config) {
            if let Some(pod) = index.pod_behind(&service.key, endpoint).filter(|pod| pod.is_waiting()) {
                waiting.entry(&pod.key).or_insert_with(|| (pod, BTreeSet::new())).1.insert(address);
            }
        }
    }
    waiting
}

/// The endpoints of one port of the Service in any state, with the address at which each would be a target. `key` is that of the port.
fn endpoints_of<'a>(
    service: &Service,
    port: &ServicePort,
    key: &PodPort,
    index: &'a Index,
    config: &Config,
) -> Vec<(SocketAddr, &'a Endpoint)> {
    let is_of = |number: u16| !matches!(key, PodPort::Number(wanted) if *wanted != number);
    let families = families(service).into_iter();
    let count = if config.capabilities.one_target_family { 1 } else { usize::MAX };
    families
        .filter(|family| *family == Family::V4 || config.capabilities.ipv6)
        .take(count)
        .flat_map(|family| backends(index.slices(&service.key), family, &port.name, port.protocol))
        .filter(|found| is_of(found.port))
        .map(|found| (SocketAddr::new(found.endpoint.addr, found.port), found.endpoint))
        .collect()
}

/// The slices whose endpoints count: where all targets have one family, those of the Service's first one.
pub(crate) fn slices_of_targets<'a>(
    service: &Service,
    slices: impl Iterator<Item = &'a EndpointSlice>,
    config: &Config,
) -> Vec<&'a EndpointSlice> {
    let family = families(service).first().copied().filter(|_| config.capabilities.one_target_family);
    slices.filter(|slice| family.is_none_or(|family| slice.family == family)).collect()
}

fn families(service: &Service) -> Vec<Family> {
    if service.families.is_empty() {
        service.cluster_ips.iter().map(|address: &IpAddr| Family::of(*address)).collect()
    } else {
        service.families.clone()
    }
}

#[cfg(test)]
mod tests {
    use steerage_model::{EndpointPort, PodGate, PodRef, Protocol};
    use steerage_watch::Event;

    use super::*;

    fn config() -> Config {
        let capabilities = steerage_provider_edge::capabilities();
        Config::with_defaults(capabilities, steerage_provider_api::Steering::Api)
    }

    fn service(ports: Vec<ServicePort>) -> Service {
        Service { ports, families: vec![Family::V4], ..Service::new(Key::new("shop", "web")) }
    }

    fn slice(ports: &[(&str, Protocol, u16)], endpoints: Vec<Endpoint>) -> EndpointSlice {
        let port = |(name, protocol, port): &(&str, Protocol, u16)| EndpointPort {
            name: (*name).to_owned(),
            protocol: *protocol,
            port: *port,
        };
        let mut slice = EndpointSlice::new(Key::new("shop", "web-1"), Key::new("shop", "web"), Family::V4);
        slice.ports = ports.iter().map(port).collect();
        slice.endpoints = endpoints;
        slice
    }

    fn at(last: u8) -> Endpoint {
        Endpoint::ready([10, 2, 0, last].into(), "node")
    }

    fn terminating(last: u8) -> Endpoint {
        Endpoint { ready: false, terminating: true, ..at(last) }
    }

    fn index(slices: impl IntoIterator<Item = EndpointSlice>) -> Index {
        let mut index = Index::default();
        for (number, slice) in slices.into_iter().enumerate() {
            let key = Key::new("shop", format!("web-{number}"));
            index.apply_slice(Event::Apply(EndpointSlice { key, ..slice }));
        }
        index
    }

    fn shown(targets: &PodTargets) -> Vec<String> {
        let list = |pods: &Arc<[PodTarget]>| {
            pods.iter().map(|p| p.address.to_string()).collect::<Vec<_>>().join(",")
        };
        targets.iter().map(|(port, pods)| format!("{port}={}", list(pods))).collect()
    }

    #[test]
    fn ready_pods_are_targets_and_terminating_ones_only_if_none_is_ready() {
        let service = service(vec![ServicePort::new("", Protocol::Tcp, 80, None)]);
        let ports = [("", Protocol::Tcp, 80)];
        let of = |endpoints| shown(&pod_targets(&service, &index([slice(&ports, endpoints)]), &config()));
        assert_eq!(of(vec![at(2), terminating(3), at(1)]), ["80=10.2.0.1:80,10.2.0.2:80"]);
        assert_eq!(
            of(vec![terminating(3), Endpoint { ready: false, serving: false, ..at(4) }]),
            ["80=10.2.0.3:80"]
        );
        assert_eq!(of(vec![Endpoint { serving: false, ..terminating(3) }]), ["80="]);
        assert_eq!(of(vec![Endpoint { node: None, ..at(9) }]), ["80=10.2.0.9:80"], "on no known node");
    }

    #[test]
    fn where_targets_have_one_family_only_its_slices_count() {
        let mut service = service(Vec::new());
        let of = |family| EndpointSlice { family, ..slice(&[], vec![at(1)]) };
        let slices = [of(Family::V4), of(Family::V6)];
        let mut config = config();
        for (first, one_target_family, expected) in [
            (Family::V4, false, &[Family::V4, Family::V6][..]),
            (Family::V4, true, &[Family::V4]),
            (Family::V6, true, &[Family::V6]),
        ] {
            service.families = vec![first];
            config.capabilities.one_target_family = one_target_family;
            let found = slices_of_targets(&service, slices.iter(), &config);
            assert_eq!(found.iter().map(|slice| slice.family).collect::<Vec<_>>(), expected);
        }
    }

    /// The endpoint of a pod that is not ready, with this UID.
    fn unready(last: u8, name: &str, uid: &str) -> Endpoint {
        let pod = PodRef { name: name.to_owned(), uid: uid.to_owned() };
        Endpoint { ready: false, serving: false, unready_pod: Some(Box::new(pod)), ..at(last) }
    }

    fn gated(last: u8, name: &str, uid: &str) -> Pod {
        Pod {
            key: Key::new("shop", name),
            uid: uid.to_owned(),
            addresses: vec![[10, 2, 0, last].into()],
            can_serve: true,
            gate: None,
        }
    }

    #[test]
    fn pods_that_wait_for_the_gate_are_targets_before_they_are_ready() {
        let service = service(vec![ServicePort::new("", Protocol::Tcp, 80, None)]);
        let of = |endpoints, pod: Pod| {
            let mut index = index([slice(&[("", Protocol::Tcp, 80)], endpoints)]);
            index.apply_pod(Event::Apply(pod));
            let waiting = waiting_pods(&service, &index, &config());
            let waiting: Vec<_> = waiting.into_values().flat_map(|(_, addresses)| addresses).collect();
            (shown(&pod_targets(&service, &index, &config())).join(" "), waiting.len())
        };
        let waits = |endpoints| of(endpoints, gated(3, "c", "u"));
        assert_eq!(waits(vec![at(1), unready(3, "c", "u")]), ("80=10.2.0.1:80,10.2.0.3:80".to_owned(), 1));
        assert_eq!(
            waits(vec![terminating(1), unready(3, "c", "u")]),
            ("80=10.2.0.1:80,10.2.0.3:80".to_owned(), 1),
            "the pod that ends serves until the new one does"
        );
        for (endpoint, why) in [
            (unready(3, "c", "earlier"), "an earlier pod of this name"),
            (unready(3, "d", "u"), "another name"),
            (unready(4, "c", "u"), "an address that the pod does not have"),
            (Endpoint { unready_pod: None, ..unready(3, "c", "u") }, "no pod"),
        ] {
            assert_eq!(waits(vec![at(1), endpoint]), ("80=10.2.0.1:80".to_owned(), 0), "{why}");
        }
        let unable = Pod { can_serve: false, ..gated(3, "c", "u") };
        assert_eq!(of(vec![unready(3, "c", "u")], unable), ("80=".to_owned(), 0));
        let met = PodGate { is_met: true, reason: String::new() };
        let met = Pod { gate: Some(met), ..gated(3, "c", "u") };
        assert_eq!(of(vec![unready(3, "c", "u")], met), ("80=10.2.0.3:80".to_owned(), 0), "not ready yet");
    }

    #[test]
    fn ports_with_the_same_target_port_share_its_pods() {
        let to = |name: &str, protocol, port, target_port| ServicePort {
            target_port,
            ..ServicePort::new(name, protocol, port, None)
        };
        let named = || TargetPort::Name("web".to_owned());
        let service = service(vec![
            to("http", Protocol::Tcp, 80, named()),
            to("https", Protocol::Tcp, 443, named()),
            to("dns", Protocol::Udp, 53, TargetPort::Number(5353)),
            to("dns-tcp", Protocol::Tcp, 53, TargetPort::Number(5353)),
            to("quic", Protocol::Udp, 443, named()),
        ]);
        let tcp = Protocol::Tcp;
        let of_one =
            [("http", tcp, 8080), ("https", tcp, 8080), ("dns", Protocol::Udp, 5353), ("dns-tcp", tcp, 5353)];
        let of_other = [("http", tcp, 9090), ("https", tcp, 9090), ("quic", Protocol::Udp, 4433)];
        let slices = [slice(&of_one, vec![at(1)]), slice(&of_other, vec![at(2)])];
        assert_eq!(
            shown(&pod_targets(&service, &index(slices), &config())),
            ["5353=10.2.0.1:5353", "web=10.2.0.1:8080,10.2.0.2:9090", "web=10.2.0.2:4433"],
            "a named port has the number of each pod, and one group for each protocol"
        );
    }

    #[test]
    fn endpoints_of_another_family_are_no_targets() {
        let service = service(vec![ServicePort::new("", Protocol::Tcp, 80, None)]);
        let mut six =
            slice(&[("", Protocol::Tcp, 80)], vec![Endpoint::ready("fd00::1".parse().expect("ip"), "node")]);
        six.family = Family::V6;
        assert_eq!(shown(&pod_targets(&service, &index([six]), &config())), ["80="]);
    }

    #[test]
    fn slices_from_before_a_change_of_the_target_port_say_nothing() {
        let mut service = service(vec![ServicePort::new("", Protocol::Tcp, 80, None)]);
        let old = index([slice(&[("", Protocol::Tcp, 8080)], vec![at(1)])]);
        assert_eq!(shown(&pod_targets(&service, &old, &config())), ["80="]);
        service.has_selector = false;
        assert_eq!(shown(&pod_targets(&service, &old, &config())), ["=10.2.0.1:8080"], "users write them");
    }

    #[test]
    fn families_that_the_provider_lacks_have_no_targets() {
        let mut service = service(vec![ServicePort::new("", Protocol::Tcp, 80, None)]);
        service.families = vec![Family::V4, Family::V6];
        let mut six = slice(
            &[("", Protocol::Tcp, 80)],
            vec![Endpoint::ready([0xfd00, 0, 0, 0, 0, 0, 0, 1].into(), "node")],
        );
        six.family = Family::V6;
        let slices = index([slice(&[("", Protocol::Tcp, 80)], vec![at(1)]), six]);
        let mut config = config();
        assert_eq!(shown(&pod_targets(&service, &slices, &config)), ["80=10.2.0.1:80,[fd00::1]:80"]);
        config.capabilities.ipv6 = false;
        assert_eq!(shown(&pod_targets(&service, &slices, &config)), ["80=10.2.0.1:80"]);
    }
}
