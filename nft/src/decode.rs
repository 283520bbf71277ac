// SPDX-License-Identifier: Apache-2.0
//! Decodes the kernel's listings of nftables objects for `Nft`. Never panics, whatever the bytes.

use std::time::Duration;

use crate::batch::{DORMANT, OBJECT_COUNTER, OWNED};
use crate::info::{BaseChainInfo, ChainInfo, RuleInfo, SetInfo, TableInfo};
use crate::rows::{Row, Rows};
use crate::set::{Data, Element};
use crate::table::ChainType;
use crate::verdict::Verdict;
use crate::wire::{Attrs, Message};

/// Flag of an element that marks the end of an interval, in a set whose key is a single field.
const INTERVAL_END: u32 = 1;

pub(crate) fn table(message: &Message<'_>) -> Option<TableInfo> {
    let attrs = message.attrs();
    let flags = attrs.u32(2).unwrap_or(0);
    Some(TableInfo {
        name: attrs.string(1)?,
        comment: comment(attrs, 6),
        objects: attrs.u32(3).unwrap_or(0),
        is_dormant: flags & DORMANT != 0,
        is_owned: flags & OWNED != 0,
    })
}

pub(crate) fn chain(message: &Message<'_>) -> Option<ChainInfo> {
    let attrs = message.attrs();
    let hook = attrs.find(4).and_then(|_| attrs.nested(4).u32(1)).map(|hook| match hook {
        0 => "prerouting",
        1 => "input",
        2 => "forward",
        3 => "output",
        4 => "postrouting",
        _ => "another hook",
    });
    // NF_DROP
    let drops = attrs.u32(5) == Some(0);
    let priority = attrs.nested(4).u32(2).unwrap_or_default().cast_signed();
    let kind = match attrs.string(7).as_deref() {
        Some("filter") => Some(ChainType::Filter),
        Some("nat") => Some(ChainType::Nat),
        _ => None,
    };
    let base = hook.map(|hook| BaseChainInfo { hook, priority, kind, drops });
    Some(ChainInfo { table: attrs.string(1)?, name: attrs.string(3)?, base })
}

/// A set's table and name.
pub(crate) fn set(message: &Message<'_>) -> Option<(String, SetInfo)> {
    let attrs = message.attrs();
    let info = SetInfo {
        name: attrs.string(2)?,
        key: attrs.u32(5).unwrap_or_default(),
        data: attrs.u32(7).unwrap_or_default(),
        size: attrs.nested(9).u32(1),
    };
    Some((attrs.string(1)?, info))
}

/// A counter's table and name, and its packets.
pub(crate) fn counter(message: &Message<'_>) -> Option<(String, String, u64)> {
    let attrs = message.attrs();
    let is_counter = attrs.u32(3) == Some(OBJECT_COUNTER);
    let packets = attrs.nested(4).u64(2).filter(|_| is_counter)?;
    Some((attrs.string(1)?, attrs.string(2)?, packets))
}

/// A rule and its table.
pub(crate) fn rule(message: &Message<'_>) -> Option<(String, RuleInfo)> {
    let attrs = message.attrs();
    let info = RuleInfo {
        chain: attrs.string(2)?,
        handle: attrs.u64(3)?,
        comment: comment(attrs, 7),
        expressions: attrs.find(4).unwrap_or_default().to_vec(),
    };
    Some((attrs.string(1)?, info))
}

pub(crate) fn elements(message: &Message<'_>) -> Vec<Element> {
    message.attrs().nested(3).into_iter().filter_map(|(_, bytes)| element(Attrs(bytes))).collect()
}

/// Elements with their remaining time.
pub(crate) fn expiring(message: &Message<'_>) -> Vec<Element> {
    let with_remaining_time = |attrs: Attrs<'_>| {
        let element = element(attrs)?;
        Some(element.expires(Duration::from_millis(attrs.u64(5)?)))
    };
    message.attrs().nested(3).into_iter().filter_map(|(_, bytes)| with_remaining_time(Attrs(bytes))).collect()
}

/// Appends the elements of a message to `rows`.
pub(crate) fn rows(message: &Message<'_>, rows: &mut Rows) {
    for (_, bytes) in message.attrs().nested(3) {
        let attrs = Attrs(bytes);
        let is_end = attrs.u32(3).unwrap_or(0) & INTERVAL_END != 0;
        if let Some(key) = attrs.nested(1).find(1).filter(|_| !is_end) {
            let (end, data) = (attrs.nested(10).find(1), attrs.nested(2).find(1));
            rows.push_row(Row { key, end, data });
        }
    }
}

fn element(attrs: Attrs<'_>) -> Option<Element> {
    if attrs.u32(3).unwrap_or(0) & INTERVAL_END != 0 {
        return None;
    }
    let data = attrs.find(2).and_then(|bytes| element_data(Attrs(bytes)));
    Some(Element {
        key: attrs.nested(1).find(1)?.to_vec(),
        key_end: attrs.nested(10).find(1).map(<[u8]>::to_vec),
        data,
        timeout: None,
    })
}

fn element_data(attrs: Attrs<'_>) -> Option<Data> {
    if let Some(value) = attrs.find(1) {
        return Some(Data::Value(value.to_vec()));
    }
    let verdict = attrs.nested(2);
    Verdict::from_wire(verdict.u32(1)?, verdict.string(2)).map(Data::Verdict)
}

/// The comment in the user data, which is a list of (type, length, content). Comments have type 0.
fn comment(attrs: Attrs<'_>, kind: u16) -> Option<String> {
    let mut rest = attrs.find(kind)?;
    while let [kind, length, tail @ ..] = rest {
        let content = tail.get(..usize::from(*length))?;
        if *kind == 0 {
            let text = content.strip_suffix(&[0]).unwrap_or(content);
            return Some(String::from_utf8_lossy(text).into_owned());
        }
        rest = &tail[content.len()..];
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::wire::Messages;

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            // Without a valid frame around the noise, no decoder would see it.
            let length = u32::try_from(bytes.len() + 20).unwrap();
            let mut frame = length.to_ne_bytes().to_vec();
            frame.extend_from_slice(&[0; 16]);
            frame.extend_from_slice(&bytes);
            for message in Messages(&frame) {
                let _ = (table(&message), chain(&message), set(&message), rule(&message), elements(&message));
                let _ = expiring(&message);
            }
        }

        #[test]
        fn nested_noise_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = (element(Attrs(&bytes)), element_data(Attrs(&bytes)), comment(Attrs(&bytes), 0));
        }
    }
}
