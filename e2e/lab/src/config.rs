// SPDX-License-Identifier: Apache-2.0
//! The configuration files of a node's components, as text. Pure.
//!
//! JSON where the reader accepts YAML. A comment gives the reason for a value that is not the default.

use std::path::Path;

use serde_json::{Value, json};

use crate::addresses::{Cloud, DNS_IPV4, Host, PODS_IPV4, PODS_IPV6, pod_cidrs};

/// Where a node's containerd listens, inside the node.
pub const CONTAINERD_SOCKET: &str = "/run/containerd/containerd.sock";

/// containerd's configuration.
pub fn containerd(pause_image: &str, cni: &Path) -> String {
    format!(
        r#"version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = [
  "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs",
]

[grpc]
  address = "{CONTAINERD_SOCKET}"

[plugins."io.containerd.grpc.v1.cri"]
  # A negative oom_score_adj needs a capability that not every machine gives.
  restrict_oom_score_adj = true
  disable_apparmor = true
  enable_unprivileged_ports = true
  enable_unprivileged_icmp = true
  sandbox_image = "{pause_image}"

[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = "/usr/lib/cni"
  conf_dir = "{cni}"

[plugins."io.containerd.grpc.v1.cri".containerd]
  snapshotter = "overlayfs"
"#,
        cni = cni.display()
    )
}

/// The pod network of a node: a veth pair per pod, addresses of both families.
pub fn cni(node: u8) -> Value {
    let (ipv4, ipv6) = pod_cidrs(node);
    json!({
        "cniVersion": "0.4.0",
        "name": "lab",
        "plugins": [
            {
                "type": "ptp",
                "mtu": 1500,
                "ipMasq": false,
                "ipam": {
                    "type": "host-local",
                    "ranges": [[{ "subnet": ipv4 }], [{ "subnet": ipv6 }]],
                    "routes": [{ "dst": "0.0.0.0/0" }, { "dst": "::/0" }],
                },
            },
        ],
    })
}

/// The parameters of a kubelet's configuration.
pub struct Kubelet<'a> {
    /// The authority of clients.
    pub authority: &'a Path,
    /// Its serving certificate.
    pub certificate: &'a Path,
    /// Its key.
    pub key: &'a Path,
    /// The resolver file of pods that ask for the node's.
    pub resolv_conf: &'a Path,
}

/// The kubelet's configuration.
pub fn kubelet(of: &Kubelet<'_>) -> Value {
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": { "enabled": false },
            "webhook": { "enabled": true },
            "x509": { "clientCAFile": of.authority },
        },
        "authorization": { "mode": "Webhook" },
        "tlsCertFile": of.certificate,
        "tlsPrivateKeyFile": of.key,
        "containerRuntimeEndpoint": format!("unix://{CONTAINERD_SOCKET}"),
        "clusterDNS": [DNS_IPV4],
        "clusterDomain": "cluster.local",
        "resolvConf": of.resolv_conf,
        // Others share the machine's cgroups, which may not be delegated.
        "cgroupDriver": "cgroupfs",
        "cgroupsPerQOS": false,
        "enforceNodeAllocatable": [],
        "failCgroupV1": false,
        "failSwapOn": false,
        "makeIPTablesUtilChains": false,
        "oomScoreAdj": 0,
        "evictionHard": { "nodefs.available": "1%", "imagefs.available": "1%", "memory.available": "50Mi" },
        // No image can be pulled again.
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "maxPods": 110,
        "serializeImagePulls": false,
    })
}

/// kube-proxy's configuration.
pub fn kube_proxy(node: &Host, kubeconfig: &Path, cloud: Option<Cloud>) -> Value {
    let mut config = json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "hostnameOverride": node.name,
        "clientConnection": { "kubeconfig": kubeconfig },
        "clusterCIDR": format!("{PODS_IPV4},{PODS_IPV6}"),
        "detectLocalMode": "NodeCIDR",
        "oomScoreAdj": 0,
        // The settings of the machine are read-only in a network namespace.
        "conntrack": {
            "maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s",
            "udpTimeout": "0s", "udpStreamTimeout": "0s",
        },
    });
    if cloud == Some(Cloud::Gce) {
        // Health checks are addressed to VIPs. In this mode kube-proxy answers at the node's own addresses only, unless told.
        config["nodePortAddresses"] = json!(["0.0.0.0/0", "::/0"]);
    }
    config
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::addresses::{Plan, ServiceProxy};

    #[test]
    fn pods_get_both_families_of_their_node() {
        let ranges = &cni(11)["plugins"][0]["ipam"]["ranges"];
        assert_eq!(ranges, &json!([[{ "subnet": "10.244.11.0/24" }], [{ "subnet": "fd44:b::/64" }]]));
    }

    #[test]
    fn kube_proxy_answers_checks_at_vips_in_gce() {
        let node = Plan {
            name: "lab".into(),
            workers: 1,
            edges: 0,
            service_proxy: ServiceProxy::KubeProxy,
            cloud: None,
            node_monitor_grace_period: "50s".to_owned(),
        }
        .nodes()
        .remove(0);
        let of = |cloud| kube_proxy(&node, Path::new("kubeconfig"), cloud).get("nodePortAddresses").cloned();
        assert_eq!(of(Some(Cloud::Gce)), Some(json!(["0.0.0.0/0", "::/0"])));
        assert_eq!(of(None), None);
    }

    #[test]
    fn containerd_finds_the_labs_network() {
        let text = containerd("registry.example/pause:1", Path::new("/lab/cni"));
        assert!(
            text.contains("conf_dir = \"/lab/cni\"")
                && text.contains("sandbox_image = \"registry.example/pause:1\"")
        );
    }
}
