// SPDX-License-Identifier: Apache-2.0
//! Requests and answers by datagram, joined by their number. Pure.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::Duration;

use super::packet::{Content, Packet};

/// What became of a numbered datagram.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Question {
    /// When it was sent, each time that it was.
    pub sent: Vec<Duration>,
    /// When and by whom it was answered.
    pub answers: Vec<(Duration, SocketAddr)>,
}

/// Sorts datagrams by number. `client` knows the sender of each number.
pub fn questions<'a>(
    packets: impl IntoIterator<Item = &'a Packet>,
    client: impl Fn(u64) -> Option<SocketAddr>,
) -> HashMap<u64, Question> {
    let mut questions: HashMap<u64, Question> = HashMap::new();
    for packet in packets {
        let Content::Udp(Some(number)) = packet.content else { continue };
        match client(number) {
            Some(client) if packet.from == client => {
                questions.entry(number).or_default().sent.push(packet.at);
            }
            Some(client) if packet.to == client => {
                questions.entry(number).or_default().answers.push((packet.at, packet.from));
            }
            _ => {}
        }
    }
    questions
}
