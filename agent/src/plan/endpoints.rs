// SPDX-License-Identifier: Apache-2.0
//! The endpoints that a Service's port leads to. Pure.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::ops::Deref;
use std::sync::Arc;

use crate::hash::endpoint_hash;

/// Which of a port's endpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Selection {
    /// All that are usable: traffic policy Cluster.
    Cluster,
    /// Those on this node: traffic policy Local.
    Local,
}

/// Endpoints of a port of a Service, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoints {
    /// Which these are. All frontends of a port have the same endpoints of one selection.
    pub selection: Selection,
    /// Their addresses and ports.
    pub list: Arc<[SocketAddr]>,
}

impl Deref for Endpoints {
    type Target = [SocketAddr];

    fn deref(&self) -> &[SocketAddr] {
        &self.list
    }
}

/// Some endpoints, in their order: mostly the same ones when others come and go, and other ones on a node with another seed. A sample
/// of a larger sample is the same as one of all.
pub fn sample(endpoints: &[SocketAddr], most: usize, seed: u32) -> Arc<[SocketAddr]> {
    if most == 0 {
        return Arc::default();
    }
    let ranked = |endpoint: &SocketAddr| (shuffled(endpoint_hash(*endpoint), seed), *endpoint);
    let mut all: Vec<_> = endpoints.iter().map(ranked).collect();
    if most >= all.len() {
        return endpoints.into();
    }
    let (_, last, _) = all.select_nth_unstable(most - 1);
    let last = *last;
    endpoints.iter().filter(|endpoint| ranked(endpoint) <= last).copied().collect()
}

/// The order of addresses in which they are taken into a sample, which is another one on a node with another seed.
pub(super) fn sample_rank(addr: IpAddr, seed: u32) -> u32 {
    shuffled(endpoint_hash(SocketAddr::new(addr, 0)), seed)
}

fn shuffled(hash: u32, seed: u32) -> u32 {
    (hash ^ seed).wrapping_mul(0x9e37_79b1)
}

/// The endpoints whose flows stay. They are in order, and include those that are used.
pub fn sample_serving(
    serving: &[SocketAddr],
    old: &Used<'_>,
    kept: &Used<'_>,
    most: usize,
    seed: u32,
) -> Arc<[SocketAddr]> {
    let others: Vec<_> = old.others(serving).copied().collect();
    let stay = sample(&others, most, seed);
    let all: BTreeSet<_> = kept.all().chain(&*stay).copied().collect();
    all.into_iter().collect()
}

/// The endpoints that packets are sent to.
#[derive(Debug, Clone, Copy)]
pub struct Used<'a> {
    /// By everybody.
    pub targets: &'a [SocketAddr],
    /// By clients outside, where those have other ones.
    pub local: &'a [SocketAddr],
}

impl Used<'_> {
    fn all(&self) -> impl Iterator<Item = &SocketAddr> {
        self.targets.iter().chain(self.local)
    }

    /// The endpoints whose flows stay and that are not used. All lists are in order.
    pub fn others<'s>(&self, serving: &'s [SocketAddr]) -> impl Iterator<Item = &'s SocketAddr> {
        let serving = if serving.as_ptr() == self.targets.as_ptr() { &[] } else { serving };
        let is_used = |endpoint: &SocketAddr| {
            self.targets.binary_search(endpoint).is_ok() || self.local.binary_search(endpoint).is_ok()
        };
        serving.iter().filter(move |endpoint| !is_used(endpoint))
    }
}
