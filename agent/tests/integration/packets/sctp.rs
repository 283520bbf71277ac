// SPDX-License-Identifier: Apache-2.0
//! SCTP frontends. Kernels without SCTP sockets still track and translate SCTP, so raw sockets act as both ends. They send the
//! first packets of an association (RFC 9260, section 5.1) with checksums.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::Duration;

use socket2::{Domain, Socket, Type};
use steerage_model::{EndpointPort, Family, Protocol, Service, ServicePort};
use steerage_requirements::requires;

use crate::packets::cluster::{Cluster, FAMILIES, FRONT, NODE_PORT, Way, local, service, slices};
use crate::world::{At, PORT, World};

const INIT: u8 = 1;
const INIT_ACK: u8 = 2;
const TAG: u32 = 0x5743_0001;

fn with_sctp(mut service: Service) -> Service {
    service.ports.push(ServicePort::new("SCTP", Protocol::Sctp, FRONT, Some(NODE_PORT)));
    service
}

fn serve_sctp(cluster: &mut Cluster, service: Service, pods: &[At]) {
    let mut slices = slices(pods);
    for slice in &mut slices {
        let sctp = EndpointPort { name: "SCTP".to_owned(), protocol: Protocol::Sctp, port: PORT };
        slice.ports = slice.ports.to_vec().into_iter().chain([sctp]).collect();
    }
    cluster.set_slices(with_sctp(service), slices);
}

/// A raw SCTP socket, wrapped in the type of a UDP socket.
fn raw(family: Family) -> UdpSocket {
    let domain = if family == Family::V4 { Domain::IPV4 } else { Domain::IPV6 };
    let socket = Socket::new(domain, Type::RAW, Some(i32::from(Protocol::Sctp.number()).into())).unwrap();
    socket.set_read_timeout(Some(Duration::from_millis(1500))).unwrap();
    socket.into()
}

/// A packet with one chunk, INIT or INIT ACK.
fn packet(kind: u8, from: u16, to: u16) -> Vec<u8> {
    let tag = if kind == INIT { 0 } else { TAG };
    let mut bytes = Vec::new();
    bytes.extend(from.to_be_bytes());
    bytes.extend(to.to_be_bytes());
    bytes.extend(tag.to_be_bytes());
    bytes.extend([0; 4]);
    bytes.extend([kind, 0, 0, 20]);
    bytes.extend(TAG.to_be_bytes());
    bytes.extend(65_536_u32.to_be_bytes());
    bytes.extend([0, 1, 0, 1]);
    bytes.extend(7_u32.to_be_bytes());
    let checksum = crc32c(&bytes).to_le_bytes();
    bytes[8..12].copy_from_slice(&checksum);
    bytes
}

/// Castagnoli's CRC (RFC 9260, appendix A).
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(
            crc ^ u32::from(*byte),
            |crc, _| if crc & 1 == 1 { (crc >> 1) ^ 0x82f6_3b78 } else { crc >> 1 },
        )
    })
}

fn send(socket: &UdpSocket, packet: &[u8], to: IpAddr) {
    socket.send_to(packet, SocketAddr::new(to, 0)).expect("send");
}

/// The next packet's ends, if its checksum is right: sender and port that it came to.
fn receive(socket: &UdpSocket) -> Option<(SocketAddr, u16)> {
    let mut buffer = [0; 256];
    let (length, peer) = socket.recv_from(&mut buffer).ok()?;
    // IPv4 raw sockets deliver the IP header too.
    let start = if peer.is_ipv4() { usize::from(buffer[0] & 0xf) * 4 } else { 0 };
    let mut bytes = buffer[start..length].to_vec();
    let port = |at: usize| u16::from_be_bytes([bytes[at], bytes[at + 1]]);
    let (from, to) = (port(0), port(2));
    let checksum: Vec<_> = bytes.splice(8..12, [0; 4]).collect();
    assert_eq!(checksum, crc32c(&bytes).to_le_bytes());
    Some((SocketAddr::new(peer.ip(), from), to))
}

#[test]
fn sctp_association_is_translated_both_ways() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"));
    let world = World::new();
    let mut cluster = Cluster::new(&world, service(), &[]);
    let mut own = 40000;
    for (service, seen) in [(service(), At::Node), (local(service()), At::Client)] {
        serve_sctp(&mut cluster, service, &[At::Pod1]);
        for family in FAMILIES {
            let [pod, client] = [At::Pod1, At::Client].map(|at| world.run(at, || raw(family)));
            for way in Way::EXTERNAL {
                own += 1;
                let to = way.to(family);
                send(&client, &packet(INIT, own, to.port()), to.ip());
                let (from, port) = receive(&pod).expect("the endpoint is asked");
                assert_eq!((from.ip(), port), (seen.addr(family), PORT), "{family} {way:?}");
                send(&pod, &packet(INIT_ACK, PORT, from.port()), from.ip());
                let (from, port) = receive(&client).expect("the answer comes back");
                assert_eq!((from, port), (to, own), "{family} {way:?}");
            }
        }
    }
    // Other protocols on the same port reach their own endpoints.
    serve_sctp(&mut cluster, service(), &[]);
    for family in FAMILIES {
        let pod = world.run(At::Pod1, || raw(family));
        let client = world.run(At::Client, || raw(family));
        send(&client, &packet(INIT, own + 1, FRONT), Way::Vip.to(family).ip());
        assert_eq!(receive(&pod), None, "nobody is left");
    }
}
