// SPDX-License-Identifier: Apache-2.0
//! Unassigned addresses of a `ServiceCIDR`.

use std::net::SocketAddr;

use serde_json::json;
use steerage_model::Protocol;
use steerage_requirements::requires;

use crate::process::scene::{Scene, eventually};
use crate::world::{At, Lost};

#[test]
fn unassigned_service_cidr_addresses_are_dropped_without_kube_proxy() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"), KubeApiserver);
    let scene = Scene::new("cidrs");
    let [first, first_v6, later]: [SocketAddr; 3] =
        ["10.96.77.77:80", "[fd00:10:96::7777]:80", "198.18.7.7:80"].map(|addr| addr.parse().unwrap());
    // A host behind the node has these addresses, so that a packet that passes gets a response.
    scene.world.own(At::Client, &[first, first_v6, later].map(|address| address.ip().to_string()));
    let asks = |to: SocketAddr| scene.world.ask(At::Pod2, to, Protocol::Tcp).expect_err("nobody serves");
    scene.service("web", "192.0.2.10".parse().unwrap(), &json!({}));
    scene.endpoints("web", "node", &[At::Pod1]);

    let agent = scene.started("node");
    std::thread::sleep(std::time::Duration::from_secs(1));
    assert_eq!([first, first_v6, later].map(asks), [Lost::Refused; 3], "kube-proxy's to drop");
    drop(agent);

    let _agent = scene.started_with("node", &["--kube-proxy-replacement"]);
    for address in [first, first_v6] {
        eventually("the API server's own network is known", || asks(address) == Lost::Silence);
    }
    assert_eq!(asks(later), Lost::Refused);
    let more = json!({ "spec": { "cidrs": ["198.18.7.0/24"] } });
    scene.put("networking.k8s.io/v1", "ServiceCIDR", "more", more);
    eventually("another network is known", || asks(later) == Lost::Silence);
    let (_, text) = scene.command(&["explain", "198.18.7.7:80/TCP"]);
    assert!(text.contains("unassigned VIP or cluster IP"), "{text}");
    scene.delete("networking.k8s.io/v1", "ServiceCIDR", "more");
    eventually("the network is nobody's", || asks(later) == Lost::Refused);
    assert_eq!(asks(first), Lost::Silence);
}
