// SPDX-License-Identifier: Apache-2.0
//! The multicast groups of the VIPs' neighbour solicitations (RFC 4291, 2.7.1). An interface that has not joined them may not receive
//! the solicitations, which the kernel's program answers. `engine` calls.
//!
//! Every edge host joins the groups of all VIPs, also one that answers for none, so that a takeover waits for no switch. They stay
//! when the process ends, as the program and its maps do.

use std::collections::BTreeSet;
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

/// The groups that the interface has joined.
#[derive(Debug, Default)]
pub(crate) struct Groups {
    joined: BTreeSet<Ipv6Addr>,
    /// The kernel took no more groups, and the interface receives all.
    has_all: bool,
    is_failing: bool,
}

impl Groups {
    /// Takes note of the groups that were found on the interface.
    pub(crate) fn observe(&mut self, found: impl IntoIterator<Item = Ipv6Addr>) {
        self.joined = found.into_iter().filter(|group| is_solicited_node(*group)).collect();
    }

    /// Joins the groups of these VIPs, and leaves all others. Whether it has succeeded.
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
        let result = self.change(netlink, index, &wanted);
        let was_failing = std::mem::replace(&mut self.is_failing, result.is_err());
        if let Err(error) = &result
            && !was_failing
        {
            let error = chain(error);
            tracing::error!(
                error,
                "IPv6 VIPs may not be reachable: their multicast groups are not joined; retrying"
            );
        }
        result.is_ok()
    }

    fn change(
        &mut self,
        netlink: &mut Rtnetlink,
        index: u32,
        wanted: &BTreeSet<Ipv6Addr>,
    ) -> Result<(), RouteError> {
        for group in self.joined.difference(wanted).copied().collect::<Vec<_>>() {
            netlink.remove(index, group.into())?;
            self.joined.remove(&group);
            // There is room for another one.
            self.has_all = false;
        }
        for group in wanted.difference(&self.joined).copied().collect::<Vec<_>>() {
            if self.has_all {
                break;
            }
            match netlink.join(index, group) {
                Ok(()) => drop(self.joined.insert(group)),
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
                Err(error) => return Err(error),
            }
        }
        Ok(())
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
            for arguments in ["link add eth7 type veth peer name other", "link set eth7 up"] {
                assert!(Command::new("ip").args(arguments.split(' ')).status().expect("ip").success());
            }
            let mut netlink = Rtnetlink::open().expect("open");
            let index = netlink.link("eth7").expect("list").expect("link").index;
            let vips = |range: std::ops::Range<u32>| -> Vec<IpAddr> {
                range.map(|number| Ipv6Addr::from(0xfd00_u128 << 112 | u128::from(number)).into()).collect()
            };
            let mut groups = Groups::default();
            let sync = |groups: &mut Groups, netlink: &mut Rtnetlink, range| {
                let is_done = groups.sync(netlink, index, vips(range).iter());
                groups.observe(netlink.addresses(index).expect("list").1);
                is_done
            };
            assert!(sync(&mut groups, &mut netlink, 1..5) && groups.joined.len() == 4);
            assert!(sync(&mut groups, &mut netlink, 3..6) && groups.joined.len() == 3);
            assert!(!groups.has_all);
            // More than any default of the kernel's limit.
            assert!(sync(&mut groups, &mut netlink, 3..6000));
            let shown = Command::new("ip").args(["-d", "link", "show", "dev", "eth7"]).output().expect("ip");
            let receives_all = String::from_utf8_lossy(&shown.stdout).contains("allmulti 1");
            assert!(groups.joined.len() == 5997 || groups.has_all && receives_all, "{}", groups.joined.len());
        });
    }
}
