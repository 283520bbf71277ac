// SPDX-License-Identifier: Apache-2.0
//! Whether anything has changed on which routes of the main table depend, as the kernel says. It reads no routes.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, socket,
};

use super::{DELROUTE, MAIN, NEWROUTE, RouteError, failed, next};

/// `RTMGRP_LINK`, `RTMGRP_IPV4_IFADDR` and `RTMGRP_IPV6_IFADDR`: of the IPv4 routes that go with an interface or an address the kernel
/// says nothing.
const LINKS_AND_ADDRESSES: u32 = 0x1 | 0x10 | 0x100;
/// `RTMGRP_IPV4_ROUTE`, `RTMGRP_IPV6_ROUTE`, and the group `RTNLGRP_NEXTHOP` (32).
const ROUTES: u32 = 0x40 | 0x400 | 1 << 31;
/// More than a socket holds: a look ends although news comes all the time.
const MOST_AT_ONCE: usize = 10_000;

#[derive(Debug)]
pub(crate) struct RouteChanges {
    fd: OwnedFd,
    buffer: Vec<u8>,
}

impl RouteChanges {
    pub(crate) fn open() -> Result<Self, RouteError> {
        let failed = failed("listen to changes of routes");
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let fd = socket(AddressFamily::Netlink, SockType::Raw, flags, SockProtocol::NetlinkRoute)
            .map_err(|errno| failed(errno.into()))?;
        bind(fd.as_raw_fd(), &NetlinkAddr::new(0, LINKS_AND_ADDRESSES | ROUTES))
            .map_err(|errno| failed(errno.into()))?;
        Ok(Self { fd, buffer: vec![0; 1 << 14] })
    }

    /// Whether there was any since the last call.
    pub(crate) fn take(&mut self) -> Result<bool, RouteError> {
        let mut is_any = false;
        for _ in 0..MOST_AT_ONCE {
            match recv(self.fd.as_raw_fd(), &mut self.buffer, MsgFlags::empty()) {
                Ok(length) => {
                    let mut rest = self.buffer.get(..length).unwrap_or_default();
                    while let Some((kind, _, _, body)) = next(&mut rest) {
                        let is_route = matches!(kind, NEWROUTE | DELROUTE);
                        is_any |= !is_route || body.get(4) == Some(&MAIN);
                    }
                }
                // Some were lost.
                Err(Errno::ENOBUFS) => is_any = true,
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => return Ok(is_any),
                Err(errno) => {
                    return Err(failed("listen to changes of routes")(io::Error::from(errno)));
                }
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::time::{Duration, Instant};

    use steerage_requirements::{in_new_netns, requires};

    use super::*;

    #[test]
    fn changes_that_may_concern_routes_are_known() {
        requires!(NetworkNamespace, Program("ip"));
        in_new_netns(|| {
            let ip = |arguments: &str| {
                let done = Command::new("ip").args(arguments.split(' ')).status().expect("ip");
                assert!(done.success(), "ip {arguments}");
            };
            ip("link add eth7 type veth peer name other");
            for device in ["eth7", "other"] {
                // No address that comes later by itself.
                ip(&format!("link set {device} addrgenmode none up"));
            }
            let mut changes = RouteChanges::open().expect("open");
            let mut quiet_since = Instant::now();
            while quiet_since.elapsed() < Duration::from_secs(2) {
                // The kernel says of a carrier with a delay.
                if changes.take().expect("read") {
                    quiet_since = Instant::now();
                }
                std::thread::sleep(Duration::from_millis(10));
            }
            let mut has_changed = |arguments: &str| {
                ip(arguments);
                let has_changed = changes.take().expect("read");
                assert!(!changes.take().expect("read"), "once: {arguments}");
                has_changed
            };
            for arguments in [
                "address add 10.0.0.7/24 dev eth7",
                "route add 10.2.0.0/16 via 10.0.0.1",
                "route replace 10.2.0.0/16 via 10.0.0.2",
                "route del 10.2.0.0/16",
                "-6 route add fd00:2::/64 dev eth7",
                "nexthop add id 9 via 10.0.0.1 dev eth7",
                "nexthop replace id 9 via 10.0.0.2 dev eth7",
                "link set eth7 mtu 1400",
            ] {
                assert!(has_changed(arguments), "{arguments}");
            }
            for arguments in
                ["route show", "route add blackhole 10.3.0.1 table 83", "rule add to 10.3.0.0/16 table 83"]
            {
                assert!(!has_changed(arguments), "{arguments}");
            }
            // More than the socket holds.
            let batch: Vec<_> = (0..5000)
                .map(|number| format!("route add blackhole 10.9.{}.{} table 83", number / 250, number % 250))
                .collect();
            let path = std::env::temp_dir().join(format!("steerage-routes-{}", std::process::id()));
            std::fs::write(&path, batch.join("\n")).expect("write");
            assert!(
                has_changed(&format!("-batch {}", path.display())),
                "what was lost may have been of the main table"
            );
            std::fs::remove_file(path).expect("remove");
        });
    }
}
