// SPDX-License-Identifier: Apache-2.0
//! Batches: operations that the kernel applies atomically. Building a batch does no I/O; `Nft::commit` sends it.

use crate::field::{field_lengths, length, type_number};
use crate::rows::{Row, Rows};
use crate::rule::{Rule, comment_userdata, milliseconds};
use crate::set::{Data, Element, MapDataType, Set};
use crate::table::{Chain, ChainPolicy, ChainType, Hook, Table};
use crate::wire::{Header, Writer, flag};

/// `NFNL_SUBSYS_NFTABLES`
pub(crate) const SUBSYSTEM: u16 = 10 << 8;

pub(crate) mod message {
    //! enum `nf_tables_msg_types`.
    pub(crate) const NEWTABLE: u16 = 0;
    pub(crate) const GETTABLE: u16 = 1;
    pub(crate) const DELTABLE: u16 = 2;
    pub(crate) const NEWCHAIN: u16 = 3;
    pub(crate) const GETCHAIN: u16 = 4;
    pub(crate) const DELCHAIN: u16 = 5;
    pub(crate) const NEWRULE: u16 = 6;
    pub(crate) const GETRULE: u16 = 7;
    pub(crate) const DELRULE: u16 = 8;
    pub(crate) const NEWSET: u16 = 9;
    pub(crate) const GETSET: u16 = 10;
    pub(crate) const DELSET: u16 = 11;
    pub(crate) const NEWSETELEM: u16 = 12;
    pub(crate) const GETSETELEM: u16 = 13;
    pub(crate) const DELSETELEM: u16 = 14;
    pub(crate) const NEWGEN: u16 = 15;
    pub(crate) const GETGEN: u16 = 16;
    pub(crate) const TRACE: u16 = 17;
    pub(crate) const NEWOBJ: u16 = 18;
    pub(crate) const GETOBJ: u16 = 19;
    pub(crate) const DELOBJ: u16 = 20;
}

/// Bytes of elements in one message, below the 64 KiB of an attribute.
const CHUNK: usize = 60_000;

/// enum `nft_set_flags`
mod set_flag {
    pub(super) const INTERVAL: u32 = 0x4;
    pub(super) const MAP: u32 = 0x8;
    pub(super) const TIMEOUT: u32 = 0x10;
    pub(super) const EVAL: u32 = 0x20;
    pub(super) const CONCAT: u32 = 0x80;
}

/// `NFT_TABLE_F_DORMANT`
pub(crate) const DORMANT: u32 = 1;
/// `NFT_TABLE_F_OWNER`
pub(crate) const OWNED: u32 = 2;
/// `NFT_OBJECT_COUNTER`
pub(crate) const OBJECT_COUNTER: u32 = 1;
/// Number of the data type of verdicts (`NFT_DATA_VERDICT`).
const VERDICT_TYPE: u32 = 0xffff_ff00;

/// Operations to commit together, in order. An operation may use what an earlier one created.
#[derive(Debug, Clone, Default)]
pub struct Batch {
    messages: Writer,
    /// What each message does, in words, for errors.
    operations: Vec<String>,
    /// Offset of the last message.
    last: usize,
    sets: u32,
}

impl Batch {
    /// A batch without operations.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether the batch has no operations.
    pub fn is_empty(&self) -> bool {
        self.operations.is_empty()
    }

    /// Size in bytes.
    pub fn len(&self) -> usize {
        self.messages.len()
    }

    /// Creates a table if it does not exist. The `nft` command prints the comment.
    pub fn add_table(&mut self, table: &Table, comment: Option<&str>) -> &mut Self {
        self.push(message::NEWTABLE, flag::CREATE, table, format!("add table {table}"), |m| {
            m.attr_str(1, &table.name);
            m.attr_u32(2, 0);
            if let Some(comment) = comment {
                m.attr(6, &comment_userdata(comment));
            }
        })
    }

    /// Creates a table that only this connection can change, and that the kernel deletes with it. It must not exist. Since Linux 5.12.
    pub fn add_owned_table(&mut self, table: &Table) -> &mut Self {
        let flags = flag::CREATE | flag::EXCLUSIVE;
        self.push(message::NEWTABLE, flags, table, format!("add owned table {table}"), |m| {
            m.attr_str(1, &table.name);
            m.attr_u32(2, OWNED);
        })
    }

    /// Creates a table whose base chains see no packets. It must not exist.
    pub fn add_dormant_table(&mut self, table: &Table) -> &mut Self {
        let flags = flag::CREATE | flag::EXCLUSIVE;
        self.push(message::NEWTABLE, flags, table, format!("add dormant table {table}"), |m| {
            m.attr_str(1, &table.name);
            m.attr_u32(2, DORMANT);
        })
    }

    /// Deletes a table with its content. The table must exist.
    pub fn delete_table(&mut self, table: &Table) -> &mut Self {
        self.push(message::DELTABLE, 0, table, format!("delete table {table}"), |m| {
            m.attr_str(1, &table.name);
        })
    }

    /// Deletes a table with its content, if it exists.
    pub fn destroy_table(&mut self, table: &Table) -> &mut Self {
        self.add_table(table, None).delete_table(table)
    }

    /// Creates a chain.
    pub fn add_chain(&mut self, table: &Table, chain: &Chain) -> &mut Self {
        let operation = format!("add chain {} to {table}", chain.name);
        self.push(message::NEWCHAIN, flag::CREATE, table, operation, |m| {
            m.attr_str(1, &table.name);
            m.attr_str(3, &chain.name);
            if let Some(base) = &chain.base {
                m.nest(4, |hook| {
                    hook.attr_u32(1, base.hook.number());
                    hook.attr_u32(2, base.priority.cast_unsigned());
                    if let Hook::Ingress(devices) = &base.hook {
                        hook.nest(4, |list| devices.iter().for_each(|device| list.attr_str(1, device)));
                    }
                });
                m.attr_u32(5, u32::from(base.policy == ChainPolicy::Accept));
                let kind = if base.kind == ChainType::Nat { "nat" } else { "filter" };
                m.attr_str(7, kind);
            }
        })
    }

    /// Creates a counter that rules count into, see [`Rule::count`]. Nothing happens if it exists.
    pub fn add_counter(&mut self, table: &Table, name: &str) -> &mut Self {
        self.push(message::NEWOBJ, flag::CREATE, table, format!("add counter {name} to {table}"), |m| {
            m.attr_str(1, &table.name);
            m.attr_str(2, name);
            m.attr_u32(3, OBJECT_COUNTER);
            m.nest(4, |_| {});
        })
    }

    /// Deletes a chain with its rules. No rule or element may jump to it.
    pub fn delete_chain(&mut self, table: &Table, chain: &str) -> &mut Self {
        self.flush_chain(table, chain);
        self.push(message::DELCHAIN, 0, table, format!("delete chain {chain} of {table}"), |m| {
            m.attr_str(1, &table.name);
            m.attr_str(3, chain);
        })
    }

    /// Deletes the rules of a chain.
    pub fn flush_chain(&mut self, table: &Table, chain: &str) -> &mut Self {
        self.push(message::DELRULE, 0, table, format!("flush chain {chain} of {table}"), |m| {
            m.attr_str(1, &table.name);
            m.attr_str(2, chain);
        })
    }

    /// Appends a rule to a chain.
    pub fn add_rule(&mut self, table: &Table, chain: &str, rule: &Rule) -> &mut Self {
        let operation = format!("add rule {} to chain {chain} of {table}", rule.label());
        self.push(message::NEWRULE, flag::CREATE | flag::APPEND, table, operation, |m| {
            m.attr_str(1, &table.name);
            m.attr_str(2, chain);
            rule.write(m);
        })
    }

    /// Creates a set or map.
    pub fn add_set(&mut self, table: &Table, set: &Set) -> &mut Self {
        self.sets += 1;
        let id = self.sets;
        let operation = format!("add set {} to {table}", set.name);
        self.push(message::NEWSET, flag::CREATE, table, operation, |m| write_set(m, table, set, id))
    }

    /// Deletes a set or map. No rule may use it.
    pub fn delete_set(&mut self, table: &Table, set: &str) -> &mut Self {
        self.push(message::DELSET, 0, table, format!("delete set {set} of {table}"), |m| {
            m.attr_str(1, &table.name);
            m.attr_str(2, set);
        })
    }

    /// Adds elements. An element that exists with the same data stays. The kernel rejects one that exists with other data
    /// (EEXIST): delete it first, in the same batch.
    pub fn add_elements<'e>(
        &mut self,
        table: &Table,
        set: &str,
        elements: impl IntoIterator<Item = &'e Element>,
    ) -> &mut Self {
        let write = |out: &mut Writer, element: &&Element| {
            write_keys(out, &element.key, element.key_end.as_deref());
            match &element.data {
                Some(Data::Value(value)) => out.nest(2, |data| data.attr(1, value)),
                Some(Data::Verdict(verdict)) => out.nest(2, |data| verdict.write(data)),
                None => {}
            }
            if let Some(timeout) = element.timeout {
                out.attr_u64(4, milliseconds(timeout));
            }
        };
        self.elements(message::NEWSETELEM, flag::CREATE, table, set, elements, write)
    }

    /// Deletes elements, which must exist. Ignores their data.
    pub fn delete_elements<'e>(
        &mut self,
        table: &Table,
        set: &str,
        elements: impl IntoIterator<Item = &'e Element>,
    ) -> &mut Self {
        let write =
            |out: &mut Writer, element: &&Element| write_keys(out, &element.key, element.key_end.as_deref());
        self.elements(message::DELSETELEM, 0, table, set, elements, write)
    }

    /// Adds many elements, see [`Batch::add_elements`].
    pub fn add_rows<'r>(
        &mut self,
        table: &Table,
        set: &str,
        rows: impl IntoIterator<Item = Row<'r>>,
    ) -> &mut Self {
        let write = |out: &mut Writer, row: &Row<'_>| {
            write_keys(out, row.key, row.end);
            if let Some(data) = row.data {
                out.nest(2, |out| out.attr(1, data));
            }
        };
        self.elements(message::NEWSETELEM, flag::CREATE, table, set, rows, write)
    }

    /// Deletes many elements, see [`Batch::delete_elements`].
    pub fn delete_rows(&mut self, table: &Table, set: &str, rows: &Rows) -> &mut Self {
        let write = |out: &mut Writer, row: &Row<'_>| write_keys(out, row.key, row.end);
        self.elements(message::DELSETELEM, 0, table, set, rows.iter(), write)
    }

    /// Deletes all elements of a set.
    pub fn flush_set(&mut self, table: &Table, set: &str) -> &mut Self {
        self.push(message::DELSETELEM, 0, table, format!("flush set {set} of {table}"), |m| {
            m.attr_str(1, &table.name);
            m.attr_str(2, set);
        })
    }

    /// The requests to the kernel, without sequence numbers: equal operations give equal bytes.
    pub fn requests(&self) -> &[u8] {
        self.messages.bytes()
    }

    pub(crate) fn overflowed(&self) -> bool {
        self.messages.overflowed()
    }

    /// Number of messages.
    pub(crate) fn count(&self) -> u32 {
        u32::try_from(self.operations.len()).unwrap_or(u32::MAX)
    }

    /// The messages with sequence numbers from `first` on. The last one requests an acknowledgement.
    pub(crate) fn seal(mut self, first: u32) -> (Writer, Vec<String>) {
        self.messages.renumber(first);
        if !self.operations.is_empty() {
            self.messages.add_flags(self.last, flag::ACK);
        }
        (self.messages, self.operations)
    }

    fn push(
        &mut self,
        kind: u16,
        flags: u16,
        table: &Table,
        operation: String,
        body: impl FnOnce(&mut Writer),
    ) -> &mut Self {
        self.last = self.messages.len();
        self.operations.push(operation);
        let header = Header {
            kind: SUBSYSTEM | kind,
            flags: flag::REQUEST | flags,
            sequence: 0,
            family: table.family as u8,
            resource: 0,
        };
        self.messages.message(header, body);
        self
    }

    fn elements<T>(
        &mut self,
        kind: u16,
        flags: u16,
        table: &Table,
        set: &str,
        elements: impl IntoIterator<Item = T>,
        write: impl Fn(&mut Writer, &T),
    ) -> &mut Self {
        let adding = kind == message::NEWSETELEM;
        let mut elements = elements.into_iter().peekable();
        let mut done = 0_usize;
        while elements.peek().is_some() {
            let verb = if adding { "add to" } else { "delete from" };
            let operation = format!("{verb} set {set} of {table}: elements from number {done} on");
            self.push(kind, flags, table, operation, |m| {
                m.attr_str(1, &table.name);
                m.attr_str(2, set);
                m.nest(3, |list| {
                    let start = list.len();
                    while let Some(element) = elements.next_if(|_| list.len() - start < CHUNK) {
                        list.nest(1, |out| write(out, &element));
                        done += 1;
                    }
                });
            });
        }
        self
    }
}

fn write_set(out: &mut Writer, table: &Table, set: &Set, id: u32) {
    let mut flags = 0;
    let mut set_if = |condition: bool, bit: u32| flags |= if condition { bit } else { 0 };
    set_if(set.data.is_some(), set_flag::MAP);
    set_if(set.expiring, set_flag::TIMEOUT);
    set_if(set.dynamic, set_flag::EVAL);
    set_if(set.interval, set_flag::INTERVAL);
    set_if(set.interval && set.key.len() > 1, set_flag::CONCAT);
    out.attr_str(1, &table.name);
    out.attr_str(2, &set.name);
    out.attr_u32(3, flags);
    out.attr_u32(4, type_number(&set.key));
    out.attr_u32(5, length(&set.key));
    match &set.data {
        Some(MapDataType::Value(fields)) => {
            out.attr_u32(6, type_number(fields));
            out.attr_u32(7, length(fields));
        }
        Some(MapDataType::Verdict) => {
            out.attr_u32(6, VERDICT_TYPE);
            out.attr_u32(7, 0);
        }
        None => {}
    }
    let has_field_lengths = set.interval && set.key.len() > 1;
    if set.size.is_some() || has_field_lengths {
        out.nest(9, |description| {
            if let Some(size) = set.size {
                description.attr_u32(1, size);
            }
            if has_field_lengths {
                description.nest(2, |fields| {
                    for length in field_lengths(&set.key) {
                        fields.nest(1, |field| field.attr_u32(1, length));
                    }
                });
            }
        });
    }
    out.attr_u32(10, id);
    if let Some(timeout) = set.timeout {
        out.attr_u64(11, milliseconds(timeout));
    }
}

pub(crate) fn write_keys(out: &mut Writer, key: &[u8], end: Option<&[u8]>) {
    out.nest(1, |out| out.attr(1, key));
    if let Some(end) = end {
        out.nest(10, |out| out.attr(1, end));
    }
}
