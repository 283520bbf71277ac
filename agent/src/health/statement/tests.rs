// SPDX-License-Identifier: Apache-2.0
//! What is stated, without sockets.

use std::collections::{BTreeMap, BTreeSet};
use std::task::Poll;

use futures::FutureExt as _;
use proptest::prelude::*;
use steerage_model::Key;

use super::*;
use crate::plan::HealthPort;

const FAMILIES: [Family; 2] = [Family::V4, Family::V6];
const LONG: Duration = Duration::from_mins(1);

type Ports<'a> = &'a [(u16, Option<u32>)];

fn key(name: &str) -> Key {
    Key::new("shop", name)
}

fn port(port: u16, v4: Option<usize>, v6: Option<usize>) -> HealthPort {
    HealthPort { port, v4, v6, vips: std::sync::Arc::default() }
}

/// Ports whose servers were opened.
fn opened() -> HealthCheckPorts {
    let ports = HealthCheckPorts::default();
    ports.set_unserved(BTreeSet::new());
    ports
}

/// A client at one family's address.
#[derive(Default)]
struct Client {
    revision: Option<String>,
    known: BTreeMap<u16, u32>,
}

impl Client {
    /// Asks, and does as it is told. It must be told at once.
    fn ask(&mut self, family: Family, ports: &HealthCheckPorts, healthy: bool) -> (Statement, StatementKind) {
        self.ask_of(family, ports, &StatedTunnel::default(), healthy)
    }

    fn ask_of(
        &mut self,
        family: Family,
        ports: &HealthCheckPorts,
        tunnel: &StatedTunnel,
        healthy: bool,
    ) -> (Statement, StatementKind) {
        let origin = Origin { instance: ports.instance(), family };
        let known = self.revision.as_deref().and_then(|text| origin.parse(text));
        let answer = news(origin, known, Duration::ZERO, ports, tunnel, || healthy).now_or_never();
        let (statement, kind) = answer.expect("no wait").expect("servers were opened");
        if statement.complete {
            self.known.clear();
        }
        for (port, count) in &statement.ports {
            match count {
                Some(count) => self.known.insert(*port, *count),
                None => self.known.remove(port),
            };
        }
        self.revision = Some(statement.revision.clone());
        (statement, kind)
    }

    fn hears(&mut self, ports: &HealthCheckPorts, expected: Ports<'_>, kind: StatementKind) {
        let (statement, found) = self.ask(Family::V4, ports, true);
        assert_eq!((statement.ports, found), (expected.iter().copied().collect(), kind));
    }
}

#[test]
fn counts_fall_before_the_rules_change_and_rise_after() {
    let (ports, mut client) = (opened(), Client::default());
    ports.withdraw(&key("web"), Some(&port(30001, Some(2), None)), true);
    client.hears(&ports, &[(30001, Some(0))], StatementKind::Complete);
    ports.publish(&[(key("web"), port(30001, Some(2), None))].into());
    client.hears(&ports, &[(30001, Some(2))], StatementKind::Changes);
    ports.withdraw(&key("web"), Some(&port(30001, Some(3), None)), true);
    client.hears(&ports, &[], StatementKind::Unchanged);
    ports.publish(&[(key("web"), port(30001, Some(3), None))].into());
    client.hears(&ports, &[(30001, Some(3))], StatementKind::Changes);
    ports.withdraw(&key("web"), Some(&port(30001, Some(1), None)), true);
    client.hears(&ports, &[(30001, Some(1))], StatementKind::Changes);
    ports.publish(&[(key("web"), port(30001, Some(1), None))].into());
    client.hears(&ports, &[], StatementKind::Unchanged);
}

#[test]
fn closed_port_is_stated_as_such_and_a_lingering_one_as_it_answers() {
    let (ports, mut client) = (opened(), Client::default());
    ports.publish(
        &[(key("web"), port(30001, Some(2), None)), (key("api"), port(30002, Some(1), None))].into(),
    );
    client.hears(&ports, &[(30001, Some(2)), (30002, Some(1))], StatementKind::Complete);
    ports.withdraw(&key("web"), None, true);
    client.hears(&ports, &[], StatementKind::Unchanged);
    ports.withdraw(&key("api"), None, false);
    client.hears(&ports, &[(30002, None)], StatementKind::Changes);
    // Another Service gets the lingering port.
    ports.withdraw(&key("other"), Some(&port(30001, Some(1), None)), true);
    client.hears(&ports, &[(30001, Some(0))], StatementKind::Changes);
    // A Service gets another port.
    ports.withdraw(&key("other"), Some(&port(30003, Some(1), None)), true);
    client.hears(&ports, &[(30001, None), (30003, Some(0))], StatementKind::Changes);
}

#[test]
fn nothing_is_stated_before_servers_are_open_nor_of_ports_of_others() {
    let (ports, mut client) = (HealthCheckPorts::default(), Client::default());
    ports.publish(
        &[(key("web"), port(30001, Some(2), None)), (key("api"), port(30002, Some(1), None))].into(),
    );
    assert_eq!(ports.stated_since(Family::V4, None), None, "ports may be missing");
    ports.set_unserved([(Family::V4, 30002)].into());
    client.hears(&ports, &[(30001, Some(2))], StatementKind::Complete);
    let mut v6 = Client::default();
    assert_eq!(v6.ask(Family::V6, &ports, true).0.ports.len(), 2, "it is free there");
    ports.publish(&[(key("api"), port(30002, Some(3), None))].into());
    client.hears(&ports, &[], StatementKind::Unchanged);
    ports.set_unserved([(Family::V4, 30001)].into());
    client.hears(&ports, &[(30001, None), (30002, Some(3))], StatementKind::Changes);
    ports.set_unserved([(Family::V4, 30001)].into());
    client.hears(&ports, &[], StatementKind::Unchanged);
}

#[test]
fn counts_are_of_the_family_of_the_address_and_revisions_too() {
    let (ports, mut client) = (opened(), Client::default());
    ports.publish(
        &[(key("both"), port(30001, Some(2), Some(0))), (key("six"), port(30002, None, Some(4)))].into(),
    );
    client.hears(&ports, &[(30001, Some(2)), (30002, Some(4))], StatementKind::Complete);
    ports.publish(&[(key("both"), port(30001, Some(2), Some(1)))].into());
    client.hears(&ports, &[], StatementKind::Unchanged);
    let (statement, kind) = client.ask(Family::V6, &ports, true);
    assert_eq!(kind, StatementKind::Complete, "the revision is of the other family");
    assert_eq!(statement.ports, [(30001, Some(1)), (30002, Some(4))].into());
}

#[test]
fn change_of_health_is_news_by_itself() {
    let (ports, mut client) = (opened(), Client::default());
    ports.publish(&[(key("web"), port(30001, Some(2), None))].into());
    let table = [
        (true, 1, StatementKind::Complete),
        (true, 0, StatementKind::Unchanged),
        (false, 0, StatementKind::Changes),
        (false, 0, StatementKind::Unchanged),
        (true, 0, StatementKind::Changes),
    ];
    for (healthy, count, kind) in table {
        let (statement, found) = client.ask(Family::V4, &ports, healthy);
        assert_eq!((statement.healthy, statement.ports.len(), found), (healthy, count, kind));
    }
}

#[test]
fn unknown_revisions_get_everything() {
    let (ports, others) = (opened(), opened());
    ports.publish(&[(key("web"), port(30001, Some(2), None))].into());
    others.publish(&[(key("web"), port(30001, Some(2), None))].into());
    let mut client = Client::default();
    let first = client.ask(Family::V4, &ports, true).0.revision;
    let (origin, change) = first.strip_suffix("-0-true").unwrap().rsplit_once('-').unwrap();
    let change: u64 = change.parse().unwrap();
    let of_another = Client::default().ask(Family::V4, &others, true).0.revision;
    let later = format!("{origin}-{}-0-true", change + 1);
    let short = format!("{origin}-{change}-true");
    for unknown in ["", "x", origin, "1-4-1-0-true", &format!("{first}x"), &of_another, &later, &short] {
        client.revision = Some(unknown.to_owned());
        client.hears(&ports, &[(30001, Some(2))], StatementKind::Complete);
        assert_eq!(client.revision.as_ref(), Some(&first), "after {unknown}");
    }
}

#[test]
fn queries_are_parsed_strictly() {
    let query = |after, wait| Ok(StatementQuery { after, wait: Duration::from_millis(wait) });
    let table = [
        (None, query(None, 0)),
        (Some(""), query(None, 0)),
        (Some("after=a-4-1-true"), query(Some("a-4-1-true"), 0)),
        (Some("after=a&wait=250"), query(Some("a"), 250)),
        (Some("wait=250&after=a&"), query(Some("a"), 250)),
        (Some("wait=10001"), query(None, MAX_STATEMENT_WAIT)),
        (Some("wait=18446744073709551615"), query(None, MAX_STATEMENT_WAIT)),
        (Some("wait=18446744073709551616"), Err("wait is not a number of milliseconds\n")),
        (Some("wait="), Err("wait is not a number of milliseconds\n")),
        (Some("wait=1s"), Err("wait is not a number of milliseconds\n")),
        (Some("wait=-1"), Err("wait is not a number of milliseconds\n")),
        (Some("wait=1&wait=2"), Err("the query has a parameter twice\n")),
        (Some("watch=1"), Err("unknown parameter: use after and wait\n")),
        (Some("after=a?wait=1"), query(Some("a?wait=1"), 0)),
    ];
    for (text, expected) in table {
        assert_eq!(StatementQuery::parse(text), expected, "{text:?}");
    }
}

#[tokio::test]
async fn request_is_held_while_only_the_other_family_changes() {
    let (ports, tunnel) = (opened(), StatedTunnel::default());
    ports.publish(&[(key("web"), port(30001, Some(2), Some(2)))].into());
    let mut client = Client::default();
    let revision = client.ask(Family::V4, &ports, true).0.revision;
    let origin = Origin { instance: ports.instance(), family: Family::V4 };
    let mut held = Box::pin(news(origin, origin.parse(&revision), LONG, &ports, &tunnel, || true));
    assert!(futures::poll!(&mut held).is_pending());
    ports.publish(&[(key("web"), port(30001, Some(2), Some(1)))].into());
    ports.publish(&[(key("web"), port(30001, Some(2), Some(1)))].into());
    tunnel.set(Family::V6, TunnelReceiver::Failed);
    assert!(futures::poll!(&mut held).is_pending());
    ports.publish(&[(key("web"), port(30001, Some(1), Some(1)))].into());
    let Poll::Ready(Some((statement, kind))) = futures::poll!(&mut held) else { panic!("not woken") };
    assert_eq!((statement.ports, kind), ([(30001, Some(1))].into(), StatementKind::Changes));
}

const RECEIVES: TunnelReceiver = TunnelReceiver::Receives { vni: 7, port: 10_361 };

#[tokio::test]
async fn request_is_answered_when_the_tunnel_changes() {
    let (ports, tunnel) = (opened(), StatedTunnel::default());
    ports.publish(&[(key("web"), port(30001, Some(2), None))].into());
    let mut client = Client::default();
    let (first, _) = client.ask_of(Family::V4, &ports, &tunnel, true);
    assert_eq!(first.edge_tunnel, None, "the agent has not looked");
    let origin = Origin { instance: ports.instance(), family: Family::V4 };
    let mut revision = first.revision;
    for receiver in [RECEIVES, TunnelReceiver::EdgeHost, RECEIVES] {
        let mut held = Box::pin(news(origin, origin.parse(&revision), LONG, &ports, &tunnel, || true));
        assert!(futures::poll!(&mut held).is_pending());
        tunnel.set(Family::V4, receiver);
        let Poll::Ready(Some((statement, kind))) = futures::poll!(&mut held) else { panic!("not woken") };
        assert_eq!((statement.edge_tunnel, kind), (Some(receiver), StatementKind::Changes));
        assert!(!statement.complete && statement.ports.is_empty());
        tunnel.set(Family::V4, receiver);
        revision = statement.revision;
    }
}

#[derive(Debug, Clone)]
enum Step {
    Withdraw { service: usize, port: Option<HealthPort>, still_balanced: bool },
    Publish { service: usize, port: HealthPort },
    Unserved(BTreeSet<(Family, u16)>),
    Healthy(bool),
    Tunnel(Family, TunnelReceiver),
    Restart,
    Ask(Family),
}

fn any_step() -> impl Strategy<Value = Step> {
    let family = || prop::sample::select(FAMILIES.to_vec());
    let count = || prop::option::of(0..3_usize);
    // Few, so that they meet.
    let port = || 0..6_u16;
    let health = move || {
        (port(), count(), count()).prop_map(|(port, v4, v6)| HealthPort {
            port,
            v4,
            v6,
            vips: std::sync::Arc::default(),
        })
    };
    prop_oneof![
        4 => (0..4_usize, prop::option::of(health()), any::<bool>())
            .prop_map(|(service, port, still_balanced)| Step::Withdraw { service, port, still_balanced }),
        4 => (0..4_usize, health()).prop_map(|(service, port)| Step::Publish { service, port }),
        1 => prop::collection::btree_set((family(), port()), 0..3).prop_map(Step::Unserved),
        1 => any::<bool>().prop_map(Step::Healthy),
        1 => (family(), prop::sample::select(vec![RECEIVES, TunnelReceiver::EdgeHost]))
            .prop_map(|(family, receiver)| Step::Tunnel(family, receiver)),
        1 => Just(Step::Restart),
        4 => family().prop_map(Step::Ask),
    ]
}

proptest! {
    #[test]
    fn client_that_follows_changes_knows_what_the_ports_answer(steps in prop::collection::vec(any_step(), 0..80)) {
        let (mut ports, mut healthy, mut unserved) = (opened(), true, BTreeSet::new());
        let (mut tunnel, mut receivers) = (StatedTunnel::default(), BTreeMap::new());
        let mut clients = FAMILIES.map(|family| (family, Client::default()));
        let asks = FAMILIES.map(Step::Ask);
        for step in steps.into_iter().chain(asks) {
            match step {
                Step::Withdraw { service, port, still_balanced } => {
                    ports.withdraw(&key(&service.to_string()), port.as_ref(), still_balanced);
                }
                Step::Publish { service, port } => {
                    ports.publish(&[(key(&service.to_string()), port)].into());
                }
                Step::Unserved(those) => {
                    unserved.clone_from(&those);
                    ports.set_unserved(those);
                }
                Step::Healthy(now) => healthy = now,
                Step::Tunnel(family, receiver) => {
                    tunnel.set(family, receiver);
                    receivers.insert(family, receiver);
                }
                Step::Restart => {
                    ports = opened();
                    (tunnel, receivers) = (StatedTunnel::default(), BTreeMap::new());
                    unserved.clear();
                }
                Step::Ask(family) => {
                    for (_, client) in clients.iter_mut().filter(|(of, _)| *of == family) {
                        let (statement, _) = client.ask_of(family, &ports, &tunnel, healthy);
                        prop_assert_eq!(statement.healthy, healthy);
                        prop_assert_eq!(statement.edge_tunnel, receivers.get(&family).copied());
                        let answered = ports.all().into_iter().filter(|(port, _)| !unserved.contains(&(family, *port)));
                        let answered = answered.filter_map(|(port, status)| Some((port, u32::try_from(status.count(family)?).unwrap())));
                        prop_assert_eq!(&client.known, &answered.collect::<BTreeMap<_, _>>());
                        let (complete, kind) = Client::default().ask_of(family, &ports, &tunnel, healthy);
                        prop_assert_eq!(kind, StatementKind::Complete);
                        prop_assert_eq!(client.revision.as_ref(), Some(&complete.revision));
                    }
                }
            }
        }
    }
}
