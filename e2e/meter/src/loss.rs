// SPDX-License-Identifier: Apache-2.0
//! What a flow can lose, and the sum of what a client lost.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use super::client::Connection;

/// Time limit of a TCP handshake, or of what stands for one.
pub const HANDSHAKE_WITHIN: Duration = Duration::from_millis(200);

/// Time limit of an answer on a connection, from the first transmission of its request to the arrival of its last byte.
pub const ANSWER_WITHIN: Duration = Duration::from_millis(200);

/// What was lost. A flow has one entry per kind and event; of two kinds with the same cause only the more telling one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LossKind {
    /// No SYN-ACK ever came.
    SynUnanswered,
    /// A SYN or its answer was lost: the client sent it again.
    SynRetransmitted,
    /// The SYN-ACK came later than [`HANDSHAKE_WITHIN`].
    SlowHandshake,
    /// The SYN was answered by a reset or an ICMP error.
    ConnectionRefused,
    /// A reset that neither the server's end of the connection nor the client explains.
    UnexpectedReset,
    /// The client's data was lost: it sent it again, and the server did not report that it came twice.
    DataRetransmitted,
    /// The server's data was lost: it came after later data, or after the end of the connection.
    AnswerRetransmitted,
    /// An answer came in full later than [`ANSWER_WITHIN`], and no other kind says why. The answer was lost and sent again, or a host
    /// had no core for it: at the client both look alike, since no packet tells how often it was sent.
    SlowAnswer,
    /// A request was not answered in full.
    BytesMissing,
    /// An answer was not what had been sent.
    BytesChanged,
    /// A backend of another Service answered.
    WrongBackend,
    /// A datagram had no answer.
    DatagramUnanswered,
    /// A datagram was answered after its client had given up.
    DatagramLate,
    /// A datagram had more than one answer.
    DatagramDuplicated,
    /// A datagram was answered by an address other than the one that was asked.
    WrongSource,
}

/// Something that was lost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loss {
    /// What.
    pub kind: LossKind,
    /// When the affected packet was sent, since the Unix epoch.
    pub at: Duration,
    /// The client's address of the flow.
    pub client: SocketAddr,
}

/// Data that was sent more than once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Retransmissions {
    /// By the client, because a packet was lost.
    pub needed: usize,
    /// By the client, although the server had the data: it said so (D-SACK), or its acknowledgement had come before.
    pub spurious: usize,
    /// By the client, nothing but the end of the connection.
    pub fins: usize,
    /// By the server: data that came twice or late.
    pub by_server: usize,
}

/// What a client lived through, by packets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Measurement {
    /// Connections that were tried.
    pub connections: usize,
    /// Requests on connections.
    pub exchanges: usize,
    /// Datagrams that were sent.
    pub datagrams: usize,
    /// Everything that was lost, by time.
    pub losses: Vec<Loss>,
    /// Retransmissions of data.
    pub retransmissions: Retransmissions,
    /// Connections that their server ended between two requests.
    pub closed_by_server: usize,
    /// SYNs that met an earlier connection between the same ports at their backend, which let go of it at once.
    pub port_collisions: usize,
    /// Connections that did not bring all answers within the client's time limit, whatever the packets say, as the client saw them.
    pub failed: Vec<Connection>,
    /// The longest time from a first SYN to its SYN-ACK.
    pub slowest_handshake: Duration,
    /// The longest time from a request on a connection to its whole answer.
    pub slowest_answer: Duration,
    /// The longest time from a datagram to its answer.
    pub slowest_datagram: Duration,
}

impl Measurement {
    /// How often each kind of loss occurred.
    pub fn counts(&self) -> BTreeMap<LossKind, usize> {
        let mut counts = BTreeMap::new();
        for loss in &self.losses {
            *counts.entry(loss.kind).or_default() += 1;
        }
        counts
    }

    /// The counts as text.
    pub fn kinds(&self) -> String {
        if self.losses.is_empty() {
            return "none".to_owned();
        }
        let counts = self.counts();
        counts.iter().map(|(kind, count)| format!("{kind} {count}")).collect::<Vec<_>>().join(", ")
    }
}

impl LossKind {
    /// Whether a host that had no core for a while looks the same: on busy cores a program waits for one as long as for a packet that
    /// is sent again. Nobody sends a datagram again: where its answer came late, nothing was lost.
    pub fn is_slow(self) -> bool {
        matches!(self, Self::SlowHandshake | Self::SlowAnswer | Self::DatagramLate)
    }
}

impl fmt::Display for LossKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, formatter)
    }
}
