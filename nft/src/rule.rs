// SPDX-License-Identifier: Apache-2.0
//! Rules: matches and statements in the order in which the kernel runs them. A plain value, given to a `Batch`.
//!
//! Each method places what it needs in registers from the first on and leaves nothing there for the next, save
//! [`Rule::load`] and [`Rule::map`], whose result the statement after them consumes.

use std::time::Duration;

use crate::set::{Field, concat};
use crate::source::{Register, Source, expression, immediate, load_all, set_mark};
use crate::table::Family;
use crate::wire::Writer;

/// What becomes of a packet.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Verdict {
    /// It is dropped.
    Drop,
    /// It passes this base chain.
    Accept,
    /// The next rule looks at it.
    Continue,
    /// The chain looks at it, then the rules after this one.
    Jump(String),
    /// The chain looks at it, and the rules after this one do not.
    Goto(String),
    /// The calling chain goes on.
    Return,
}

impl Verdict {
    pub(crate) fn write(&self, out: &mut Writer) {
        let (code, chain): (i32, _) = match self {
            Self::Drop => (0, None),
            Self::Accept => (1, None),
            Self::Continue => (-1, None),
            Self::Jump(chain) => (-3, Some(chain)),
            Self::Goto(chain) => (-4, Some(chain)),
            Self::Return => (-5, None),
        };
        out.nest(2, |verdict| {
            verdict.attr_u32(1, code.cast_unsigned());
            if let Some(chain) = chain {
                verdict.attr_str(2, chain);
            }
        });
    }

    pub(crate) fn from_wire(code: u32, chain: Option<String>) -> Option<Self> {
        Some(match (code.cast_signed(), chain) {
            (0, _) => Self::Drop,
            (1, _) => Self::Accept,
            (-1, _) => Self::Continue,
            (-3, Some(chain)) => Self::Jump(chain),
            (-4, Some(chain)) => Self::Goto(chain),
            (-5, _) => Self::Return,
            _ => return None,
        })
    }
}

/// How a packet is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reject {
    /// ICMP or `ICMPv6` "port unreachable", in a table of that family.
    PortUnreachable(Family),
    /// The same in an `inet` table.
    PortUnreachableInet,
    /// A TCP reset; the rule must match TCP only.
    TcpReset,
}

/// What a rule does to a dynamic set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DynamicOp {
    /// Adds the element where it is missing.
    Add = 0,
    /// Adds the element, or restarts its timeout. Data of an element that is there are not replaced:
    /// delete it first.
    Update = 1,
    /// Deletes the element. The kernel wants data for a map even here, and does not look at them.
    Delete = 2,
}

/// One rule.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Rule {
    expressions: Writer,
    comment: Option<String>,
}

impl Rule {
    /// A rule that matches every packet and does nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Matches when the source equals the value.
    #[must_use]
    pub fn equals(self, source: &Source, value: Field) -> Self {
        self.compare(source, 0, &concat(&[value]))
    }

    /// Matches when the source differs from the value.
    #[must_use]
    pub fn differs(self, source: &Source, value: Field) -> Self {
        self.compare(source, 1, &concat(&[value]))
    }

    /// Matches when the source, as raw bytes, is what is given.
    #[must_use]
    pub fn equals_bytes(self, source: &Source, bytes: &[u8]) -> Self {
        self.compare(source, 0, bytes)
    }

    /// Matches when any of the bits is set in a source of 4 bytes in host order (`Ct::State`, `Ct::Status`, a mark).
    #[must_use]
    pub fn has_any(self, source: Source, bits: u32) -> Self {
        self.compare(&source.masked(bits.to_ne_bytes().to_vec()), 1, &[0; 4])
    }

    /// Matches when none of the bits is set in a source of 4 bytes in host order.
    #[must_use]
    pub fn has_none(self, source: Source, bits: u32) -> Self {
        self.compare(&source.masked(bits.to_ne_bytes().to_vec()), 0, &[0; 4])
    }

    /// Matches when the concatenation is in the set (or a key of the map).
    #[must_use]
    pub fn in_set(self, set: &str, key: &[Source]) -> Self {
        self.lookup(set, key, false)
    }

    /// Matches when the concatenation is not in the set.
    #[must_use]
    pub fn not_in_set(self, set: &str, key: &[Source]) -> Self {
        self.lookup(set, key, true)
    }

    /// Looks the concatenation up in a map of values and leaves the result in the first registers for the statement that
    /// follows. Does not match where the map holds nothing.
    #[must_use]
    pub fn map(mut self, map: &str, key: &[Source]) -> Self {
        let source = Source::Map { map: map.to_owned(), key: key.to_vec(), data: Vec::new() };
        source.load(Register::FIRST, &mut self.expressions);
        self
    }

    /// Loads a concatenation into the first registers for the statement that follows.
    #[must_use]
    pub fn load(mut self, sources: &[Source]) -> Self {
        load_all(sources, Register::FIRST, &mut self.expressions);
        self
    }

    /// Looks the concatenation up in a verdict map and obeys.
    #[must_use]
    pub fn verdict_map(mut self, map: &str, key: &[Source]) -> Self {
        load_all(key, Register::FIRST, &mut self.expressions);
        expression(&mut self.expressions, "lookup", |e| {
            e.attr_str(1, map);
            e.attr_u32(2, Register::FIRST.wire());
            e.attr_u32(3, 0);
        });
        self
    }

    /// Translates the destination to the address and port that were loaded (`Family::Ip` or `Family::Ip6`).
    #[must_use]
    pub fn dnat(self, family: Family) -> Self {
        self.nat(1, family)
    }

    /// Translates the source to the address and port that were loaded.
    #[must_use]
    pub fn snat(self, family: Family) -> Self {
        self.nat(0, family)
    }

    /// Translates the source to this host's address on the way out, the port chosen at random.
    #[must_use]
    pub fn masquerade_random(mut self) -> Self {
        /// `NF_NAT_RANGE_PROTO_RANDOM_FULLY`
        const FULLY_RANDOM: u32 = 1 << 4;
        expression(&mut self.expressions, "masq", |e| e.attr_u32(1, FULLY_RANDOM));
        self
    }

    /// Netdev: sends the packet to the neighbour whose address was loaded, on the device with this index, otherwise
    /// unchanged (the link-layer addresses are the neighbour's and the device's). Ends the rule.
    #[must_use]
    pub fn forward(mut self, family: Family, device: u32) -> Self {
        let words = if family == Family::Ip6 { 4 } else { 1 };
        let device_at = Register::FIRST.plus(words);
        immediate(&mut self.expressions, device_at, &device.to_ne_bytes());
        expression(&mut self.expressions, "fwd", |e| {
            e.attr_u32(1, device_at.wire());
            e.attr_u32(2, Register::FIRST.wire());
            e.attr_u32(3, u32::from(family as u8));
        });
        self
    }

    /// Sets the packet's mark.
    #[must_use]
    pub fn set_mark(mut self, source: &Source) -> Self {
        source.load(Register::FIRST, &mut self.expressions);
        set_mark(&mut self.expressions, Register::FIRST);
        self
    }

    /// Adds, refreshes or deletes an element of a dynamic set; with `data`, of a dynamic map.
    #[must_use]
    pub fn dynamic(
        mut self,
        op: DynamicOp,
        set: &str,
        key: &[Source],
        data: &[Source],
        timeout: Option<Duration>,
    ) -> Self {
        let words = load_all(key, Register::FIRST, &mut self.expressions);
        let data_at = Register::FIRST.plus(words);
        load_all(data, data_at, &mut self.expressions);
        expression(&mut self.expressions, "dynset", |e| {
            e.attr_str(1, set);
            e.attr_u32(3, op as u32);
            e.attr_u32(4, Register::FIRST.wire());
            if !data.is_empty() {
                e.attr_u32(5, data_at.wire());
            }
            if let Some(timeout) = timeout {
                e.attr_u64(6, milliseconds(timeout));
            }
        });
        self
    }

    /// Refuses the packet and tells its sender.
    #[must_use]
    pub fn reject(mut self, how: Reject) -> Self {
        /// `NFT_REJECT_ICMP_UNREACH`, `NFT_REJECT_TCP_RST`, `NFT_REJECT_ICMPX_UNREACH`
        const KINDS: [u32; 3] = [0, 1, 2];
        let (kind, code) = match how {
            Reject::PortUnreachable(Family::Ip6) => (KINDS[0], 4),
            Reject::PortUnreachable(_) => (KINDS[0], 3),
            Reject::TcpReset => (KINDS[1], 0),
            Reject::PortUnreachableInet => (KINDS[2], 1),
        };
        expression(&mut self.expressions, "reject", |e| {
            e.attr_u32(1, kind);
            e.attr_u8(2, code);
        });
        self
    }

    /// Counts the packets that come so far.
    #[must_use]
    pub fn counter(mut self) -> Self {
        expression(&mut self.expressions, "counter", |e| {
            e.attr_u64(1, 0);
            e.attr_u64(2, 0);
        });
        self
    }

    /// Matches at most so many packets a second, and bursts of so many.
    #[must_use]
    pub fn limit_per_second(mut self, packets: u64, burst: u32) -> Self {
        expression(&mut self.expressions, "limit", |e| {
            e.attr_u64(1, packets);
            e.attr_u64(2, 1);
            e.attr_u32(3, burst);
            e.attr_u32(4, 0);
            e.attr_u32(5, 0);
        });
        self
    }

    /// Ends with a verdict.
    #[must_use]
    pub fn verdict(mut self, verdict: &Verdict) -> Self {
        expression(&mut self.expressions, "immediate", |e| {
            e.attr_u32(1, 0);
            e.nest(2, |data| verdict.write(data));
        });
        self
    }

    /// Ends with a drop.
    #[must_use]
    pub fn drop(self) -> Self {
        self.verdict(&Verdict::Drop)
    }

    /// Ends with an accept.
    #[must_use]
    pub fn accept(self) -> Self {
        self.verdict(&Verdict::Accept)
    }

    /// Runs another chain, then goes on.
    #[must_use]
    pub fn jump(self, chain: &str) -> Self {
        self.verdict(&Verdict::Jump(chain.to_owned()))
    }

    /// Goes on in another chain for good.
    #[must_use]
    pub fn goto(self, chain: &str) -> Self {
        self.verdict(&Verdict::Goto(chain.to_owned()))
    }

    /// Goes back to the calling chain.
    #[must_use]
    pub fn return_(self) -> Self {
        self.verdict(&Verdict::Return)
    }

    /// A comment of at most 127 bytes that `nft` prints with the rule.
    #[must_use]
    pub fn comment(mut self, comment: impl Into<String>) -> Self {
        self.comment = Some(comment.into());
        self
    }

    /// What it is called where its refusal is reported.
    pub(crate) fn label(&self) -> &str {
        self.comment.as_deref().unwrap_or("without comment")
    }

    pub(crate) fn write(&self, out: &mut Writer) {
        out.nest(4, |list| list.append(&self.expressions));
        if let Some(comment) = &self.comment {
            out.attr(7, &comment_userdata(comment));
        }
    }

    fn compare(mut self, source: &Source, op: u32, bytes: &[u8]) -> Self {
        source.load(Register::FIRST, &mut self.expressions);
        expression(&mut self.expressions, "cmp", |e| {
            e.attr_u32(1, Register::FIRST.wire());
            e.attr_u32(2, op);
            e.nest(3, |data| data.attr(1, bytes));
        });
        self
    }

    fn lookup(mut self, set: &str, key: &[Source], inverted: bool) -> Self {
        load_all(key, Register::FIRST, &mut self.expressions);
        expression(&mut self.expressions, "lookup", |e| {
            e.attr_str(1, set);
            e.attr_u32(2, Register::FIRST.wire());
            if inverted {
                e.attr_u32(5, 1);
            }
        });
        self
    }

    fn nat(mut self, kind: u32, family: Family) -> Self {
        let words = if family == Family::Ip6 { 4 } else { 1 };
        expression(&mut self.expressions, "nat", |e| {
            e.attr_u32(1, kind);
            e.attr_u32(2, u32::from(family as u8));
            e.attr_u32(3, Register::FIRST.wire());
            e.attr_u32(5, Register::FIRST.plus(words).wire());
        });
        self
    }
}

/// A comment as `nft` keeps it: type 0, length, text with a closing zero.
pub(crate) fn comment_userdata(comment: &str) -> Vec<u8> {
    let mut end = comment.len().min(127);
    while !comment.is_char_boundary(end) {
        end -= 1;
    }
    let mut bytes = vec![0, u8::try_from(end + 1).unwrap_or(u8::MAX)];
    bytes.extend_from_slice(&comment.as_bytes()[..end]);
    bytes.push(0);
    bytes
}

pub(crate) fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
