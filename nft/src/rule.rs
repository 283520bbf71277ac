// SPDX-License-Identifier: Apache-2.0
//! Rules: matches and statements in the order in which the kernel runs them. Plain values, given to a `Batch`.
//!
//! Each method uses registers from the first on. Only [`Rule::load`] and [`Rule::map`] leave a result there; the next
//! statement consumes it.

use std::time::Duration;

use crate::batch::OBJECT_COUNTER;
use crate::expression::Expression;
use crate::field::{Field, concat};
use crate::kernel_expression::{KernelExpression, kernel_expressions};
use crate::keys::PayloadBase;
use crate::load::load_all;
use crate::registers::{Register, load_constant, set_mark, write_expression};
use crate::table::Family;
use crate::verdict::Verdict;
use crate::wire::Writer;

/// How a rule rejects a packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reject {
    /// ICMP or `ICMPv6` "port unreachable", in a table of this family.
    PortUnreachable(Family),
    /// ICMP or `ICMPv6` "port unreachable", in an `inet` table.
    PortUnreachableInet,
    /// A TCP reset. The rule must match TCP only.
    TcpReset,
}

/// How a rule changes a dynamic set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DynamicOp {
    /// Adds the element if it is missing.
    Add = 0,
    /// Adds the element, or restarts its timeout. The data of an existing element stay: delete the element first.
    Update = 1,
    /// Deletes the element. For a map the kernel requires data even here, and ignores them.
    Delete = 2,
}

/// A rate of packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limit {
    /// So many packets
    pub packets: u64,
    /// in so many seconds. `nft` knows second, minute, hour, day and week.
    pub unit: u64,
    /// So many at once.
    pub burst: u32,
    /// Matches what exceeds the rate, instead of what does not.
    pub over: bool,
}

impl Limit {
    fn write(self, e: &mut Writer) {
        e.attr_u64(1, self.packets);
        e.attr_u64(2, self.unit);
        e.attr_u32(3, self.burst);
        e.attr_u32(4, 0);
        e.attr_u32(5, u32::from(self.over));
    }
}

/// A rule.
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

    /// Matches if the expression equals the value.
    #[must_use]
    pub fn equals(self, expression: &Expression, value: Field) -> Self {
        self.compare(expression, 0, &concat(&[value]))
    }

    /// Matches if the expression does not equal the value.
    #[must_use]
    pub fn not_equals(self, expression: &Expression, value: Field) -> Self {
        self.compare(expression, 1, &concat(&[value]))
    }

    /// Matches if the expression has exactly these bytes.
    #[must_use]
    pub fn equals_bytes(self, expression: &Expression, bytes: &[u8]) -> Self {
        self.compare(expression, 0, bytes)
    }

    /// Matches if any of the bits is set in an expression of 4 bytes in host order (`Ct::State`, `Ct::Status`, a mark).
    #[must_use]
    pub fn has_any(self, expression: Expression, bits: u32) -> Self {
        self.compare(&expression.masked(bits.to_ne_bytes().to_vec()), 1, &[0; 4])
    }

    /// Matches if none of the bits is set in an expression of 4 bytes in host order.
    #[must_use]
    pub fn has_none(self, expression: Expression, bits: u32) -> Self {
        self.compare(&expression.masked(bits.to_ne_bytes().to_vec()), 0, &[0; 4])
    }

    /// Matches if any of the bits is set in an expression of 1 byte.
    #[must_use]
    pub fn has_any_byte(self, expression: Expression, bits: u8) -> Self {
        self.compare(&expression.masked(vec![bits]), 1, &[0])
    }

    /// Matches if the expression is at most the value. Numbers of several bytes are compared in network order.
    #[must_use]
    pub fn at_most(self, expression: &Expression, value: Field) -> Self {
        self.compare(expression, 3, &concat(&[value]))
    }

    /// Matches if the concatenation is an element of the set. For the keys of a map there is [`Rule::map`]: older kernels refuse a map
    /// here (seen: Ubuntu's 5.15.0-25).
    #[must_use]
    pub fn in_set(self, set: &str, key: &[Expression]) -> Self {
        self.lookup(set, key, false)
    }

    /// Matches if the concatenation is not an element of the set.
    #[must_use]
    pub fn not_in_set(self, set: &str, key: &[Expression]) -> Self {
        self.lookup(set, key, true)
    }

    /// Looks the concatenation up in a map to values, and loads the data for the next statement. Does not match if the map
    /// lacks the key.
    #[must_use]
    pub fn map(mut self, map: &str, key: &[Expression]) -> Self {
        let expression = Expression::Map { map: map.to_owned(), key: key.to_vec(), data: Vec::new() };
        expression.load(Register::FIRST, &mut self.expressions);
        self
    }

    /// Loads a concatenation for the next statement.
    #[must_use]
    pub fn load(mut self, expressions: &[Expression]) -> Self {
        load_all(expressions, Register::FIRST, &mut self.expressions);
        self
    }

    /// Looks the concatenation up in a verdict map and obeys.
    #[must_use]
    pub fn verdict_map(mut self, map: &str, key: &[Expression]) -> Self {
        load_all(key, Register::FIRST, &mut self.expressions);
        write_expression(&mut self.expressions, "lookup", |e| {
            e.attr_str(1, map);
            e.attr_u32(2, Register::FIRST.wire());
            e.attr_u32(3, 0);
        });
        self
    }

    /// Translates the destination to the loaded address and port (`Family::Ip` or `Family::Ip6`).
    #[must_use]
    pub fn dnat(self, family: Family) -> Self {
        self.nat(1, family)
    }

    /// Translates the source to the loaded address and port (`Family::Ip` or `Family::Ip6`).
    #[must_use]
    pub fn snat(self, family: Family) -> Self {
        self.nat(0, family)
    }

    /// Translates the source to this host's address on the output interface, with a random port.
    #[must_use]
    pub fn masquerade_random(mut self) -> Self {
        /// `NF_NAT_RANGE_PROTO_RANDOM_FULLY`
        const FULLY_RANDOM: u32 = 1 << 4;
        write_expression(&mut self.expressions, "masq", |e| e.attr_u32(1, FULLY_RANDOM));
        self
    }

    /// Netdev family: sends the packet to the neighbour with the loaded address, on the device with this index. Only the
    /// link-layer addresses change. Ends the rule.
    #[must_use]
    pub fn forward(mut self, family: Family, device: u32) -> Self {
        let words = if family == Family::Ip6 { 4 } else { 1 };
        let device_at = Register::FIRST.plus(words);
        load_constant(&mut self.expressions, device_at, &device.to_ne_bytes());
        write_expression(&mut self.expressions, "fwd", |e| {
            e.attr_u32(1, device_at.wire());
            e.attr_u32(2, Register::FIRST.wire());
            e.attr_u32(3, u32::from(family as u8));
        });
        self
    }

    /// Sends a copy of the packet to the next hop on the way to the loaded address (`Family::Ip` or `Family::Ip6`), then runs the next
    /// statement. The copy keeps its addresses, has no conntrack entry, and passes the hooks output and postrouting, but no rule like
    /// this one again. Before the input hook its hop limit is one less. An IPv4 copy has the flag "don't fragment".
    #[must_use]
    pub fn duplicate(mut self) -> Self {
        write_expression(&mut self.expressions, "dup", |e| e.attr_u32(1, Register::FIRST.wire()));
        self
    }

    /// Sets the TTL or hop limit of the packet (`Family::Ip` or `Family::Ip6`).
    #[must_use]
    pub fn set_hop_limit(self, family: Family, value: u8) -> Self {
        /// `NFT_PAYLOAD_CSUM_INET`, and the offset of the checksum of an IPv4 header.
        const CHECKSUM: (u32, u32) = (1, 10);
        if family == Family::Ip6 {
            return self.write_header(&Expression::Value(Field::Proto(value)), 7, 1, (0, 0));
        }
        // With the protocol: the kernel updates the checksum for whole words.
        let protocol = Expression::network(8, 2);
        let both =
            Expression::Bitwise { of: Box::new(protocol), mask: vec![0, u8::MAX], xor: vec![value, 0] };
        self.write_header(&both, 8, 2, CHECKSUM)
    }

    /// Sets the packet's mark.
    #[must_use]
    pub fn set_mark(mut self, expression: &Expression) -> Self {
        expression.load(Register::FIRST, &mut self.expressions);
        set_mark(&mut self.expressions, Register::FIRST);
        self
    }

    /// Has the kernel report the packet's way from here on, see [`crate::Tracer`].
    #[must_use]
    pub fn trace(mut self) -> Self {
        /// `NFT_META_NFTRACE`
        const NFTRACE: u32 = 12;
        load_constant(&mut self.expressions, Register::FIRST, &[1]);
        write_expression(&mut self.expressions, "meta", |e| {
            e.attr_u32(2, NFTRACE);
            e.attr_u32(3, Register::FIRST.wire());
        });
        self
    }

    /// Adds, updates or deletes an element of a dynamic set, or with `data` of a dynamic map.
    #[must_use]
    pub fn dynamic(
        mut self,
        op: DynamicOp,
        set: &str,
        key: &[Expression],
        data: &[Expression],
        timeout: Option<Duration>,
    ) -> Self {
        let words = load_all(key, Register::FIRST, &mut self.expressions);
        let data_at = Register::FIRST.plus(words);
        load_all(data, data_at, &mut self.expressions);
        write_expression(&mut self.expressions, "dynset", |e| {
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

    /// Keeps an element with a limit of its own in a dynamic set, and matches as the limit does. Matches nothing while the set is full.
    #[must_use]
    pub fn dynamic_limit(mut self, set: &str, key: &[Expression], timeout: Duration, limit: Limit) -> Self {
        load_all(key, Register::FIRST, &mut self.expressions);
        write_expression(&mut self.expressions, "dynset", |e| {
            e.attr_str(1, set);
            e.attr_u32(3, DynamicOp::Update as u32);
            e.attr_u32(4, Register::FIRST.wire());
            e.attr_u64(6, milliseconds(timeout));
            e.nest(7, |expression| {
                expression.attr_str(1, "limit");
                expression.nest(2, |e| limit.write(e));
            });
        });
        self
    }

    /// Rejects the packet: drops it and informs the sender.
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
        write_expression(&mut self.expressions, "reject", |e| {
            e.attr_u32(1, kind);
            e.attr_u8(2, code);
        });
        self
    }

    /// Counts the packets that reach this statement into a counter of the table.
    #[must_use]
    pub fn count(mut self, counter: &str) -> Self {
        write_expression(&mut self.expressions, "objref", |e| {
            e.attr_u32(1, OBJECT_COUNTER);
            e.attr_str(2, counter);
        });
        self
    }

    /// Counts the packets that reach this statement.
    #[must_use]
    pub fn counter(mut self) -> Self {
        write_expression(&mut self.expressions, "counter", |e| {
            e.attr_u64(1, 0);
            e.attr_u64(2, 0);
        });
        self
    }

    /// Matches at most `packets` per second, with bursts of at most `burst`.
    #[must_use]
    pub fn limit_per_second(mut self, packets: u64, burst: u32) -> Self {
        let limit = Limit { packets, unit: 1, burst, over: false };
        write_expression(&mut self.expressions, "limit", |e| limit.write(e));
        self
    }

    /// Ends the rule with a verdict.
    #[must_use]
    pub fn verdict(mut self, verdict: &Verdict) -> Self {
        write_expression(&mut self.expressions, "immediate", |e| {
            e.attr_u32(1, 0);
            e.nest(2, |data| verdict.write(data));
        });
        self
    }

    /// Drops the packet.
    #[must_use]
    pub fn drop(self) -> Self {
        self.verdict(&Verdict::Drop)
    }

    /// Accepts the packet.
    #[must_use]
    pub fn accept(self) -> Self {
        self.verdict(&Verdict::Accept)
    }

    /// Runs another chain, then continues with the next rule.
    #[must_use]
    pub fn jump(self, chain: &str) -> Self {
        self.verdict(&Verdict::Jump(chain.to_owned()))
    }

    /// Continues in another chain and does not return.
    #[must_use]
    pub fn goto(self, chain: &str) -> Self {
        self.verdict(&Verdict::Goto(chain.to_owned()))
    }

    /// Returns to the calling chain.
    #[must_use]
    pub fn return_(self) -> Self {
        self.verdict(&Verdict::Return)
    }

    /// Sets the comment that the `nft` command prints with the rule. Cut at 127 bytes.
    #[must_use]
    pub fn comment(mut self, comment: impl Into<String>) -> Self {
        self.comment = Some(comment.into());
        self
    }

    /// What a kernel must know to take the rule: its expressions in order, also those inside others.
    pub fn kernel_expressions(&self) -> Vec<KernelExpression> {
        kernel_expressions(self.expressions.bytes())
    }

    /// Name of the rule in errors.
    pub(crate) fn label(&self) -> &str {
        self.comment.as_deref().unwrap_or("without comment")
    }

    pub(crate) fn write(&self, out: &mut Writer) {
        out.nest(4, |list| list.append(&self.expressions));
        if let Some(comment) = &self.comment {
            out.attr(7, &comment_userdata(comment));
        }
    }

    fn compare(mut self, expression: &Expression, op: u32, bytes: &[u8]) -> Self {
        expression.load(Register::FIRST, &mut self.expressions);
        write_expression(&mut self.expressions, "cmp", |e| {
            e.attr_u32(1, Register::FIRST.wire());
            e.attr_u32(2, op);
            e.nest(3, |data| data.attr(1, bytes));
        });
        self
    }

    /// Writes to the IP header. `checksum` is the kind and the offset of its checksum.
    fn write_header(mut self, value: &Expression, offset: u32, length: u32, checksum: (u32, u32)) -> Self {
        value.load(Register::FIRST, &mut self.expressions);
        write_expression(&mut self.expressions, "payload", |e| {
            e.attr_u32(2, PayloadBase::Network as u32);
            e.attr_u32(3, offset);
            e.attr_u32(4, length);
            e.attr_u32(5, Register::FIRST.wire());
            e.attr_u32(6, checksum.0);
            e.attr_u32(7, checksum.1);
            e.attr_u32(8, 0);
        });
        self
    }

    fn lookup(mut self, set: &str, key: &[Expression], inverted: bool) -> Self {
        load_all(key, Register::FIRST, &mut self.expressions);
        write_expression(&mut self.expressions, "lookup", |e| {
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
        write_expression(&mut self.expressions, "nat", |e| {
            e.attr_u32(1, kind);
            e.attr_u32(2, u32::from(family as u8));
            e.attr_u32(3, Register::FIRST.wire());
            e.attr_u32(5, Register::FIRST.plus(words).wire());
        });
        self
    }
}

/// A comment in the user-data format of the `nft` command: type 0, length, text, zero.
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
