// SPDX-License-Identifier: Apache-2.0
//! Tables that a real kube-proxy left on a node where the agent replaces it.

use std::net::{IpAddr, SocketAddr};
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::json;
use steerage_model::Protocol;
use steerage_requirements::requires;

use crate::process::scene::{FRONT, Scene, eventually};
use crate::process::steady::{Steady, steady};
use crate::world::{At, Lost};

const LEFT: &str = "steerage_agent_foreign_tables{reason=\"kube_proxy\"}";

/// Runs kube-proxy until its tables say what `is_written` looks for, and kills it.
fn run_kube_proxy(scene: &Scene, is_written: impl Fn(&str) -> bool) {
    let file = scene.folder.join("kube-proxy.json");
    let settings = json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "hostnameOverride": "node",
        "clientConnection": { "kubeconfig": scene.server.kubeconfig() },
        "detectLocalMode": "NodeCIDR",
        "oomScoreAdj": 0,
        // These settings are the machine's, read-only in a network namespace.
        "conntrack": {
            "maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s",
            "udpTimeout": "0s", "udpStreamTimeout": "0s",
        },
    });
    std::fs::write(&file, settings.to_string()).unwrap();
    let log = std::fs::File::create(scene.folder.join("kube-proxy.log")).unwrap();
    let mut kube_proxy = scene.world.run(At::Node, || {
        Command::new("kube-proxy")
            .arg(format!("--config={}", file.display()))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .unwrap()
    });
    eventually("kube-proxy writes its table", || {
        is_written(&scene.world.sh_at(At::Node, "nft list table ip kube-proxy 2>/dev/null || true"))
    });
    kube_proxy.kill().unwrap();
    kube_proxy.wait().unwrap();
}

#[test]
fn tables_left_by_kube_proxy_are_named_and_their_removal_restores_traffic() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"), Program("kube-proxy"), KubeApiserver);
    let scene = Scene::new("leftovers");
    let vip: IpAddr = "192.0.2.10".parse().unwrap();
    let front = SocketAddr::new(vip, FRONT);
    // Not labelled for the agent: kube-proxy serves it, until the agent replaces kube-proxy.
    let service = |ranges: &[&str]| {
        scene.service("web", vip, &json!({ "loadBalancerSourceRanges": ranges }));
        scene.unlabel("web");
    };
    service(&["198.51.100.0/24"]);
    scene.endpoints("web", "node", &[At::Pod1]);
    run_kube_proxy(&scene, |table| table.contains("192.0.2.10") && table.contains("198.51.100.0/24"));

    let agent = scene.started_with("node", &["--kube-proxy-replacement"]);
    service(&["10.1.0.0/24"]);
    let explained = || scene.command(&["explain", "192.0.2.10:80/TCP", "--from", "10.1.0.2"]).1;
    eventually("the agent serves the client", || explained().contains("sent to 1 endpoint"));
    // One for each family that kube-proxy had come to.
    let tables = scene.nft("list tables");
    let left: Vec<_> = tables.lines().filter_map(|line| line.strip_prefix("table ")).collect();
    let left: Vec<_> = left.into_iter().filter(|table| table.ends_with(" kube-proxy")).collect();
    eventually("the tables are counted", || agent.metric(LEFT) == left.len() as u64);
    let log = scene.log();
    for table in &left {
        let named = |line: &str| {
            line.contains("table of kube-proxy, which this agent replaces") && line.contains(table)
        };
        assert!(log.lines().any(named), "{table}: {log}");
    }
    let (_, text) = scene.command(&["check"]);
    assert!(text.contains("table ip kube-proxy of kube-proxy") && text.contains("--cleanup"), "{text}");
    // kube-proxy's rules still drop by the old ranges. The agent does not touch them.
    let (lost, clients) = steady(&scene.world, front, || {
        let lost = scene.world.ask(At::Client, front, Protocol::Tcp);
        assert!(scene.nft("list tables").contains("table ip kube-proxy"));
        for table in &left {
            scene.nft(&format!("delete table {table}"));
        }
        std::thread::sleep(Duration::from_millis(500));
        lost
    });
    assert_eq!(lost, Err(Lost::Silence));
    clients.all_answered("tables left by kube-proxy, until they are deleted");
    assert!(!Steady::lost(&clients.flows).is_empty());
    eventually("the tables are not counted any more", || agent.metric(LEFT) == 0);

    // Beside kube-proxy its tables are where they belong.
    drop(agent);
    run_kube_proxy(&scene, |table| table.contains("10.1.0.0/24"));
    let agent = scene.started("node");
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(agent.metric(LEFT), 0);
}
