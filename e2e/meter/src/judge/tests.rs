// SPDX-License-Identifier: Apache-2.0
//! Verdicts on made-up packets: a table of faults, and properties of connections without any.

use std::net::SocketAddr;
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::packet::{Content, Segment};

const CLIENT: &str = "10.0.0.1:40000";
const SERVER: &str = "10.0.0.2:80";
const REQUEST: u32 = 90;
const ANSWER: u32 = 120;

fn address(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

fn ends() -> Ends {
    Ends { client: address(CLIENT), server: address(SERVER) }
}

/// A connection, packet by packet, a millisecond after each other unless time is let pass.
struct Script {
    packets: Vec<Packet>,
    now: Duration,
    sent: u32,
    received: u32,
    isn: [u32; 2],
    exchanges: Vec<Exchange>,
}

impl Script {
    fn new(isn: [u32; 2]) -> Self {
        Self {
            packets: Vec::new(),
            now: Duration::from_secs(1),
            sent: 0,
            received: 0,
            isn,
            exchanges: Vec::new(),
        }
    }

    /// A connection with this many requests that have been answered.
    fn answered(requests: usize) -> Self {
        let mut script = Self::new([100, 900]);
        script.syn().syn_ack();
        for _ in 0..requests {
            script.request().answer();
        }
        script
    }

    fn wait(&mut self, milliseconds: u64) -> &mut Self {
        self.now += Duration::from_millis(milliseconds);
        self
    }

    fn packet(&mut self, by_client: bool, segment: Segment) -> &mut Self {
        let (from, to) = if by_client { (CLIENT, SERVER) } else { (SERVER, CLIENT) };
        self.now += Duration::from_millis(1);
        let content = Content::Tcp(segment);
        self.packets.push(Packet { at: self.now, from: address(from), to: address(to), content });
        self
    }

    /// The header of a segment that comes after this many bytes of its sender and acknowledges this many of the other's.
    fn segment(&self, by_client: bool, after: u32, acknowledged: u32) -> Segment {
        let [own, other] = if by_client { self.isn } else { [self.isn[1], self.isn[0]] };
        Segment {
            seq: own.wrapping_add(1).wrapping_add(after),
            ack: other.wrapping_add(1).wrapping_add(acknowledged),
            acks: true,
            ..Segment::default()
        }
    }

    fn syn(&mut self) -> &mut Self {
        self.packet(true, Segment { seq: self.isn[0], syn: true, ..Segment::default() })
    }

    fn syn_ack(&mut self) -> &mut Self {
        let ack = self.isn[0].wrapping_add(1);
        self.packet(false, Segment { seq: self.isn[1], ack, syn: true, acks: true, ..Segment::default() })
    }

    fn request(&mut self) -> &mut Self {
        self.packet(true, Segment { length: REQUEST, ..self.segment(true, self.sent, self.received) });
        self.sent += REQUEST;
        self
    }

    /// The last request again.
    fn request_again(&mut self) -> &mut Self {
        let segment = self.segment(true, self.sent - REQUEST, self.received);
        self.packet(true, Segment { length: REQUEST, ..segment })
    }

    /// Answers the oldest request that has no answer.
    fn answer(&mut self) -> &mut Self {
        self.packet(false, Segment { length: ANSWER, ..self.segment(false, self.received, self.sent) });
        self.received += ANSWER;
        self.answered_in_full()
    }

    /// The client has read the answer.
    fn answered_in_full(&mut self) -> &mut Self {
        let asked = u64::try_from(self.exchanges.len()).unwrap() * u64::from(REQUEST);
        let before = self.exchanges.last().map_or(0, |last| last.answer.end);
        self.exchanges.push(Exchange {
            request: asked..asked + u64::from(REQUEST),
            answer: before..self.received.into(),
        });
        self.packet(true, self.segment(true, self.sent, self.received))
    }

    fn reports_duplicate(&mut self) -> &mut Self {
        let edge = |bytes: u32| self.isn[0].wrapping_add(1).wrapping_add(bytes);
        let duplicate = Some((edge(self.sent - REQUEST), edge(self.sent)));
        self.packet(false, Segment { duplicate, ..self.segment(false, self.received, self.sent) })
    }

    fn fin(&mut self, by_client: bool) -> &mut Self {
        let (own, other) = if by_client { (self.sent, self.received) } else { (self.received, self.sent) };
        self.packet(by_client, Segment { fin: true, ..self.segment(by_client, own, other) })
    }

    fn reset(&mut self, by_client: bool) -> &mut Self {
        self.packet(by_client, Segment { rst: true, ..self.segment(by_client, 0, 0) })
    }

    fn unreachable(&mut self) -> &mut Self {
        let (from, to) = (address(SERVER), address(CLIENT));
        self.packets.push(Packet { at: self.now, from, to, content: Content::Unreachable });
        self
    }

    fn connection(&self, ending: Ending) -> Connection {
        Connection {
            ends: ends(),
            opened: Duration::from_secs(1),
            exchanges: self.exchanges.clone(),
            received: self.received.into(),
            ending,
            retransmissions: None,
        }
    }

    fn judge(&self, ending: Ending) -> Result<Measurement, NotMeasured> {
        let connections = vec![self.connection(ending)];
        judge(&self.packets, &Observed { connections, ..Observed::default() })
    }

    #[track_caller]
    fn loses(&self, ending: Ending, expected: &[LossKind]) {
        let measured = self.judge(ending).unwrap();
        let kinds: Vec<_> = measured.losses.iter().map(|loss| loss.kind).collect();
        assert_eq!(kinds, expected, "{measured:?}");
    }
}

fn unanswered() -> Ending {
    Ending::Unanswered("no answer".into())
}

#[test]
fn connection_that_its_server_ends_as_asked_loses_nothing() {
    let mut script = Script::answered(1);
    script.fin(false).fin(true);
    script.loses(Ending::Complete, &[]);
    let measured = script.judge(Ending::Complete).unwrap();
    assert_eq!((measured.failed.len(), measured.closed_by_server), (0, 0));
    assert_eq!(measured.slowest_handshake, Duration::from_millis(1));
}

#[test]
fn each_fault_of_a_handshake_has_its_kind() {
    let mut script = Script::new([1, 2]);
    script.syn().wait(1000).syn();
    script.loses(unanswered(), &[LossKind::SynUnanswered]);
    script.syn_ack().request().answer();
    script.loses(Ending::Complete, &[LossKind::SynRetransmitted]);

    let mut slow = Script::new([1, 2]);
    slow.syn().wait(199).syn_ack();
    slow.loses(Ending::Complete, &[]);
    let mut slow = Script::new([1, 2]);
    slow.syn().wait(200).syn_ack();
    slow.loses(Ending::Complete, &[LossKind::SlowHandshake]);

    Script::new([1, 2]).syn().reset(false).loses(unanswered(), &[LossKind::ConnectionRefused]);
    Script::new([1, 2]).syn().unreachable().loses(unanswered(), &[LossKind::ConnectionRefused]);
}

#[test]
fn syn_that_meets_an_earlier_connection_at_its_backend_is_not_lost() {
    let mut script = Script::new([1, 2]);
    script.syn();
    let stale = script.segment(false, 5_000, 7_000);
    script.packet(false, stale).reset(true).wait(8).syn().syn_ack().request().answer();
    script.loses(Ending::Complete, &[]);
    assert_eq!(script.judge(Ending::Complete).unwrap().port_collisions, 1);

    // A SYN that was lost besides is one.
    let mut lost = Script::new([1, 2]);
    lost.syn().wait(1000).syn();
    let stale = lost.segment(false, 5_000, 7_000);
    lost.packet(false, stale).reset(true).wait(8).syn().syn_ack().request().answer();
    lost.loses(Ending::Complete, &[LossKind::SynRetransmitted]);
}

#[test]
fn resets_are_unexpected_unless_the_server_had_ended_the_connection() {
    Script::answered(1).request().reset(false).loses(unanswered(), &[LossKind::UnexpectedReset]);
    Script::answered(1).reset(true).loses(Ending::Complete, &[LossKind::UnexpectedReset]);
    // The client wrote into a connection that was closed.
    let mut script = Script::answered(1);
    script.fin(false).request().reset(false);
    script.loses(unanswered(), &[]);
    let measured = script.judge(unanswered()).unwrap();
    assert_eq!((measured.failed.len(), measured.closed_by_server), (0, 1));
    // A client that gave up resets what still comes.
    Script::answered(1).request().reset(true).loses(unanswered(), &[LossKind::BytesMissing]);
}

#[test]
fn requests_without_answer_and_with_another_are_missing_and_changed_bytes() {
    Script::answered(1).request().loses(unanswered(), &[LossKind::BytesMissing]);
    Script::answered(1).loses(Ending::BytesChanged, &[LossKind::BytesChanged]);
    let mut script = Script::answered(1);
    script.request().fin(false);
    script.loses(unanswered(), &[LossKind::BytesMissing]);
    assert_eq!(script.judge(unanswered()).unwrap().failed.len(), 1);
}

#[test]
fn retransmission_is_a_loss_unless_the_server_had_the_data() {
    let mut lost = Script::answered(1);
    lost.request().wait(250).request_again().answer();
    lost.loses(Ending::Complete, &[LossKind::DataRetransmitted]);
    assert_eq!(lost.judge(Ending::Complete).unwrap().retransmissions.needed, 1);

    let mut reported = Script::answered(1);
    reported.request().wait(150).request_again().reports_duplicate().answer();
    reported.loses(Ending::Complete, &[]);
    assert_eq!(reported.judge(Ending::Complete).unwrap().retransmissions.spurious, 1);

    let mut crossing = Script::answered(1);
    crossing.request().answer().request_again();
    crossing.loses(Ending::Complete, &[]);
    assert_eq!(crossing.judge(Ending::Complete).unwrap().retransmissions.spurious, 1);
}

#[test]
fn answer_must_arrive_within_its_limit() {
    let mut slow = Script::answered(1);
    slow.request().wait(199).answer();
    slow.loses(Ending::Complete, &[]);
    assert_eq!(slow.judge(Ending::Complete).unwrap().slowest_answer, Duration::from_millis(200));
    let mut slow = Script::answered(1);
    slow.request().wait(200).answer().request().answer();
    slow.loses(Ending::Complete, &[LossKind::SlowAnswer]);
    assert_eq!(slow.judge(Ending::Complete).unwrap().losses[0].at, Duration::from_millis(1006));
}

#[test]
fn answer_that_was_lost_is_a_loss_although_the_server_had_the_request() {
    let mut lost = Script::answered(1);
    lost.request().wait(202).request_again().reports_duplicate().answer();
    lost.loses(Ending::Complete, &[LossKind::SlowAnswer]);
    assert_eq!(lost.judge(Ending::Complete).unwrap().retransmissions.spurious, 1);
    // The resent request crosses the resent answer.
    let mut lost = Script::answered(1);
    lost.request().wait(202).request_again().answer().reports_duplicate();
    lost.loses(Ending::Complete, &[LossKind::SlowAnswer]);
}

#[test]
fn slow_answer_is_counted_once_and_not_for_the_requests_behind_it() {
    let mut pipelined = Script::answered(1);
    pipelined.request().request().request().wait(300).answer().answer().answer();
    pipelined.loses(Ending::Complete, &[LossKind::SlowAnswer]);
    let mut pipelined = Script::answered(1);
    pipelined.request().request().wait(300).answer().wait(300).answer();
    pipelined.loses(Ending::Complete, &[LossKind::SlowAnswer, LossKind::SlowAnswer]);
}

#[test]
fn answer_is_timed_to_its_last_byte() {
    let mut script = Script::answered(1);
    script.request();
    let half = Segment { length: ANSWER / 2, ..script.segment(false, ANSWER, 2 * REQUEST) };
    let rest = Segment { length: ANSWER / 2, ..script.segment(false, ANSWER + ANSWER / 2, 2 * REQUEST) };
    script.packet(false, half).wait(300).packet(false, rest);
    script.received += ANSWER;
    script.answered_in_full().loses(Ending::Complete, &[LossKind::SlowAnswer]);
}

#[test]
fn servers_data_that_comes_twice_is_counted_and_no_loss() {
    let mut script = Script::answered(1);
    let again = Segment { length: ANSWER, ..script.segment(false, 0, REQUEST) };
    script.packet(false, again);
    script.loses(Ending::Complete, &[]);
    assert_eq!(script.judge(Ending::Complete).unwrap().retransmissions.by_server, 1);
}

#[test]
fn servers_data_that_comes_after_later_data_or_its_fin_was_lost() {
    let mut script = Script::answered(1);
    script.request();
    let later = Segment { length: ANSWER, ..script.segment(false, 2 * ANSWER, 2 * REQUEST) };
    script.packet(false, later).wait(300);
    let late = Segment { length: ANSWER, ..script.segment(false, ANSWER, 2 * REQUEST) };
    script.packet(false, late);
    script.received = 3 * ANSWER;
    script.answered_in_full().loses(Ending::Complete, &[LossKind::AnswerRetransmitted]);
    assert_eq!(script.judge(Ending::Complete).unwrap().retransmissions.by_server, 1);

    let mut closing = Script::answered(1);
    closing.request();
    let fin = Segment { fin: true, ..closing.segment(false, 2 * ANSWER, 2 * REQUEST) };
    closing.packet(false, fin).answer();
    closing.loses(Ending::Complete, &[LossKind::AnswerRetransmitted]);
}

#[test]
fn request_that_crosses_the_fin_of_an_idle_server_is_no_loss() {
    let mut crossing = Script::answered(1);
    let fin = Segment { fin: true, ..crossing.segment(false, ANSWER, REQUEST) };
    crossing.request().packet(false, fin).reset(false);
    crossing.loses(unanswered(), &[]);
    let measured = crossing.judge(unanswered()).unwrap();
    assert_eq!((measured.failed.len(), measured.closed_by_server), (0, 1));
    // A server that took no request at all was not idle.
    let mut fresh = Script::new([1, 2]);
    fresh.syn().syn_ack();
    let fin = Segment { fin: true, ..fresh.segment(false, 0, 0) };
    fresh.request().packet(false, fin).loses(unanswered(), &[LossKind::BytesMissing]);
}

#[test]
fn answer_of_another_services_backend_is_a_loss() {
    let other = || Ending::WrongBackend("other-1".into());
    Script::answered(1).loses(other(), &[LossKind::WrongBackend]);
    assert_eq!(Script::answered(1).judge(other()).unwrap().failed.len(), 1);
}

#[test]
fn capture_that_lacks_packets_measures_nothing() {
    let script = Script::answered(2);
    assert!(script.judge(Ending::Complete).is_ok());
    for (index, packet) in script.packets.iter().enumerate() {
        let Content::Tcp(segment) = packet.content else { panic!("{packet:?}") };
        let of_server = packet.from == address(SERVER);
        if !segment.syn && (!of_server || segment.length == 0) {
            continue;
        }
        let mut cut = Script { packets: script.packets.clone(), ..Script::answered(2) };
        cut.packets.remove(index);
        let measured = cut.judge(Ending::Complete);
        // Without its SYN-ACK a connection that worked cannot have been measured either.
        assert!(measured.is_err(), "without packet {index}: {measured:?}");
    }
    let mut longer = script.connection(Ending::Complete);
    longer.exchanges[1].request.end += 1;
    let observed = Observed { connections: vec![longer], ..Observed::default() };
    assert!(judge(&script.packets, &observed).is_err(), "a part of a request was not captured");
    let mut counted = script.connection(Ending::Complete);
    counted.retransmissions = Some(1);
    let observed = Observed { connections: vec![counted], ..Observed::default() };
    assert!(judge(&script.packets, &observed).is_err(), "the kernel retransmitted what was not captured");
}

#[test]
fn port_that_is_used_again_is_another_connection() {
    let mut first = Script::answered(1);
    first.fin(false).fin(true);
    let mut second = Script::new([70_000, 80_000]);
    second.now = first.now;
    second.syn().wait(1000).syn().syn_ack().request().answer();
    let packets = [first.packets.clone(), second.packets.clone()].concat();
    let mut connections = vec![first.connection(Ending::Complete), second.connection(Ending::Complete)];
    connections[1].opened = first.now;
    // Observed in the order of their ends, not of their beginnings.
    connections.reverse();
    let measured = judge(&packets, &Observed { connections, ..Observed::default() }).unwrap();
    assert_eq!(measured.kinds(), "SynRetransmitted 1");
    assert_eq!(measured.losses[0].at, first.now + Duration::from_millis(1));
}

fn datagram(at: u64, from: &str, to: &str, number: u64) -> Packet {
    let content = Content::Udp(Some(number));
    Packet { at: Duration::from_millis(at), from: address(from), to: address(to), content }
}

/// Who answered, with which number.
type Answer = (&'static str, u64);

#[test]
fn each_fault_of_a_datagram_has_its_kind() {
    let other = "10.0.0.3:80";
    let cases: [(&[Answer], &[LossKind]); 5] = [
        (&[(SERVER, 7)], &[]),
        (&[], &[LossKind::DatagramUnanswered]),
        (&[(SERVER, 8)], &[LossKind::DatagramUnanswered]),
        (&[(SERVER, 7), (SERVER, 7)], &[LossKind::DatagramDuplicated]),
        (&[(other, 7)], &[LossKind::WrongSource]),
    ];
    for (answers, expected) in cases {
        let mut packets = vec![datagram(1, CLIENT, SERVER, 7)];
        packets.extend((2..).zip(answers).map(|(at, (from, number))| datagram(at, from, CLIENT, *number)));
        let one = Datagram {
            client: address(CLIENT),
            server: address(SERVER),
            number: 7,
            patience: Duration::from_secs(1),
            answers: 0,
        };
        let observed = Observed { datagrams: vec![one.clone()], ..Observed::default() };
        let kinds: Vec<_> = judge(&packets, &observed).unwrap().losses.iter().map(|loss| loss.kind).collect();
        assert_eq!(kinds, expected, "{answers:?}");
        assert!(judge(&[], &observed).is_err(), "a datagram that was not captured is not measured");
        let read = Datagram { answers: 3, ..one };
        let observed = Observed { datagrams: vec![read], ..Observed::default() };
        assert!(judge(&packets, &observed).is_err(), "an answer was read that was not captured");
    }
}

#[test]
fn datagram_that_is_answered_after_its_client_gave_up_is_lost() {
    let patience = Duration::from_secs(1);
    for (late, expected) in [(1001, "none"), (1002, "DatagramLate 1")] {
        let packets = [datagram(1, CLIENT, SERVER, 7), datagram(late, SERVER, CLIENT, 7)];
        let (client, server) = (address(CLIENT), address(SERVER));
        let datagrams = vec![Datagram { client, server, number: 7, patience, answers: 0 }];
        let measured = judge(&packets, &Observed { datagrams, ..Observed::default() }).unwrap();
        assert_eq!(measured.kinds(), expected);
    }
}

proptest! {
    /// Whatever the sequence numbers begin with, wrapping around included.
    #[test]
    fn connections_without_a_fault_lose_nothing(isn: [u32; 2], requests in 0..20_usize, fin: bool) {
        let mut script = Script::new(isn);
        script.syn().syn_ack();
        for _ in 0..requests {
            script.request().answer();
        }
        if fin {
            script.fin(false).fin(true);
        }
        let measured = script.judge(Ending::Complete).unwrap();
        prop_assert_eq!(measured.losses, vec![]);
        prop_assert_eq!(measured.retransmissions, crate::loss::Retransmissions::default());
    }

    /// Each lost packet of the client is reported, and counted once.
    #[test]
    fn every_lost_packet_is_reported(isn: [u32; 2], syns in 0..3_usize, lost: Vec<bool>) {
        let mut script = Script::new(isn);
        script.syn();
        for _ in 0..syns {
            script.wait(1000).syn();
        }
        script.syn_ack();
        for lost in &lost {
            script.request();
            if *lost {
                script.wait(250).request_again();
            }
            script.answer();
        }
        let measured = script.judge(Ending::Complete).unwrap();
        let count = |kind| measured.counts().get(&kind).copied().unwrap_or_default();
        prop_assert_eq!(count(LossKind::SynRetransmitted), usize::from(syns > 0));
        prop_assert_eq!(count(LossKind::DataRetransmitted), lost.iter().filter(|lost| **lost).count());
        prop_assert_eq!(measured.losses.len(), measured.counts().values().sum::<usize>());
    }

    /// Packets in any order give some verdict, and none panics.
    #[test]
    fn no_packets_make_the_judge_panic(
        packets in proptest::collection::vec((any::<bool>(), any::<[u32; 3]>(), any::<[bool; 4]>(), any::<Option<(u32, u32)>>()), 0..30),
    ) {
        let mut script = Script::new([0, 0]);
        script.syn();
        for (by_client, [seq, ack, length], [syn, acks, fin, rst], duplicate) in packets {
            let segment = Segment { seq, ack, syn, acks, fin, rst, length: length % 65_536, duplicate };
            script.packet(by_client, segment);
        }
        for ending in [Ending::Complete, unanswered()] {
            let _ = script.judge(ending);
        }
    }
}
