// SPDX-License-Identifier: Apache-2.0
//! The health check that a planned load balancer needs, and the firewall rules that admit it. Pure.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};
use steerage_model::{Family, Key, Protocol};
use steerage_provider_api::{HealthCheck, HealthProtocol, LoadBalancer};
use steerage_provider_cloud::names;

use crate::desired::{Names, firewall, of};
use crate::marks;
use crate::object::{Id, Kind};

/// From these ranges Google checks health, of external and internal load balancers.
pub(crate) const PROBERS_V4: [&str; 4] =
    ["130.211.0.0/22", "209.85.152.0/22", "209.85.204.0/22", "35.191.0.0/16"];
pub(crate) const PROBERS_V6: [&str; 2] = ["2600:1901:8001::/48", "2600:2d00:1:b029::/64"];

/// The health check of a load balancer, and the rules that admit it.
pub(crate) struct Checks {
    pub(crate) check: Id,
    pub(crate) all: BTreeMap<Id, Value>,
    pub(crate) are_shared: bool,
}

impl Checks {
    pub(crate) fn new(lb: &LoadBalancer, wanted: &HealthCheck, names: &Names<'_>) -> Self {
        let config = names.config;
        let first_tcp = lb.listeners.iter().find(|listener| listener.protocol == Protocol::Tcp);
        let port = wanted.port.or(first_tcp.map(|listener| listener.port)).unwrap_or_default();
        let interval = seconds(wanted.interval).clamp(1, 300);
        let timeout = seconds(wanted.timeout).clamp(1, interval);
        let (healthy, unhealthy) =
            (wanted.healthy_threshold.clamp(1, 10), wanted.unhealthy_threshold.clamp(1, 10));
        let (kind, field, path) = match &wanted.protocol {
            HealthProtocol::Tcp => ("TCP", "tcpHealthCheck", None),
            HealthProtocol::Http { path } => ("HTTP", "httpHealthCheck", Some(path)),
        };
        let mut probe = json!({ "port": port, "portSpecification": "USE_FIXED_PORT" });
        if let Some(path) = path {
            probe["requestPath"] = path.as_str().into();
        }
        let mut body = json!({
            "type": kind,
            "checkIntervalSec": interval,
            "timeoutSec": timeout,
            "healthyThreshold": healthy,
            "unhealthyThreshold": unhealthy,
        });
        body[field] = probe;
        let are_shared = !wanted.is_of_service;
        let (port, path) = (port.to_string(), path.map_or("", String::as_str));
        let name = |parts: &[&str]| {
            if are_shared {
                names::resource(names.cluster(), &Key::new("", ""), parts)
            } else {
                names.name(parts)
            }
        };
        let description = if are_shared {
            marks::of_shared(&config.cluster)
        } else {
            marks::of_owner(&config.cluster, &lb.owner)
        };
        let check = if are_shared {
            // Services with other settings have another one.
            let numbers = format!("{interval} {timeout} {healthy} {unhealthy}");
            name(&["health-check", kind, &port, path, &numbers])
        } else {
            name(&["health-check", kind])
        };
        let check = Id::new(Kind::HealthCheck, check);
        body["name"] = check.name.clone().into();
        body["description"] = description.clone().into();
        let mut all = BTreeMap::from([(check.clone(), body)]);
        for family in &lb.families {
            let place: &[&str] =
                if are_shared { &["probes", of(*family), &port] } else { &["probes", of(*family)] };
            let id = Id::new(Kind::Firewall, name(place));
            let sources: &[&str] = match family {
                Family::V4 => &PROBERS_V4,
                Family::V6 => &PROBERS_V6,
            };
            let sources: Vec<String> = sources.iter().map(|range| (*range).to_owned()).collect();
            let allowed = json!([{ "IPProtocol": "tcp", "ports": [port] }]);
            let body = firewall(&id, &description, &sources, &allowed, config);
            all.insert(id, body);
        }
        Self { check, all, are_shared }
    }
}

/// Rounded up.
fn seconds(time: Duration) -> u64 {
    time.as_secs() + u64::from(time.subsec_nanos() > 0)
}
