// SPDX-License-Identifier: Apache-2.0
//! Upgrade and downgrade between versions of the layout, under traffic.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use serde_json::json;
use steerage_model::Family;
use steerage_nft::{
    Batch, Chain, ChainType, Ct, DataType, Element, Expression, Field, Hook, Nft, Rule, Set, Table, concat,
};
use steerage_requirements::requires;

use crate::process::scene::{FRONT, Scene};
use crate::process::traffic::{losses, unharmed};
use crate::world::{At, PORT};

fn vip() -> IpAddr {
    "192.0.2.10".parse().unwrap()
}

/// Replaces the agent's table, in one transaction, by one with another layout: other sets and chains, the same Service.
fn load_another_layout() {
    let table = Table::new(steerage_nft::Family::Ip, "steerage");
    let front = [DataType::Ipv4Addr, DataType::InetProto, DataType::InetService];
    let key = [Expression::daddr(table.family), Expression::l4proto(), Expression::dport()];
    let mut batch = Batch::new();
    batch
        .destroy_table(&table)
        .add_table(&table, Some("steerage layout 0"))
        .add_set(&table, &Set::new("fronts", &front).maps_to(&[DataType::Ipv4Addr, DataType::InetService]))
        .add_chain(&table, &Chain::base("prerouting", ChainType::Nat, Hook::Prerouting, -101))
        .add_chain(&table, &Chain::base("postrouting", ChainType::Nat, Hook::Postrouting, 99))
        .add_rule(&table, "prerouting", &Rule::new().map("fronts", &key).dnat(table.family))
        .add_rule(
            &table,
            "postrouting",
            &Rule::new().has_any(Expression::Ct(Ct::Status), Ct::DNAT).masquerade_random(),
        );
    let end = concat(&[At::Pod1.addr(Family::V4).into(), Field::Port(PORT)]);
    for protocol in [6, 17] {
        let key = concat(&[vip().into(), Field::Proto(protocol), Field::Port(FRONT)]);
        batch.add_elements(&table, "fronts", &[Element::entry(key, end.clone())]);
    }
    Nft::open().unwrap().commit(batch).unwrap();
}

fn scene(name: &str) -> Scene {
    let scene = Scene::new(name);
    scene.service("web", vip(), &json!({}));
    scene.endpoints("web", "node", &[At::Pod1]);
    scene
}

#[test]
fn changed_layout_is_replaced_without_losing_connections() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"), KubeApiserver);
    let scene = scene("layout");
    scene.world.run(At::Node, load_another_layout);
    unharmed(&scene.world, SocketAddr::new(vip(), FRONT), |_| {
        for _ in 0..5 {
            let agent = scene.started("node");
            let table = scene.nft("list table ip steerage");
            assert!(table.contains("chain to-cluster") && !table.contains("fronts"), "{table}");
            drop(agent);
            scene.world.run(At::Node, load_another_layout);
            assert!(scene.nft("list table ip steerage").contains("steerage layout 0"));
        }
    });
}

/// Uses the binary of another version in `STEERAGE_AGENT_PREVIOUS`, if set: each version must take over the other's tables.
///
/// The previous version lets a packet through that arrives in the very moment of the change: it passes the new table's chains before it
/// and the old table's after it. A flow that begins so is lost.
#[test]
fn upgrade_and_downgrade_lose_no_connection() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"), KubeApiserver);
    requires!(Variable("STEERAGE_AGENT_PREVIOUS"));
    let previous = std::env::var_os("STEERAGE_AGENT_PREVIOUS").expect("checked above");
    let scene = scene("previous");
    drop(scene.started("node"));
    let (downgrades, mut lost) = losses(&scene.world, SocketAddr::new(vip(), FRONT), |traffic| {
        let downgrade = |_| {
            let begun = traffic.now();
            let before = scene.start_binary(Path::new(&previous), "node", &[]);
            before.wait_ready();
            let times = begun..traffic.now();
            drop(before);
            drop(scene.started("node"));
            times
        };
        (0..5).map(downgrade).collect::<Vec<_>>()
    });
    for times in downgrades {
        if let Some(first) = lost.iter().position(|loss| times.contains(&loss.at)) {
            println!("lost by the previous version: {:?}", lost.remove(first));
        }
    }
    assert_eq!(lost, []);
}
