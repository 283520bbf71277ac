// SPDX-License-Identifier: Apache-2.0
//! Traces: through which rules of which tables a packet passes, as the kernel reports it for packets that [`crate::Rule::trace`] marks.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::time::Duration;

use nix::poll::PollTimeout;

use crate::batch::{SUBSYSTEM, message};
use crate::error::Error;
use crate::monitor::wait;
use crate::socket::Socket;
use crate::table::{Family, Table};
use crate::verdict::Verdict;
use crate::wire::{Attrs, Message};

/// `NFNLGRP_NFTRACE` as a bit.
const GROUP: u32 = 1 << (9 - 1);

/// What a packet met.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TraceEvent {
    /// A rule that matched, by its handle. `None`: a verdict that this crate does not know, such as to queue the packet.
    Rule(u64, Option<Verdict>),
    /// The end of a chain that another one had called.
    Return,
    /// The policy of a base chain, at its end.
    Policy {
        /// It drops.
        drops: bool,
    },
}

/// One step of a packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TraceStep {
    /// Identifies the packet.
    pub packet: u32,
    /// The table of the chain.
    pub table: Table,
    /// The chain.
    pub chain: String,
    /// What the packet met there.
    pub event: TraceEvent,
    /// The packet's source and destination at the first step in a base chain.
    pub ends: Option<(SocketAddr, SocketAddr)>,
    /// The input interface's index, if there is one.
    pub input: Option<u32>,
    /// The output interface's index, if there is one yet.
    pub output: Option<u32>,
}

/// A subscription to the traces of the network namespace in which it was opened.
#[derive(Debug)]
pub struct Tracer {
    socket: Socket,
}

impl Tracer {
    /// Subscribes in the network namespace of the calling thread.
    pub fn open() -> Result<Self, Error> {
        Ok(Self { socket: Socket::open(GROUP)? })
    }

    /// The steps of the next waiting datagram, without blocking. Returns `None` if none is waiting.
    pub fn receive(&mut self) -> Result<Option<Vec<TraceStep>>, Error> {
        Ok(self.socket.receive()?.map(|messages| messages.filter_map(|message| step(&message)).collect()))
    }

    /// Waits for a datagram. Returns false on timeout.
    pub fn wait(&self, timeout: Duration) -> Result<bool, Error> {
        wait(self.socket.as_fd(), PollTimeout::try_from(timeout).unwrap_or(PollTimeout::MAX))
    }
}

pub(crate) fn step(message: &Message<'_>) -> Option<TraceStep> {
    if message.kind != SUBSYSTEM | message::TRACE {
        return None;
    }
    let attrs = message.attrs();
    let event = match attrs.u32(4)? {
        1 => TraceEvent::Policy { drops: attrs.u32(16)? == 0 },
        2 => TraceEvent::Return,
        3 => {
            let verdict = attrs.nested(5);
            TraceEvent::Rule(attrs.u64(3)?, Verdict::from_wire(verdict.u32(1)?, verdict.string(2)))
        }
        _ => return None,
    };
    Some(TraceStep {
        packet: attrs.u32(6)?,
        table: Table::new(Family::from_wire(message.family()?)?, attrs.string(1)?),
        chain: attrs.string(2)?,
        event,
        ends: ends(attrs),
        input: attrs.u32(10),
        output: attrs.u32(12),
    })
}

/// Addresses and ports, from the beginnings of the packet's headers.
fn ends(attrs: Attrs<'_>) -> Option<(SocketAddr, SocketAddr)> {
    let (network, transport) = (attrs.find(8)?, attrs.find(9)?);
    let address = |from: usize, length: usize| -> Option<IpAddr> {
        let bytes = network.get(from..from + length)?;
        let v4 = <[u8; 4]>::try_from(bytes).map(IpAddr::from);
        v4.or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from)).ok()
    };
    let (source, destination) = match network.first()? >> 4 {
        4 => (address(12, 4)?, address(16, 4)?),
        6 => (address(8, 16)?, address(24, 16)?),
        _ => return None,
    };
    let port = |at: usize| Some(u16::from_be_bytes(transport.get(at..at + 2)?.try_into().ok()?));
    Some((SocketAddr::new(source, port(0)?), SocketAddr::new(destination, port(2)?)))
}
