// SPDX-License-Identifier: Apache-2.0
//! `--config`: flags that were not given get the values of kube-proxy's configuration file.

use std::fs;
use std::num::NonZero;
use std::path::Path;

use anyhow::Context;
use steerage_agent::health::HealthAddress;
use steerage_agent::kube_proxy_config::{
    Difference, FileSettings, HostSettings, SYSCTLS, Treatment, read, translate,
};
use steerage_agent::settings::DetectLocal;
use steerage_watch::ClientArgs;

use super::{AgentArgs, DetectLocalMode, HEALTHZ_PORTS, MetricsAddress};

/// Prints the report on a file.
pub(super) fn check(path: &Path) -> anyhow::Result<()> {
    let (_, report) = load(path)?;
    for difference in report {
        println!("{difference}");
    }
    Ok(())
}

/// Fills in what the file says, and logs what the agent does differently.
pub(super) fn apply(path: &Path, agent: &mut AgentArgs, client: &mut ClientArgs) -> anyhow::Result<()> {
    let (settings, report) = load(path)?;
    for Difference { treatment, field, value, text } in report {
        match treatment {
            Treatment::Differs => {
                tracing::warn!(field, value, instead = text, "kube-proxy setting not followed");
            }
            Treatment::Applied | Treatment::Same | Treatment::Unused => {
                tracing::debug!(%treatment, field, value, how = text, "kube-proxy setting read");
            }
        }
    }
    fill(settings, agent, client);
    Ok(())
}

fn load(path: &Path) -> anyhow::Result<(FileSettings, Vec<Difference>)> {
    let found = read(path).and_then(|config| translate(&config, &host_settings()));
    found.with_context(|| format!("--config {}", path.display()))
}

fn host_settings() -> HostSettings {
    let value = |name: &str| {
        let path = Path::new("/proc/sys").join(name.replace('.', "/"));
        fs::read_to_string(path).ok()?.trim().parse().ok()
    };
    HostSettings {
        processors: std::thread::available_parallelism().map_or(1, NonZero::get),
        settings: SYSCTLS.into_iter().filter_map(|name| Some((name, value(name)?))).collect(),
    }
}

/// Flags win.
fn fill(settings: FileSettings, agent: &mut AgentArgs, client: &mut ClientArgs) {
    let FileSettings {
        node_name,
        kubeconfig,
        bind_address,
        healthz,
        metrics_bind_address,
        node_port_addresses,
        detect_local,
        masquerade_all,
        deny_external_ips,
    } = settings;
    agent.node_name = agent.node_name.take().or(node_name);
    if client.api_server.is_none() {
        client.kubeconfig = client.kubeconfig.take().or(kubeconfig);
    }
    agent.bind_address = agent.bind_address.or(bind_address);
    if agent.healthz_port.is_empty() {
        // The edge and the controller probe the agent's own.
        agent.healthz_port = vec![healthz, HealthAddress::all(HEALTHZ_PORTS[1])];
    }
    agent.metrics_bind_address.get_or_insert(MetricsAddress(Some(metrics_bind_address)));
    agent.nodeport_addresses.get_or_insert(node_port_addresses);
    agent.masquerade_all |= masquerade_all;
    agent.deny_service_external_ips |= deny_external_ips;
    if agent.detect_local_mode.is_some() {
        return;
    }
    let mode = match detect_local {
        DetectLocal::NodeCidrs => DetectLocalMode::NodeCidr,
        DetectLocal::ClusterCidrs(nets) => {
            if agent.cluster_cidr.is_empty() {
                agent.cluster_cidr = nets;
            }
            DetectLocalMode::ClusterCidr
        }
        DetectLocal::Bridge(name) => {
            agent.pod_bridge_interface.get_or_insert(name);
            DetectLocalMode::BridgeInterface
        }
        DetectLocal::InterfacePrefix(prefix) => {
            agent.pod_interface_name_prefix.get_or_insert(prefix);
            DetectLocalMode::InterfaceNamePrefix
        }
        DetectLocal::Nothing => DetectLocalMode::None,
    };
    agent.detect_local_mode = Some(mode);
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use steerage_agent::kube_proxy_config::parse;
    use steerage_agent::settings::NodePortAddresses;

    use super::*;
    use crate::args::Args;

    const FILE: &str = r#"
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: nftables
hostnameOverride: Node-1
clientConnection: {kubeconfig: /var/lib/kube-proxy/kubeconfig.conf}
clusterCIDR: "10.244.0.0/16"
bindAddress: 10.0.0.1
metricsBindAddress: 0.0.0.0
nftables: {masqueradeAll: true}
"#;

    fn filled(flags: &str) -> (AgentArgs, ClientArgs) {
        let line = format!("steerage-agent --kube-proxy-replacement --config f {flags}");
        let Args { mut agent, mut client, .. } = Args::parse_from(line.split_whitespace());
        let (settings, _) = translate(&parse(FILE).unwrap(), &HostSettings::default()).unwrap();
        fill(settings, &mut agent, &mut client);
        (agent, client)
    }

    #[test]
    fn file_fills_in_what_no_flag_says() {
        let (agent, client) = filled("");
        assert_eq!(agent.node_name.as_deref(), Some("node-1"));
        assert_eq!(client.kubeconfig.as_deref(), Some(Path::new("/var/lib/kube-proxy/kubeconfig.conf")));
        assert_eq!(agent.bind_address, Some([10, 0, 0, 1].into()));
        assert_eq!(agent.nodeport_addresses, Some(NodePortAddresses::Primary));
        assert_eq!(agent.metrics_bind_address, Some(MetricsAddress("0.0.0.0:10249".parse().ok())));
        assert_eq!(agent.healthz_port, [10256, 10356].map(HealthAddress::all));
        assert_eq!(agent.detect_local_mode, Some(DetectLocalMode::ClusterCidr));
        assert_eq!(agent.cluster_cidr, ["10.244.0.0/16".parse().unwrap()]);
        assert!(agent.masquerade_all && !agent.deny_service_external_ips);
    }

    #[test]
    fn flags_win_over_the_file() {
        let (agent, client) = filled(
            "--node-name other --kubeconfig /k --bind-address 10.0.0.2 --nodeport-addresses 10.0.0.0/8 \
             --metrics-bind-address none --healthz-port 1 --detect-local-mode none",
        );
        assert_eq!(agent.node_name.as_deref(), Some("other"));
        assert_eq!(client.kubeconfig.as_deref(), Some(Path::new("/k")));
        assert_eq!(agent.bind_address, Some([10, 0, 0, 2].into()));
        assert!(matches!(agent.nodeport_addresses, Some(NodePortAddresses::In(_))));
        assert_eq!(agent.metrics_bind_address, Some(MetricsAddress(None)));
        assert_eq!(agent.healthz_port, [HealthAddress::all(1)]);
        assert_eq!((agent.detect_local_mode, agent.cluster_cidr.len()), (Some(DetectLocalMode::None), 0));
        let (_, client) = filled("--api-server 10.0.0.1:6443");
        assert_eq!(client.kubeconfig, None, "the service account is the agent's own");
    }
}
