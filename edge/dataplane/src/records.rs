// SPDX-License-Identifier: Apache-2.0
//! Converts the state to the values of maps, and back. Pure, used by `writer` and `adopt`.

use std::net::{IpAddr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use steerage_edge_packet::hash::{GATE_WORDS, gate};
use steerage_edge_packet::maps::{INET, INET6, LOCAL, Prefix, TUNNEL, Target};
use steerage_edge_packet::{V4, V6};

use crate::state::{Path, TargetState};

pub(crate) fn target(state: &TargetState, version: u32) -> Target {
    let (family, address) = match state.address {
        IpAddr::V4(address) => (INET, [V4::from(address).0, 0, 0, 0]),
        IpAddr::V6(address) => (INET6, V6::from(address).0),
    };
    let mut target = Target { family, address, version, ..Target::default() };
    match state.path {
        Path::Neighbour => {}
        Path::Local => target.flags = LOCAL,
        Path::Tunnel { mac, mtu, vni } => {
            (target.flags, target.mac, target.mtu, target.vni) = (TUNNEL, mac, mtu, vni);
        }
    }
    target
}

/// `None` if there is no such target.
pub(crate) fn target_state(target: &Target) -> Option<TargetState> {
    let address = match target.family {
        INET => IpAddr::V4(V4(target.address[0]).into()),
        INET6 => IpAddr::V6(V6(target.address).into()),
        _ => return None,
    };
    let path = match target.flags {
        LOCAL => Path::Local,
        TUNNEL => Path::Tunnel { mac: target.mac, mtu: target.mtu, vni: target.vni },
        _ => Path::Neighbour,
    };
    Some(TargetState { address, path })
}

pub(crate) fn prefix(set: u32, net: &IpNet) -> Prefix {
    let length = match net {
        IpNet::V4(net) => 96 + u32::from(net.prefix_len()),
        IpNet::V6(net) => u32::from(net.prefix_len()),
    };
    Prefix { length: 32 + length, set, address: net.network().into() }
}

pub(crate) fn net(prefix: &Prefix) -> Option<IpNet> {
    let length = u8::try_from(prefix.length.checked_sub(32)?).ok()?;
    let address = Ipv6Addr::from(prefix.address);
    match (address.to_ipv4_mapped(), length.checked_sub(96)) {
        (Some(address), Some(length)) => Ipv4Net::new(address, length).ok().map(IpNet::V4),
        _ => Ipv6Net::new(address, length).ok().map(IpNet::V6),
    }
}

/// The gate: which bits have a VIP, and how many.
#[derive(Clone, Debug)]
pub(crate) struct Gate(Vec<[u16; 64]>);

impl Default for Gate {
    fn default() -> Self {
        Self(vec![[0; 64]; usize::try_from(GATE_WORDS).unwrap_or(0)])
    }
}

impl Gate {
    /// Adds a VIP, and returns the word to write.
    pub(crate) fn add(&mut self, vip: IpAddr) -> (u32, u64) {
        self.change(vip, |count| count.saturating_add(1))
    }

    /// Removes a VIP, and returns the word to write.
    pub(crate) fn remove(&mut self, vip: IpAddr) -> (u32, u64) {
        self.change(vip, |count| count.saturating_sub(1))
    }

    pub(crate) fn word(&self, word: u32) -> u64 {
        let counts = usize::try_from(word).ok().and_then(|word| self.0.get(word));
        counts.map_or(0, |counts| {
            (0..).zip(counts).map(|(bit, count)| u64::from(*count != 0) << bit).fold(0, |all, bit| all | bit)
        })
    }

    fn change(&mut self, vip: IpAddr, change: impl Fn(u16) -> u16) -> (u32, u64) {
        let (word, bit) = match vip {
            IpAddr::V4(vip) => gate(V4::from(vip)),
            IpAddr::V6(vip) => gate(V6::from(vip)),
        };
        let counts = usize::try_from(word).ok().and_then(|word| self.0.get_mut(word));
        let count = usize::try_from(bit.trailing_zeros()).ok();
        if let Some(count) = counts.zip(count).and_then(|(counts, bit)| counts.get_mut(bit)) {
            *count = change(*count);
        }
        (word, self.word(word))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_and_prefixes_convert_back() {
        for address in ["10.0.0.1", "fd00::1"] {
            let address = address.parse().unwrap();
            let tunnel = Path::Tunnel { mac: [2, 0, 0, 0, 0, 1], mtu: 1450, vni: 7 };
            for path in [Path::Neighbour, Path::Local, tunnel] {
                let state = TargetState { address, path };
                assert_eq!(target_state(&target(&state, 3)), Some(state));
            }
        }
        assert_eq!(target_state(&Target::default()), None);
        for text in ["10.0.0.0/8", "0.0.0.0/0", "192.0.2.1/32", "::/0", "fd00::/64", "fd00::1/128"] {
            let range: IpNet = text.parse().unwrap();
            assert_eq!(net(&prefix(7, &range)), Some(range), "{text}");
        }
    }

    #[test]
    fn bit_of_the_gate_stays_while_a_vip_has_it() {
        let vip = "10.0.0.100".parse().unwrap();
        let mut gate = Gate::default();
        let (word, bits) = gate.add(vip);
        assert_eq!(bits.count_ones(), 1);
        assert_eq!(gate.add(vip), (word, bits));
        assert_eq!(gate.remove(vip), (word, bits));
        assert_eq!(gate.remove(vip), (word, 0));
    }
}
