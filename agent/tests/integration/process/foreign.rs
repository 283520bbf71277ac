// SPDX-License-Identifier: Apache-2.0
//! Foreign changes of the agent's tables, and of other tables.

use std::time::Duration;

use serde_json::json;
use steerage_nft::{Batch, Chain, Family, Nft, Table};
use steerage_requirements::requires;

use crate::process::scene::{FRONT, Scene, eventually};
use crate::process::steady::{Steady, steady};
use crate::process::traffic::harmed;
use crate::world::{At, ask_on};

/// The listing of the agent's tables, without counters and whatever differs between loads.
fn listing(scene: &Scene) -> String {
    // Without what counters count.
    ["ip", "ip6"]
        .map(|family| scene.world.sh_at(At::Node, &format!("nft -s list table {family} steerage")))
        .concat()
}

/// Whether both tables exist, with this listing.
fn is_whole(scene: &Scene, whole: &str) -> bool {
    let tables = scene.nft("list tables");
    let ours = tables.lines().filter(|table| table.ends_with(" steerage")).count();
    ours == 2 && listing(scene) == whole
}

#[test]
fn foreign_changes_are_repaired_and_other_tables_ignored() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"), KubeApiserver);
    let scene = Scene::new("foreign");
    scene.service("web", "192.0.2.10".parse().unwrap(), &json!({}));
    scene.endpoints("web", "node", &[At::Pod1]);
    let agent = scene.started("node");
    let to = ("192.0.2.10".parse::<std::net::IpAddr>().unwrap(), FRONT).into();
    let whole = listing(&scene);
    harmed(&scene.world, to, || {
        for harm in [
            "delete element ip steerage frontends { 192.0.2.10 . tcp . 80 }",
            "add element ip steerage frontends { 192.0.2.99 . tcp . 80 }",
            "flush map ip steerage slots-1",
            "flush chain ip steerage services",
            "add rule ip steerage to-cluster drop",
            "insert rule ip steerage prerouting accept",
            "add chain ip steerage other",
            "add chain ip steerage output { policy drop ; }",
            "add table ip steerage { flags dormant ; }",
            "flush chain ip steerage output; delete chain ip steerage output; \
             add chain ip steerage output { type nat hook output priority 300 ; }",
            "flush table ip6 steerage",
            "delete table ip steerage",
            "delete table ip steerage; delete table ip6 steerage",
            "flush ruleset",
        ] {
            let compared = agent.metric("steerage_agent_full_writes_total");
            scene.nft(harm);
            let took = eventually(harm, || is_whole(&scene, &whole));
            println!("{:>5} ms  {harm}", took.as_millis());
            // Until everything is compared nobody watches: the comparison would repair the next harm, and not count it.
            eventually("a comparison", || agent.metric("steerage_agent_full_writes_total") > compared);
        }
        let repaired = "tables repaired after another program changed them";
        eventually("a line about the first repair", || scene.log().contains(repaired));
        let log = scene.log();
        for part in
            ["ip steerage: made dormant", "chain output (now hook output, priority -101, policy drop)"]
        {
            assert!(log.contains(part), "no {part}");
        }
        let first = log.lines().find(|line| line.contains(repaired)).unwrap();
        assert!(first.contains("1 element of frontends") && first.contains("elements=1 "), "{first}");
        let handle = rule_handle(&scene);
        scene.nft(&format!("delete rule ip steerage services handle {handle}"));
        let took = eventually("a deleted rule", || is_whole(&scene, &whole));
        println!("{:>5} ms  delete rule", took.as_millis());
    });
    assert!(agent.metric_sum("steerage_agent_foreign_changes_total") >= 12);

    // Another program commits to its own table, thousands of times and with thousands of elements.
    let counts = || {
        let writes =
            ["full_writes", "writes"].map(|name| agent.metric(&format!("steerage_agent_{name}_total")));
        (agent.metric_sum("steerage_agent_foreign_changes_total"), writes)
    };
    let mut before = counts();
    eventually("an end of the repairs", || {
        std::thread::sleep(Duration::from_secs(2));
        let last = std::mem::replace(&mut before, counts());
        last == before
    });
    scene.world.run(At::Node, || {
        let (table, mut nft) = (Table::new(Family::Ip, "foreign"), Nft::open().unwrap());
        for _ in 0..5_000 {
            let mut batch = Batch::new();
            batch.add_table(&table, None);
            batch.add_chain(&table, &Chain::regular("c")).delete_table(&table);
            nft.commit(batch).unwrap();
        }
    });
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(counts(), before);
}

/// As a reload of Debian's nftables.service does it.
#[test]
fn flushed_ruleset_is_repaired_and_named_under_traffic() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"), KubeApiserver);
    let scene = Scene::new("flushed");
    scene.service("web", "192.0.2.10".parse().unwrap(), &json!({}));
    scene.endpoints("web", "node", &[At::Pod1]);
    let agent = scene.started("node");
    let to = ("192.0.2.10".parse::<std::net::IpAddr>().unwrap(), FRONT).into();
    let whole = listing(&scene);
    let deleted = "steerage_agent_foreign_changes_total{table=\"ip steerage\",change=\"deleted\"}";
    let ((), clients) = steady(&scene.world, to, || {
        for round in 1..=5 {
            std::thread::sleep(Duration::from_millis(300));
            scene.nft("flush ruleset");
            eventually("the repair", || agent.metric(deleted) == round && is_whole(&scene, &whole));
        }
    });
    clients.all_answered("five times flush ruleset");

    // While the agent cannot repair, flows and connections begin untranslated. They are not stuck so.
    let ((), clients) = steady(&scene.world, to, || {
        std::thread::sleep(Duration::from_millis(300));
        agent.pause(true);
        scene.nft("delete table ip steerage");
        std::thread::sleep(Duration::from_millis(500));
        agent.pause(false);
        eventually("the repair", || is_whole(&scene, &whole));
        std::thread::sleep(Duration::from_millis(300));
    });
    clients.all_answered("half a second without the table");
    assert!(Steady::lost(&clients.flows).len() >= 20 && Steady::lost(&clients.connections).len() >= 5);

    let log = scene.log();
    for part in [
        "tables changed by another program; repairing them",
        "ip steerage: deleted; ip6 steerage: deleted",
        "nft (process ",
        "tables repaired after another program changed them",
    ] {
        assert!(log.contains(part), "no {part}");
    }
    eventually("an event on the node", || {
        let notes = scene.node_events("TablesChanged");
        notes.iter().any(|note| note.contains("ip steerage: deleted") && note.contains("nft (process "))
    });
}

/// The damage is there for as long as the agent is stopped. Who connects meanwhile from outside the ranges does not stay connected.
#[test]
fn clients_that_a_changed_table_admitted_do_not_stay_connected() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"), KubeApiserver);
    let scene = Scene::new("admitted");
    let to = std::net::SocketAddr::new("192.0.2.10".parse().unwrap(), FRONT);
    scene.service("web", to.ip(), &json!({ "loadBalancerSourceRanges": ["203.0.113.0/24"] }));
    scene.endpoints("web", "node", &[At::Pod1]);
    let agent = scene.started("node");
    let connect = || {
        let timeout = Duration::from_secs(1);
        scene.world.run(At::Client, || std::net::TcpStream::connect_timeout(&to, timeout))
    };
    eventually("the ranges", || scene.nft("list map ip steerage restricted").contains("192.0.2.10"));
    assert!(connect().is_err(), "the client is outside the ranges");
    agent.pause(true);
    scene.nft("flush map ip steerage restricted");
    let mut stream = connect().expect("a connection");
    assert!(ask_on(&mut stream).expect("an answer").starts_with("pod1 "));
    agent.pause(false);
    eventually("an end of the connection", || ask_on(&mut stream).is_err());
    assert!(connect().is_err());
    eventually("an event on the node", || {
        let notes = scene.node_events("TablesChanged");
        notes.iter().any(|note| note.contains("outside loadBalancerSourceRanges may have been admitted"))
    });
}

/// The handle of the last rule of the chain `services`.
fn rule_handle(scene: &Scene) -> u32 {
    let text = scene.world.sh_at(At::Node, "nft -a list chain ip steerage services");
    let last = text.lines().filter_map(|line| line.split("# handle ").nth(1)).next_back().unwrap();
    last.trim().parse().unwrap()
}

/// The endpoints of all long lists, in order.
fn lists(scene: &Scene) -> Vec<String> {
    let text = scene.nft("list map ip steerage endpoints");
    let elements = text.split_once("elements = {").and_then(|(_, rest)| rest.split_once('}'));
    let elements = elements.map(|(elements, _)| elements).unwrap_or_default();
    let mut elements: Vec<_> = elements.split(',').map(|element| element.trim().to_owned()).collect();
    elements.sort();
    elements
}

/// A start believes its predecessor, and reads afterwards.
#[test]
fn list_changed_while_no_agent_ran_is_repaired_and_named() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"), KubeApiserver);
    let scene = Scene::new("between");
    scene.service("web", "192.0.2.10".parse().unwrap(), &json!({}));
    let endpoint = |n| json!({ "addresses": [format!("10.244.77.{n}")], "nodeName": "other", "conditions": { "ready": true } });
    let slice = json!({
        "metadata": { "labels": { "kubernetes.io/service-name": "web" } },
        "addressType": "IPv4",
        "ports": [{ "name": "tcp", "protocol": "TCP", "port": 80 }],
        "endpoints": (1..=20).map(endpoint).collect::<Vec<_>>(),
    });
    scene.put("discovery.k8s.io/v1", "EndpointSlice", "web", slice);
    let agent = scene.started("node");
    eventually("a list", || lists(&scene).len() == 20);
    let whole = lists(&scene);
    drop(agent);
    let (slot, _) = whole[7].split_once(':').expect("a slot and its endpoint");
    scene.nft(&format!("delete element ip steerage endpoints {{ {slot} }}"));
    assert_eq!(lists(&scene).len(), 19);

    let agent = scene.started("node");
    let took = eventually("the repair", || lists(&scene) == whole);
    println!("{} ms after the start", took.as_millis());
    eventually("a count", || agent.metric_sum("steerage_agent_foreign_changes_total") == 1);
    let line = "tables are not what was written last: another program changed them unseen, or a write was cut short; repairing them";
    assert!(scene.log().contains(line));
    eventually("an event on the node", || {
        let notes = scene.node_events("TablesChanged");
        notes
            .iter()
            .any(|note| note.contains("while no agent watched") && note.contains("element of endpoints"))
    });
}
