// SPDX-License-Identifier: Apache-2.0
//! The multicast groups of the VIPs' neighbour solicitations (RFC 4291, 2.7.1). An interface that has not joined them may not receive
//! the solicitations, which the kernel's program answers. `engine` calls.
//!
//! Every edge host joins the groups of all VIPs, also one that answers for none, so that a takeover waits for no switch. They stay
//! when the process ends, as the program and its maps do.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv6Addr};

use steerage_model::chain;

use super::route::{RouteError, Rtnetlink};

/// The group of an address.
pub(crate) fn solicited_node(address: Ipv6Addr) -> Ipv6Addr {
    let mut group = [0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, 0, 0, 0];
    group[13..].copy_from_slice(&address.octets()[13..]);
    group.into()
}

fn is_solicited_node(group: Ipv6Addr) -> bool {
    let group_of_its_last_bytes = solicited_node(group);
    group == group_of_its_last_bytes
}

/// Groups that are joined or left at once: the kernel looks at all others for each, and the engine waits.
const AT_ONCE: usize = 100;

/// The groups that the interface has joined.
#[derive(Debug, Default)]
pub(crate) struct Groups {
    /// By an address, and whether that has the edge's mark. Others may be another program's, and stay.
    joined: BTreeMap<Ipv6Addr, bool>,
    /// Without an address: the interface was down, and has lost it.
    without_address: BTreeSet<Ipv6Addr>,
    /// The kernel took no more groups, and the interface receives all.
    has_all: bool,
    is_failing: bool,
}

impl Groups {
    /// Takes note of the groups that were found on the interface.
    pub(crate) fn observe(&mut self, found: impl IntoIterator<Item = (Ipv6Addr, bool)>) {
        self.joined = found.into_iter().filter(|(group, _)| is_solicited_node(*group)).collect();
    }

    /// Joins some of the groups of these VIPs that are missing, and leaves some others. Whether none has failed.
    pub(crate) fn sync<'a>(
        &mut self,
        netlink: &mut Rtnetlink,
        index: u32,
        vips: impl Iterator<Item = &'a IpAddr>,
    ) -> bool {
        let group = |vip: &IpAddr| match vip {
            IpAddr::V4(_) => None,
            IpAddr::V6(vip) => Some(solicited_node(*vip)),
        };
        let wanted: BTreeSet<_> = vips.filter_map(group).collect();
        let left = self.leave_others(netlink, index, &wanted);
        let result = self.join(netlink, index, &wanted).and(left);
        let was_failing = std::mem::replace(&mut self.is_failing, result.is_err());
        if let Err(error) = &result
            && !was_failing
        {
            let error = chain(error);
            tracing::error!(
                error,
                "multicast groups of IPv6 VIPs not joined, which may not be reachable; retrying"
            );
        }
        result.is_ok()
    }

    fn leave_others(
        &mut self,
        netlink: &mut Rtnetlink,
        index: u32,
        wanted: &BTreeSet<Ipv6Addr>,
    ) -> Result<(), RouteError> {
        let is_left = |(group, is_marked): &(&Ipv6Addr, &bool)| **is_marked && !wanted.contains(*group);
        let others: Vec<_> =
            self.joined.iter().filter(is_left).map(|(group, _)| *group).take(AT_ONCE).collect();
        let mut result = Ok(());
        for group in others {
            match netlink.remove(index, group.into()) {
                Ok(()) => {
                    self.joined.remove(&group);
                    // There is room for another one.
                    self.has_all = false;
                }
                Err(error) => result = result.and(Err(error)),
            }
        }
        result
    }

    fn join(
        &mut self,
        netlink: &mut Rtnetlink,
        index: u32,
        wanted: &BTreeSet<Ipv6Addr>,
    ) -> Result<(), RouteError> {
        self.without_address.retain(|group| wanted.contains(group));
        let is_missing =
            |group: &&Ipv6Addr| !self.joined.contains_key(*group) && !self.without_address.contains(*group);
        let missing: Vec<_> = wanted.iter().filter(is_missing).copied().take(AT_ONCE).collect();
        let mut result = Ok(());
        for group in missing {
            if self.has_all {
                break;
            }
            match netlink.join(index, group) {
                Ok(()) => drop(self.joined.insert(group, true)),
                Err(error) if error.is_joined_already() => drop(self.without_address.insert(group)),
                Err(error) if error.is_lack_of_room() => {
                    netlink.receive_all_multicast(index)?;
                    self.has_all = true;
                    tracing::warn!(
                        joined = self.joined.len(),
                        wanted = wanted.len(),
                        "the kernel joins no more multicast groups (net.core.optmem_max); the interface now receives all multicast frames, \
                         but a switch with MLD snooping may not send those of the other VIPs"
                    );
                }
                Err(error) => result = result.and(Err(error)),
            }
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;
    use steerage_requirements::{in_new_netns, requires};

    #[test]
    fn group_has_the_last_three_bytes() {
        let group = solicited_node("2001:db8::12:3456".parse().expect("address"));
        assert_eq!(group, "ff02::1:ff12:3456".parse::<Ipv6Addr>().expect("group"));
        assert!(is_solicited_node(group) && !is_solicited_node("ff02::1".parse().expect("group")));
    }

    #[test]
    fn groups_follow_the_vips_until_the_kernel_takes_no_more() {
        requires!(NetworkNamespace, Program("ip"));
        in_new_netns(|| {
            let ip = |arguments: &str| {
                assert!(Command::new("ip").args(arguments.split(' ')).status().expect("ip").success());
            };
            ip("link add eth7 type veth peer name other");
            ip("link set eth7 up");
            let shown = |arguments: &str| {
                let output = Command::new("ip").args(arguments.split(' ')).output().expect("ip");
                String::from_utf8_lossy(&output.stdout).into_owned()
            };
            let mut netlink = Rtnetlink::open().expect("open");
            let index = netlink.link("eth7").expect("list").expect("link").index;
            let vips = |range: std::ops::Range<u32>| -> Vec<IpAddr> {
                range.map(|number| Ipv6Addr::from(0xfd00_u128 << 112 | u128::from(number)).into()).collect()
            };
            let mut groups = Groups::default();
            let sync = |groups: &mut Groups, netlink: &mut Rtnetlink, range| {
                groups.observe(netlink.addresses(index).expect("list").groups);
                groups.sync(netlink, index, vips(range).iter())
            };
            let members = || shown("maddr show dev eth7").matches("ff02::1:ff00:").count();
            // Another program's stays.
            ip("addr add ff02::1:ff00:77/128 dev eth7 autojoin");
            assert!(sync(&mut groups, &mut netlink, 1..5));
            assert_eq!(members(), 5);
            assert!(sync(&mut groups, &mut netlink, 3..6));
            assert_eq!(members(), 4);
            // The addresses go, the memberships stay.
            ip("link set eth7 down");
            ip("link set eth7 up");
            assert!(sync(&mut groups, &mut netlink, 3..8));
            assert_eq!(members(), 6, "{}", shown("maddr show dev eth7"));
            assert!(!groups.has_all);
            // More than any default of the kernel's limit.
            for _ in 0..80 {
                assert!(sync(&mut groups, &mut netlink, 3..6000));
            }
            let receives_all = shown("-d link show dev eth7").contains("allmulti 1");
            let joined = groups.joined.len();
            assert!(joined > 5900 || groups.has_all && receives_all, "{joined}");
        });
    }
}
