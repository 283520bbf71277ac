// SPDX-License-Identifier: Apache-2.0
//! The verdict: what the client did, joined with the packets that its host sent and received. Pure.

use std::collections::{HashMap, VecDeque};
use std::error::Error;
use std::fmt;
use std::time::Duration;

use super::client::{Connection, Datagram, Ending, Observed};
use super::loss::{HANDSHAKE_WITHIN, Loss, LossKind, Measurement};
use super::packet::Packet;
use super::tcp::{Ends, Trace, traces};
use super::udp::{Exchange, exchanges};

/// Why there is no verdict: the capture lacks packets that must have been there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotMeasured(String);

impl fmt::Display for NotMeasured {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "not measured: {}", self.0)
    }
}

impl Error for NotMeasured {}

/// Judges everything that a client did by packets in the order of their capture.
pub fn judge(packets: &[Packet], observed: &Observed) -> Result<Measurement, NotMeasured> {
    let mut measurement = Measurement {
        connections: observed.connections.len(),
        exchanges: observed.connections.iter().map(|connection| connection.exchanges).sum(),
        datagrams: observed.datagrams.len(),
        ..Measurement::default()
    };
    let mut traces: HashMap<Ends, VecDeque<Trace>> =
        traces(packets).into_iter().map(|(ends, traces)| (ends, traces.into())).collect();
    let mut connections: Vec<_> = observed.connections.iter().collect();
    // A port is used again only after the connection before has ended.
    connections.sort_by_key(|connection| connection.opened);
    for connection in connections {
        let trace = traces.get_mut(&connection.ends).and_then(VecDeque::pop_front);
        let trace = trace.ok_or_else(|| NotMeasured(format!("no SYN of {connection:?} was captured")))?;
        check(connection, &trace)?;
        measurement.add_connection(connection, &trace);
    }
    let clients: HashMap<_, _> =
        observed.datagrams.iter().map(|datagram| (datagram.number, datagram.client)).collect();
    let mut exchanges = exchanges(packets, |number| clients.get(&number).copied());
    for datagram in &observed.datagrams {
        let exchange = exchanges.remove(&datagram.number).unwrap_or_default();
        measurement.add_datagram(datagram, &exchange)?;
    }
    measurement.losses.sort_by_key(|loss| loss.at);
    Ok(measurement)
}

/// Whether the capture has all that client and kernel know of a connection.
fn check(connection: &Connection, trace: &Trace) -> Result<(), NotMeasured> {
    let missing =
        |what: String| Err(NotMeasured(format!("the capture lacks packets: {what} ({connection:?})")));
    if connection.received > trace.received {
        return missing(format!("the client read {} bytes of {}", connection.received, trace.received));
    }
    if trace.answered.is_none() && connection.exchanges > 0 {
        return missing("no SYN-ACK".to_owned());
    }
    // The FIN is acknowledged as one byte, possibly before the capture's order of time shows it.
    if trace.acknowledged > trace.received + 1 {
        return missing(format!("{} bytes of {} are acknowledged", trace.acknowledged, trace.received));
    }
    match connection.retransmissions {
        Some(kernel) if kernel > trace.retransmissions() => {
            missing(format!("the kernel counts {kernel} retransmissions, not {}", trace.retransmissions()))
        }
        _ => Ok(()),
    }
}

impl Measurement {
    fn add_connection(&mut self, connection: &Connection, trace: &Trace) {
        let client = connection.ends.client;
        self.losses.extend(losses(connection, trace).into_iter().map(|(kind, at)| Loss { kind, at, client }));
        if let Some(answered) = trace.answered {
            self.slowest_handshake = self.slowest_handshake.max(answered.saturating_sub(trace.opened));
        }
        self.port_collisions += trace.challenged;
        let spurious = trace.resent.iter().filter(|resent| resent.spurious).count();
        self.retransmissions.spurious += spurious;
        self.retransmissions.needed += trace.resent.len() - spurious;
        self.retransmissions.fins += trace.fins_resent;
        self.retransmissions.by_server += trace.resent_by_server;
        let closed = connection.ending == Ending::ClosedByServer || closed_first(connection, trace);
        self.closed_by_server += usize::from(closed);
        self.failed += usize::from(!closed && connection.ending != Ending::Complete);
    }

    fn add_datagram(&mut self, datagram: &Datagram, exchange: &Exchange) -> Result<(), NotMeasured> {
        let Some(&at) = exchange.sent.first() else {
            return Err(NotMeasured(format!("{datagram:?} was not captured")));
        };
        if datagram.answers > exchange.answers.len() {
            return Err(NotMeasured(format!("an answer to {datagram:?} was not captured")));
        }
        let mut lose = |kind, at| self.losses.push(Loss { kind, at, client: datagram.client });
        match &exchange.answers[..] {
            [] => lose(LossKind::DatagramUnanswered, at),
            [(first, _), more @ ..] => {
                self.slowest_datagram = self.slowest_datagram.max(first.saturating_sub(at));
                for (at, _) in more {
                    lose(LossKind::DatagramDuplicated, *at);
                }
            }
        }
        for (at, from) in &exchange.answers {
            if *from != datagram.server {
                self.losses.push(Loss { kind: LossKind::WrongSource, at: *at, client: datagram.client });
            }
        }
        Ok(())
    }
}

/// Whether the server had ended the connection before the client sent its newest bytes: nobody can answer those.
fn closed_first(connection: &Connection, trace: &Trace) -> bool {
    matches!(connection.ending, Ending::Unanswered(_))
        && trace.closed_by_server.is_some_and(|closed| trace.last_sent.is_some_and(|sent| closed < sent))
}

/// What a connection lost, and when. A cause is named once, not its consequences too.
fn losses(connection: &Connection, trace: &Trace) -> Vec<(LossKind, Duration)> {
    let mut losses = Vec::new();
    let opened = trace.opened;
    let Some(answered) = trace.answered else {
        let kind =
            if trace.refused.is_some() { LossKind::ConnectionRefused } else { LossKind::SynUnanswered };
        return vec![(kind, opened)];
    };
    if trace.syns > 1 + trace.challenged {
        losses.push((LossKind::SynRetransmitted, opened));
    } else if answered.saturating_sub(opened) > HANDSHAKE_WITHIN {
        losses.push((LossKind::SlowHandshake, opened));
    }
    let resent = trace.resent.iter().filter(|resent| !resent.spurious);
    losses.extend(resent.map(|resent| (LossKind::DataRetransmitted, resent.at)));
    let until_close = |reset: Option<Duration>| {
        reset.filter(|reset| trace.closed_by_server.is_none_or(|closed| *reset < closed))
    };
    // What the client's kernel does with a connection that its program gave up says nothing.
    let given_up = !matches!(connection.ending, Ending::Complete);
    let reset = until_close(trace.reset_by_server)
        .or_else(|| until_close(trace.reset_by_client).filter(|_| !given_up));
    if let Some(at) = reset {
        losses.push((LossKind::UnexpectedReset, at));
    } else if matches!(connection.ending, Ending::Unanswered(_)) && !closed_first(connection, trace) {
        losses.push((LossKind::BytesMissing, trace.last_sent.unwrap_or(opened)));
    }
    if connection.ending == Ending::BytesChanged {
        losses.push((LossKind::BytesChanged, trace.last_sent.unwrap_or(opened)));
    }
    losses
}

#[cfg(test)]
mod tests;
