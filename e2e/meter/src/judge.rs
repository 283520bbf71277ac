// SPDX-License-Identifier: Apache-2.0
//! The verdict: what the client did, joined with the packets that its host sent and received. Pure.

use std::collections::{HashMap, VecDeque};
use std::error::Error;
use std::fmt;
use std::time::Duration;

use super::asker::Datagram;
use super::client::{Connection, Ending, Exchange, Observed};
use super::loss::{ANSWER_WITHIN, HANDSHAKE_WITHIN, Loss, LossKind, Measurement};
use super::packet::Packet;
use super::tcp::{Ends, Trace, traces};
use super::udp::{Question, questions};

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
        exchanges: observed.connections.iter().map(|connection| connection.exchanges.len()).sum(),
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
    let mut questions = questions(packets, |number| clients.get(&number).copied());
    for datagram in &observed.datagrams {
        let question = questions.remove(&datagram.number).unwrap_or_default();
        measurement.add_datagram(datagram, &question)?;
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
    if trace.answered.is_none() && !connection.exchanges.is_empty() {
        return missing("no SYN-ACK".to_owned());
    }
    if let Some(last) = connection.exchanges.last()
        && last.request.end > trace.sent
    {
        return missing(format!("the client sent {} bytes, not {}", last.request.end, trace.sent));
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
        let slowest = answer_times(connection, trace).map(|(_, _, took)| took).max();
        self.slowest_answer = self.slowest_answer.max(slowest.unwrap_or_default());
        self.port_collisions += trace.challenged;
        let spurious = trace.resent.iter().filter(|resent| resent.spurious).count();
        self.retransmissions.spurious += spurious;
        self.retransmissions.needed += trace.resent.len() - spurious;
        self.retransmissions.fins += trace.fins_resent;
        self.retransmissions.by_server += trace.resent_by_server;
        let closed = connection.ending == Ending::ClosedByServer || closed_first(connection, trace);
        self.closed_by_server += usize::from(closed);
        if !closed && connection.ending != Ending::Complete {
            self.failed.push(connection.clone());
        }
    }

    fn add_datagram(&mut self, datagram: &Datagram, question: &Question) -> Result<(), NotMeasured> {
        let Some(&at) = question.sent.first() else {
            return Err(NotMeasured(format!("{datagram:?} was not captured")));
        };
        if datagram.answers > question.answers.len() {
            return Err(NotMeasured(format!("an answer to {datagram:?} was not captured")));
        }
        let mut lose = |kind, at| self.losses.push(Loss { kind, at, client: datagram.client });
        match &question.answers[..] {
            [] => lose(LossKind::DatagramUnanswered, at),
            [(first, _), more @ ..] => {
                let took = first.saturating_sub(at);
                self.slowest_datagram = self.slowest_datagram.max(took);
                if took > datagram.patience {
                    lose(LossKind::DatagramLate, at);
                }
                for (at, _) in more {
                    lose(LossKind::DatagramDuplicated, *at);
                }
            }
        }
        for (at, from) in &question.answers {
            if *from != datagram.server {
                self.losses.push(Loss { kind: LossKind::WrongSource, at: *at, client: datagram.client });
            }
        }
        Ok(())
    }
}

/// Whether the server ended the connection while it had no request: before the client sent its newest one, or while that was on its
/// way, as the acknowledgement in the FIN shows. Nobody can answer such a request.
fn closed_first(connection: &Connection, trace: &Trace) -> bool {
    let Some(closed) = trace.closed_by_server else { return false };
    let crossed =
        connection.exchanges.last().is_some_and(|answered| trace.confirmed_at_close <= answered.request.end);
    let unanswered = matches!(connection.ending, Ending::Unanswered(_));
    unanswered && (crossed || trace.last_sent.is_some_and(|sent| closed < sent))
}

/// Each exchange with the time of its request and how long its answer took. A request that was sent before the preceding one had its
/// answer is timed from that answer on: a slow answer is counted once, not once for each request that waits behind it.
fn answer_times<'a>(
    connection: &'a Connection,
    trace: &'a Trace,
) -> impl Iterator<Item = (&'a Exchange, Duration, Duration)> {
    let mut before = Duration::ZERO;
    connection.exchanges.iter().filter_map(move |exchange| {
        let sent = trace.sent_at(exchange.request.start)?;
        let answered = trace.received_at(exchange.answer.end)?;
        let from = sent.max(before);
        before = answered;
        Some((exchange, sent, answered.saturating_sub(from)))
    })
}

/// Answers that took too long, unless a packet that was sent again says why.
fn slow_answers(connection: &Connection, trace: &Trace) -> Vec<Duration> {
    let explained = |exchange: &Exchange| {
        let overlaps = |from, to| from < exchange.request.end && exchange.request.start < to;
        trace.resent.iter().any(|resent| !resent.spurious && overlaps(resent.from, resent.to))
            || trace.late.iter().any(|late| exchange.answer.contains(&late.from))
    };
    answer_times(connection, trace)
        .filter(|(exchange, _, took)| *took > ANSWER_WITHIN && !explained(exchange))
        .map(|(_, sent, _)| sent)
        .collect()
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
    losses.extend(trace.late.iter().map(|late| (LossKind::AnswerRetransmitted, late.at)));
    losses.extend(slow_answers(connection, trace).into_iter().map(|sent| (LossKind::SlowAnswer, sent)));
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
    let wrong = match connection.ending {
        Ending::BytesChanged => Some(LossKind::BytesChanged),
        Ending::WrongBackend(_) => Some(LossKind::WrongBackend),
        _ => None,
    };
    losses.extend(wrong.map(|kind| (kind, trace.last_sent.unwrap_or(opened))));
    losses
}

#[cfg(test)]
mod tests;
