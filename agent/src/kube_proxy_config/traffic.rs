// SPDX-License-Identifier: Apache-2.0
//! How local pods are recognised, and where node ports are served.

use std::net::IpAddr;

use ipnet::IpNet;
use steerage_model::Family;

use super::fields::KubeProxyConfiguration;
use super::modes::Mode;
use super::report::{Report, invalid};
use super::translate::given;
use super::{ConfigError, Treatment};
use crate::settings::{DetectLocal, NodePortAddresses};

/// `detectLocalMode` and what belongs to it.
pub(super) fn detect_local(
    config: &KubeProxyConfiguration,
    report: &mut Report,
) -> Result<DetectLocal, ConfigError> {
    const MODE: &str = "detectLocalMode";
    let mode = config.detect_local_mode.as_deref().unwrap_or_default();
    let fields = config.detect_local.clone().unwrap_or_default();
    let interface = |field: &'static str, name: Option<String>| {
        name.filter(|name| !name.is_empty())
            .ok_or_else(|| invalid(field, "", "empty, though detectLocalMode needs it"))
    };
    let cidrs = given(config.cluster_cidr.as_deref());
    let is_cluster = ["", "ClusterCIDR"].contains(&mode);
    let detected = match mode {
        "" | "ClusterCIDR" => {
            let nets = cidrs
                .into_iter()
                .flat_map(|list| list.split(','))
                .map(|net| net.trim().parse().map_err(|_| invalid("clusterCIDR", net, "not a network")));
            let nets: Vec<IpNet> = nets.collect::<Result<_, _>>()?;
            if nets.is_empty() {
                let text = "as --detect-local-mode none, because clusterCIDR is empty; only this host's own connections to a \
                            cluster IP get the node's address, which kube-proxy leaves to routing";
                report.add(Treatment::Applied, MODE, mode, text);
                return Ok(DetectLocal::Nothing);
            }
            report.add(Treatment::Applied, MODE, mode, "as --detect-local-mode cluster-cidr");
            DetectLocal::ClusterCidrs(nets)
        }
        "NodeCIDR" => {
            report.add(Treatment::Applied, MODE, mode, "as --detect-local-mode node-cidr");
            DetectLocal::NodeCidrs
        }
        "BridgeInterface" => {
            let name = interface("detectLocal.bridgeInterface", fields.bridge_interface.clone())?;
            report.add(Treatment::Applied, MODE, mode, "as --detect-local-mode bridge-interface");
            DetectLocal::Bridge(name)
        }
        "InterfaceNamePrefix" => {
            let name = interface("detectLocal.interfaceNamePrefix", fields.interface_name_prefix.clone())?;
            report.add(Treatment::Applied, MODE, mode, "as --detect-local-mode interface-name-prefix");
            DetectLocal::InterfacePrefix(name)
        }
        other => return Err(invalid(MODE, other, "not a mode of kube-proxy")),
    };
    let of = |is_used: bool, flag: &str| {
        if is_used {
            (Treatment::Applied, format!("as {flag}"))
        } else {
            (Treatment::Unused, "detectLocalMode is another one".to_owned())
        }
    };
    let used = [
        (
            "detectLocal.bridgeInterface",
            fields.bridge_interface,
            mode == "BridgeInterface",
            "--pod-bridge-interface",
        ),
        (
            "detectLocal.interfaceNamePrefix",
            fields.interface_name_prefix,
            mode == "InterfaceNamePrefix",
            "--pod-interface-name-prefix",
        ),
        ("clusterCIDR", cidrs.map(str::to_owned), is_cluster, "--cluster-cidr"),
    ];
    for (field, value, is_used, flag) in used {
        if let Some(value) = value.filter(|value| !value.is_empty()) {
            let (treatment, text) = of(is_used, flag);
            report.add(treatment, field, value, text);
        }
    }
    Ok(detected)
}

/// `nodePortAddresses`, whose default depends on the mode.
pub(super) fn node_port_addresses(
    mode: Mode,
    config: &KubeProxyConfiguration,
    report: &mut Report,
) -> Result<NodePortAddresses, ConfigError> {
    const FIELD: &str = "nodePortAddresses";
    let list = config.node_port_addresses.clone().unwrap_or_default();
    let value = list.join(",");
    match (list.as_slice(), mode) {
        ([one], _) if one == "primary" => {
            report.add(Treatment::Applied, FIELD, value, "as --nodeport-addresses primary");
            return Ok(NodePortAddresses::Primary);
        }
        ([], Mode::NfTables) => {
            report.add(Treatment::Same, FIELD, value, "--nodeport-addresses primary, as in mode nftables");
            return Ok(NodePortAddresses::Primary);
        }
        ([], Mode::IpTables | Mode::Ipvs) => {
            report.add(
                Treatment::Applied,
                FIELD,
                value,
                "as --nodeport-addresses 0.0.0.0/0,::/0, which excludes loopback; consider primary, the agent's default",
            );
            let all = [IpAddr::from([0, 0, 0, 0]), IpAddr::from([0; 16])];
            let nets = all.into_iter().filter_map(|addr| IpNet::new(addr, 0).ok());
            return Ok(NodePortAddresses::In(nets.collect()));
        }
        _ => {}
    }
    let parse = |net: &String| {
        net.parse().map_err(|_| invalid(FIELD, net, "neither a network nor the only word primary"))
    };
    let nets: Vec<IpNet> = list.iter().map(parse).collect::<Result<_, _>>()?;
    report.add(Treatment::Applied, FIELD, &value, "as --nodeport-addresses");
    for family in [Family::V4, Family::V6] {
        if nets.iter().all(|net| Family::of(net.addr()) != family) {
            let text = format!(
                "no node ports on {family} addresses, because no network is {family}; kube-proxy opens all of them"
            );
            report.add(Treatment::Differs, FIELD, &value, text);
        }
    }
    if nets.iter().any(|net| net.addr().is_loopback()) {
        let text = "node ports are not served on loopback addresses";
        report.add(Treatment::Differs, FIELD, &value, text);
    }
    Ok(NodePortAddresses::In(nets))
}
