// SPDX-License-Identifier: Apache-2.0
//! The table and the JSON of what was lost. Pure.

use std::fmt::Write as _;

use serde_json::{Value, json};
use steerage_meter::loss::Measurement;

use super::run::Row;

/// When the first and the last loss occurred, relative to the event.
fn when(row: &Row) -> String {
    let offset = |at: f64| format!("{:+.2}", at - row.at.as_secs_f64());
    match &row.measured.losses[..] {
        [] => "–".to_owned(),
        [only] => offset(only.at.as_secs_f64()),
        [first, .., last] => {
            format!("{} … {}", offset(first.at.as_secs_f64()), offset(last.at.as_secs_f64()))
        }
    }
}

fn milliseconds(measured: &Measurement) -> [f64; 3] {
    [measured.slowest_handshake, measured.slowest_answer, measured.slowest_datagram]
        .map(|time| time.as_secs_f64() * 1000.0)
}

/// A table in Markdown.
pub(super) fn markdown(rows: &[Row]) -> String {
    let mut text = "| event (times) | slots had moved | clients | connections | requests | datagrams | lost | when s | failed connections \
                    | retransmitted by nodes (both families) | slowest handshake, answer, datagram ms |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
        .to_owned();
    for row in rows {
        let Row { event, has_moved, times, family, measured, is_kept, .. } = row;
        let [handshake, answer, datagram] = milliseconds(measured);
        let _ = writeln!(
            text,
            "| {event} ({times}) | {} | {family} | {} | {} | {} | {}{} | {} | {} | {} | {handshake:.0}, {answer:.0}, {datagram:.0} |",
            if *has_moved { "yes" } else { "no" },
            measured.connections,
            measured.exchanges,
            measured.datagrams,
            measured.kinds(),
            if *is_kept { "" } else { " **broken**" },
            when(row),
            measured.failed.len(),
            row.sent_again,
        );
    }
    text
}

/// One value for each row.
pub(super) fn json(rows: &[Row]) -> Value {
    let entry = |row: &Row| {
        let measured = &row.measured;
        let [handshake, answer, datagram] = milliseconds(measured);
        let counts: serde_json::Map<_, _> =
            measured.counts().into_iter().map(|(kind, count)| (kind.to_string(), json!(count))).collect();
        json!({
            "event": row.event, "slotsHadMoved": row.has_moved, "times": row.times, "clients": row.family,
            "connections": measured.connections, "requests": measured.exchanges, "datagrams": measured.datagrams,
            "lost": counts, "failedConnections": measured.failed.len(), "retransmittedByNodesBothFamilies": row.sent_again, "promiseKept": row.is_kept,
            "slowestMilliseconds": { "handshake": handshake, "answer": answer, "datagram": datagram },
        })
    };
    rows.iter().map(entry).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use steerage_meter::loss::{Loss, LossKind};

    use super::*;

    #[test]
    fn broken_promises_stand_out() {
        let at = Duration::from_secs(100);
        let loss = |offset| Loss {
            kind: LossKind::SynUnanswered,
            at: at + Duration::from_millis(offset),
            client: ([10, 1, 0, 2], 1).into(),
        };
        let measured =
            Measurement { connections: 7, losses: vec![loss(10), loss(250)], ..Measurement::default() };
        let row = Row {
            event: "third host joins",
            has_moved: true,
            times: 1,
            family: "IPv4".to_owned(),
            at,
            measured,
            sent_again: 3,
            is_kept: false,
        };
        let text = markdown(std::slice::from_ref(&row));
        assert!(
            text.contains("| third host joins (1) | yes | IPv4 | 7 |")
                && text.contains("SynUnanswered 2 **broken** | +0.01 … +0.25 |"),
            "{text}"
        );
        assert_eq!(json(&[row])[0]["lost"]["SynUnanswered"], 2);
    }
}
