// SPDX-License-Identifier: Apache-2.0
//! The fields of the file. kubeadm writes all of them, most of them empty or null: every value may be missing.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

/// The file. Public fields of its own sections are kube-proxy's, and documented there.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct KubeProxyConfiguration {
    #[serde(rename = "apiVersion")]
    pub(super) api_version: String,
    pub(super) kind: String,
    pub(super) feature_gates: Option<BTreeMap<String, bool>>,
    pub(super) client_connection: Option<ClientConnection>,
    pub(super) logging: Option<Logging>,
    pub(super) hostname_override: Option<String>,
    pub(super) bind_address: Option<String>,
    pub(super) healthz_bind_address: Option<String>,
    pub(super) metrics_bind_address: Option<String>,
    pub(super) bind_address_hard_fail: Option<bool>,
    pub(super) enable_profiling: Option<bool>,
    pub(super) show_hidden_metrics_for_version: Option<String>,
    pub(super) mode: Option<String>,
    pub(super) iptables: Option<IpTables>,
    pub(super) ipvs: Option<Ipvs>,
    pub(super) nftables: Option<NfTables>,
    pub(super) winkernel: Option<Winkernel>,
    pub(super) detect_local_mode: Option<String>,
    pub(super) detect_local: Option<DetectLocalFields>,
    #[serde(rename = "clusterCIDR")]
    pub(super) cluster_cidr: Option<String>,
    pub(super) node_port_addresses: Option<Vec<String>>,
    #[serde(rename = "oomScoreAdj")]
    pub(super) oom_score_adj: Option<i64>,
    pub(super) conntrack: Option<Conntrack>,
    pub(super) config_sync_period: Option<String>,
    pub(super) port_range: Option<String>,
    pub(super) windows_run_as_service: Option<bool>,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(super) struct ClientConnection {
    pub(super) kubeconfig: Option<String>,
    pub(super) accept_content_types: Option<String>,
    pub(super) content_type: Option<String>,
    pub(super) qps: Option<f64>,
    pub(super) burst: Option<i64>,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(super) struct Logging {
    pub(super) format: Option<String>,
    /// A number of nanoseconds, or a duration.
    pub(super) flush_frequency: Option<Value>,
    pub(super) verbosity: Option<u32>,
    pub(super) vmodule: Option<Vec<Value>>,
    pub(super) options: Option<Value>,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(super) struct IpTables {
    pub(super) masquerade_bit: Option<u32>,
    pub(super) masquerade_all: Option<bool>,
    pub(super) localhost_node_ports: Option<bool>,
    pub(super) sync_period: Option<String>,
    pub(super) min_sync_period: Option<String>,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(super) struct NfTables {
    pub(super) masquerade_bit: Option<u32>,
    pub(super) masquerade_all: Option<bool>,
    pub(super) sync_period: Option<String>,
    pub(super) min_sync_period: Option<String>,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(super) struct Ipvs {
    pub(super) sync_period: Option<String>,
    pub(super) min_sync_period: Option<String>,
    pub(super) scheduler: Option<String>,
    #[serde(rename = "excludeCIDRs")]
    pub(super) exclude_cidrs: Option<Vec<String>>,
    #[serde(rename = "strictARP")]
    pub(super) strict_arp: Option<bool>,
    pub(super) tcp_timeout: Option<String>,
    pub(super) tcp_fin_timeout: Option<String>,
    pub(super) udp_timeout: Option<String>,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(super) struct Conntrack {
    pub(super) max_per_core: Option<u64>,
    pub(super) min: Option<u64>,
    pub(super) tcp_established_timeout: Option<String>,
    pub(super) tcp_close_wait_timeout: Option<String>,
    pub(super) tcp_be_liberal: Option<bool>,
    pub(super) udp_timeout: Option<String>,
    pub(super) udp_stream_timeout: Option<String>,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(super) struct DetectLocalFields {
    pub(super) bridge_interface: Option<String>,
    pub(super) interface_name_prefix: Option<String>,
}

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub(super) struct Winkernel {
    pub(super) network_name: Option<String>,
    pub(super) source_vip: Option<String>,
    #[serde(rename = "enableDSR")]
    pub(super) enable_dsr: Option<bool>,
    pub(super) root_hns_endpoint_name: Option<String>,
    pub(super) forward_health_check_vip: Option<bool>,
}

/// The IPVS fields and their values, of those that say something.
impl Ipvs {
    pub(super) fn timeouts(&self) -> [(&'static str, Option<&str>); 3] {
        [
            ("ipvs.tcpTimeout", self.tcp_timeout.as_deref()),
            ("ipvs.tcpFinTimeout", self.tcp_fin_timeout.as_deref()),
            ("ipvs.udpTimeout", self.udp_timeout.as_deref()),
        ]
    }
}
