// SPDX-License-Identifier: Apache-2.0
//! The edge's objects for the controller's plan, and the patches that lead to them. Pure.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use kube::api::ObjectMeta;
use serde_json::{Map, Value};
use steerage_edge_api as api;
use steerage_model::{Family, Key, Protocol};
use steerage_provider_api::{
    DrainingTarget, Error, GroupKey, HealthCheck, HealthProtocol, LoadBalancer, Owner, Target, TargetSet,
};

use crate::{sharing, sources, use_rules};

/// Label on all objects of Steerage; others are never changed.
pub const MANAGED_BY: &str = "app.kubernetes.io/managed-by";
/// The value of [`MANAGED_BY`].
pub const MANAGER: &str = "steerage";
/// Label with the UID of the Service.
pub const SERVICE_UID: &str = "steerage.dev/service-uid";
/// Label with the namespace of the Service.
pub const SERVICE_NAMESPACE: &str = "steerage.dev/service-namespace";
/// Label with the name of the Service.
pub const SERVICE_NAME: &str = "steerage.dev/service-name";

/// A listener has a protocol that the edge cannot forward.
pub const PROTOCOL_NOT_SUPPORTED: &str = "ProtocolNotSupported";
/// More source ranges than a load balancer has.
pub const TOO_MANY_SOURCE_RANGES: &str = "TooManySourceRanges";

/// The name of the object of this owner.
pub fn object_name(owner: &Owner) -> String {
    format!("lb-{}", owner.uid)
}

/// Name and labels of the object of this owner.
pub fn metadata(owner: &Owner) -> ObjectMeta {
    let labels = [
        (MANAGED_BY, MANAGER.to_owned()),
        (SERVICE_UID, owner.uid.clone()),
        (SERVICE_NAMESPACE, owner.service.namespace().to_owned()),
        (SERVICE_NAME, owner.service.name().to_owned()),
    ];
    ObjectMeta {
        name: Some(object_name(owner)),
        labels: Some(labels.map(|(key, value)| (key.to_owned(), value)).into()),
        ..ObjectMeta::default()
    }
}

/// The owner of an object, from its labels; `None` if Steerage does not manage it.
pub fn owner(labels: Option<&BTreeMap<String, String>>) -> Option<Owner> {
    let labels = labels?;
    let text = |key: &str| labels.get(key);
    if labels.get(MANAGED_BY).map(String::as_str) != Some(MANAGER) {
        return None;
    }
    let service = Key::new(text(SERVICE_NAMESPACE)?, text(SERVICE_NAME)?);
    Some(Owner { service, uid: text(SERVICE_UID)?.clone() })
}

/// The object's spec with these addresses, and without targets.
pub fn structure(lb: &LoadBalancer, addresses: Vec<IpAddr>) -> Result<api::EdgeLoadBalancerSpec, Error> {
    let group = lb.group(&GroupKey::Vip).ok_or_else(|| {
        Error::Unavailable("no target group is planned that the edge reaches by VIP".to_owned())
    })?;
    let source_ranges = sources::checked(&lb.source_ranges, &lb.annotations)?;
    check_source_ranges(&source_ranges)?;
    let service = &lb.owner.service;
    let (namespace, name) = (service.namespace().to_owned(), service.name().to_owned());
    Ok(api::EdgeLoadBalancerSpec {
        service: api::ServiceReference { namespace, name, uid: lb.owner.uid.clone() },
        addresses,
        sharing_key: sharing::key(lb)?,
        listeners: lb.listeners.iter().map(listener).collect::<Result<_, _>>()?,
        health_check: health_check(&group.health_check)?,
        affinity: group.affinity.map(|affinity| api::Affinity {
            timeout_seconds: u32::try_from(affinity.timeout.as_secs()).unwrap_or(u32::MAX),
        }),
        source_ranges: source_ranges.iter().map(ToString::to_string).collect(),
        node_set: None,
        targets: Vec::new(),
        draining: Vec::new(),
        endpoint_nodes: None,
        panic_threshold_percent: use_rules::panic_threshold(&lb.annotations)?,
        slow_start_milliseconds: use_rules::slow_start(&lb.annotations)?,
    })
}

fn check_source_ranges(ranges: &[IpNet]) -> Result<(), Error> {
    let Some((family, count)) = sources::too_many(ranges.iter().copied()) else { return Ok(()) };
    let message = format!(
        "The Service has {count} source ranges of {family} after merging, but the edge supports {} of each IP family. No load balancer \
         is created or changed. Use larger ranges, or split the Service.",
        api::MAX_SOURCE_RANGES
    );
    Err(Error::invalid(TOO_MANY_SOURCE_RANGES, message))
}

fn listener(listener: &steerage_provider_api::Listener) -> Result<api::Listener, Error> {
    let protocol = match listener.protocol {
        Protocol::Tcp => api::ListenerProtocol::Tcp,
        Protocol::Udp => api::ListenerProtocol::Udp,
        Protocol::Sctp => {
            let message = format!(
                "Port {} uses SCTP, which the edge does not support. Remove the port.",
                listener.port
            );
            return Err(Error::invalid(PROTOCOL_NOT_SUPPORTED, message));
        }
    };
    Ok(api::Listener { name: listener.name.clone(), protocol, port: listener.port })
}

fn health_check(check: &HealthCheck) -> Result<api::HealthCheck, Error> {
    let (protocol, path) = match &check.protocol {
        HealthProtocol::Tcp => (api::HealthCheckProtocol::Tcp, None),
        HealthProtocol::Http { path } => (api::HealthCheckProtocol::Http, Some(path.clone())),
    };
    let milliseconds = |d: std::time::Duration| u32::try_from(d.as_millis()).unwrap_or(u32::MAX);
    let no_port = || Error::Unavailable("the planned health check has no port".to_owned());
    Ok(api::HealthCheck {
        protocol,
        port: check.port.ok_or_else(no_port)?,
        path,
        interval_milliseconds: milliseconds(check.interval),
        timeout_milliseconds: milliseconds(check.timeout),
        healthy_threshold: check.healthy_threshold,
        unhealthy_threshold: check.unhealthy_threshold,
    })
}

/// The targets that the edge can use: those with an address of at least one family of the load balancer. A target serves the families
/// of which it has one.
pub fn targets(families: &[Family], set: &TargetSet) -> Vec<api::EdgeTarget> {
    set.targets
        .iter()
        .filter(|target| is_usable(families, target))
        .map(|target| edge_target(target))
        .collect()
}

/// The same of the targets that drain.
pub fn draining(families: &[Family], set: &TargetSet) -> Vec<api::EdgeTarget> {
    let usable = set.draining.iter().filter(|draining| is_usable(families, &draining.target));
    usable.map(draining_target).collect()
}

/// The nodes with an endpoint, as the object has them.
pub fn endpoint_nodes(set: &TargetSet) -> Option<Vec<String>> {
    set.endpoint_nodes.as_ref().map(|nodes| nodes.to_vec())
}

/// The other targets, each with the reason. In a shared set a node that has no address yet is none of them: it changes the set when it
/// gets one.
pub fn refused(families: &[Family], set: &TargetSet) -> Vec<(String, String)> {
    let is_refused = |target: &&Arc<Target>| {
        !is_usable(families, target) && (set.shared.is_none() || !target.addresses.is_empty())
    };
    let refused = set.targets.iter().filter(is_refused);
    let reason = |target: &Arc<Target>| {
        let names: Vec<String> = families.iter().map(ToString::to_string).collect();
        (target.node.clone(), format!("the node has no InternalIP of {}", names.join(" or ")))
    };
    refused.map(reason).collect()
}

fn is_usable(families: &[Family], target: &Target) -> bool {
    target.addresses.iter().any(|address| families.contains(&Family::of(*address)))
}

/// The object of a shared set: every node with an address, because load balancers of both families use it.
pub fn shared_set(set: &TargetSet) -> api::EdgeNodeSetSpec {
    let targets = set.targets.iter().filter(|target| !target.addresses.is_empty());
    let draining = set.draining.iter().filter(|draining| !draining.target.addresses.is_empty());
    api::EdgeNodeSetSpec {
        targets: targets.map(|target| edge_target(target)).collect(),
        draining: draining.map(draining_target).collect(),
    }
}

fn draining_target(draining: &DrainingTarget) -> api::EdgeTarget {
    api::EdgeTarget { drain_reason: draining.reason.to_string(), ..edge_target(&draining.target) }
}

fn edge_target(target: &Target) -> api::EdgeTarget {
    api::EdgeTarget {
        node: target.node.clone(),
        addresses: target.addresses.clone(),
        pod_cidrs: target.pod_cidrs.iter().map(ToString::to_string).collect(),
        weight: target.weight.max(1),
        drain_reason: String::new(),
    }
}

/// The JSON merge patch (RFC 7396) from one value to another; `None` when they are equal. It contains only
/// differences, so that fields unknown to this version stay.
pub fn merge_patch(from: &Value, to: &Value) -> Option<Value> {
    let (Value::Object(old), Value::Object(new)) = (from, to) else {
        return (from != to).then(|| to.clone());
    };
    let mut patch = Map::new();
    for key in old.keys().filter(|key| !new.contains_key(*key)) {
        patch.insert(key.clone(), Value::Null);
    }
    for (key, value) in new {
        let difference = match old.get(key) {
            Some(before) => merge_patch(before, value),
            None => Some(value.clone()),
        };
        if let Some(difference) = difference {
            patch.insert(key.clone(), difference);
        }
    }
    (!patch.is_empty()).then_some(Value::Object(patch))
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use serde_json::json;

    fn target(node: &str, addresses: &[&str]) -> Target {
        Target {
            node: node.to_owned(),
            addresses: addresses.iter().map(|a| a.parse().expect("ip")).collect(),
            provider_id: None,
            zone: None,
            pod_cidrs: Vec::new(),
            weight: 0,
        }
    }

    #[test]
    fn patch_contains_only_differences() {
        let from = json!({"a": 1, "b": {"c": [1], "d": 2}, "gone": 3});
        let to = json!({"a": 1, "b": {"c": [1, 2], "d": 2}, "new": 4});
        let patch = merge_patch(&from, &to).expect("differs");
        assert_eq!(patch, json!({"b": {"c": [1, 2]}, "gone": null, "new": 4}));
        assert_eq!(merge_patch(&to, &to), None);
    }

    #[test]
    fn owner_is_read_from_labels() {
        let of = Owner { service: Key::new("default", "web"), uid: "u-1".to_owned() };
        let meta = metadata(&of);
        assert_eq!(meta.name.as_deref(), Some("lb-u-1"));
        assert_eq!(owner(meta.labels.as_ref()), Some(of));
        let mut foreign = meta.labels.expect("labels");
        foreign.remove(MANAGED_BY);
        assert_eq!(owner(Some(&foreign)), None);
    }

    #[test]
    fn targets_without_an_address_of_the_family_are_refused() {
        let targets_of = |families: &[Family]| {
            let list = vec![target("a", &["10.0.0.1"]), target("b", &["fd00::1"]), target("c", &[])];
            let set = TargetSet::own(list);
            let (usable, refused) = (targets(families, &set), refused(families, &set));
            let names = |list: &[String]| list.join(",");
            let usable: Vec<_> = usable.into_iter().map(|t| t.node).collect();
            let refused: Vec<_> = refused.into_iter().map(|(node, _)| node).collect();
            (names(&usable), names(&refused))
        };
        assert_eq!(targets_of(&[Family::V4]), ("a".to_owned(), "b,c".to_owned()));
        assert_eq!(targets_of(&[Family::V4, Family::V6]), ("a,b".to_owned(), "c".to_owned()));
    }

    #[test]
    fn source_ranges_are_counted_after_merging() {
        let ranges = |count: u32, step: u32| -> Vec<IpNet> {
            let address = |number: u32| Ipv4Addr::from(0x0a00_0000 + number * step);
            (0..count).map(|number| IpNet::from(IpAddr::from(address(number)))).collect()
        };
        assert!(check_source_ranges(&[]).is_ok());
        assert!(check_source_ranges(&ranges(1000, 2)).is_ok());
        assert!(check_source_ranges(&ranges(4096, 1)).is_ok(), "one range after merging");
        let error = check_source_ranges(&ranges(1001, 2)).expect_err("too many");
        assert_eq!(error.reason(), TOO_MANY_SOURCE_RANGES);
        assert!(error.to_string().contains("1001 source ranges of IPv4"), "{error}");
    }

    #[test]
    fn weights_are_never_zero() {
        assert_eq!(edge_target(&target("a", &["10.0.0.1"])).weight, 1);
    }
}
