// SPDX-License-Identifier: Apache-2.0
//! The socket filter of a capture, in classic BPF: packets to or from some servers, all datagrams to some clients, and ICMP errors.
//! Pure.

use std::net::IpAddr;

use libc::{BPF_ABS, BPF_ALU, BPF_AND, BPF_B, BPF_JA, BPF_JEQ, BPF_JMP, BPF_K, BPF_LD, BPF_RET, BPF_W};
use socket2::SockFilter;

/// Bytes of a packet that are captured: enough for all headers and the number of a datagram.
pub(super) const SNAP: usize = 192;

/// Where the two addresses of each protocol are, from the network header on.
const IPV4: [u32; 2] = [12, 16];
const IPV6: [u32; 2] = [8, 24];

/// A filter for a socket whose packets begin with the network header.
pub(super) fn filter(servers: &[IpAddr], clients: &[IpAddr]) -> Vec<SockFilter> {
    let mut program =
        vec![statement(BPF_LD | BPF_B | BPF_ABS, 0), statement(BPF_ALU | BPF_AND | BPF_K, 0xf0)];
    let (ipv4, ipv6) = (IpAddr::is_ipv4, IpAddr::is_ipv6);
    version(&mut program, 0x40, [9, 1, 17], tests(servers, clients, IPV4, ipv4));
    version(&mut program, 0x60, [6, 58, 17], tests(servers, clients, IPV6, ipv6));
    program.push(statement(BPF_RET | BPF_K, 0));
    program
}

/// What accepts packets of one version: all datagrams to the clients, and everything from or to the servers.
struct Tests {
    datagrams: Vec<SockFilter>,
    all: Vec<SockFilter>,
}

fn tests(
    servers: &[IpAddr],
    clients: &[IpAddr],
    [source, destination]: [u32; 2],
    of_version: fn(&IpAddr) -> bool,
) -> Tests {
    let (mut datagrams, mut all) = (Vec::new(), Vec::new());
    for client in clients.iter().filter(|client| of_version(client)) {
        address(&mut datagrams, destination, &words(client));
    }
    for server in servers.iter().filter(|server| of_version(server)) {
        address(&mut all, source, &words(server));
        address(&mut all, destination, &words(server));
    }
    Tests { datagrams, all }
}

fn words(address: &IpAddr) -> Vec<u32> {
    match address {
        IpAddr::V4(address) => vec![address.to_bits()],
        IpAddr::V6(address) => {
            let word = |chunk: &[u8]| chunk.iter().fold(0, |word, byte| word << 8 | u32::from(*byte));
            address.octets().chunks(4).map(word).collect()
        }
    }
}

/// What is done with packets of one version of IP: ICMP, and what the tests accept. Others jump past it.
fn version(program: &mut Vec<SockFilter>, version: u32, [protocol_at, icmp, udp]: [u32; 3], tests: Tests) {
    let mut body = vec![
        statement(BPF_LD | BPF_B | BPF_ABS, protocol_at),
        jump_if(icmp, 0, 1),
        accept(),
        jump_if(udp, 1, 0),
        jump(tests.datagrams.len()),
    ];
    body.extend(tests.datagrams);
    body.extend(tests.all);
    body.push(statement(BPF_RET | BPF_K, 0));
    program.push(jump_if(version, 1, 0));
    program.push(jump(body.len()));
    program.extend(body);
}

/// Accepts packets that have all words of an address at this place.
fn address(program: &mut Vec<SockFilter>, place: u32, words: &[u32]) {
    let mut left = u8::try_from(words.len() * 2).unwrap_or(u8::MAX);
    for (offset, word) in (place..).step_by(4).zip(words) {
        left = left.saturating_sub(2);
        program.push(statement(BPF_LD | BPF_W | BPF_ABS, offset));
        // Past the words that are left and their acceptance.
        program.push(jump_if(*word, 0, left + 1));
    }
    program.push(accept());
}

/// A conditional jump reaches 255 instructions, this one any number.
fn jump(over: usize) -> SockFilter {
    statement(BPF_JMP | BPF_JA, u32::try_from(over).unwrap_or(u32::MAX))
}

fn accept() -> SockFilter {
    statement(BPF_RET | BPF_K, u32::try_from(SNAP).unwrap_or(u32::MAX))
}

fn statement(code: u32, value: u32) -> SockFilter {
    SockFilter::new(u16::try_from(code).unwrap_or(0), 0, 0, value)
}

fn jump_if(value: u32, then: u8, or_else: u8) -> SockFilter {
    SockFilter::new(u16::try_from(BPF_JMP | BPF_JEQ | BPF_K).unwrap_or(0), then, or_else, value)
}
