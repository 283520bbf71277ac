// SPDX-License-Identifier: Apache-2.0

use std::collections::BTreeSet;
use std::net::IpAddr;

use proptest::prelude::*;
use steerage_model::Protocol;
use steerage_provider_api::LoadBalancer;

use super::*;
use crate::desired::desired;
use crate::desired::tests::{owner, planned};
use crate::options::tests::config;
use crate::types::{Balancer, Check, Persistence, Reference};

/// An empty load balancer of the owner.
fn empty() -> Tree {
    let balancer = Balancer {
        vip_network_id: None,
        project_id: None,
        additional_vips: Vec::new(),
        name: String::new(),
        flavor_id: None,
        availability_zone: None,
        id: "lb".to_owned(),
        provisioning_status: Provisioning::Active,
        operating_status: Some("ONLINE".to_owned()),
        admin_state_up: true,
        vip_address: Some([10, 0, 0, 100].into()),
        vip_port_id: Some("port".to_owned()),
        vip_subnet_id: Some("subnet".to_owned()),
        provider: Some("amphora".to_owned()),
        tags: Vec::new(),
        created_at: None,
    };
    Tree { balancer, listeners: Vec::new(), pools: Vec::new() }
}

fn tags(of: &Value) -> Option<Vec<String>> {
    serde_json::from_value(of.get("tags")?.clone()).ok()
}

/// Whether haproxy would ask a member that stays on another port than Octavia shows.
fn moves_checks(pool: &Pool, members: &[Member]) -> bool {
    let is_moved = |member: &Member| {
        let now = members.iter().find(|now| now.key() == member.key());
        now.is_some_and(|now| now.monitor_port != member.monitor_port)
    };
    pool.protocol != "UDP" && pool.members.iter().any(is_moved)
}

/// What Octavia makes of a change. Panics at what Octavia refuses.
fn make(tree: &mut Tree, step: &Step) {
    match step {
        Step::UpdateBalancer { changes, .. } => {
            tree.balancer.tags = tags(changes).unwrap_or_else(|| tree.balancer.tags.clone());
            tree.balancer.admin_state_up |= changes.get("admin_state_up").is_some();
        }
        Step::CreatePool { name, body } => {
            let of_name = tree.pools.iter().filter(|pool| pool.name == *name).count();
            assert!(of_name < 3, "{name} again and again");
            let mut pool = body.clone();
            let id = (0..).map(|number| format!("id {number} of {name}"));
            let is_free = |id: &String| tree.pools.iter().all(|pool| pool.id != *id);
            pool["id"] = id.into_iter().find(is_free).into();
            pool["provisioning_status"] = "ACTIVE".into();
            tree.pools.push(serde_json::from_value(pool).unwrap());
        }
        Step::UpdatePool { id, changes, .. } => {
            let pool = tree.pools.iter_mut().find(|pool| pool.id == *id).unwrap();
            pool.provisioning_status = Provisioning::Active;
            pool.tags = tags(changes).unwrap_or_else(|| pool.tags.clone());
            pool.admin_state_up |= changes.get("admin_state_up").is_some();
            if let Some(algorithm) = changes.get("lb_algorithm") {
                pool.lb_algorithm = algorithm.as_str().unwrap().to_owned();
            }
            if let Some(kept) = changes.get("session_persistence") {
                pool.session_persistence =
                    serde_json::from_value::<Option<Persistence>>(kept.clone()).unwrap();
            }
        }
        Step::DeletePool { id, .. } => {
            assert!(tree.listeners.iter().all(|listener| listener.default_pool_id.as_ref() != Some(id)));
            tree.pools.retain(|pool| pool.id != *id);
        }
        Step::SetMembers { pool, members, .. } => {
            let pool = tree.pools.iter().find(|known| known.id == *pool).unwrap();
            let is_kept = |member: &Member| members.iter().any(|kept| kept.key() == member.key());
            let is_first = pool.members.is_empty() || members.is_empty();
            assert!(is_first || pool.members.iter().any(is_kept), "all members are replaced at once");
            assert!(!moves_checks(pool, members), "a check moves in place");
            assert!(tree.note(step, &Value::Null));
        }
        Step::CreateMonitor { body, .. } => {
            let id = body["pool_id"].as_str().unwrap();
            let pool = tree.pools.iter_mut().find(|pool| pool.id == id).unwrap();
            assert!(pool.monitor.is_none(), "a second monitor");
            pool.monitor = Some(Monitor {
                id: format!("monitor of {id}"),
                provisioning_status: Provisioning::Active,
                admin_state_up: true,
                tags: tags(body).unwrap(),
                pools: vec![Reference { id: id.to_owned() }],
                check: serde_json::from_value::<Check>(body.clone()).unwrap(),
            });
        }
        Step::UpdateMonitor { id, changes, .. } => {
            let is_it = |pool: &&mut Pool| pool.monitor.as_ref().is_some_and(|monitor| monitor.id == *id);
            let pool = tree.pools.iter_mut().find(is_it).unwrap();
            let monitor = pool.monitor.as_mut().unwrap();
            assert!(changes.get("type").is_none(), "Octavia cannot change the type");
            monitor.provisioning_status = Provisioning::Active;
            monitor.tags = tags(changes).unwrap_or_else(|| monitor.tags.clone());
            monitor.admin_state_up |= changes.get("admin_state_up").is_some();
            if changes.get("delay").is_some() {
                let mut check = changes.clone();
                check["type"] = monitor.check.r#type.clone().into();
                monitor.check = serde_json::from_value(check).unwrap();
            }
        }
        Step::DeleteMonitor { id, .. } => {
            for pool in &mut tree.pools {
                pool.monitor.take_if(|monitor| monitor.id == *id);
            }
        }
        Step::CreateListener { body, .. } => {
            let mut listener = body.clone();
            listener["id"] = format!("id of {}", body["name"]).into();
            listener["provisioning_status"] = "ACTIVE".into();
            let listener: Listener = serde_json::from_value(listener).unwrap();
            let is_same = |other: &Listener| {
                (&other.protocol, other.protocol_port) == (&listener.protocol, listener.protocol_port)
            };
            assert!(!tree.listeners.iter().any(is_same), "a second listener on the port");
            tree.listeners.push(listener);
        }
        Step::UpdateListener { id, changes, .. } => {
            let listener = tree.listeners.iter_mut().find(|listener| listener.id == *id).unwrap();
            listener.provisioning_status = Provisioning::Active;
            listener.tags = tags(changes).unwrap_or_else(|| listener.tags.clone());
            listener.admin_state_up |= changes.get("admin_state_up").is_some();
            if let Some(pool) = changes.get("default_pool_id") {
                listener.default_pool_id = pool.as_str().map(str::to_owned);
            }
            if let Some(allowed) = changes.get("allowed_cidrs") {
                listener.allowed_cidrs = serde_json::from_value(allowed.clone()).unwrap();
            }
            if changes.get("connection_limit").is_some() {
                listener.limits = serde_json::from_value(changes.clone()).unwrap();
            }
        }
        Step::DeleteListener { id, .. } => tree.listeners.retain(|listener| listener.id != *id),
    }
}

fn wanted(lb: &LoadBalancer) -> Desired {
    desired(lb, &config("amphora")).unwrap()
}

/// The nodes behind each listener.
fn served(tree: &Tree) -> Vec<((String, u16), BTreeSet<IpAddr>)> {
    let nodes = |listener: &Listener| {
        let pool =
            tree.pools.iter().find(|pool| Some(&pool.id) == listener.default_pool_id.as_ref()).unwrap();
        pool.members.iter().map(|member| member.address).collect()
    };
    let port = |listener: &Listener| (listener.protocol.clone(), listener.protocol_port);
    tree.listeners.iter().map(|listener| (port(listener), nodes(listener))).collect()
}

/// Makes the first change until there is none, and returns what the changes were called.
fn converge(tree: &mut Tree, wanted: &Desired, check: impl Fn(&Tree)) -> Vec<String> {
    let (mut made, mut last) = (Vec::new(), None);
    while let Some(step) = diff(&owner(), tree, wanted, last.as_deref()).unwrap().into_iter().next() {
        make(tree, &step);
        check(tree);
        if let Step::SetMembers { name, .. } = &step {
            last = Some(name.clone());
        }
        made.push(step.to_string());
        assert!(made.len() < 100, "never ends: {made:?}");
    }
    made
}

const WEB: (Protocol, u16, u16) = (Protocol::Tcp, 80, 30080);

fn made(lb: &LoadBalancer) -> Tree {
    let mut tree = empty();
    converge(&mut tree, &wanted(lb), |_| {});
    tree
}

#[test]
fn members_change_at_once_where_one_of_them_stays() {
    let mut tree = made(&planned(&[WEB], &[1, 2]));
    let mut become_of = |nodes: &[u8]| {
        let steps = converge(&mut tree, &wanted(&planned(&[WEB], nodes)), |_| {});
        let members = steps.iter().map(|step| step.split_once("become ").unwrap().1.to_owned());
        members.collect::<Vec<_>>()
    };
    assert_eq!(become_of(&[2, 3]), ["node-2, node-3"]);
    assert_eq!(become_of(&[1]), ["node-1, node-2, node-3", "node-1"]);
    assert_eq!(become_of(&[1, 2]), ["node-1, node-2"]);
    assert_eq!(become_of(&[]), ["none"]);
    // One that Octavia does not send to serves nobody meanwhile.
    let mut tree = made(&planned(&[WEB], &[1, 2]));
    tree.pools[0].members[1].weight = 0;
    let steps = converge(&mut tree, &wanted(&planned(&[WEB], &[2, 3])), |_| {});
    assert_eq!(steps.len(), 2, "{steps:?}");
}

#[test]
fn no_port_waits_for_another_one() {
    let ports = [WEB, (Protocol::Tcp, 443, 30443), (Protocol::Udp, 53, 30053)];
    let tree = made(&planned(&ports, &[1]));
    let wanted = wanted(&LoadBalancer {
        source_ranges: vec!["10.0.0.0/8".parse().unwrap()],
        ..planned(&ports, &[1, 2])
    });
    let names: Vec<&str> = wanted.listeners.iter().map(|listener| listener.pool.name.as_str()).collect();
    for last in 0..3 {
        let steps = diff(&owner(), &tree, &wanted, Some(names[last])).unwrap();
        assert!(steps[..3].iter().all(|step| step.to_string().contains("allowed_cidrs")), "{steps:?}");
        let members = steps[3..].iter().map(|step| match step {
            Step::SetMembers { name, .. } => name.as_str(),
            _ => "",
        });
        let expected = [1, 2, 3].map(|next| names[(last + next) % 3]);
        assert_eq!(members.collect::<Vec<_>>(), expected);
    }
}

/// Clients that are admitted besides can wait, members cannot.
#[test]
fn only_ranges_that_are_taken_away_are_urgent() {
    let ranges = |texts: &[&str]| LoadBalancer {
        source_ranges: texts.iter().map(|text| text.parse().unwrap()).collect(),
        ..planned(&[WEB], &[1])
    };
    for (from, to, is_first) in [
        (&[][..], &["10.0.0.0/8"][..], true),
        (&["10.0.0.0/8"], &["10.1.0.0/16"], true),
        (&["10.0.0.0/8", "192.0.2.0/24"], &["192.0.2.0/24", "198.51.100.0/24"], true),
        (&["10.1.0.0/16"], &["10.0.0.0/8"], false),
        (&["10.0.0.0/8"], &[], false),
    ] {
        let tree = made(&ranges(from));
        let to = LoadBalancer { source_ranges: ranges(to).source_ranges, ..planned(&[WEB], &[1, 2]) };
        let steps: Vec<String> =
            diff(&owner(), &tree, &wanted(&to), None).unwrap().iter().map(ToString::to_string).collect();
        assert_eq!(steps.len(), 2, "{steps:?}");
        assert_eq!(steps[0].contains("allowed_cidrs"), is_first, "{from:?}: {steps:?}");
    }
}

#[test]
fn every_difference_is_one_change_and_nothing_else() {
    let lb = planned(&[WEB], &[1, 2]);
    let whole = made(&lb);
    for (what, expected, spoil) in [
        (
            "a member",
            "members become node-1, node-2",
            (|tree| drop(tree.pools[0].members.pop())) as fn(&mut Tree),
        ),
        ("a foreign member", "members become", |tree| {
            let mut foreign = tree.pools[0].members[0].clone();
            foreign.address = [192, 0, 2, 1].into();
            tree.pools[0].members.push(foreign);
        }),
        ("a weight", "members become", |tree| tree.pools[0].members[0].weight = 7),
        ("a disabled member", "members become", |tree| tree.pools[0].members[0].admin_state_up = false),
        ("a member in ERROR", "members become", |tree| {
            tree.pools[0].members[0].provisioning_status = Provisioning::Error;
        }),
        ("the monitor", "health monitor created", |tree| tree.pools[0].monitor = None),
        ("an interval", "health monitor: ", |tree| {
            tree.pools[0].monitor.as_mut().unwrap().check.delay = 60;
        }),
        ("a disabled monitor", "health monitor: admin_state_up changes", |tree| {
            tree.pools[0].monitor.as_mut().unwrap().admin_state_up = false;
        }),
        ("an algorithm", "lb_algorithm changes", |tree| {
            "SOURCE_IP".clone_into(&mut tree.pools[0].lb_algorithm);
        }),
        ("an affinity", "session_persistence changes", |tree| {
            let r#type = "SOURCE_IP".to_owned();
            tree.pools[0].session_persistence = Some(Persistence { r#type, persistence_timeout: None });
        }),
        ("the listener", "listener TCP 80: created", |tree| tree.listeners.clear()),
        ("a range", "allowed_cidrs changes", |tree| {
            tree.listeners[0].allowed_cidrs = Some(vec!["10.0.0.0/8".to_owned()]);
        }),
        ("a timeout", "timeout_client_data", |tree| tree.listeners[0].limits.timeout_client_data = Some(1)),
        ("a disabled listener", "admin_state_up changes", |tree| tree.listeners[0].admin_state_up = false),
        ("a listener without its pool", "default_pool_id changes", |tree| {
            tree.listeners[0].default_pool_id = None;
        }),
        ("a disabled load balancer", "load balancer: admin_state_up changes", |tree| {
            tree.balancer.admin_state_up = false;
        }),
        ("a tag of the load balancer", "load balancer: tags changes", |tree| drop(tree.balancer.tags.pop())),
    ] {
        let mut tree = whole.clone();
        spoil(&mut tree);
        let steps = converge(&mut tree, &wanted(&lb), |_| {});
        assert_eq!(steps.len(), 1, "{what}: {steps:?}");
        assert!(steps[0].contains(expected), "{what}: {steps:?}");
        assert_eq!(tree, whole, "{what}");
    }
}

#[test]
fn type_of_a_monitor_changes_by_another_monitor() {
    let mut lb = planned(&[WEB], &[1]);
    let mut tree = made(&lb);
    lb.groups[0].health_check.protocol = steerage_provider_api::HealthProtocol::Tcp;
    let steps = converge(&mut tree, &wanted(&lb), |_| {});
    let expected = ["health monitor deleted", "health monitor created"];
    assert!(steps.iter().zip(expected).all(|(step, part)| step.contains(part)), "{steps:?}");
}

/// The plan under policy Cluster: all nodes, which are asked on the port of their service proxy.
fn under_cluster(mut lb: LoadBalancer) -> LoadBalancer {
    for group in &mut lb.groups {
        (group.health_check.port, group.health_check.is_of_service) = (Some(10256), false);
    }
    lb
}

/// haproxy keeps the port of a server's check, whatever Octavia makes of `monitor_port`.
#[test]
fn checks_move_to_another_port_by_another_pool() {
    let (local, cluster) = (planned(&[WEB], &[1]), under_cluster(planned(&[WEB], &[1, 2, 3])));
    let mut tree = made(&local);
    for (to, members) in [(&cluster, "node-1, node-2, node-3"), (&local, "node-1")] {
        let (before, name) = (tree.pools[0].clone(), wanted(to).listeners[0].pool.name.clone());
        let steps = converge(&mut tree, &wanted(to), |tree| {
            let used = tree.listeners[0].default_pool_id.as_ref();
            let used = tree.pools.iter().find(|pool| Some(&pool.id) == used).unwrap();
            assert!(*used == before || used.monitor.is_some() && !used.members.is_empty());
        });
        let expected = [
            format!("pool {name}: created"),
            format!("pool {name}: health monitor created"),
            format!("pool {name}: members become {members}"),
            "listener TCP 80: default_pool_id changes".to_owned(),
            format!("pool {name}: deleted"),
        ];
        assert_eq!(steps, expected);
        assert!(tree.pools.len() == 1 && tree.pools[0].id != before.id);
    }
    // No member stays: its successor has another ID, and the pool may stay.
    let steps = converge(&mut tree, &wanted(&under_cluster(planned(&[WEB], &[2]))), |_| {});
    assert!(tree.pools.len() == 1 && steps.iter().all(|step| !step.contains("created")), "{steps:?}");
}

/// LVS and OVN keep nothing.
#[test]
fn checks_of_others_than_haproxy_move_in_place() {
    let of = |port: (Protocol, u16, u16), provider: &str| {
        let local = planned(&[port], &[1]);
        let cluster = under_cluster(planned(&[port], &[1, 2]));
        let [local, cluster] = [local, cluster].map(|lb| desired(&lb, &config(provider)).unwrap());
        let mut tree = empty();
        converge(&mut tree, &local, |_| {});
        converge(&mut tree, &cluster, |_| {})
    };
    for steps in [of((Protocol::Udp, 53, 30053), "amphora"), of(WEB, "ovn")] {
        assert!(steps.iter().all(|step| step.contains("become") || step.contains("tags")), "{steps:?}");
    }
}

/// Without quota for another pool, members go and come again, half of them at once.
#[test]
fn checks_move_in_the_pool_that_is_there() {
    for (from, to, expected) in [
        (
            &[1, 2, 3][..],
            &[1, 2, 3][..],
            &["node-3", "node-1, node-2, node-3", "node-1, node-2", "node-1, node-2, node-3"][..],
        ),
        (&[1], &[1, 2], &["node-2, node-1", "node-2", "node-1, node-2"]),
        (&[1], &[1], &["none", "node-1"]),
    ] {
        let mut tree = made(&planned(&[WEB], from));
        let pool = tree.pools[0].id.clone();
        let cluster = wanted(&under_cluster(planned(&[WEB], to))).keeping_pools(true);
        let steps = converge(&mut tree, &cluster, |_| {});
        let members = steps.iter().filter_map(|step| step.split_once("become ")).map(|(_, members)| members);
        assert_eq!(members.collect::<Vec<_>>(), expected);
        assert!(tree.pools.len() == 1 && tree.pools[0].id == pool);
        assert!(tree.pools[0].members.iter().all(|member| member.monitor_port == Some(10256)));
    }
}

#[test]
fn others_listeners_stay_and_block_their_port() {
    let lb = planned(&[WEB], &[1]);
    let mut tree = made(&lb);
    let mut foreign = tree.listeners[0].clone();
    (foreign.id, foreign.protocol_port) = ("theirs".to_owned(), 81);
    foreign.tags = vec!["team=a".to_owned()];
    tree.listeners.push(foreign);
    let before = tree.clone();
    assert!(converge(&mut tree, &wanted(&lb), |_| {}).is_empty());
    assert_eq!(tree, before);
    let error =
        diff(&owner(), &tree, &wanted(&planned(&[(Protocol::Tcp, 81, 30081)], &[1])), None).unwrap_err();
    assert!(error.reason() == "ObjectNotOwned" && error.to_string().contains("theirs"), "{error}");
    // An HTTP listener takes the TCP port.
    "HTTP".clone_into(&mut tree.listeners[1].protocol);
    let error =
        diff(&owner(), &tree, &wanted(&planned(&[(Protocol::Tcp, 81, 30081)], &[1])), None).unwrap_err();
    assert_eq!(error.reason(), "ObjectNotOwned");
    // The pool that their listener uses stays, too.
    converge(&mut tree, &wanted(&planned(&[(Protocol::Tcp, 443, 30443)], &[1])), |_| {});
    assert_eq!((tree.listeners.len(), tree.pools.len()), (2, 2));
}

/// Somebody gave it Steerage's tag.
#[test]
fn own_listener_of_another_protocol_is_replaced() {
    let lb = planned(&[WEB], &[1]);
    let mut tree = made(&lb);
    "HTTP".clone_into(&mut tree.listeners[0].protocol);
    let steps = converge(&mut tree, &wanted(&lb), |_| {});
    assert_eq!(steps, ["listener HTTP 80: deleted", "listener TCP 80: created"]);
}

fn any_plan() -> impl Strategy<Value = LoadBalancer> {
    let listener = (prop_oneof![Just(Protocol::Tcp), Just(Protocol::Udp)], 80..84_u16, 30080..30083_u16);
    let listeners = proptest::collection::vec(listener, 1..4);
    let nodes = proptest::collection::btree_set(1..6_u8, 0..5);
    let check = prop_oneof![Just(Some(32000)), Just(Some(10256)), Just(None)];
    (listeners, nodes, any::<bool>(), any::<bool>(), check).prop_map(
        |(mut listeners, nodes, is_proxied, is_restricted, check)| {
            listeners.sort();
            listeners.dedup_by_key(|(protocol, port, _)| (*protocol, *port));
            let nodes: Vec<u8> = nodes.into_iter().collect();
            let mut lb = planned(&listeners, &nodes);
            for group in &mut lb.groups {
                group.health_check.port = check;
            }
            if is_proxied {
                let name = crate::annotations::PROXY_PROTOCOL.to_owned();
                lb.annotations.insert(name, "v2".to_owned());
            }
            if is_restricted {
                lb.source_ranges = vec!["10.0.0.0/8".parse().unwrap()];
            }
            lb
        },
    )
}

proptest! {
    /// From any load balancer to any other, also if the second one begins in the middle of the first change: it ends, nothing is left
    /// over, and a listener that both have never loses nodes that both have.
    #[test]
    fn every_change_ends_and_serves_meanwhile(from in any_plan(), to in any_plan(), cut in 0..20_usize) {
        let (first, second) = (wanted(&from), wanted(&to));
        let mut tree = made(&from);
        prop_assert_eq!(diff(&owner(), &tree, &first, None).unwrap(), []);
        let before = served(&tree);
        let nodes = |lb: &LoadBalancer| -> BTreeSet<IpAddr> {
            lb.nodes().targets.iter().map(|target| target.addresses[0]).collect()
        };
        let (old, new) = (nodes(&from), nodes(&to));
        let check = |tree: &Tree| {
            for (port, now) in served(tree) {
                let is_old = before.iter().any(|(known, _)| *known == port);
                assert!(now.is_superset(&new) || is_old && now.is_superset(&old), "{port:?}: {now:?}");
            }
        };
        for _ in 0..cut {
            let Some(step) = diff(&owner(), &tree, &second, None).unwrap().into_iter().next() else { break };
            make(&mut tree, &step);
            check(&tree);
        }
        converge(&mut tree, &second, check);
        let ports = |wanted: &Desired| wanted.listeners.iter().map(|one| (one.protocol.to_owned(), one.port)).collect::<BTreeSet<_>>();
        prop_assert_eq!(served(&tree).into_iter().map(|(port, _)| port).collect::<BTreeSet<_>>(), ports(&second));
        prop_assert_eq!(tree.pools.len(), second.listeners.len());
        // And back, from wherever it was cut.
        converge(&mut tree, &first, |_| {});
        prop_assert_eq!(tree.pools.len(), first.listeners.len());
    }
}
