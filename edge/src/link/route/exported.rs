// SPDX-License-Identifier: Apache-2.0
//! The routes of VIPs that a routing daemon exports: one blackhole route for each, in a table that the kernel need not consult.
//!
//! Blackhole routes need no interface and no gateway, are the same for both families, and BIRD and FRR take them. The program takes the
//! packets of a VIP before the kernel looks for a route. Routes without the edge's protocol number are never touched.

use std::net::IpAddr;

use super::{
    Attributes, CREATE, DELROUTE, GETROUTE, NEWROUTE, RouteError, Rtnetlink, address, attribute, u32_at,
};

/// Marks a route as the edge's (`rtm_protocol`). No daemon in iproute2's `rt_protos` has the number.
const ROUTE_PROTOCOL: u8 = 83;

/// Fails if there is such a route.
const EXCLUSIVE: u16 = 0x200;
const BLACKHOLE: u8 = 6;
/// `RT_SCOPE_UNIVERSE`, and what matches every scope.
const UNIVERSE: u8 = 0;
const ANY_SCOPE: u8 = 255;
/// Attributes.
const DESTINATION: u16 = 1;
const TABLE: u16 = 15;

impl Rtnetlink {
    /// The edge's routes of all tables, with the table's number.
    pub(crate) fn exported(&mut self) -> Result<Vec<(u32, IpAddr)>, RouteError> {
        self.dump(GETROUTE, &[0; 12], "list the routes", |kind, body| {
            let head = body.get(..12).filter(|head| kind == NEWROUTE && head[5] == ROUTE_PROTOCOL)?;
            let attributes = Attributes(&body[12..]);
            let table = attributes.find(TABLE).and_then(|table| u32_at(table, 0));
            let vip = attributes.find(DESTINATION).and_then(address);
            let is_host = |vip: &IpAddr| head[1] == if vip.is_ipv4() { 32 } else { 128 };
            Some((table.unwrap_or(head[4].into()), vip.filter(is_host)?))
        })
    }

    /// Adds the route of a VIP. Fails if the table has a route to the same destination, of any program.
    pub(crate) fn export(&mut self, table: u32, vip: IpAddr) -> Result<(), RouteError> {
        let body = route_body(table, vip, UNIVERSE);
        let what = format!("add the route of {vip} to table {table}");
        self.request(NEWROUTE, CREATE | EXCLUSIVE, &body, &what)
    }

    /// Removes the edge's route of a VIP; none is success.
    pub(crate) fn withdraw(&mut self, table: u32, vip: IpAddr) -> Result<(), RouteError> {
        let body = route_body(table, vip, ANY_SCOPE);
        let what = format!("remove the route of {vip} from table {table}");
        match self.request(DELROUTE, 0, &body, &what) {
            Err(error) if error.source.raw_os_error() == Some(libc::ESRCH) => Ok(()),
            other => other,
        }
    }
}

/// `struct rtmsg` and the attributes. Tables above 255 have their number in an attribute.
fn route_body(table: u32, vip: IpAddr, scope: u8) -> Vec<u8> {
    let (family, length, octets) = match vip {
        IpAddr::V4(vip) => (libc::AF_INET, 32, vip.octets().to_vec()),
        IpAddr::V6(vip) => (libc::AF_INET6, 128, vip.octets().to_vec()),
    };
    let family = u8::try_from(family).unwrap_or(0);
    let mut body = vec![family, length, 0, 0, 0, ROUTE_PROTOCOL, scope, BLACKHOLE, 0, 0, 0, 0];
    attribute(&mut body, DESTINATION, &octets);
    attribute(&mut body, TABLE, &table.to_ne_bytes());
    body
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use steerage_requirements::{in_new_netns, requires};

    use super::*;

    fn ip(arguments: &str) -> String {
        let done = Command::new("ip").args(arguments.split(' ')).output().expect("ip");
        assert!(done.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&done.stderr));
        String::from_utf8_lossy(&done.stdout).into_owned()
    }

    fn is_taken(result: Result<(), RouteError>) -> bool {
        result.is_err_and(|error| error.source.raw_os_error() == Some(libc::EEXIST))
    }

    #[test]
    fn own_routes_are_written_and_others_stay() {
        requires!(NetworkNamespace, Program("ip"));
        in_new_netns(|| {
            ip("link set lo up");
            let mut netlink = Rtnetlink::open().expect("open");
            let vips: [IpAddr; 2] = ["10.0.0.100", "fd00::100"].map(|vip| vip.parse().expect("vip"));
            for table in [83, 254, 70_000] {
                for vip in vips {
                    netlink.export(table, vip).expect("add");
                    assert!(is_taken(netlink.export(table, vip)));
                }
            }
            assert_eq!(netlink.exported().expect("list").len(), 6);
            assert!(ip("route show table 70000").starts_with("blackhole 10.0.0.100 proto 83"));
            assert!(ip("-6 route show table 70000").starts_with("blackhole fd00::100 dev lo proto 83"));
            // Of another program: not listed, not replaced, and not removed.
            ip("route add blackhole 10.0.0.101/32 table 83 proto static");
            ip("-6 route add blackhole fd00::101/128 table 83 proto static");
            // With the edge's number, and no VIP.
            ip("route add blackhole 10.2.0.0/16 table 83 proto 83");
            let others: [IpAddr; 2] = ["10.0.0.101", "fd00::101"].map(|vip| vip.parse().expect("vip"));
            for other in others {
                assert!(is_taken(netlink.export(83, other)));
                netlink.withdraw(83, other).expect("none of the edge's");
            }
            assert_eq!(netlink.exported().expect("list").len(), 6);
            for vip in vips {
                for _ in 0..2 {
                    netlink.withdraw(83, vip).expect("remove, also twice");
                }
            }
            let mut left = netlink.exported().expect("list");
            left.sort_unstable();
            assert_eq!(left, [(254, vips[0]), (254, vips[1]), (70_000, vips[0]), (70_000, vips[1])]);
            assert!(ip("route show table 83").contains("10.0.0.101 proto static"));
            assert!(ip("-6 route show table 83").contains("fd00::101 dev lo proto static"));
        });
    }
}
