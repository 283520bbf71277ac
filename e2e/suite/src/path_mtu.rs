// SPDX-License-Identifier: Apache-2.0
//! The path MTU that the system learns for a UDP socket that sends no fragments.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use nix::sys::socket::{getsockopt, setsockopt};
use tokio::net::UdpSocket;
use tokio::time::timeout;

use crate::net;

mod options {
    #![allow(missing_docs, reason = "made by nix's macro")]
    use nix::{getsockopt_impl, setsockopt_impl, sockopt_impl};
    sockopt_impl!(Discover, SetOnly, libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::c_int);
    sockopt_impl!(Discover6, SetOnly, libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::c_int);
    sockopt_impl!(Mtu, GetOnly, libc::IPPROTO_IP, libc::IP_MTU, libc::c_int);
    sockopt_impl!(Mtu6, GetOnly, libc::IPPROTO_IPV6, libc::IPV6_MTU, libc::c_int);
}

/// What the system knows after it has sent a datagram of 1,488 bytes at most, and got an answer to a shorter one.
pub async fn learned(to: SocketAddr) -> Result<u32> {
    let socket = UdpSocket::bind(net::any(to, 0)).await?;
    if to.is_ipv4() {
        setsockopt(&socket, options::Discover, &libc::IP_PMTUDISC_DO)?;
    } else {
        setsockopt(&socket, options::Discover6, &libc::IPV6_PMTUDISC_DO)?;
    }
    socket.connect(to).await?;
    let text = format!("echo {}", "x".repeat(1_435));
    let start = Instant::now();
    // Each may get the error that the ICMP message for the one before has caused.
    while start.elapsed() < net::ONLY_ANSWER_TIMEOUT {
        match socket.send(text.as_bytes()).await {
            Err(error) if error.raw_os_error() == Some(libc::EMSGSIZE) => break,
            _ => {
                let answered = timeout(Duration::from_millis(200), socket.recv(&mut [0; 2048])).await;
                ensure!(!matches!(answered, Ok(Ok(_))), "{to} has answered a datagram that does not fit");
            }
        }
    }
    let mtu =
        if to.is_ipv4() { getsockopt(&socket, options::Mtu) } else { getsockopt(&socket, options::Mtu6) };
    Ok(u32::try_from(mtu?)?)
}
