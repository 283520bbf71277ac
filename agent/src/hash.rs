// SPDX-License-Identifier: Apache-2.0
//! Bob Jenkins' lookup3 hash as the kernel's `jhash()` computes it (include/linux/jhash.h), so that user space computes the same
//! hashes as rules.

use std::net::{IpAddr, SocketAddr};

/// Seed of an endpoint's hash in affinity maps.
pub(crate) const ENDPOINT_SEED: u32 = 0x5743_1e55;
/// The number of hash values: all of 32 bits but the last.
pub(crate) const ENDPOINT_MODULUS: u32 = u32::MAX;

/// What `jhash ip daddr . th dport mod ENDPOINT_MODULUS seed ENDPOINT_SEED` gives for an endpoint.
pub fn endpoint_hash(endpoint: SocketAddr) -> u32 {
    // As `concat()` puts them, without an allocation: plans of large Services hash a million endpoints.
    let [first, second] = endpoint.port().to_be_bytes();
    let port = [first, second, 0, 0];
    let hash = match endpoint.ip() {
        IpAddr::V4(addr) => jhash([addr.octets(), port].as_flattened(), ENDPOINT_SEED),
        IpAddr::V6(addr) => {
            let mut bytes = [0; 20];
            bytes[..16].copy_from_slice(&addr.octets());
            bytes[16..].copy_from_slice(&port);
            jhash(&bytes, ENDPOINT_SEED)
        }
    };
    // The kernel's reciprocal_scale().
    let scaled = (u64::from(hash) * u64::from(ENDPOINT_MODULUS)) >> 32;
    u32::try_from(scaled).unwrap_or_default()
}

/// The seed of a node's hashes of flows: the same after a restart, and another one on each node, so that nodes and load balancers
/// choose independently.
pub fn flow_seed(node: &str) -> u32 {
    jhash(node.as_bytes(), ENDPOINT_SEED)
}

/// The kernel's `jhash()`.
pub(crate) fn jhash(bytes: &[u8], seed: u32) -> u32 {
    let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
    let start = 0xdead_beef_u32.wrapping_add(length).wrapping_add(seed);
    let mut state = [start; 3];
    let mut rest = bytes;
    while rest.len() > 12 {
        let (block, tail) = rest.split_at(12);
        add(&mut state, block);
        mix(&mut state);
        rest = tail;
    }
    if !rest.is_empty() {
        add(&mut state, rest);
        finish(&mut state);
    }
    state[2]
}

fn add(state: &mut [u32; 3], block: &[u8]) {
    for (word, bytes) in state.iter_mut().zip(block.chunks(4)) {
        let mut padded = [0; 4];
        padded[..bytes.len()].copy_from_slice(bytes);
        *word = word.wrapping_add(u32::from_le_bytes(padded));
    }
}

fn mix([a, b, c]: &mut [u32; 3]) {
    let step = |x: &mut u32, y: &mut u32, z: &mut u32, bits: u32| {
        *x = x.wrapping_sub(*z) ^ z.rotate_left(bits);
        *z = z.wrapping_add(*y);
    };
    step(a, b, c, 4);
    step(b, c, a, 6);
    step(c, a, b, 8);
    step(a, b, c, 16);
    step(b, c, a, 19);
    step(c, a, b, 4);
}

fn finish([a, b, c]: &mut [u32; 3]) {
    let step = |x: &mut u32, y: &u32, bits: u32| *x = (*x ^ *y).wrapping_sub(y.rotate_left(bits));
    step(c, b, 14);
    step(a, c, 11);
    step(b, a, 25);
    step(c, b, 16);
    step(a, c, 4);
    step(b, a, 14);
    step(c, b, 24);
}
