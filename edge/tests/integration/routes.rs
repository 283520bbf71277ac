// SPDX-License-Identifier: Apache-2.0
//! A routed network: edge hosts keep routes of their VIPs, BIRD exports them by BGP, and the router spreads connections over all hosts.

use std::io::Read as _;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::json;
use steerage_requirements::requires;

use crate::testbed::bird::Bird;
use crate::testbed::frr::Frr;
use crate::testbed::net::Load;
use crate::testbed::{TestBed, VIP4, VIP6, eventually, sh};

const TABLE: u32 = 83;
const FLAGS: [&str; 4] = ["--route-table", "83", "--route-withdraw-wait", "1s"];
/// Routes of a host whose process is dead go after 6.2s, less the second that may have passed since the last renewal.
const LIFETIME: Duration = Duration::from_millis(6_200);

fn routed(edges: u8) -> TestBed {
    routed_with(edges, 3)
}

/// With so many nodes.
pub(crate) fn routed_with(edges: u8, nodes: u8) -> TestBed {
    let mut testbed = TestBed::new(edges, nodes);
    testbed.flags = FLAGS.to_vec();
    let nodes: Vec<_> = (0..nodes.into()).collect();
    testbed.apply_load_balancer(&nodes, |_| {});
    testbed
}

/// The VIPs in the table of an edge host.
fn exported(testbed: &TestBed, edge: usize) -> Vec<&'static str> {
    let netns = testbed.netns(&format!("edge{}", edge + 1));
    // A table that never had a route is an error.
    let list = format!(
        "ip -n {netns} route show table all proto 83; ip -n {netns} -6 route show table all proto 83"
    );
    let shown = sh(&list);
    let has = |vip: &&str| shown.contains(&format!("blackhole {vip} "));
    [VIP4, VIP6].into_iter().filter(has).collect()
}

fn has_routes(testbed: &TestBed, edge: usize) -> bool {
    exported(testbed, edge) == [VIP4, VIP6]
}

/// Whether the router spreads both VIPs over exactly these edge hosts.
pub(crate) fn is_spread_over(testbed: &TestBed, edges: &[u8]) -> bool {
    let router = testbed.netns("router");
    let shown = [
        (sh(&format!("ip -n {router} route show {VIP4} proto bird")), "10.0.0."),
        (sh(&format!("ip -n {router} -6 route show {VIP6} proto bird")), "fd00::"),
    ];
    shown.iter().all(|(shown, prefix)| {
        (0..2).all(|edge| shown.contains(&format!("via {prefix}{} ", 11 + edge)) == edges.contains(&edge))
    })
}

/// Two hosts that the router uses, and the routing daemons.
fn two_hosts(has_bfd: bool) -> (TestBed, [Bird; 3]) {
    two_hosts_of(routed(2), &[0, 1, 2], has_bfd)
}

pub(crate) fn two_hosts_of(mut testbed: TestBed, nodes: &[usize], has_bfd: bool) -> (TestBed, [Bird; 3]) {
    let on_edge = |edge| Bird::on_edge(&testbed, edge, TABLE, has_bfd);
    let birds = [Bird::on_router(&testbed, 2, has_bfd), on_edge(0), on_edge(1)];
    testbed.start_ready(0);
    testbed.start_ready(1);
    eventually("the router uses both hosts", || is_spread_over(&testbed, &[0, 1]));
    testbed.wait_until_served_by(nodes);
    (testbed, birds)
}

fn flows(testbed: &TestBed, edge: usize, vip: &str) -> u64 {
    let text = testbed.get(edge, "/metrics");
    let name = format!("steerage_edge_vip_flows_total{{vip=\"{vip}\"}} ");
    text.lines().find_map(|line| line.strip_prefix(&name)?.parse().ok()).unwrap_or(0)
}

/// Records each change of the routes of an edge host.
struct RouteMonitor(Child);

impl RouteMonitor {
    fn start(testbed: &TestBed, edge: usize) -> Self {
        let netns = testbed.netns(&format!("edge{}", edge + 1));
        let monitor =
            Command::new("ip").args(["-n", &netns, "monitor", "route"]).stdout(Stdio::piped()).spawn();
        let monitor = Self(monitor.expect("ip monitor"));
        std::thread::sleep(Duration::from_millis(300));
        monitor
    }

    fn stop(mut self) -> String {
        self.0.kill().expect("kill");
        let mut text = String::new();
        self.0.stdout.take().expect("output").read_to_string(&mut text).expect("text");
        self.0.wait().expect("wait");
        text.lines().filter(|line| line.contains("proto 83")).collect()
    }
}

#[test]
fn router_uses_all_hosts_and_loses_nothing_when_one_ends() {
    requires!(NetworkNamespace, Program("ip"), Program("bird"));
    let (mut testbed, _birds) = two_hosts(false);
    for edge in 0..2 {
        assert_eq!(testbed.metric(edge, "steerage_edge_exported_routes").as_deref(), Some("2"));
        for vip in [VIP4, VIP6] {
            let flows = flows(&testbed, edge, vip);
            assert!(flows >= 5, "host {edge} has forwarded {flows} flows to {vip}");
        }
    }
    let load = Load::start(&testbed.client(), 20);
    std::thread::sleep(Duration::from_millis(500));
    for edge in [0, 1] {
        let begun = Instant::now();
        assert!(testbed.terminate(edge));
        let took = begun.elapsed();
        assert!(took >= Duration::from_secs(1), "it has waited for the routers: {took:?}");
        assert!(exported(&testbed, edge).is_empty());
        let other = u8::from(edge == 0);
        assert!(is_spread_over(&testbed, &[other]), "the router left the host before its end");
        std::thread::sleep(Duration::from_secs(1));
        testbed.start_ready(edge);
        eventually("the router uses both hosts again", || is_spread_over(&testbed, &[0, 1]));
        std::thread::sleep(Duration::from_secs(1));
    }
    load.stop("SIGTERM and restart of each of two hosts that a router uses");
}

#[test]
fn routes_of_a_killed_host_go_and_come_back() {
    requires!(NetworkNamespace, Program("ip"), Program("bird"));
    let (mut testbed, _birds) = two_hosts(false);
    let load = Load::start(&testbed.client(), 20);
    std::thread::sleep(Duration::from_secs(2));
    let killed = Instant::now();
    testbed.kill(0);
    std::thread::sleep(LIFETIME.saturating_sub(Duration::from_secs(2)));
    assert!(is_spread_over(&testbed, &[0, 1]), "its kernel forwards by the last tables");
    eventually("the router leaves the killed host", || is_spread_over(&testbed, &[1]));
    let took = killed.elapsed();
    assert!(took < LIFETIME + Duration::from_secs(2), "{took:?}");
    println!("the router left the killed host after {took:?}");
    std::thread::sleep(Duration::from_secs(1));
    testbed.start_ready(0);
    eventually("the router uses both hosts again", || is_spread_over(&testbed, &[0, 1]));
    // Both at once: the next processes adopt the routes before these expire.
    testbed.kill(0);
    testbed.kill(1);
    std::thread::sleep(Duration::from_secs(2));
    testbed.start_ready(0);
    testbed.start_ready(1);
    std::thread::sleep(LIFETIME + Duration::from_secs(1));
    assert!(is_spread_over(&testbed, &[0, 1]));
    load.stop("kill -9 of a host that a router uses, its return, kill -9 of both, and their return");
}

#[test]
fn router_leaves_a_disconnected_host_by_bfd() {
    requires!(NetworkNamespace, Program("ip"), Program("bird"));
    let (testbed, _birds) = two_hosts(true);
    let load = Load::start(&testbed.client(), 20);
    std::thread::sleep(Duration::from_millis(500));
    let disconnected = Instant::now();
    let first = testbed.netns("edge1");
    sh(&format!("ip -n {first} link set eth0 down"));
    eventually("the router leaves the disconnected host", || is_spread_over(&testbed, &[1]));
    println!("the router left the disconnected host after {:?}", disconnected.elapsed());
    std::thread::sleep(Duration::from_secs(1));
    load.stop("the cable pulled of a host that a router uses");
}

#[test]
fn frr_exports_the_routes() {
    requires!(NetworkNamespace, Program("ip"), Program("bird"), Program("vtysh"));
    let mut testbed = routed(1);
    // FRR 8.4 takes routes of both families from the main table alone.
    testbed.flags = vec!["--route-table", "254"];
    let _bird = Bird::on_router(&testbed, 1, false);
    let _frr = Frr::on_edge(&testbed, 0);
    testbed.start_ready(0);
    eventually("the router uses the host", || is_spread_over(&testbed, &[0]));
    testbed.wait_until_served_by(&[0, 1, 2]);
    testbed.apply_load_balancer(&[0, 1, 2], |lb| lb["spec"]["addresses"] = json!([VIP4]));
    let router = testbed.netns("router");
    eventually("the router has no route to the VIP that is gone", || {
        sh(&format!("ip -n {router} -6 route show {VIP6} proto bird")).is_empty()
    });
    assert_eq!(exported(&testbed, 0), [VIP4]);
}

#[test]
fn routes_of_a_stopped_process_go_and_come_back() {
    requires!(NetworkNamespace, Program("ip"));
    let mut testbed = routed(2);
    testbed.start_ready(0);
    testbed.start_ready(1);
    eventually("both hosts have routes", || has_routes(&testbed, 0) && has_routes(&testbed, 1));
    eventually("they expire", || !testbed.keeps_vips_forever(0));
    testbed.stop(0);
    eventually("the routes of the stopped process are gone", || exported(&testbed, 0).is_empty());
    assert!(has_routes(&testbed, 1));
    testbed.resume(0);
    eventually("the process that runs again has routes", || has_routes(&testbed, 0));
    // They are guarded as before.
    std::thread::sleep(LIFETIME + Duration::from_secs(1));
    assert!(has_routes(&testbed, 0));
    testbed.kill(0);
    eventually("the routes of the killed process are gone", || exported(&testbed, 0).is_empty());
}

#[test]
fn restarted_process_adopts_the_routes() {
    requires!(NetworkNamespace, Program("ip"));
    let mut testbed = routed(2);
    testbed.start_ready(0);
    testbed.start_ready(1);
    eventually("both hosts have routes", || has_routes(&testbed, 0) && has_routes(&testbed, 1));
    std::thread::sleep(Duration::from_secs(2));
    let monitor = RouteMonitor::start(&testbed, 0);
    for _ in 0..2 {
        testbed.kill(0);
        testbed.start_ready(0);
        // It renews the lifetime once it can serve.
        std::thread::sleep(Duration::from_secs(2));
    }
    // The fences of the killed processes would remove them by then.
    std::thread::sleep(LIFETIME + Duration::from_secs(1));
    assert_eq!(monitor.stop(), "", "no route was removed or added");
    assert!(has_routes(&testbed, 0));
    let netns = testbed.netns("edge1");
    let fences =
        sh(&format!("for pid in $(ip netns pids {netns}); do tr '\\0' ' ' </proc/$pid/cmdline; echo; done"));
    assert_eq!(fences.matches("route-fence").count(), 1, "{fences}");
}

#[test]
fn only_host_keeps_its_routes() {
    requires!(NetworkNamespace, Program("ip"), Program("bird"));
    let mut testbed = routed(1);
    let _birds = [Bird::on_router(&testbed, 1, false), Bird::on_edge(&testbed, 0, TABLE, false)];
    let netns = testbed.netns("edge1");
    sh(&format!("ip -n {netns} route add blackhole 10.99.0.1/32 table {TABLE} proto static"));
    testbed.start_ready(0);
    testbed.wait_until_served_by(&[0, 1, 2]);
    let load = Load::start(&testbed.client(), 20);
    testbed.kill(0);
    std::thread::sleep(LIFETIME + Duration::from_secs(1));
    assert!(has_routes(&testbed, 0), "no other host can serve");
    testbed.start_ready(0);
    let begun = Instant::now();
    assert!(testbed.terminate(0));
    assert!(begun.elapsed() < Duration::from_secs(5));
    std::thread::sleep(Duration::from_secs(1));
    assert!(has_routes(&testbed, 0), "the kernel forwards without the process");
    // It cannot list, and there is no host that can.
    testbed.start_without_api(0);
    std::thread::sleep(LIFETIME + Duration::from_secs(1));
    assert!(has_routes(&testbed, 0), "losing sight of the cluster takes no traffic down");
    load.stop("kill -9, SIGTERM and loss of the API server of the only host that a router uses");
    assert!(testbed.terminate(0));
    testbed.clean_up(0);
    assert!(exported(&testbed, 0).is_empty());
    let left = sh(&format!("ip -n {netns} route show table {TABLE}"));
    assert_eq!(left.trim(), "blackhole 10.99.0.1 proto static", "another program's route stays");
}

#[test]
fn routes_stay_if_all_processes_end() {
    requires!(NetworkNamespace, Program("ip"));
    let mut testbed = routed(2);
    testbed.start_ready(0);
    testbed.start_ready(1);
    eventually("both hosts have routes", || has_routes(&testbed, 0) && has_routes(&testbed, 1));
    testbed.terminate_all();
    assert!(has_routes(&testbed, 0) && has_routes(&testbed, 1), "each has learned that the other one ends");
    std::thread::sleep(LIFETIME + Duration::from_secs(1));
    assert!(has_routes(&testbed, 0) && has_routes(&testbed, 1));
}

/// Its engine has ended while the other host could serve, and so has limited the time for which the program forwards.
#[test]
fn host_that_adds_its_routes_again_while_it_ends_forwards_without_end() {
    requires!(NetworkNamespace, Program("ip"));
    let mut testbed = routed(2);
    testbed.flags = vec!["--route-table", "83", "--route-withdraw-wait", "5s"];
    testbed.start_ready(0);
    testbed.start_ready(1);
    eventually("both hosts have routes", || has_routes(&testbed, 0) && has_routes(&testbed, 1));
    let mut first = testbed.begin_to_terminate(0);
    eventually("it has withdrawn its routes", || exported(&testbed, 0).is_empty());
    eventually("its program has a limited time", || {
        testbed.forwarding_left(0).is_some_and(|left| left <= Duration::from_secs(15))
    });
    assert!(testbed.terminate(1));
    assert!(first.wait().expect("wait").success());
    assert!(has_routes(&testbed, 0) && has_routes(&testbed, 1), "each has learned that the other one ends");
    for edge in [0, 1] {
        assert_eq!(testbed.forwarding_left(edge), None, "routers send to host {edge}");
    }
}

#[test]
fn host_that_cannot_serve_has_no_routes_beside_one_that_can() {
    requires!(NetworkNamespace, Program("ip"));
    let mut testbed = routed(2);
    testbed.start_ready(0);
    testbed.start_ready(1);
    eventually("both hosts have routes", || has_routes(&testbed, 0) && has_routes(&testbed, 1));
    testbed.kill(0);
    testbed.start_without_api(0);
    std::thread::sleep(Duration::from_secs(2));
    assert!(has_routes(&testbed, 0), "they last until the process has had time to list");
    eventually("the host that cannot list has no routes", || exported(&testbed, 0).is_empty());
    assert!(has_routes(&testbed, 1));
    // No host that can serve is left.
    testbed.kill(1);
    eventually("the host that cannot list has routes again", || has_routes(&testbed, 0));
}

#[test]
fn routes_follow_the_vips() {
    requires!(NetworkNamespace, Program("ip"));
    let mut testbed = routed(1);
    let node = testbed.netns("node21");
    sh(&format!("ip netns exec {node} sysctl -qw net.ipv4.conf.all.arp_ignore=0"));
    testbed.start_ready(0);
    eventually("a VIP that another machine has is not exported", || exported(&testbed, 0) == [VIP6]);
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(exported(&testbed, 0), [VIP6]);
    sh(&format!("ip netns exec {node} sysctl -qw net.ipv4.conf.all.arp_ignore=1"));
    eventually("it is exported once it is free", || has_routes(&testbed, 0));
    testbed.apply_load_balancer(&[0, 1, 2], |lb| lb["spec"]["addresses"] = json!([VIP4]));
    eventually("the route of a VIP that is gone is removed", || exported(&testbed, 0) == [VIP4]);
    // Whoever removes the routes.
    let netns = testbed.netns("edge1");
    sh(&format!("ip -n {netns} route flush table {TABLE}"));
    eventually("a route that another program has removed is there again", || exported(&testbed, 0) == [VIP4]);
}
