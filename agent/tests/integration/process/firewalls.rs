// SPDX-License-Identifier: Apache-2.0
//! Firewalls beside the agent, under traffic with lost packets counted: they drop, or not, in tables of their own. The agent names
//! those that drop, and its own tables stay as they are.

use std::net::{IpAddr, SocketAddr};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::json;
use steerage_model::Protocol;
use steerage_nft::Nft;
use steerage_requirements::requires;

use crate::process::scene::{Agent, FRONT, Scene, eventually};
use crate::process::steady::{Steady, steady, steady_for};
use crate::process::traffic::unharmed;
use crate::world::{At, Lost};

const DROPS: &str = "steerage_agent_foreign_tables{reason=\"drops_by_default\"}";
const IPTABLES: &str = "steerage_agent_foreign_tables{reason=\"iptables\"}";

fn front() -> SocketAddr {
    SocketAddr::new("192.0.2.10".parse::<IpAddr>().unwrap(), FRONT)
}

fn scene(name: &str) -> Scene {
    let scene = Scene::new(name);
    scene.service("web", front().ip(), &json!({}));
    scene.endpoints("web", "node", &[At::Pod1]);
    scene
}

/// What the agent has written and seen of its own tables.
fn own_tables(scene: &Scene, agent: &Agent<'_>) -> (String, u64, u64) {
    (
        scene.world.sh_at(At::Node, "nft -s -a list table ip steerage"),
        agent.metric_sum("steerage_agent_foreign_changes_total"),
        agent.metric("steerage_agent_writes_total"),
    )
}

#[test]
fn foreign_table_that_drops_is_named_and_its_removal_restores_traffic() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"), KubeApiserver);
    let scene = scene("dropping");
    let agent = scene.started("node");
    let before = own_tables(&scene, &agent);
    let (lost, clients) = steady(&scene.world, front(), || {
        std::thread::sleep(Duration::from_millis(300));
        scene.nft(
            "add table inet strict; add chain inet strict pass { type filter hook forward priority 0 ; policy drop ; }",
        );
        eventually("the table is counted", || agent.metric(DROPS) == 1);
        let lost = scene.world.ask(At::Client, front(), Protocol::Tcp);
        scene.nft("delete table inet strict");
        lost
    });
    assert_eq!(lost, Err(Lost::Silence));
    clients.all_answered("a foreign table with policy drop, for a while");
    assert!(!Steady::lost(&clients.flows).is_empty() && !Steady::lost(&clients.connections).is_empty());
    eventually("the table is not counted any more", || agent.metric(DROPS) == 0);
    let log = scene.log();
    let named = log.lines().filter(|line| line.contains("table of another program drops"));
    let named: Vec<_> = named.collect();
    assert_eq!(named.len(), 1, "once: {named:?}");
    for part in ["inet strict", "pass", "forward"] {
        assert!(named[0].contains(part), "no {part}: {named:?}");
    }
    assert!(log.contains("table of another program no longer reported"), "{log}");
    eventually("an event on the node", || {
        scene.node_events("ForeignTable").iter().any(|note| note.contains("chain pass of table inet strict"))
    });
    assert_eq!(own_tables(&scene, &agent), before);

    // One that is there at the start, which drops by a rule, is named too; `check` says the same.
    drop(agent);
    scene.nft("add table ip old; add chain ip old entry { type filter hook input priority 0 ; }; add rule ip old entry tcp dport 1 drop");
    scene.nft(
        "add chain ip old pass { type filter hook forward priority 0 ; }; add rule ip old pass counter drop",
    );
    let agent = scene.started("node");
    eventually("the table is counted", || agent.metric(DROPS) == 1);
    assert!(
        scene
            .log()
            .lines()
            .any(|line| line.contains("table of another program drops") && line.contains("ip old"))
    );
    let (_, text) = scene.command(&["check"]);
    assert!(text.contains("chain pass of table ip old drops by default at forward"), "{text}");
    assert!(!text.contains("chain entry of table"), "{text}");
}

#[test]
fn iptables_changes_do_not_touch_services() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"), Program("iptables-nft"), KubeApiserver);
    let scene = scene("iptables");
    let agent = scene.started("node");
    let run = |line: &str| scene.world.sh_at(At::Node, line);
    run(
        "iptables-nft -t nat -A PREROUTING -p tcp --dport 1 -j REDIRECT --to-ports 2; iptables-nft -A FORWARD -p tcp --dport 9 -j DROP",
    );
    eventually("iptables' tables are counted", || agent.metric(IPTABLES) == 2);
    let before = own_tables(&scene, &agent);
    // Another program writes its rules anew, as kube-proxy in its iptables mode, CNI plugins and docker do: nothing is lost.
    unharmed(&scene.world, front(), |_| {
        for _ in 0..20 {
            run("printf \"*nat\\n:PREROUTING ACCEPT [0:0]\\nCOMMIT\\n\" | iptables-nft-restore");
            run(
                "iptables-nft -t nat -F; iptables-nft -t nat -A PREROUTING -p tcp --dport 1 -j REDIRECT --to-ports 2",
            );
        }
    });
    assert_eq!(own_tables(&scene, &agent), before);
    assert_eq!(agent.metric(DROPS), 0);

    // A rule that drops everything is another matter. The agent names the table.
    let (lost, clients) = steady(&scene.world, front(), || {
        run("iptables-nft -I FORWARD -j DROP");
        eventually("the table is counted", || agent.metric(DROPS) == 1);
        let lost = scene.world.ask(At::Client, front(), Protocol::Tcp);
        run("iptables-nft -D FORWARD -j DROP");
        lost
    });
    assert_eq!(lost, Err(Lost::Silence));
    clients.all_answered("iptables -I FORWARD -j DROP, for a while");
    eventually("the table is not counted any more", || agent.metric(DROPS) == 0);
    let log = scene.log();
    assert!(
        log.lines().any(|line| line.contains("drops what its rules") && line.contains("ip filter")),
        "{log}"
    );
    assert_eq!(own_tables(&scene, &agent), before);
}

/// What firewalld's nftables backend commits when it reloads, in its own transactions, as `nft monitor` shows it: it drops new
/// connections of all programs until its rules are there again.
const RELOAD: [&str; 5] = [
    "add table inet firewalld_policy_drop; \
     add chain inet firewalld_policy_drop filter_input { type filter hook input priority filter + 9 ; policy drop ; }; \
     add chain inet firewalld_policy_drop filter_forward { type filter hook forward priority filter + 9 ; policy drop ; }; \
     add chain inet firewalld_policy_drop filter_output { type filter hook output priority filter + 9 ; policy drop ; }; \
     add rule inet firewalld_policy_drop filter_input ct state { established, related } accept; \
     add rule inet firewalld_policy_drop filter_forward ct state { established, related } accept; \
     add rule inet firewalld_policy_drop filter_output ct state { established, related } accept",
    "delete table inet firewalld",
    "add table inet firewalld",
    "add chain inet firewalld nat_PREROUTING { type nat hook prerouting priority dstnat + 10 ; }; \
     add chain inet firewalld filter_FORWARD { type filter hook forward priority filter + 10 ; }; \
     add rule inet firewalld filter_FORWARD ct state { established, related } accept; \
     add rule inet firewalld filter_FORWARD ct status dnat accept; \
     add rule inet firewalld filter_FORWARD ct state invalid drop; \
     add rule inet firewalld filter_FORWARD reject with icmpx admin-prohibited",
    "delete table inet firewalld_policy_drop",
];

#[test]
fn reload_as_firewalld_does_it_leaves_the_agents_tables() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"), KubeApiserver);
    let scene = scene("reload");
    scene.nft(RELOAD[2]);
    scene.nft(RELOAD[3]);
    let agent = scene.started("node");
    reloaded(&scene, &agent, "firewalld's transactions of a reload", || {
        for _ in 0..3 {
            for (step, transaction) in RELOAD.into_iter().enumerate() {
                scene.nft(transaction);
                std::thread::sleep(Duration::from_millis(if step == 0 { 100 } else { 20 }));
            }
        }
    });
}

/// With the real one, in the node's network namespace and on a bus of its own. Where it is not installed the test above has its
/// transactions: Debian's package would switch a firewall on for the whole host at its next boot.
#[test]
fn reload_of_firewalld_leaves_the_agents_tables() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"), KubeApiserver);
    let is_there = |program: &str| Command::new(program).arg("--version").output().is_ok();
    if !["firewalld", "firewall-cmd", "dbus-daemon"].into_iter().all(is_there) {
        println!("skipped: firewalld is not installed");
        return;
    }
    let scene = scene("firewalld");
    let firewalld = Firewalld::start(&scene);
    let agent = scene.started("node");
    reloaded(&scene, &agent, "firewall-cmd --reload", || firewalld.reload());
}

/// Checks that firewalld is named, and that a reload costs no established connection and nothing of the agent's tables.
fn reloaded(scene: &Scene, agent: &Agent<'_>, what: &str, reload: impl Fn()) {
    eventually("firewalld's table is counted", || agent.metric(DROPS) == 1);
    let named =
        |line: &str| line.contains("table of another program drops") && line.contains("inet firewalld");
    assert!(scene.log().lines().any(named));
    let before = own_tables(scene, agent);
    assert!(
        scene.world.ask(At::Client, front(), Protocol::Tcp).is_ok(),
        "firewalld accepts what is translated"
    );
    let mut stream =
        scene.world.run(At::Client, || std::net::TcpStream::connect(front()).expect("a connection"));
    let ((), clients) = steady_for(&scene.world, front(), Duration::from_mins(1), || {
        std::thread::sleep(Duration::from_millis(300));
        reload();
        std::thread::sleep(Duration::from_millis(300));
        assert!(crate::world::ask_on(&mut stream).is_ok_and(|who| who.starts_with("pod1 ")));
    });
    clients.all_answered(what);
    assert_eq!(own_tables(scene, agent), before);
    let generation = || scene.world.run(At::Node, || Nft::open().unwrap().generation().unwrap());
    let settled = generation();
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(generation(), settled, "the agent has nothing to write");
}

/// firewalld and its bus. Ended on drop.
struct Firewalld<'s> {
    scene: &'s Scene,
    bus: String,
    processes: Vec<Child>,
}

impl<'s> Firewalld<'s> {
    fn start(scene: &'s Scene) -> Self {
        let socket = scene.folder.join("bus");
        let configuration = scene.folder.join("bus.conf");
        let listen = format!("unix:path={}", socket.display());
        std::fs::write(
            &configuration,
            format!(
                "<busconfig><type>system</type><listen>{listen}</listen><auth>EXTERNAL</auth><policy context=\"default\">\
                 <allow send_destination=\"*\"/><allow receive_sender=\"*\"/><allow own=\"*\"/><allow user=\"*\"/></policy></busconfig>"
            ),
        )
        .unwrap();
        let mut firewalld = Self { scene, bus: listen, processes: Vec::new() };
        let file = format!("--config-file={}", configuration.display());
        firewalld.spawn(&["dbus-daemon", &file, "--nofork", "--nopidfile"]);
        eventually("the bus", || socket.exists());
        let log = scene.folder.join("firewalld.log").display().to_string();
        firewalld.spawn(&["firewalld", "--nofork", "--nopid", "--log-file", &log]);
        eventually("firewalld runs", || {
            scene.nft("list tables").contains("inet firewalld") && firewalld.command("--state")
        });
        firewalld
    }

    fn spawn(&mut self, line: &[&str]) {
        let child = self.scene.world.run(At::Node, || {
            Command::new(line[0])
                .args(&line[1..])
                .env("DBUS_SYSTEM_BUS_ADDRESS", &self.bus)
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .unwrap()
        });
        self.processes.push(child);
    }

    fn command(&self, argument: &str) -> bool {
        let output =
            Command::new("firewall-cmd").arg(argument).env("DBUS_SYSTEM_BUS_ADDRESS", &self.bus).output();
        output.is_ok_and(|output| output.status.success())
    }

    fn reload(&self) {
        assert!(self.command("--reload"));
    }
}

impl Drop for Firewalld<'_> {
    fn drop(&mut self) {
        for process in self.processes.iter_mut().rev() {
            let _ = process.kill();
            let _ = process.wait();
        }
    }
}
