// SPDX-License-Identifier: Apache-2.0
//! External IPs at addresses of other nodes.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use serde_json::json;
use steerage_model::{Family, Protocol};
use steerage_requirements::requires;

use crate::process::scene::{FRONT, Scene, eventually};
use crate::process::traffic::unharmed;
use crate::world::{At, Lost};

#[test]
fn other_nodes_keep_their_addresses_and_restarts_take_no_external_ip() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"), KubeApiserver);
    let scene = Scene::new("external");
    let far = At::Far.addr(Family::V4);
    let at_node = SocketAddr::new(far, FRONT);
    let at_free: SocketAddr = "198.51.100.1:80".parse().unwrap();
    let ask = |to| scene.world.ask(At::Pod2, to, Protocol::Tcp).map(|(who, _)| who);
    let served = || Ok("pod1".to_owned());
    scene.put("v1", "Node", "other", json!({}));
    let addresses = json!([{ "type": "InternalIP", "address": far.to_string() }]);
    scene.status("v1", "Node", "other", &json!({ "addresses": addresses }));

    let agent = scene.started("node");
    let lists = |kind: &str| format!("steerage_agent_watch_lists_total{{kind=\"{kind}\"}}");
    scene.service("plain", "192.0.2.9".parse().unwrap(), &json!({}));
    scene.endpoints("plain", "node", &[At::Pod1]);
    eventually("a Service is served", || ask("192.0.2.9:80".parse().unwrap()) == served());
    assert_eq!(agent.metric(&lists("nodes")), 1, "its own Node alone: no Service has an external IP");

    let external = json!({ "externalIPs": [far.to_string(), at_free.ip().to_string()] });
    scene.service("web", "192.0.2.10".parse().unwrap(), &external);
    scene.endpoints("web", "node", &[At::Pod1]);
    eventually("the other external IP is served", || ask(at_free) == served());
    assert_eq!((ask(at_node), agent.metric(&lists("nodes"))), (Err(Lost::Refused), 2));
    assert_eq!(agent.metric("steerage_agent_refused_external_ips"), 1);
    let (_, text) = scene.command(&["explain", &format!("{at_node}/TCP")]);
    assert!(text.contains("not served: it is an address of another node"), "{text}");

    drop(agent);
    let count = |text: &str| scene.log().matches(text).count();
    let late = || count("Nodes not listed in time");
    let refused = || count("reason=it is an address of another node");
    assert_eq!(refused(), 1);
    let (agent, before) = unharmed(&scene.world, at_free, |_| {
        // An agent waits ten seconds for the Nodes. Where it had no core for as long, another one begins anew.
        let restart = || {
            let (before, begun) = ((late(), refused()), Instant::now());
            let agent = scene.start("node");
            eventually("the agent is ready", || {
                let answer = ask(at_node);
                assert!(
                    answer == Err(Lost::Refused) || late() > before.0,
                    "{answer:?} until the Nodes are listed"
                );
                agent.get("/readyz").is_some_and(|text| text.contains(" 200 "))
            });
            eventually("the Nodes are listed", || ask(at_node) == Err(Lost::Refused));
            let is_late = late() > before.0;
            assert!(!is_late || begun.elapsed() >= Duration::from_secs(10), "it waits for ten seconds");
            (!is_late).then_some((agent, before.1))
        };
        std::iter::repeat_with(restart).take(3).flatten().next().expect("Nodes in time")
    });
    assert_eq!(agent.metric("steerage_agent_elements_written_total"), 0, "the tables had all of it");
    assert_eq!(refused(), before + 1);
    scene.delete("v1", "Node", "other");
    eventually("the address is nobody's", || ask(at_node) == served());
    assert_eq!(agent.metric("steerage_agent_refused_external_ips"), 0);
}

#[test]
fn agents_of_a_large_cluster_do_not_watch_its_nodes() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"), KubeApiserver);
    let scene = Scene::new("many-nodes");
    scene.make_nodes(1_000);
    let addresses = json!([{ "type": "InternalIP", "address": "198.51.100.1" }]);
    scene.status("v1", "Node", "node-0", &json!({ "addresses": addresses }));

    let agent = scene.started("node");
    let external = json!({ "externalIPs": ["198.51.100.1"] });
    scene.service("web", "192.0.2.10".parse().unwrap(), &external);
    scene.endpoints("web", "node", &[At::Pod1]);
    let at_node = "198.51.100.1:80".parse().unwrap();
    eventually("external IPs are served", || {
        scene.world.ask(At::Pod2, at_node, Protocol::Tcp).map(|(who, _)| who) == Ok("pod1".to_owned())
    });
    assert_eq!(agent.metric("steerage_agent_watch_lists_total{kind=\"nodes\"}"), 1, "its own Node alone");
    assert!(scene.log().contains("not watching all Nodes"), "{}", scene.log());
}
