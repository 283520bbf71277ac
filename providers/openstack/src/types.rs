// SPDX-License-Identifier: Apache-2.0
//! Objects of Octavia and Neutron, as far as this crate reads them. Requests name only the fields that they change, so fields that are not
//! here stay as they are.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use steerage_model::Family;

/// `provisioning_status`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(from = "String")]
pub(crate) enum Provisioning {
    Active,
    /// Octavia or its provider driver gave up.
    Error,
    /// It is being deleted.
    Deleting,
    /// Being created or changed: no other change is taken.
    Pending,
}

impl Provisioning {
    /// Whether no change is taken now.
    pub(crate) fn is_pending(self) -> bool {
        matches!(self, Self::Pending | Self::Deleting)
    }
}

impl From<String> for Provisioning {
    fn from(text: String) -> Self {
        match text.as_str() {
            "ACTIVE" => Self::Active,
            "ERROR" => Self::Error,
            "PENDING_DELETE" | "DELETED" => Self::Deleting,
            _ => Self::Pending,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct Balancer {
    pub(crate) id: String,
    pub(crate) provisioning_status: Provisioning,
    #[serde(default)]
    pub(crate) operating_status: Option<String>,
    #[serde(default = "yes")]
    pub(crate) admin_state_up: bool,
    pub(crate) vip_address: Option<IpAddr>,
    pub(crate) vip_port_id: Option<String>,
    pub(crate) vip_subnet_id: Option<String>,
    #[serde(default)]
    pub(crate) vip_network_id: Option<String>,
    #[serde(default)]
    pub(crate) project_id: Option<String>,
    #[serde(default)]
    pub(crate) additional_vips: Vec<AdditionalVip>,
    #[serde(default)]
    pub(crate) name: String,
    #[serde(default)]
    pub(crate) flavor_id: Option<String>,
    #[serde(default)]
    pub(crate) availability_zone: Option<String>,
    #[serde(default)]
    pub(crate) provider: Option<String>,
    #[serde(default)]
    pub(crate) tags: Vec<String>,
    #[serde(default)]
    pub(crate) created_at: Option<String>,
}

/// A further VIP, of another subnet.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct AdditionalVip {
    pub(crate) ip_address: Option<IpAddr>,
    /// Its port. Amphorae have one port for all VIPs, OVN has one for each.
    pub(crate) port_id: Option<String>,
}

impl Balancer {
    /// All VIPs with their ports, the first one first.
    pub(crate) fn vips(&self) -> impl Iterator<Item = (IpAddr, &str)> {
        let first = self.vip_port_id.as_deref().unwrap_or_default();
        let more = self
            .additional_vips
            .iter()
            .map(move |vip| (vip.ip_address, vip.port_id.as_deref().unwrap_or(first)));
        std::iter::once((self.vip_address, first)).chain(more).filter_map(|(vip, port)| Some((vip?, port)))
    }

    /// The VIP of a family, with its port.
    pub(crate) fn vip(&self, family: Family) -> Option<(IpAddr, &str)> {
        self.vips().find(|(vip, _)| Family::of(*vip) == family)
    }

    /// The port of the VIP that a floating IP translates to.
    pub(crate) fn floating_port(&self) -> &str {
        self.vip(Family::V4).map_or(self.vip_port_id.as_deref().unwrap_or_default(), |(_, port)| port)
    }

    /// The families of its VIPs, the first one's first.
    pub(crate) fn families(&self) -> Vec<Family> {
        let families: Vec<Family> = self.vips().map(|(vip, _)| Family::of(vip)).collect();
        if families.is_empty() { vec![Family::V4] } else { families }
    }

    /// Whether clients are served, as far as Octavia knows.
    pub(crate) fn is_serving(&self) -> bool {
        matches!(self.operating_status.as_deref(), Some("ONLINE" | "DEGRADED"))
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct Listener {
    pub(crate) id: String,
    #[serde(default)]
    pub(crate) name: String,
    pub(crate) provisioning_status: Provisioning,
    pub(crate) protocol: String,
    pub(crate) protocol_port: u16,
    pub(crate) default_pool_id: Option<String>,
    pub(crate) admin_state_up: bool,
    #[serde(default)]
    pub(crate) allowed_cidrs: Option<Vec<String>>,
    #[serde(default)]
    pub(crate) tags: Vec<String>,
    #[serde(flatten)]
    pub(crate) limits: Limits,
}

/// Limits of a listener: connections, and times in milliseconds.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub(crate) struct Limits {
    #[serde(default)]
    pub(crate) connection_limit: Option<i64>,
    #[serde(default)]
    pub(crate) timeout_client_data: Option<i64>,
    #[serde(default)]
    pub(crate) timeout_member_connect: Option<i64>,
    #[serde(default)]
    pub(crate) timeout_member_data: Option<i64>,
    #[serde(default)]
    pub(crate) timeout_tcp_inspect: Option<i64>,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct Pool {
    pub(crate) id: String,
    pub(crate) name: String,
    pub(crate) provisioning_status: Provisioning,
    pub(crate) protocol: String,
    pub(crate) lb_algorithm: String,
    pub(crate) admin_state_up: bool,
    pub(crate) session_persistence: Option<Persistence>,
    #[serde(default)]
    pub(crate) healthmonitor_id: Option<String>,
    #[serde(default)]
    pub(crate) tags: Vec<String>,
    #[serde(skip)]
    pub(crate) members: Vec<Member>,
    #[serde(skip)]
    pub(crate) monitor: Option<Monitor>,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct Persistence {
    pub(crate) r#type: String,
    #[serde(default)]
    pub(crate) persistence_timeout: Option<u64>,
}

impl Persistence {
    pub(crate) fn body(&self) -> Value {
        let mut body = json!({ "type": self.r#type });
        if let Some(timeout) = self.persistence_timeout {
            body["persistence_timeout"] = timeout.into();
        }
        body
    }
}

/// A member. Octavia knows it by address and port.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct Member {
    pub(crate) address: IpAddr,
    pub(crate) protocol_port: u16,
    #[serde(default)]
    pub(crate) name: String,
    pub(crate) weight: u32,
    pub(crate) monitor_port: Option<u16>,
    pub(crate) subnet_id: Option<String>,
    #[serde(default)]
    pub(crate) backup: bool,
    #[serde(default = "yes")]
    pub(crate) admin_state_up: bool,
    #[serde(default = "active")]
    pub(crate) provisioning_status: Provisioning,
}

fn yes() -> bool {
    true
}

pub(crate) fn active() -> Provisioning {
    Provisioning::Active
}

impl Member {
    pub(crate) fn key(&self) -> (IpAddr, u16) {
        (self.address, self.protocol_port)
    }

    /// Whether Octavia sends to it, as far as its fields say.
    pub(crate) fn is_usable(&self) -> bool {
        self.admin_state_up
            && self.weight > 0
            && !self.backup
            && self.provisioning_status != Provisioning::Error
    }

    pub(crate) fn body(&self) -> Value {
        let mut body = json!({
            "address": self.address,
            "protocol_port": self.protocol_port,
            "name": self.name,
            "weight": self.weight,
            "monitor_port": self.monitor_port,
            "backup": self.backup,
            "admin_state_up": self.admin_state_up,
        });
        if let Some(subnet) = &self.subnet_id {
            body["subnet_id"] = subnet.as_str().into();
        }
        body
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct Monitor {
    pub(crate) id: String,
    pub(crate) provisioning_status: Provisioning,
    pub(crate) admin_state_up: bool,
    #[serde(default)]
    pub(crate) tags: Vec<String>,
    #[serde(default)]
    pub(crate) pools: Vec<Reference>,
    #[serde(flatten)]
    pub(crate) check: Check,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct Reference {
    pub(crate) id: String,
}

/// What a health monitor asks, and how often, in seconds.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize)]
pub(crate) struct Check {
    pub(crate) r#type: String,
    pub(crate) delay: u64,
    pub(crate) timeout: u64,
    pub(crate) max_retries: u32,
    pub(crate) max_retries_down: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) http_method: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) url_path: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) expected_codes: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct FloatingIp {
    pub(crate) id: String,
    #[serde(rename = "floating_ip_address")]
    pub(crate) address: IpAddr,
    pub(crate) floating_network_id: String,
    pub(crate) port_id: Option<String>,
    #[serde(default)]
    pub(crate) description: String,
    /// `None` where Neutron does not count revisions.
    #[serde(default)]
    pub(crate) revision_number: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub(crate) struct Subnet {
    #[serde(default)]
    pub(crate) id: String,
    pub(crate) ip_version: u8,
    pub(crate) cidr: String,
    #[serde(default)]
    pub(crate) network_id: String,
}
