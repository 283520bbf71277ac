// SPDX-License-Identifier: Apache-2.0
//! What the agent states of its node, beside what its health-check ports answer and what its rules do.

use std::net::{IpAddr, SocketAddr, TcpListener};

use serde_json::json;
use steerage_model::{Family, MAX_STATEMENT_WAIT, Protocol, STATEMENT_PATH, Statement};
use steerage_requirements::requires;

use crate::process::scene::{Agent, FRONT, Scene, eventually};
use crate::world::At;

const BUSY: u16 = 30777;

fn vip() -> IpAddr {
    "192.0.2.10".parse().unwrap()
}

/// Status and body of an answer at this address.
fn get(agent: &Agent<'_>, address: &str, path: &str) -> Option<(u16, String)> {
    let text = agent.get_at(address, path)?;
    let (head, body) = text.split_once("\r\n\r\n")?;
    Some((head.split(' ').nth(1)?.parse().ok()?, body.to_owned()))
}

fn statement_at(agent: &Agent<'_>, address: &str, query: &str) -> Statement {
    let (status, body) = get(agent, address, &format!("{STATEMENT_PATH}{query}")).expect("an answer");
    assert_eq!(status, 200, "{body}");
    serde_json::from_str(&body).expect(&body)
}

/// Everything.
fn statement(agent: &Agent<'_>) -> Statement {
    statement_at(agent, "127.0.0.1:10356", "")
}

/// What changes next.
fn next(agent: &Agent<'_>, last: &Statement) -> Statement {
    let query = format!("?after={}&wait={MAX_STATEMENT_WAIT}", last.revision);
    statement_at(agent, "127.0.0.1:10356", &query)
}

/// Follows until the port has this count; `None`: until it is not served.
fn follow(agent: &Agent<'_>, last: &mut Statement, port: u16, count: Option<u32>) {
    eventually(&format!("{count:?} at {port}"), || {
        *last = next(agent, last);
        assert!(!last.complete, "the revision is known");
        last.ports.get(&port) == Some(&count)
    });
}

#[test]
fn statement_is_what_the_ports_answer_and_what_the_rules_do() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"), KubeApiserver);
    let scene = Scene::new("statements");
    let local = json!({ "externalTrafficPolicy": "Local" });
    scene.service("web", vip(), &local);
    scene.service("far", "192.0.2.11".parse().unwrap(), &local);
    scene.endpoints("web", "node", &[At::Pod1]);
    scene.endpoints("far", "node", &[At::Far]);
    let port = |service: &str| {
        let port = scene.get("v1", "Service", service)["spec"]["healthCheckNodePort"].as_u64().unwrap();
        u16::try_from(port).unwrap()
    };
    let [web, far] = ["web", "far"].map(port);

    scene.reach(false);
    let agent = scene.start("node");
    let early = || get(&agent, "127.0.0.1:10356", STATEMENT_PATH);
    let refused = (503, "the rules are not in the kernel yet\n".to_owned());
    eventually("a new agent knows nothing", || early().as_ref() == Some(&refused));
    scene.reach(true);
    eventually("it knows all, or nothing", || {
        let (status, body) = early().unwrap();
        assert!(status == 503 || body.contains(&format!("\"{web}\":1")), "{body}");
        status == 200
    });
    let mut last = statement(&agent);
    assert_eq!((last.complete, last.healthy), (true, true));
    assert_eq!(last.ports, [(web, Some(1)), (far, Some(0))].into());
    assert_eq!(statement_at(&agent, "[::1]:10356", "").ports, last.ports, "Services of one family");

    let probe = |port: u16| {
        let address = SocketAddr::new(At::Node.addr(Family::V4), port).to_string();
        get(&agent, &address, "/healthz").map(|(status, _)| status)
    };
    let front = SocketAddr::new(vip(), FRONT);
    for _ in 0..20 {
        std::thread::scope(|scope| {
            scope.spawn(|| scene.endpoints("web", "node", &[At::Far]));
            follow(&agent, &mut last, web, Some(0));
        });
        assert_eq!(probe(web), Some(503));
        std::thread::scope(|scope| {
            scope.spawn(|| scene.endpoints("web", "node", &[At::Pod1]));
            follow(&agent, &mut last, web, Some(1));
        });
        // The rules are there already.
        let answered = scene.world.ask(At::Client, front, Protocol::Tcp);
        assert!(answered.as_ref().is_ok_and(|(who, _)| who == "pod1"), "{answered:?}");
        assert_eq!(probe(web), Some(200));
    }

    // A port of another program is not stated, until it is free.
    let node = SocketAddr::new(At::Node.addr(Family::V4), BUSY);
    let squatter = scene.world.run(At::Node, || TcpListener::bind(node).unwrap());
    scene.endpoints("late", "node", &[At::Pod1]);
    scene.service(
        "late",
        "192.0.2.12".parse().unwrap(),
        &json!({ "externalTrafficPolicy": "Local", "healthCheckNodePort": BUSY }),
    );
    eventually("the agent has noticed", || {
        !scene.service_events("FailedToStartServiceHealthcheck").is_empty()
    });
    assert_eq!(statement(&agent).ports, [(web, Some(1)), (far, Some(0))].into());
    assert_eq!(statement_at(&agent, "[::1]:10356", "").ports.get(&BUSY), Some(&Some(1)), "it is free there");
    drop(squatter);
    follow(&agent, &mut last, BUSY, Some(1));
    assert_eq!(probe(BUSY), Some(200));

    scene.delete("v1", "Service", "late");
    follow(&agent, &mut last, BUSY, None);
    let counted = agent.metric("steerage_agent_statements_total{kind=\"changes\"}");
    assert!(counted >= 42, "{counted}");
    drop(agent);

    // The next process has its own revisions.
    let agent = scene.started("node");
    eventually("it states", || {
        get(&agent, "127.0.0.1:10356", STATEMENT_PATH).is_some_and(|(status, _)| status == 200)
    });
    let first = next(&agent, &last);
    assert!(first.complete);
    assert_eq!(first.ports, [(web, Some(1)), (far, Some(0))].into());
}
