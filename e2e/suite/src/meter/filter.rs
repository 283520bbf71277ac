// SPDX-License-Identifier: Apache-2.0
//! The socket filter of a capture, in classic BPF: packets to or from some servers, and ICMP errors. Pure.

use std::net::IpAddr;

use libc::{BPF_ABS, BPF_ALU, BPF_AND, BPF_B, BPF_JA, BPF_JEQ, BPF_JMP, BPF_K, BPF_LD, BPF_RET, BPF_W};
use socket2::SockFilter;

/// Bytes of a packet that are captured: enough for all headers and the number of a datagram.
pub(super) const SNAP: usize = 192;

/// Where the two addresses of each protocol are, from the network header on.
const IPV4: [u32; 2] = [12, 16];
const IPV6: [u32; 2] = [8, 24];

/// A filter for a socket whose packets begin with the network header.
pub(super) fn filter(servers: &[IpAddr]) -> Vec<SockFilter> {
    let (mut ipv4, mut ipv6) = (Vec::new(), Vec::new());
    for server in servers {
        match server {
            IpAddr::V4(address) => addresses(&mut ipv4, IPV4, &[address.to_bits()]),
            IpAddr::V6(address) => {
                let words: Vec<_> = address
                    .octets()
                    .chunks(4)
                    .map(|chunk| chunk.iter().fold(0, |word, byte| word << 8 | u32::from(*byte)))
                    .collect();
                addresses(&mut ipv6, IPV6, &words);
            }
        }
    }
    let mut program =
        vec![statement(BPF_LD | BPF_B | BPF_ABS, 0), statement(BPF_ALU | BPF_AND | BPF_K, 0xf0)];
    version(&mut program, 0x40, 9, 1, ipv4);
    version(&mut program, 0x60, 6, 58, ipv6);
    program.push(statement(BPF_RET | BPF_K, 0));
    program
}

/// What is done with packets of one version of IP: ICMP and the tests that are given, else nothing. Others jump past it.
fn version(program: &mut Vec<SockFilter>, version: u32, protocol_at: u32, icmp: u32, tests: Vec<SockFilter>) {
    program.push(jump_if(version, 1, 0));
    // A conditional jump reaches 255 instructions, this one any number.
    let length = u32::try_from(tests.len()).unwrap_or(u32::MAX);
    program.push(statement(BPF_JMP | BPF_JA, length.saturating_add(4)));
    program.push(statement(BPF_LD | BPF_B | BPF_ABS, protocol_at));
    program.push(jump_if(icmp, 0, 1));
    program.push(accept());
    program.extend(tests);
    program.push(statement(BPF_RET | BPF_K, 0));
}

/// Accepts packets that have all words of an address at one of two places.
fn addresses(program: &mut Vec<SockFilter>, places: [u32; 2], words: &[u32]) {
    for place in places {
        let mut left = u8::try_from(words.len() * 2).unwrap_or(u8::MAX);
        for (offset, word) in (place..).step_by(4).zip(words) {
            left = left.saturating_sub(2);
            program.push(statement(BPF_LD | BPF_W | BPF_ABS, offset));
            // Past the words that are left and their acceptance.
            program.push(jump_if(*word, 0, left + 1));
        }
        program.push(accept());
    }
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
