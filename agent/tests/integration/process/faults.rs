// SPDX-License-Identifier: Apache-2.0
//! Crashes of the agent at any time, and outages of the API server.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::Duration;

use serde_json::json;
use steerage_model::{Family, Protocol};
use steerage_nft::Nft;
use steerage_requirements::requires;

use crate::process::scene::{FRONT, Scene, eventually};
use crate::process::traffic::unharmed;
use crate::world::{At, Lost};

const VIP: &str = "192.0.2.10";

fn vip() -> IpAddr {
    VIP.parse().unwrap()
}

fn front() -> SocketAddr {
    SocketAddr::new(vip(), FRONT)
}

fn served(scene: &Scene, by: &str) -> bool {
    (0..4).all(|_| scene.world.ask(At::Client, front(), Protocol::Tcp).is_ok_and(|(who, _)| who == by))
}

/// The rules with their handles, which differ after a chain or table was written again.
fn handles(scene: &Scene) -> String {
    scene.world.sh_at(At::Node, "nft -a -t list table ip steerage")
}

#[test]
fn kill_at_any_time_loses_no_connection() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"), KubeApiserver);
    let scene = Scene::new("killed");
    scene.service("web", vip(), &json!({}));
    scene.endpoints("web", "node", &[At::Pod1, At::Far]);
    let agent = scene.started("node");
    let seed = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().subsec_nanos();
    println!("seed {seed}");
    let mut random = seed;
    let mut moment = || {
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        Duration::from_millis(u64::from(random >> 16) % 400)
    };
    let before = handles(&scene);
    unharmed(&scene.world, front(), |_| {
        drop(agent);
        for round in 0..25 {
            let agent = scene.start("node");
            // Kills the agent during its start, during a write, or while idle. Pod1 stays, for the long connection to it or to Far.
            let pods: &[At] =
                if round % 2 == 0 { &[At::Pod1, At::Pod2, At::Far] } else { &[At::Pod1, At::Far] };
            std::thread::sleep(moment());
            scene.endpoints("web", "node", pods);
            std::thread::sleep(moment() / 8);
            drop(agent);
        }
        let agent = scene.started("node");
        assert_eq!(handles(&scene), before, "no rule was ever written anew");
        // Everything is programmed, and unchanged parts were not written.
        let generation = || scene.world.run(At::Node, || Nft::open().unwrap().generation().unwrap());
        eventually("the last endpoints are served", || {
            scene.world.ask(At::Client, front(), Protocol::Tcp).is_ok_and(|(who, _)| who == "pod2")
        });
        let mut reached = generation();
        eventually("all is written", || {
            std::thread::sleep(Duration::from_secs(2));
            std::mem::replace(&mut reached, generation()) == reached
        });
        drop(agent);
        let agent = scene.started("node");
        assert_eq!(
            generation(),
            reached + 7,
            "the lock, of each family the trial of features and that of rules, which begins and ends, and nothing else"
        );
        assert_eq!(agent.metric("steerage_agent_elements_written_total"), 0);
    });
    // The ruleset equals that of a single full load.
    let listing = |scene: &Scene| scene.world.sh_at(At::Node, "nft -s list table ip steerage");
    let sorted = |text: String| {
        let mut words: Vec<_> =
            text.split([',', '{', '}', '\n']).map(|word| word.trim().to_owned()).collect();
        words.sort();
        words
    };
    let found = sorted(listing(&scene));
    let (status, text) = scene.command(&["cleanup"]);
    assert!(status.success(), "{text}");
    let _agent = scene.started("node");
    assert_eq!(found, sorted(listing(&scene)));
}

#[test]
fn changes_during_api_outage_are_applied_afterwards() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"), KubeApiserver);
    let scene = Scene::new("cut");
    let gone: SocketAddr = SocketAddr::new("192.0.2.11".parse().unwrap(), FRONT);
    scene.service("web", vip(), &json!({}));
    scene.endpoints("web", "node", &[At::Pod1]);
    scene.service("gone", gone.ip(), &json!({}));
    scene.endpoints("gone", "node", &[At::Pod2]);
    let agent = scene.started("node");
    assert_eq!(scene.world.ask(At::Client, gone, Protocol::Tcp).unwrap().0, "pod2");
    let lists = || {
        ["services", "endpointslices"]
            .map(|kind| agent.metric(&format!("steerage_agent_watch_lists_total{{kind=\"{kind}\"}}")))
    };
    let before = lists();
    unharmed(&scene.world, front(), |_| {
        scene.reach(false);
        // Nobody tells the agent of these; and the server that it comes back to does not remember them either: it starts
        // anew, and says 410 Gone to who asks for what was before.
        scene.delete("v1", "Service", "gone");
        scene.delete("discovery.k8s.io/v1", "EndpointSlice", "gone");
        scene.endpoints("web", "node", &[At::Pod1, At::Pod2]);
        scene.server.cut().unwrap();
        std::thread::sleep(Duration::from_secs(2));
        assert_eq!(
            scene.world.ask(At::Client, gone, Protocol::Tcp).unwrap().0,
            "pod2",
            "the last good state is kept"
        );
        scene.server.heal().unwrap();
        scene.reach(true);
        eventually("the deleted Service is swept", || {
            scene.world.ask(At::Client, gone, Protocol::Tcp).is_err()
        });
        eventually("the new endpoint serves", || {
            scene.world.ask(At::Client, front(), Protocol::Tcp).is_ok_and(|(who, _)| who == "pod2")
        });
    });
    // Each watch reconnects after its own backoff.
    eventually("all is listed anew", || lists().iter().zip(before).all(|(after, before)| *after > before));
    eventually("nothing is left of it", || {
        !scene.nft("list set ip steerage frontends").contains("192.0.2.11")
    });
}

#[test]
fn recreated_node_keeps_serving() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"), KubeApiserver);
    let scene = Scene::new("renamed");
    scene.service("web", vip(), &json!({ "externalTrafficPolicy": "Local" }));
    scene.endpoints("web", "node", &[At::Pod1]);
    let agent = scene.started("node");
    unharmed(&scene.world, front(), |_| {
        // Deletes the old Node first, as when a machine is registered again: the agent keeps its previous addresses.
        scene.delete("v1", "Node", "node");
        std::thread::sleep(Duration::from_millis(500));
        assert!(served(&scene, "pod1"));
        drop(agent);
        scene.node("renamed");
        scene.endpoints("web", "renamed", &[At::Pod1]);
        let _agent = scene.started("renamed");
        scene.endpoints("web", "renamed", &[At::Pod1, At::Pod2]);
        eventually("the new name counts", || {
            scene.world.ask(At::Client, front(), Protocol::Tcp).is_ok_and(|(who, _)| who == "pod2")
        });
        eventually("the node is announced", || {
            scene.get("v1", "Node", "renamed")["metadata"]["annotations"]["steerage.dev/agent-mode"]
                == "labelled"
        });
    });
}

/// Fills the conntrack table, as a flood does. This kernel's limit applies to all namespaces and cannot be lowered in one.
/// Established connections and rule updates must keep working. The kernel evicts entries of the flood for new connections.
#[test]
fn full_conntrack_table_delays_no_rule() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"), KubeApiserver);
    let scene = Scene::new("full");
    scene.service("web", vip(), &json!({}));
    scene.endpoints("web", "node", &[At::Pod1]);
    let agent = scene.started("node");
    let read = |name: &str| -> u64 {
        let text = scene.world.sh_at(At::Node, &format!("cat /proc/sys/net/netfilter/{name}"));
        text.trim().parse().unwrap()
    };
    let limit = read("nf_conntrack_max");
    if limit > 600_000 {
        println!("not filled: the limit is {limit}");
        return;
    }
    unharmed(&scene.world, front(), |_| {
        // An entry of the flood would end after 30 s, and on a busy machine the first ones before the last one is there.
        scene.world.sh_at(At::Node, "sysctl -qw net.netfilter.nf_conntrack_udp_timeout=600");
        scene.world.run(At::Node, || flood(limit));
        let count = read("nf_conntrack_count");
        println!("{count} of {limit} connections");
        assert!(count * 10 > limit * 9, "{count} of {limit}");
        scene.endpoints("web", "node", &[At::Pod2, At::Pod1]);
        let took = eventually("the rules follow", || {
            scene.world.ask(At::Client, front(), Protocol::Tcp).is_ok_and(|(who, _)| who == "pod2")
        });
        println!("the rules followed after {} ms", took.as_millis());
    });
    // Made only now: the kernel ends an entry when a new one needs its room.
    let mut flow = None;
    eventually("a flow to the first endpoint", || {
        let socket = scene.world.run(At::Client, || crate::world::udp_socket(front()));
        let is_there = crate::world::ask_udp(&socket, front()).is_ok_and(|(who, _)| who == "pod1");
        flow = is_there.then_some(socket);
        is_there
    });
    let flow = flow.unwrap();
    // Removes the flow's endpoint: its entry must be found among all others.
    scene.endpoints("web", "node", &[At::Pod2]);
    eventually("the stale flow is ended", || {
        let answer = crate::world::ask_udp(&flow, front());
        assert_ne!(answer, Err(Lost::Refused));
        answer.is_ok_and(|(who, _)| who == "pod2")
    });
    eventually("it is counted", || agent.metric("steerage_agent_stale_flows_deleted_total") > 0);
}

/// Sends datagrams to the client between changing ports, until nearly this many entries exist.
fn flood(entries: u64) {
    let client = At::Client.addr(Family::V4);
    let mut sent = 0;
    while sent < entries {
        let socket = UdpSocket::bind((At::Node.addr(Family::V4), 0)).unwrap();
        for port in 1024..=u16::MAX {
            // Ignores errors: the client rejects the datagrams, but they create entries.
            let _ = socket.send_to(b"", SocketAddr::new(client, port));
            sent += 1;
            if sent == entries {
                break;
            }
        }
    }
}
