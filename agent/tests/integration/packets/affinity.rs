// SPDX-License-Identifier: Apache-2.0
//! `sessionAffinity: ClientIP`: kept, refreshed, and ended by the timeout or with the endpoint.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, TcpStream};
use std::time::{Duration, Instant};

use socket2::{Domain, Socket, Type};

use steerage_agent::rules::endpoint_hash;
use steerage_model::{Family, Protocol};
use steerage_requirements::requires;

use crate::packets::cluster::{Cluster, FAMILIES, Way, local, service, with_affinity};
use crate::world::{At, World, ask_on};

/// Opens a connection.
const SYN: u8 = 2;
const LONG: Duration = Duration::from_hours(3);

/// The pods that answer this number of new connections.
pub(crate) fn answering(world: &World, from: At, way: Way, family: Family) -> BTreeSet<String> {
    let ask = |_| world.ask(from, way.to(family), Protocol::Tcp).expect("an answer").0;
    (0..12).map(ask).collect()
}

pub(crate) fn at(name: &str) -> At {
    [At::Pod1, At::Pod2, At::Far, At::Node].into_iter().find(|at| at.name() == name).expect("a server")
}

fn table(family: Family) -> &'static str {
    if family == Family::V4 { "ip" } else { "ip6" }
}

#[test]
fn client_keeps_endpoint_until_it_is_removed() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let pods = [At::Pod1, At::Pod2, At::Far];
    let service = with_affinity(service(), LONG);
    let mut cluster = Cluster::new(&world, service.clone(), &pods);
    for family in FAMILIES {
        for way in [Way::ClusterIp, Way::Vip, Way::NodePort] {
            let first = answering(&world, At::Client, way, family);
            assert_eq!(first.len(), 1, "{family} {way:?}: {first:?}");
            let kept = at(first.first().unwrap());
            let others: Vec<_> = pods.into_iter().filter(|pod| *pod != kept).collect();
            cluster.set(service.clone(), &others);
            let second = answering(&world, At::Client, way, family);
            assert_eq!(second.len(), 1, "{family} {way:?}: {second:?}");
            assert!(second.is_disjoint(&first));
            // The endpoint is back, but the client has another one now.
            cluster.set(service.clone(), &pods);
            assert_eq!(answering(&world, At::Client, way, family), second);
        }
    }
}

#[test]
fn client_keeps_endpoint_across_layout_change() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let mut cluster = Cluster::new(&world, with_affinity(service(), LONG), &[At::Pod1, At::Pod2, At::Far]);
    let ask_all = || -> Vec<String> {
        let ways = [Way::ClusterIp, Way::Vip, Way::NodePort].into_iter();
        let all = ways.flat_map(|way| FAMILIES.map(|family| way.to(family)));
        all.map(|to| world.ask(At::Client, to, Protocol::Tcp).expect("an answer").0).collect()
    };
    let before = ask_all();
    let age = |family: &str| {
        let text = world.sh_at(At::Node, &format!("nft list map {family} steerage affinity"));
        assert!(!text.contains("expires 3h"), "none begins anew: {text}");
        text.matches(" expires ").count()
    };
    std::thread::sleep(Duration::from_millis(1100));
    // A client whose affinity is about to expire.
    let other = "10.97.0.9 . tcp . 80 . 10.1.0.9 timeout 3h expires 800ms : 0x1";
    for round in 0..3 {
        world.sh_at(At::Node, &format!("nft \"add element ip steerage affinity {{ {other} }}\""));
        for family in ["ip", "ip6"] {
            // The element of a table with another layout.
            world.sh_at(At::Node, &format!("nft add chain {family} steerage other"));
        }
        cluster.dataplane.mark_out_of_sync();
        cluster.apply();
        let listing = world.sh_at(At::Node, "nft list ruleset");
        assert!(!listing.contains("other"), "replaced");
        assert_eq!(["ip", "ip6"].map(age), [3, 3], "in round {round}");
    }
    assert_eq!(ask_all(), before);
}

#[test]
fn affinity_ends_with_its_timeout() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let pods = [At::Pod1, At::Pod2, At::Far];
    // Rounded up to the shortest timeout.
    let _cluster = Cluster::new(&world, with_affinity(service(), Duration::from_secs(1)), &pods);
    let mut seen = BTreeSet::new();
    for _ in 0..40 {
        let (who, _) = world.ask(At::Client, Way::Vip.to(Family::V4), Protocol::Tcp).expect("an answer");
        seen.insert(who);
        if seen.len() > 1 {
            return;
        }
        std::thread::sleep(Duration::from_millis(5200));
    }
    panic!("always {seen:?}");
}

#[test]
fn new_connections_extend_affinity() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let pods = [At::Pod1, At::Pod2, At::Far];
    let timeout = Duration::from_secs(5);
    let _cluster = Cluster::new(&world, with_affinity(service(), timeout), &pods);
    let ask = || {
        let asked = Instant::now();
        (world.ask(At::Client, Way::Vip.to(Family::V4), Protocol::Tcp).expect("an answer").0, asked)
    };
    let begun = Instant::now();
    let (mut first, mut last) = ask();
    // Without refreshes the affinity would have expired three times. Where a refresh comes too late, for want of a core, this begins
    // anew.
    let mut kept = 0;
    while kept < 9 {
        std::thread::sleep(Duration::from_secs(2));
        let (who, asked) = ask();
        if last.elapsed() < timeout {
            assert_eq!(who, first);
            kept += 1;
        } else {
            assert!(begun.elapsed() < Duration::from_mins(2), "the machine is too slow");
            (first, kept) = (who, 0);
        }
        last = asked;
    }
}

/// A browser opens several connections before the first one has carried anything.
#[test]
fn connections_that_a_client_opens_at_once_have_one_endpoint() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let _cluster = Cluster::new(&world, with_affinity(service(), LONG), &[At::Pod1, At::Pod2, At::Far]);
    for family in FAMILIES {
        let to = Way::Vip.to(family);
        let connect = || (0..12).map(|_| TcpStream::connect(to).expect("connect")).collect();
        let mut streams: Vec<_> = world.run(At::Client, connect);
        let text = world.sh_at(At::Node, &format!("nft list map {} steerage affinity", table(family)));
        assert!(!text.contains("expires"), "nobody has sent anything: {text}");
        let answers = streams.iter_mut().map(|stream| ask_on(stream).expect("an answer"));
        let who: BTreeSet<_> =
            answers.map(|answer| answer.split(' ').next().unwrap_or_default().to_owned()).collect();
        assert_eq!(who.len(), 1, "{who:?}");
    }
}

/// The checksum of TCP over IPv4 (RFC 9293).
fn checksum(source: [u8; 4], to: [u8; 4], segment: &[u8]) -> u16 {
    let length = u16::try_from(segment.len()).expect("short").to_be_bytes();
    let pseudo = [&source[..], &to, &[0, 6], &length, segment].concat();
    let sum: u32 = pseudo.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    !u16::try_from((sum & 0xffff) + (sum >> 16)).expect("two carries at most")
}

/// A packet with an empty TCP segment, from an address that need not be the sender's.
pub(crate) fn segment(source: Ipv4Addr, to: SocketAddrV4, flags: u8) -> Vec<u8> {
    let (from, at) = (source.octets(), to.ip().octets());
    let header = [0x50, flags, 0xff, 0xff, 0, 0, 0, 0];
    let mut segment = [&[0x9c, 0x40][..], &to.port().to_be_bytes(), &[0; 8], &header].concat();
    let sum = checksum(from, at, &segment);
    segment[16..18].copy_from_slice(&sum.to_be_bytes());
    let header = [0x45, 0, 0, 40, 0, 0, 0, 0, 64, 6, 0, 0];
    [&header[..], &from, &at, &segment].concat()
}

#[test]
fn forged_first_packets_leave_no_client_without_affinity() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let _cluster = Cluster::new(&world, with_affinity(service(), LONG), &[At::Pod1, At::Pod2, At::Far]);
    let SocketAddr::V4(to) = Way::Vip.to(Family::V4) else { panic!("an IPv4 address") };
    let sent = world.run(At::Client, || {
        let socket = Socket::new(Domain::IPV4, Type::RAW, Some(socket2::Protocol::from(255))).unwrap();
        let send = |n: &u16| {
            let [a, b] = n.to_be_bytes();
            socket.send_to(&segment([10, 200, a, b].into(), to, SYN), &SocketAddr::V4(to).into()).is_ok()
        };
        (0..2000).filter(send).count()
    });
    assert!(sent > 1000, "{sent}");
    let count = |map: &str| {
        let text = world.sh_at(At::Node, &format!("nft list map ip steerage {map}"));
        text.matches("expires").count()
    };
    assert!(count("candidates") > 1000, "the packets have arrived and were translated");
    assert_eq!(count("affinity"), 0);
    let first = answering(&world, At::Client, Way::Vip, Family::V4);
    assert_eq!((first.len(), count("affinity")), (1, 1));
}

#[test]
fn policy_local_overrides_affinity_to_remote_endpoint() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let service = with_affinity(service(), LONG);
    let mut cluster = Cluster::new(&world, service.clone(), &[At::Far]);
    let vip = Way::Vip.to(Family::V4);
    assert_eq!(world.ask(At::Client, vip, Protocol::Tcp).expect("an answer").0, "far");
    cluster.set(local(service), &[At::Pod1, At::Far]);
    let (who, peer) = world.ask(At::Client, vip, Protocol::Tcp).expect("an answer");
    assert_eq!((who.as_str(), peer.ip()), ("pod1", At::Client.addr(Family::V4)));
}

#[test]
fn affinity_covers_host_network_endpoint() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let service = with_affinity(service(), LONG);
    let mut cluster = Cluster::new(&world, service.clone(), &[At::Node]);
    let vip = Way::Vip.to(Family::V4);
    assert_eq!(world.ask(At::Client, vip, Protocol::Tcp).expect("an answer").0, "node");
    cluster.set(service, &[At::Node, At::Pod1, At::Pod2]);
    assert_eq!(answering(&world, At::Client, Way::Vip, Family::V4), BTreeSet::from(["node".to_owned()]));
}

#[test]
fn kernel_and_agent_hash_endpoints_equally() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    for family in FAMILIES {
        let _cluster = Cluster::new(&world, with_affinity(service(), LONG), &[At::Far]);
        world.ask(At::Client, Way::Vip.to(family), Protocol::Tcp).expect("an answer");
        let (ip, table) = if family == Family::V4 { ("10.1.0.2", "ip") } else { ("fd01::2", "ip6") };
        let text = world.sh_at(At::Node, &format!("nft list map {table} steerage affinity"));
        // The kernel keeps the hash in host order, but nft prints it as if in network order.
        let hash = format!("0x{:08x}", endpoint_hash(At::Far.socket(family)).to_be());
        assert!(text.contains(ip) && text.contains(&hash), "{hash} in {text}");
    }
}
