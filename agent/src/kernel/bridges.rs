// SPDX-License-Identifier: Apache-2.0
//! Whether a network namespace has a bridge (rtnetlink). Changes nothing.

use std::io;
use std::os::fd::AsRawFd as _;

use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, recv, send, socket,
};

use super::next_hops::{attributes, half_word, word};

/// `RTM_NEWLINK`, `RTM_GETLINK`, and `NLM_F_REQUEST | NLM_F_DUMP`
const NEWLINK: u16 = 16;
const GETLINK: u16 = 18;
const DUMP: u16 = 0x301;
/// `NLMSG_ERROR`, `NLMSG_DONE`
const ERROR: u16 = 2;
const DONE: u16 = 3;
/// Bytes of `nlmsghdr` and of `ifinfomsg`.
const HEADER: usize = 16;
const LINK: usize = 16;
/// `IFLA_LINKINFO`, and `IFLA_INFO_KIND` in it
const INFO: u16 = 18;
const KIND: u16 = 1;

/// Whether the network namespace of the calling thread has a bridge.
pub(super) fn has_bridge() -> io::Result<bool> {
    let socket =
        socket(AddressFamily::Netlink, SockType::Raw, SockFlag::SOCK_CLOEXEC, SockProtocol::NetlinkRoute)?;
    nix::sys::socket::connect(socket.as_raw_fd(), &NetlinkAddr::new(0, 0))?;
    let mut request = Vec::with_capacity(HEADER + LINK);
    request.extend(u32::try_from(HEADER + LINK).unwrap_or_default().to_ne_bytes());
    request.extend([GETLINK, DUMP].into_iter().flat_map(u16::to_ne_bytes));
    request.extend([0; 8 + LINK]);
    send(socket.as_raw_fd(), &request, MsgFlags::empty())?;
    let mut buffer = vec![0; 1 << 16];
    let mut found = false;
    loop {
        let length = recv(socket.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
        let mut rest = &buffer[..length];
        while let Some((length, kind)) = word(rest, 0).zip(half_word(rest, 4)) {
            let length = usize::try_from(length).unwrap_or(usize::MAX);
            let message = rest.get(HEADER..length).unwrap_or_default();
            match kind {
                NEWLINK => found |= is_bridge(message),
                DONE => return Ok(found),
                ERROR => {
                    let errno = word(message, 0).unwrap_or_default().cast_signed().saturating_neg();
                    return Err(io::Error::from_raw_os_error(errno));
                }
                _ => {}
            }
            rest = rest.get(length.max(HEADER).next_multiple_of(4)..).unwrap_or_default();
        }
    }
}

fn is_bridge(message: &[u8]) -> bool {
    let of = |bytes, kind| attributes(bytes).find(|(of, _)| *of == kind).map(|(_, data)| data);
    let info = of(message.get(LINK..).unwrap_or_default(), INFO).unwrap_or_default();
    of(info, KIND).is_some_and(|name| name.strip_suffix(b"\0").unwrap_or(name) == b"bridge")
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use steerage_requirements::{in_new_netns, requires};

    use super::*;

    #[test]
    fn bridge_is_found_among_other_links() {
        requires!(NetworkNamespace, Program("ip"));
        in_new_netns(|| {
            let add = |line: &str| {
                assert!(
                    Command::new("ip").args(line.split(' ')).status().is_ok_and(|status| status.success())
                );
            };
            for number in 0..40 {
                add(&format!("link add veth{number} type veth peer name peer{number}"));
            }
            assert!(!has_bridge().unwrap());
            add("link add cni0 type bridge");
            assert!(has_bridge().unwrap());
        });
    }
}
