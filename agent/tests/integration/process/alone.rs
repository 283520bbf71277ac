// SPDX-License-Identifier: Apache-2.0
//! One agent per node, and its debug subcommands.

use serde_json::json;
use steerage_model::Family;
use steerage_requirements::requires;

use crate::process::scene::{Scene, eventually};
use crate::world::At;

#[test]
fn second_agent_exits_and_first_answers_debug_requests() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"), KubeApiserver);
    let scene = Scene::new("alone");
    let vip = "192.0.2.10".parse().unwrap();
    let (status, text) = scene.command(&["explain", "192.0.2.10:80/TCP"]);
    assert!(!status.success() && text.contains("no steerage-agent runs"), "{text}");
    scene.service("web", vip, &json!({}));
    scene.endpoints("web", "node", &[At::Pod1, At::Far]);
    let mut agent = scene.started("node");

    // Other ports than the first agent's, so that only the lock can stop it.
    let second = ["--node-name", "node", "--admin-address", "127.0.0.1:0", "--healthz-port", "0"];
    let (status, text) = scene.command(&second);
    assert_eq!(status.code(), Some(1));
    let told = format!("another steerage-agent (process {}) serves this network namespace", agent.process());
    assert!(text.contains(&told), "{text}");
    let (status, text) = scene.command(&["cleanup"]);
    assert!(!status.success() && text.contains(&told), "{text}");
    assert!(agent.is_running());
    assert!(scene.nft("list tables").contains("table ip steerage"));

    let client = At::Client.addr(Family::V4).to_string();
    let (status, text) = scene.command(&["explain", "192.0.2.10:80/tcp", "--from", &client]);
    assert!(status.success(), "{text}");
    for part in [
        "shop/web: the address of its load balancer",
        "sent to one of 2 endpoints, chosen by a hash of the client's address and port",
        "10.244.0.11:8080",
        "outside",
    ] {
        assert!(text.contains(part), "no {part} in {text}");
    }
    let (status, text) = scene.command(&["explain", "192.0.2.10"]);
    assert!(!status.success() && text.contains("IP:PORT/PROTO"), "{text}");

    // What the agent means is what the kernel holds; a rule of a foreign hand is seen while the agent can't undo it.
    let (_, text) = scene.command(&["dump", "--all"]);
    assert!(text.contains("shop/web: ") && text.ends_with("\n0 difference(s)\n"), "{text}");
    assert!(text.contains("=   slots-2: 192.0.2.10 80/TCP slot 1 -> 10.244.1.11 8080"), "{text}");
    for family in ["ip", "ip6"] {
        assert!(text.contains(&format!("= table {family} steerage: ")), "{text}");
    }

    // What kube-proxy counts. The slice changes once after the start, and then has nothing here.
    let programmed = "kubeproxy_network_programming_duration_seconds_count{ip_family=\"IPv4\"}";
    assert_eq!(agent.metric(programmed), 0, "what the first list brings is no change");
    scene.service("web", vip, &json!({ "externalTrafficPolicy": "Local" }));
    scene.endpoints("web", "node", &[At::Far]);
    let lacking =
        "kubeproxy_sync_proxy_rules_no_local_endpoints_total{traffic_policy=\"external\",ip_family=\"IPv4\"}";
    eventually("both ports of a Service without local endpoints are counted", || agent.metric(lacking) == 2);
    eventually("the change of the slice is counted", || agent.metric(programmed) == 1);
    assert!(agent.metric("kubeproxy_sync_proxy_rules_duration_seconds_count{ip_family=\"IPv4\"}") >= 2);
    let pending = "kubeproxy_sync_proxy_rules_endpoint_changes_pending";
    eventually("and pending no more", || agent.metric(pending) == 0);
    scene.endpoints("web", "node", &[At::Pod1]);
    eventually("and counted no more", || agent.metric(lacking) == 0);

    drop(agent);
    let announced =
        || scene.get("v1", "Node", "node")["metadata"]["annotations"]["steerage.dev/agent-mode"].is_string();
    assert!(announced());
    let (status, text) = scene.command(&["cleanup"]);
    assert!(
        status.success()
            && text
                .contains("kubectl annotate node NODE steerage.dev/agent-mode- steerage.dev/agent-version-"),
        "{text}"
    );
    assert!(!scene.nft("list tables").contains("steerage") && announced());
    let kubeconfig = scene.server.kubeconfig().to_str().unwrap();
    let (status, text) = scene.command(&["cleanup", "--node-name", "node", "--kubeconfig", kubeconfig]);
    assert!(status.success() && text.is_empty(), "{text}");
    assert!(!announced());
}
