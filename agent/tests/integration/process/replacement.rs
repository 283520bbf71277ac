// SPDX-License-Identifier: Apache-2.0
//! The agent in kube-proxy's place: its configuration file, and the addresses at which operators look for it.

use serde_json::json;
use steerage_requirements::requires;

use crate::process::scene::{Scene, eventually};
use crate::world::At;

const FILE: &str = "apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: nftables
healthzBindAddress: 127.0.0.1
metricsBindAddress: 127.0.0.1:10248
nftables: {masqueradeAll: true}
enableProfiling: true
";

#[test]
fn settings_and_addresses_of_kube_proxy_are_taken_over() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"), Program("sysctl"), KubeApiserver);
    let scene = Scene::new("replacement");
    let file = std::env::temp_dir().join(format!("steerage-kube-proxy-{}.conf", std::process::id()));
    std::fs::write(&file, FILE).unwrap();
    let path = file.to_str().unwrap();
    let (status, text) = scene.command(&["check", "--config", path]);
    assert!(status.success(), "{text}");
    for line in ["applied nftables.masqueradeAll true: as --masquerade-all", "differs enableProfiling true: "]
    {
        assert!(text.contains(line), "no {line} in {text}");
    }

    scene.service("web", "192.0.2.10".parse().unwrap(), &json!({}));
    scene.endpoints("web", "node", &[At::Pod1]);
    let flags = ["--kube-proxy-replacement", "--config", path];
    let agent = scene.started_with("node", &flags);
    let cluster_ip = scene.get("v1", "Service", "web")["spec"]["clusterIP"].as_str().unwrap().to_owned();
    assert!(scene.nft("list set ip steerage masqueraded").contains(&cluster_ip));
    let mode = || agent.get_at("127.0.0.1:10248", "/proxyMode").unwrap_or_default();
    eventually("the mode is where the file says", || mode().ends_with("\r\n\r\nnftables"));
    let health = || agent.get_at("127.0.0.1:10256", "/healthz").unwrap_or_default();
    eventually("so is the node's health", || health().contains(" 200 "));
    assert!(health().contains("\"IPv4\"") && health().contains("\"IPv6\""), "{}", health());
    let metrics = agent.get("/metrics").unwrap();
    assert!(
        metrics.contains("\nrest_client_requests_total{code=\"200\",method=\"GET\",host=\""),
        "{metrics}"
    );
    assert!(metrics.contains("kubeproxy_sync_proxy_rules_duration_seconds_count{ip_family=\"IPv6\"}"));
    let log = scene.log();
    let told = log.lines().find(|line| line.contains("kube-proxy setting not followed"));
    assert!(told.is_some_and(|line| line.contains("enableProfiling")), "{log}");
    drop(agent);

    scene.world.sh_at(At::Node, "sysctl -qw net.ipv6.conf.all.disable_ipv6=1");
    let agent = scene.started_with("node", &flags);
    let health = || agent.get_at("127.0.0.1:10256", "/healthz").unwrap_or_default();
    eventually("health is served without IPv6", || health().contains(" 200 "));
    assert!(health().contains("\"IPv4\"") && !health().contains("\"IPv6\""), "{}", health());
    let metrics = agent.get("/metrics").unwrap();
    assert!(
        !metrics.lines().any(|line| line.starts_with("kubeproxy_") && line.contains("IPv6")),
        "{metrics}"
    );
    std::fs::remove_file(&file).unwrap();
}
