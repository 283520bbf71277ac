// SPDX-License-Identifier: Apache-2.0
//! Rtnetlink in a network namespace.

use std::net::Ipv4Addr;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::*;
use steerage_requirements::{in_new_netns, requires};

fn ip(arguments: &str) {
    let done = Command::new("ip").args(arguments.split(' ')).status().expect("ip");
    assert!(done.success(), "ip {arguments}");
}

#[test]
fn network_is_read_and_groups_are_joined() {
    requires!(NetworkNamespace, Program("ip"));
    in_new_netns(|| {
        ip("link add eth7 address 02:00:00:00:00:07 type veth peer name other");
        ip("link set eth7 up");
        ip("link set other up");
        ip("address add 10.0.0.7/24 dev eth7");
        ip("address add fd00::7/64 dev eth7 nodad");
        ip("route add default via 10.0.0.1");
        ip("route add 10.0.0.128/25 via 10.0.0.2");
        ip("neighbour add 10.0.0.1 lladdr 02:00:00:00:00:01 dev eth7");
        let mut netlink = Rtnetlink::open().expect("open");
        assert_eq!(netlink.default_interface().expect("list").as_deref(), Some("eth7"));
        assert_eq!(netlink.link("none").expect("list"), None);
        let link = netlink.link("eth7").expect("list").expect("link");
        assert_eq!((link.mac, link.up, link.has_carrier), ([2, 0, 0, 0, 0, 7], true, true));
        ip("link set eth7 mtu 1400");
        assert!(netlink.mtus().expect("list").contains(&(link.index, 1400)));
        ip("link set other down");
        let disconnected = netlink.link("eth7").expect("list").expect("link");
        assert!(!disconnected.has_carrier);
        ip("link set other up");
        let connected = netlink.link("eth7").expect("list").expect("link");
        assert!(connected.has_carrier);
        assert_eq!(connected.carrier_changes, link.carrier_changes + 2);

        let group: Ipv6Addr = "ff02::1:ff00:100".parse().expect("group");
        for _ in 0..2 {
            netlink.join(link.index, group).expect("join, also twice");
        }
        ip("address add 10.0.0.100/32 dev eth7");
        let Addresses { own, groups } = netlink.addresses(link.index).expect("list");
        assert_eq!(groups, [(group, true)]);
        assert!(own.contains(&"10.0.0.7/24".parse().expect("net")), "{own:?}");
        assert_eq!(netlink.marked().expect("list"), [(link.index, IpAddr::from(group))]);
        // As versions did that had VIPs as addresses.
        let vip: IpAddr = "10.0.0.200".parse().expect("ip");
        let mut body = address_body(link.index, vip);
        attribute(&mut body, 11, &[EDGE_PROTOCOL]);
        netlink.request(NEWADDR, CREATE, &body, "add a VIP").expect("add");
        let own = netlink.addresses(link.index).expect("list").own;
        assert!(!own.iter().any(|net| net.addr() == vip), "{own:?}");
        crate::leftovers::remove(&mut netlink).expect("remove");
        assert_eq!(netlink.marked().expect("list"), [(link.index, IpAddr::from(group))]);
        let joined = Command::new("ip").args(["maddress", "show", "dev", "eth7"]).output().expect("ip");
        let joined = String::from_utf8_lossy(&joined.stdout).into_owned();
        assert!(joined.contains("33:33:ff:00:01:00") && joined.contains("ff02::1:ff00:100"), "{joined}");
        let routes = netlink.routes().expect("list");
        let find = |net: &str| routes.iter().find(|route| route.net == net.parse().expect("net")).cloned();
        assert_eq!(find("10.0.0.0/24").map(|route| route.gateway), Some(false));
        assert_eq!(find("10.0.0.128/25").map(|route| route.gateway), Some(true));
        assert!(find("10.0.0.128/25").is_some_and(|route| route.next_hop.is_some()));
        assert!(find("10.0.0.0/24").is_some_and(|route| route.next_hop.is_none()));
        assert_eq!(find("fd00::/64").and_then(|route| route.device), Some(link.index));
        let neighbour = ("10.0.0.1".parse().expect("ip"), [2, 0, 0, 0, 0, 1]);
        assert!(netlink.neighbours(link.index).expect("list").contains(&neighbour));
        for _ in 0..2 {
            netlink.remove(link.index, group.into()).expect("remove, also twice");
        }
        assert_eq!(netlink.addresses(link.index).expect("list").groups, []);
        netlink.receive_all_multicast(link.index).expect("set the flag");
        let shown = Command::new("ip").args(["-d", "link", "show", "dev", "eth7"]).output().expect("ip");
        assert!(String::from_utf8_lossy(&shown.stdout).contains("allmulti 1"), "{shown:?}");
    });
}

/// While another program adds and removes the first entry, others are at other places.
#[test]
fn list_that_changes_meanwhile_is_read_again() {
    const ADDRESSES: u16 = 3000;
    const READS: u32 = 40;
    requires!(NetworkNamespace, Program("ip"));
    in_new_netns(|| {
        ip("link add eth7 type veth peer name other");
        let mut netlink = Rtnetlink::open().expect("open");
        let link = netlink.link("eth7").expect("list").expect("link");
        let address = |number: u16| IpAddr::from(Ipv4Addr::from(0x0a00_0000 + u32::from(number)));
        let add = |netlink: &mut Rtnetlink, number, scope| {
            let mut body = address_body(link.index, address(number));
            body[3] = scope;
            netlink.request(NEWADDR, CREATE, &body, "add an address").expect("add");
        };
        for number in 1..=ADDRESSES {
            add(&mut netlink, number, 0);
        }
        let is_done = AtomicBool::new(false);
        let read = std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut other = Rtnetlink::open().expect("open");
                while !is_done.load(Ordering::Relaxed) {
                    for _ in 0..20 {
                        // Before those of a wider scope.
                        add(&mut other, 0, libc::RT_SCOPE_LINK);
                        std::thread::sleep(Duration::from_millis(2));
                        other.remove(link.index, address(0)).expect("remove");
                    }
                    std::thread::sleep(Duration::from_millis(300));
                }
            });
            let read = (0..READS).map(|_| match netlink.addresses(link.index) {
                Ok(Addresses { own, .. }) => Some(own.iter().filter(|net| net.addr() != address(0)).count()),
                Err(error) => {
                    assert!(error.is_interrupted(), "{error}");
                    None
                }
            });
            let read: Vec<_> = read.collect();
            is_done.store(true, Ordering::Relaxed);
            read
        });
        let read: Vec<_> = read.into_iter().flatten().collect();
        assert!(!read.is_empty(), "it does not change all the time");
        assert!(read.iter().all(|count| *count == usize::from(ADDRESSES)), "{read:?}");
    });
}
