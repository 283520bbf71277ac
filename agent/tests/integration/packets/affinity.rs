// SPDX-License-Identifier: Apache-2.0
//! `sessionAffinity: ClientIP`: kept, refreshed, and ended by the timeout or with the endpoint.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4, TcpStream};
use std::time::{Duration, Instant};

use socket2::{Domain, Socket, Type};

use steerage_agent::kernel::{CountedPackets, counted_packets};
use steerage_agent::plan::{ServicePlan, plan_service};
use steerage_agent::rules::endpoint_hash;
use steerage_model::{EndpointSlice, Family, Key, Protocol, Service};
use steerage_requirements::requires;

use crate::packets::cluster::{Cluster, FAMILIES, Way, key, local, place, service, with_affinity};
use crate::packets::long_lists::{answer_on_ports, endpoints_of_flows, on_ports};
use crate::world::{At, World, ask_on, ask_udp, udp_socket};

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

/// A pod that listens on two ports is two endpoints, where slices give a port two numbers.
#[test]
fn client_keeps_one_of_two_endpoints_on_one_address() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"), Program("conntrack"));
    let world = World::new();
    answer_on_ports(&world);
    let service = with_affinity(service(), LONG);
    let mut cluster = Cluster::new(&world, service.clone(), &[]);
    let both = on_ports(&[At::Far], 2);
    for family in FAMILIES {
        let flows = || {
            world.sh_at(At::Node, "conntrack -F 2>/dev/null");
            for _ in 0..20 {
                world.ask(At::Client, Way::Vip.to(family), Protocol::Tcp).expect("an answer");
            }
            endpoints_of_flows(&world, family).into_keys().collect::<Vec<_>>()
        };
        cluster.set_slices(service.clone(), both.clone());
        let first = flows();
        assert_eq!(first.len(), 1, "{family}: {first:?}");
        // It goes, and the other one stays.
        let has_first = |slice: &&EndpointSlice| slice.ports.iter().all(|port| port.port == first[0]);
        for slice in both.iter().filter(has_first) {
            cluster.delete_slice(slice.key.clone());
        }
        cluster.apply();
        let second = flows();
        assert_eq!(second.len(), 1, "{family}: {second:?}");
        assert_ne!(second, first);
        // It is back, but the client has another one now.
        cluster.set_slices(service.clone(), both.clone());
        assert_eq!(flows(), second, "{family}");
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
    // By the program: the library lists again until nothing changes, and here elements expire all the time.
    let count = |map: &str| {
        let text = world.sh_at(At::Node, &format!("nft list map ip steerage {map}"));
        text.matches(" expires ").count()
    };
    let mut sources = 0_u16..60_000;
    // Until so many have arrived and were translated. Each is forgotten after three seconds.
    while count("candidates") <= 1000 {
        let some: Vec<_> = sources.by_ref().take(2000).collect();
        assert!(!some.is_empty(), "{} candidates", count("candidates"));
        world.run(At::Client, || {
            let socket = Socket::new(Domain::IPV4, Type::RAW, Some(socket2::Protocol::from(255))).unwrap();
            for [a, b] in some.iter().map(|n| n.to_be_bytes()) {
                let packet = segment([10, 200, a, b].into(), to, SYN);
                let _ = socket.send_to(&packet, &SocketAddr::V4(to).into());
            }
        });
    }
    assert_eq!(count("affinity"), 0);
    let first = answering(&world, At::Client, Way::Vip, Family::V4);
    assert_eq!((first.len(), count("affinity")), (1, 1));
}

/// The affinity map of IPv4.
fn remembered(world: &World) -> String {
    world.sh_at(At::Node, "nft list map ip steerage affinity")
}

/// The kernel keeps the hash in host order, but nft prints it as if in network order.
fn listed_hash(at: At, family: Family) -> String {
    format!("0x{:08x}", endpoint_hash(at.socket(family)).to_be())
}

#[test]
fn open_connection_to_a_removed_endpoint_does_not_undo_a_new_choice() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let pods = [At::Pod1, At::Pod2, At::Far];
    let service = with_affinity(service(), LONG);
    let mut cluster = Cluster::new(&world, service.clone(), &pods);
    let vip = Way::Vip.to(Family::V4);
    let mut old = world.run(At::Client, || TcpStream::connect(vip).expect("connect"));
    let mut ask_old = || at(ask_on(&mut old).expect("an answer").split(' ').next().unwrap_or_default());
    let gone = ask_old();
    assert_eq!(ask_old(), gone);
    assert!(remembered(&world).contains(&listed_hash(gone, Family::V4)));
    let others: Vec<_> = pods.into_iter().filter(|pod| *pod != gone).collect();
    cluster.set(service, &others);
    let chosen = answering(&world, At::Client, Way::Vip, Family::V4);
    let chosen = at(chosen.first().expect("one"));
    for _ in 0..3 {
        assert_eq!(ask_old(), gone, "the connection stays");
        let text = remembered(&world);
        assert!(text.contains(&listed_hash(chosen, Family::V4)), "{chosen:?} in {text}");
        assert!(!text.contains(&listed_hash(gone, Family::V4)), "{gone:?} in {text}");
    }
}

/// A packet with a datagram, from an address that need not be the sender's.
fn datagram(source: Ipv4Addr, to: SocketAddrV4) -> Vec<u8> {
    let datagram = [&[0x9c, 0x40][..], &to.port().to_be_bytes(), &[0, 12, 0, 0], b"who?"].concat();
    let header = [0x45, 0, 0, 32, 0, 0, 0, 0, 64, 17, 0, 0];
    [&header[..], &source.octets(), &to.ip().octets(), &datagram].concat()
}

/// A forged datagram is answered, and no rule can tell it from one of a client that sends but one.
#[test]
fn forged_datagrams_leave_room_for_clients_that_go_on() {
    /// An eighth of what a namespace has.
    const ANSWERED: usize = 4096;
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let _cluster = Cluster::new(
        &world,
        with_affinity(service(), Duration::from_hours(24)),
        &[At::Pod1, At::Pod2, At::Far],
    );
    let to = Way::Vip.to(Family::V4);
    let SocketAddr::V4(vip) = to else { panic!("an IPv4 address") };
    let count = || remembered(&world).matches("expires").count();
    let client = format!(" {} ", At::Client.addr(Family::V4));
    let begun = Instant::now();
    let mut sources = 0_u16..60_000;
    let mut forge = |count| {
        let some: Vec<_> = sources.by_ref().take(count).collect();
        world.run(At::Client, || {
            let socket = Socket::new(Domain::IPV4, Type::RAW, Some(socket2::Protocol::from(255))).unwrap();
            for [a, b] in some.iter().map(|n| n.to_be_bytes()) {
                let packet = datagram([10, 200, a, b].into(), vip);
                let _ = socket.send_to(&packet, &SocketAddr::V4(vip).into());
            }
        });
    };
    while count() < ANSWERED {
        assert!(begun.elapsed() < Duration::from_mins(5), "{} are remembered", count());
        forge(500);
    }
    forge(2000);
    let CountedPackets { affinity_limited, .. } =
        world.run(At::Node, || counted_packets().expect("readable"));
    assert!(affinity_limited.contains(&(Family::V6, 0)), "{affinity_limited:?}");
    assert!(
        affinity_limited.iter().any(|(family, packets)| *family == Family::V4 && *packets > 0),
        "{affinity_limited:?}"
    );
    let socket = world.run(At::Client, || udp_socket(to));
    // The servers' queues may still be full of forged ones.
    let ask = || {
        while ask_udp(&socket, to).is_err() {
            assert!(begun.elapsed() < Duration::from_mins(8), "no answer");
        }
    };
    ask();
    // One more in twenty seconds.
    assert!(count() <= ANSWERED + 100, "{} are remembered", count());
    // Connection tracking takes a flow for assured that lasts two seconds.
    std::thread::sleep(Duration::from_millis(2200));
    for _ in 0..3 {
        ask();
    }
    assert!(remembered(&world).contains(&client), "one that goes on is remembered");
}

#[test]
fn client_of_one_datagram_is_remembered() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let _cluster = Cluster::new(&world, with_affinity(service(), LONG), &[At::Pod1, At::Pod2, At::Far]);
    let (who, _) = world.ask(At::Client, Way::Vip.to(Family::V4), Protocol::Udp).expect("an answer");
    assert!(remembered(&world).contains(&listed_hash(at(&who), Family::V4)));
}

/// A namespace with more timeouts has fewer places for each, and not more places.
#[test]
fn timeouts_of_a_namespace_share_its_places() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let mut cluster = Cluster::new(&world, with_affinity(service(), LONG), &[At::Pod1]);
    let shares = |number: u8| {
        let text = world.sh_at(At::Node, &format!("nft list set ip steerage shares-{number}"));
        text.contains("elements")
    };
    let other = |number: u8| {
        let timeout = Duration::from_secs(10 * u64::from(number));
        let key = Key::new(key().namespace(), format!("other-{number}"));
        let cluster_ips = vec![IpAddr::from([10, 96, 1, number])];
        let service = Service { cluster_ips, ..Service::new(key) };
        with_affinity(
            Service { ports: self::service().ports, proxy_name: self::service().proxy_name, ..service },
            timeout,
        )
    };
    for (services, expected) in [(0, 1), (1, 2), (2, 4), (6, 18), (1, 2)] {
        let plan = |number: u8| {
            let service = other(number);
            let plan = plan_service(&service, &cluster.index, &place());
            let plan = if number <= services { plan } else { ServicePlan::default() };
            (service.key, plan)
        };
        let updates = (1..=6).map(plan).collect();
        cluster.write(updates);
        assert_eq!([1, 2, 4, 18].map(shares), [1, 2, 4, 18].map(|number| number == expected), "{services}");
    }
    cluster.dataplane.mark_out_of_sync();
    assert_eq!(cluster.write(BTreeMap::new()).elements, 0, "the differences were right");
    world.ask(At::Client, Way::Vip.to(Family::V4), Protocol::Tcp).expect("an answer");
    assert!(remembered(&world).contains(&listed_hash(At::Pod1, Family::V4)));
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
        let hash = listed_hash(At::Far, family);
        assert!(text.contains(ip) && text.contains(&hash), "{hash} in {text}");
    }
}
