// SPDX-License-Identifier: Apache-2.0
//! What one TCP connection went through, from its segments as the client's host saw them. Pure.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::Duration;

use super::packet::{Content, Packet, Segment};

/// The two ends of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ends {
    /// Who opened it.
    pub client: SocketAddr,
    /// Whom it was opened to.
    pub server: SocketAddr,
}

/// What one connection went through. Positions count bytes of data, from 0 on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    /// The time of the first SYN.
    pub opened: Duration,
    /// How many SYNs the client sent.
    pub syns: usize,
    /// How often the server answered a SYN with an ACK for an earlier connection between the same ports, and the client reset that.
    /// The client then sends its SYN again after a few milliseconds. With address translation two virtual addresses share the ports of
    /// one backend, so that this is no loss.
    pub challenged: usize,
    /// The time of the SYN-ACK.
    pub answered: Option<Duration>,
    /// The time of a reset or an ICMP error before any SYN-ACK.
    pub refused: Option<Duration>,
    /// The time of the server's first reset after the handshake.
    pub reset_by_server: Option<Duration>,
    /// The time of the client's first reset after the handshake.
    pub reset_by_client: Option<Duration>,
    /// The time of the server's FIN.
    pub closed_by_server: Option<Duration>,
    /// How many bytes the client sent.
    pub sent: u64,
    /// When the client sent its newest byte for the first time.
    pub last_sent: Option<Duration>,
    /// How many bytes arrived from the server without a gap.
    pub received: u64,
    /// How many bytes the client acknowledged.
    pub acknowledged: u64,
    /// Data that the client sent again.
    pub resent: Vec<Resent>,
    /// How often the client sent nothing but its FIN again.
    pub fins_resent: usize,
    /// How many segments of data the server sent twice, or so late that later ones had come.
    pub resent_by_server: usize,
    /// Data of the server that filled a gap: what comes after it had come before.
    pub late: Vec<LateData>,
    /// How many of the client's bytes the server had when it sent its FIN.
    pub confirmed_at_close: u64,
    /// Up to which position the client had sent, each time that it sent new bytes.
    sent_up_to: Vec<(u64, Duration)>,
    /// Up to which position bytes had arrived without a gap, each time that more had.
    received_up_to: Vec<(u64, Duration)>,
    /// An ACK came where a SYN-ACK should have.
    stale_ack: bool,
    client_isn: u32,
    server_isn: u32,
    /// How many of the client's bytes the server acknowledged.
    confirmed: u64,
    fin_sent: bool,
    /// Parts that arrived beyond a gap.
    beyond: Vec<(u64, u64)>,
}

/// Data of the server that came after later data, or after its FIN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LateData {
    /// When it came.
    pub at: Duration,
    /// Its first position.
    pub from: u64,
}

/// Data that was sent again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resent {
    /// When.
    pub at: Duration,
    /// Whether the server had it already.
    pub spurious: bool,
    /// Its first position.
    pub from: u64,
    /// The position after its last byte.
    pub to: u64,
}

/// Sorts packets, in the order of their capture, into connections. Packets of connections whose SYN was not captured are ignored.
pub fn traces<'a>(packets: impl IntoIterator<Item = &'a Packet>) -> HashMap<Ends, Vec<Trace>> {
    let mut traces: HashMap<Ends, Vec<Trace>> = HashMap::new();
    for packet in packets {
        let sent = Ends { client: packet.from, server: packet.to };
        let came = Ends { client: packet.to, server: packet.from };
        match &packet.content {
            Content::Tcp(segment) if segment.syn && !segment.acks => {
                let all = traces.entry(sent).or_default();
                match all.last_mut() {
                    Some(last) if last.client_isn == segment.seq => last.syns += 1,
                    // A port is used again.
                    _ => all.push(Trace::open(packet.at, segment)),
                }
            }
            Content::Tcp(segment) => {
                if let Some(trace) = traces.get_mut(&sent).and_then(|all| all.last_mut()) {
                    trace.send(packet.at, segment);
                } else if let Some(trace) = traces.get_mut(&came).and_then(|all| all.last_mut()) {
                    trace.receive(packet.at, segment);
                }
            }
            Content::Unreachable => {
                if let Some(trace) = traces.get_mut(&came).and_then(|all| all.last_mut())
                    && trace.answered.is_none()
                {
                    trace.refused.get_or_insert(packet.at);
                }
            }
            Content::Udp(_) => {}
        }
    }
    traces
}

impl Trace {
    fn open(at: Duration, segment: &Segment) -> Self {
        Self { opened: at, syns: 1, client_isn: segment.seq, ..Self::default() }
    }

    fn send(&mut self, at: Duration, segment: &Segment) {
        if segment.rst {
            if self.answered.is_some() {
                self.reset_by_client.get_or_insert(at);
            } else if std::mem::take(&mut self.stale_ack) {
                self.challenged += 1;
            }
            return;
        }
        if segment.acks && self.answered.is_some() {
            let fin = u64::from(self.closed_by_server.is_some());
            let acknowledged = position(self.server_isn, segment.ack);
            self.acknowledged = self.acknowledged.max(acknowledged.saturating_sub(fin));
        }
        let from = position(self.client_isn, segment.seq);
        let to = from + u64::from(segment.length);
        if to > self.sent {
            self.last_sent = Some(at);
            self.sent_up_to.push((to, at));
        } else if segment.fin && self.fin_sent && segment.length == 0 {
            self.fins_resent += 1;
        }
        if segment.length > 0 && from < self.sent {
            let to = to.min(self.sent);
            self.resent.push(Resent { at, spurious: to <= self.confirmed, from, to });
        }
        self.sent = self.sent.max(to);
        self.fin_sent |= segment.fin;
    }

    fn receive(&mut self, at: Duration, segment: &Segment) {
        if segment.rst {
            let first = if self.answered.is_some() { &mut self.reset_by_server } else { &mut self.refused };
            first.get_or_insert(at);
            return;
        }
        if segment.syn {
            if self.answered.is_none() {
                self.answered = Some(at);
                self.server_isn = segment.seq;
            }
            return;
        }
        if self.answered.is_none() {
            self.stale_ack = segment.acks;
            return;
        }
        self.confirm(segment);
        let from = position(self.server_isn, segment.seq);
        self.take(at, from, from + u64::from(segment.length));
        if segment.fin && self.closed_by_server.is_none() {
            self.closed_by_server = Some(at);
            self.confirmed_at_close = position(self.client_isn, segment.ack);
        }
    }

    fn confirm(&mut self, segment: &Segment) {
        let confirmed = position(self.client_isn, segment.ack);
        // The acknowledgement of a FIN is one more than there are bytes.
        self.confirmed = self.confirmed.max(confirmed.min(self.sent));
        if let Some((left, right)) = segment.duplicate {
            let (left, right) = (position(self.client_isn, left), position(self.client_isn, right));
            let same = |resent: &&mut Resent| !resent.spurious && resent.from < right && left < resent.to;
            if let Some(resent) = self.resent.iter_mut().find(same) {
                resent.spurious = true;
            }
        }
    }

    /// Adds bytes of the server to what arrived.
    fn take(&mut self, at: Duration, from: u64, to: u64) {
        if from == to {
            return;
        }
        let known =
            to <= self.received || self.beyond.iter().any(|&(left, right)| left <= from && to <= right);
        let fills_gap =
            !known && (self.closed_by_server.is_some() || self.beyond.iter().any(|&(left, _)| from < left));
        self.resent_by_server += usize::from(known || fills_gap || from < self.received);
        if fills_gap {
            self.late.push(LateData { at, from });
        }
        let before = self.received;
        self.beyond.push((from, to));
        self.beyond.sort_unstable();
        for &(left, right) in &self.beyond {
            if left <= self.received {
                self.received = self.received.max(right);
            }
        }
        self.beyond.retain(|&(_, right)| right > self.received);
        if self.received > before {
            self.received_up_to.push((self.received, at));
        }
    }

    /// When the client first sent the byte at a position.
    pub fn sent_at(&self, position: u64) -> Option<Duration> {
        let after = self.sent_up_to.partition_point(|&(end, _)| end <= position);
        self.sent_up_to.get(after).map(|&(_, at)| at)
    }

    /// When all bytes before a position had arrived.
    pub fn received_at(&self, position: u64) -> Option<Duration> {
        let reached = self.received_up_to.partition_point(|&(end, _)| end < position);
        self.received_up_to.get(reached).map(|&(_, at)| at)
    }

    /// How many retransmissions of data, SYNs included, the client's kernel has made.
    pub fn retransmissions(&self) -> usize {
        self.syns - 1 + self.resent.len() + self.fins_resent
    }
}

/// How many bytes of data come before a sequence number. The SYN takes the first number; keepalives go one back.
fn position(isn: u32, number: u32) -> u64 {
    let offset = number.wrapping_sub(isn).wrapping_sub(1);
    // A probe of an idle connection before any data would wrap around.
    if offset == u32::MAX { 0 } else { offset.into() }
}
