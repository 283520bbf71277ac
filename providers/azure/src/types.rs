// SPDX-License-Identifier: Apache-2.0
//! The resources of Azure that this crate reads and writes. A `PUT` replaces the whole resource, so every type keeps the fields that it
//! does not know.

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Fields that this crate does not know.
pub(crate) type Rest = Map<String, Value>;

/// The path of a resource. Azure answers with other letters in upper case than it was asked with.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Id(pub(crate) String);

impl PartialEq for Id {
    fn eq(&self, other: &Self) -> bool {
        self.0.eq_ignore_ascii_case(&other.0)
    }
}

impl Eq for Id {}

impl Id {
    /// The last part: the resource's name.
    pub(crate) fn name(&self) -> &str {
        self.0.rsplit('/').next().unwrap_or_default()
    }

    /// Whether the resource is in the other one.
    pub(crate) fn is_in(&self, parent: &str) -> bool {
        let (own, parent) = (self.0.to_ascii_lowercase(), parent.to_ascii_lowercase());
        own.strip_prefix(&parent).is_some_and(|rest| rest.starts_with('/'))
    }
}

/// A reference to another resource.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Ref {
    pub(crate) id: Id,
}

impl Ref {
    pub(crate) fn to(id: impl Into<String>) -> Self {
        Self { id: Id(id.into()) }
    }
}

/// A resource of its own: it has a path, a version and tags.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Resource<P> {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) id: Option<Id>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) etag: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) location: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) sku: Option<Value>,
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) tags: BTreeMap<String, String>,
    pub(crate) properties: P,
    #[serde(flatten)]
    pub(crate) rest: Rest,
}

/// A part of a resource.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Part<P> {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) id: Option<Id>,
    #[serde(default)]
    pub(crate) name: String,
    #[serde(default)]
    pub(crate) properties: P,
    #[serde(flatten)]
    pub(crate) rest: Rest,
}

impl<P: Default> Part<P> {
    pub(crate) fn new(name: impl Into<String>, properties: P) -> Self {
        Self { name: name.into(), properties, ..Self::default() }
    }
}

/// Azure writes null for what is not set.
fn or_default<'de, D: serde::Deserializer<'de>, T: Default + Deserialize<'de>>(
    deserializer: D,
) -> Result<T, D::Error> {
    Ok(Option::<T>::deserialize(deserializer)?.unwrap_or_default())
}

/// How far Azure is with a resource.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
pub(crate) enum Provisioning {
    #[default]
    Succeeded,
    Updating,
    Deleting,
    Failed,
    Canceled,
    #[serde(other)]
    Creating,
}

impl Provisioning {
    /// Whether another change would be refused.
    pub(crate) fn is_busy(self) -> bool {
        matches!(self, Self::Updating | Self::Deleting | Self::Creating)
    }

    /// Whether the last change failed: the same one has to be made again.
    pub(crate) fn is_failed(self) -> bool {
        matches!(self, Self::Failed | Self::Canceled)
    }
}

/// What is in a load balancer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct BalancerProperties {
    #[serde(default, rename = "frontendIPConfigurations", deserialize_with = "or_default")]
    pub(crate) frontends: Vec<Part<Frontend>>,
    #[serde(default, rename = "backendAddressPools", deserialize_with = "or_default")]
    pub(crate) pools: Vec<Part<Pool>>,
    #[serde(default, rename = "loadBalancingRules", deserialize_with = "or_default")]
    pub(crate) rules: Vec<Part<Rule>>,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) probes: Vec<Part<Probe>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) provisioning_state: Option<Provisioning>,
    #[serde(flatten)]
    pub(crate) rest: Rest,
}

pub(crate) type Balancer = Resource<BalancerProperties>;

/// An address of a load balancer: a public IP, or a private address of a subnet.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Frontend {
    #[serde(default, rename = "publicIPAddress", skip_serializing_if = "Option::is_none")]
    pub(crate) public_ip: Option<Ref>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) subnet: Option<Ref>,
    #[serde(default, rename = "privateIPAddress", skip_serializing_if = "Option::is_none")]
    pub(crate) private_ip: Option<IpAddr>,
    #[serde(default, rename = "privateIPAllocationMethod", skip_serializing_if = "Option::is_none")]
    pub(crate) allocation: Option<String>,
    #[serde(default, rename = "privateIPAddressVersion", skip_serializing_if = "Option::is_none")]
    pub(crate) version: Option<String>,
    #[serde(flatten)]
    pub(crate) rest: Rest,
}

/// Addresses of nodes.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Pool {
    #[serde(default, rename = "loadBalancerBackendAddresses", deserialize_with = "or_default")]
    pub(crate) addresses: Vec<Part<PoolAddress>>,
    #[serde(flatten)]
    pub(crate) rest: Rest,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PoolAddress {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) ip_address: Option<IpAddr>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) virtual_network: Option<Ref>,
    #[serde(flatten)]
    pub(crate) rest: Rest,
}

/// A port of a frontend, the pool that serves it, and the probe that checks it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Rule {
    #[serde(default, rename = "frontendIPConfiguration")]
    pub(crate) frontend: Ref,
    #[serde(default, rename = "backendAddressPool", skip_serializing_if = "Option::is_none")]
    pub(crate) pool: Option<Ref>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) probe: Option<Ref>,
    #[serde(default)]
    pub(crate) protocol: String,
    #[serde(default)]
    pub(crate) frontend_port: u16,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) backend_port: Option<u16>,
    #[serde(default, rename = "enableFloatingIP", skip_serializing_if = "Option::is_none")]
    pub(crate) floating_ip: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) enable_tcp_reset: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) idle_timeout_in_minutes: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) load_distribution: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) disable_outbound_snat: Option<bool>,
    #[serde(flatten)]
    pub(crate) rest: Rest,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Probe {
    #[serde(default)]
    pub(crate) protocol: String,
    #[serde(default)]
    pub(crate) port: u16,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) request_path: Option<String>,
    #[serde(default)]
    pub(crate) interval_in_seconds: u64,
    #[serde(default, rename = "probeThreshold", skip_serializing_if = "Option::is_none")]
    pub(crate) threshold: Option<u32>,
    #[serde(flatten)]
    pub(crate) rest: Rest,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PublicIpProperties {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) ip_address: Option<IpAddr>,
    #[serde(default, rename = "publicIPAllocationMethod", skip_serializing_if = "Option::is_none")]
    pub(crate) allocation: Option<String>,
    #[serde(default, rename = "publicIPAddressVersion", skip_serializing_if = "Option::is_none")]
    pub(crate) version: Option<String>,
    #[serde(default, rename = "publicIPPrefix", skip_serializing_if = "Option::is_none")]
    pub(crate) prefix: Option<Ref>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) dns_settings: Option<Value>,
    /// What uses it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) ip_configuration: Option<Ref>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) provisioning_state: Option<Provisioning>,
    #[serde(flatten)]
    pub(crate) rest: Rest,
}

pub(crate) type PublicIp = Resource<PublicIpProperties>;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct SecurityGroupProperties {
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) security_rules: Vec<Part<SecurityRule>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) provisioning_state: Option<Provisioning>,
    #[serde(flatten)]
    pub(crate) rest: Rest,
}

pub(crate) type SecurityGroup = Resource<SecurityGroupProperties>;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct SecurityRule {
    #[serde(default)]
    pub(crate) protocol: String,
    #[serde(default)]
    pub(crate) access: String,
    #[serde(default)]
    pub(crate) direction: String,
    #[serde(default)]
    pub(crate) priority: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) source_port_range: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) source_address_prefix: Option<String>,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) source_address_prefixes: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) destination_address_prefix: Option<String>,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) destination_address_prefixes: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) destination_port_range: Option<String>,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) destination_port_ranges: Vec<String>,
    #[serde(flatten)]
    pub(crate) rest: Rest,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn unknown_fields_of_every_level_survive() {
        let document = json!({
            "id": "/a", "name": "lb", "etag": "W/1", "location": "westeurope", "sku": { "name": "Standard", "tier": "Regional" },
            "tags": { "team": "a" }, "extendedLocation": { "name": "x" },
            "properties": {
                "frontendIPConfigurations": [{ "name": "f", "etag": "W/1", "zones": ["1"],
                    "properties": { "publicIPAddress": { "id": "/p" }, "gatewayLoadBalancer": { "id": "/g" } } }],
                "backendAddressPools": [{ "name": "p", "properties": { "syncMode": "Automatic",
                    "loadBalancerBackendAddresses": [{ "name": "n", "properties": { "ipAddress": "10.0.0.1", "adminState": "None" } }] } }],
                "loadBalancingRules": [{ "name": "r", "properties": { "frontendIPConfiguration": { "id": "/f" }, "frontendPort": 0, "protocol": "All" } }],
                "probes": [],
                "outboundRules": [{ "name": "o" }], "inboundNatRules": [{ "name": "i" }], "provisioningState": "Succeeded",
            },
        });
        let read: Balancer = serde_json::from_value(document.clone()).unwrap();
        assert_eq!(serde_json::to_value(&read).unwrap(), document);
    }

    #[test]
    fn ids_differ_in_more_than_case() {
        assert_eq!(Id("/subscriptions/S/a".to_owned()), Id("/Subscriptions/s/A".to_owned()));
        assert!(Id("/x/LB/frontends/a".to_owned()).is_in("/X/lb"));
        assert!(!Id("/x/lb2/frontends/a".to_owned()).is_in("/x/lb"));
        let odd: Provisioning = serde_json::from_value(json!("Moving")).unwrap();
        assert!(odd.is_busy());
    }
}
