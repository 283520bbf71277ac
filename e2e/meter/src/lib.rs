// SPDX-License-Identifier: Apache-2.0
//! The loss meter: judges connections and datagrams by the packets that the kernel saw, not by whether they succeeded in the end.
//!
//! The suite and `steerage-bench edge-loss` call it. It makes no namespaces and no servers, and repeats no attempt.
//!
//! A client numbers what it sends ([`client`], [`asker`]) while a capture in its network namespace records every packet of it
//! ([`capture`]). Afterwards [`judge()`] joins both views. It is pure, as are the parts that it is made of: [`packet`], [`tcp`],
//! [`udp`], [`loss`].
//! Where the two views contradict each other, or the kernel dropped packets of the capture, nothing was measured: that is an error,
//! never "0 lost".

pub mod asker;
pub mod capture;
pub mod client;
mod filter;
pub mod judge;
pub mod load;
pub mod loss;
pub mod packet;
pub mod tcp;
pub mod udp;

use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::Result;

use capture::Capture;
use client::{Observed, TIME_LIMIT};
use judge::judge;
use loss::Measurement;

/// The next number of a request, over all clients.
fn next_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Packets of a connection that ends may follow the client's last read.
const SETTLE: Duration = Duration::from_millis(300);

/// A machine from which clients send.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// The name of its network namespace under /run/netns.
    pub netns: String,
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
}

impl Source {
    /// Its addresses of the family of this one.
    fn of_family(&self, server: IpAddr) -> Vec<IpAddr> {
        self.addresses.iter().copied().filter(|address| address.is_ipv4() == server.is_ipv4()).collect()
    }
}

/// A filter for more addresses may be longer than the kernel takes. Then datagrams that come from others than the servers are not
/// captured, and a client that takes one for its answer was not measured.
const MOST_CLIENTS: usize = 16;

/// Lets a client work inside the machine's network namespace and judges what it did by the packets to and from `servers`. Blocking.
pub fn measure(
    source: &Source,
    servers: &[IpAddr],
    work: impl AsyncFnOnce() -> Result<Observed> + Send,
) -> Result<Measurement> {
    let clients = if source.addresses.len() > MOST_CLIENTS { &[] } else { source.addresses.as_slice() };
    let capture = Capture::start(&source.netns, servers, clients)?;
    let observed = steerage_lab::in_netns(&source.netns, || -> Result<Observed> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(work())
    })??;
    // The answer to one of the last datagrams may come as late as that to one of the first.
    let all_answered = observed.datagrams.iter().all(|datagram| datagram.answers > 0);
    thread::sleep(if all_answered { SETTLE } else { TIME_LIMIT });
    Ok(judge(&capture.stop()?, &observed)?)
}
