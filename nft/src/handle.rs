// SPDX-License-Identifier: Apache-2.0
//! The handle to nftables: commits batches, reads back what is there. All calls are synchronous and wait for hardly
//! anything but the kernel's own work; call them off an asynchronous runtime's threads when a batch is large.

use std::time::Duration;

use nix::errno::Errno;

use crate::batch::{Batch, SUBSYSTEM, message};
use crate::decode;
use crate::error::{Error, Refusal};
use crate::rows::{RowShape, Rows};
use crate::set::Element;
use crate::socket::{Answer, Socket, refusal};
use crate::table::{Family, Table};
use crate::wire::{Head, Message, Writer, flag};

/// `NFNL_MSG_BATCH_BEGIN`, `NFNL_MSG_BATCH_END`
const BATCH_BEGIN: u16 = 0x10;
const BATCH_END: u16 = 0x11;
/// `NFNL_BATCH_GENID`
const BATCH_GENERATION: u16 = 1;
/// ERESTART is private to the kernel and has no name in user space.
const ERESTART: i32 = 85;
/// How often a dump that others disturbed is tried again, and a transaction that others overtook.
const TRIES: usize = 16;
/// A set of so few elements still has the table that it was created with.
const NEVER_GREW: usize = 32;
/// Time between two listings that should agree.
const SETTLE: Duration = Duration::from_millis(5);

/// A connection to nftables of the network namespace in which it was opened.
#[derive(Debug)]
pub struct Nft {
    socket: Socket,
}

impl Nft {
    /// Opens it in the network namespace of the calling thread. Needs `CAP_NET_ADMIN` there.
    pub fn open() -> Result<Self, Error> {
        Ok(Self { socket: Socket::open(0)? })
    }

    /// The netlink port by which a `Monitor` knows our own changes.
    pub fn port(&self) -> Result<u32, Error> {
        self.socket.port()
    }

    /// The generation of the ruleset of this namespace; every commit of anybody raises it.
    pub fn generation(&mut self) -> Result<u32, Error> {
        let mut generation = None;
        self.ask(message::GETGEN, 0, 0, "read the generation", |_| {}, |m| generation = m.attrs().u32(1))?;
        generation.ok_or_else(|| Error::NoAnswer("read the generation".to_owned()))
    }

    /// Applies all of a batch, or nothing of it.
    pub fn commit(&mut self, batch: Batch) -> Result<(), Error> {
        self.send_batch(batch, None)
    }

    /// Applies all of a batch if nobody has committed anything since `generation`; otherwise [`Error::Stale`].
    pub fn commit_at(&mut self, batch: Batch, generation: u32) -> Result<(), Error> {
        self.send_batch(batch, Some(generation))
    }

    /// Reads with `plan` and commits what it returns, as one: when somebody else commits in between, both are done again,
    /// a bounded number of times. Returns the generations before and after it, see [`Nft::generation`].
    pub fn transact<E: From<Error>>(
        &mut self,
        mut plan: impl FnMut(&mut Self) -> Result<Batch, E>,
    ) -> Result<(u32, u32), E> {
        let mut last = Error::Stale;
        for _ in 0..TRIES {
            let generation = self.generation()?;
            let batch = plan(self)?;
            if batch.is_empty() {
                return Ok((generation, generation));
            }
            match self.commit_at(batch, generation) {
                // The kernel leaves 0 out.
                Ok(()) => return Ok((generation, generation.checked_add(1).unwrap_or(1))),
                Err(Error::Stale) => last = Error::Stale,
                Err(error) => return Err(error.into()),
            }
        }
        Err(last.into())
    }

    /// The tables of a family.
    pub fn tables(&mut self, family: Family) -> Result<Vec<TableInfo>, Error> {
        self.dump(message::GETTABLE, family, "list tables", |_| {}, decode::table)
    }

    /// The table, if it exists.
    pub fn table(&mut self, table: &Table) -> Result<Option<TableInfo>, Error> {
        Ok(self.tables(table.family)?.into_iter().find(|info| info.name == table.name))
    }

    /// The names of a table's chains.
    pub fn chains(&mut self, table: &Table) -> Result<Vec<String>, Error> {
        let all = self.dump(message::GETCHAIN, table.family, "list chains", |_| {}, decode::chain)?;
        Ok(all.into_iter().filter(|(of, _)| *of == table.name).map(|(_, name)| name).collect())
    }

    /// A table's rules, chain by chain, in order.
    pub fn rules(&mut self, table: &Table) -> Result<Vec<RuleInfo>, Error> {
        let only = |m: &mut Writer| m.attr_str(1, &table.name);
        let all = self.dump(message::GETRULE, table.family, "list rules", only, decode::rule)?;
        Ok(all.into_iter().filter(|(of, _)| *of == table.name).map(|(_, rule)| rule).collect())
    }

    /// The names of a table's sets and maps.
    pub fn sets(&mut self, table: &Table) -> Result<Vec<String>, Error> {
        let only = |m: &mut Writer| m.attr_str(1, &table.name);
        let all = self.dump(message::GETSET, table.family, "list sets", only, decode::set)?;
        Ok(all.into_iter().filter(|(of, _)| *of == table.name).map(|(_, name)| name).collect())
    }

    /// The elements of a set or map, without their timeouts, in order. See [`Nft::rows`].
    pub fn elements(&mut self, table: &Table, set: &str) -> Result<Vec<Element>, Error> {
        let list = |nft: &mut Self| {
            let mut found = Vec::new();
            let whole = nft.list(table, set, |m| found.extend(decode::elements(m)))?;
            found.sort_unstable();
            found.dedup();
            Ok(whole.then_some(found))
        };
        self.settled(list, Vec::len)
    }

    /// The elements of a set that packets fill, each with what is left of its time, by key. One listing, as it comes: under
    /// traffic no two are alike, and some elements may be missing.
    pub fn expiring(&mut self, table: &Table, set: &str) -> Result<Vec<Element>, Error> {
        let mut found = Vec::new();
        self.list(table, set, |m| found.extend(decode::expiring(m)))?;
        found.sort_unstable();
        found.dedup_by(|later, first| later.key == first.key);
        Ok(found)
    }

    /// The elements of a set, or of a map to values, whose elements have this shape, in order. The kernel's work grows with the
    /// square of a set's size: a tenth of a second for 90,000 elements. After a set has grown, the kernel moves its elements to a
    /// larger table in the background, and a listing then misses some without saying so: a set that may have grown is read until
    /// two listings agree, with short waits in between.
    pub fn rows(&mut self, table: &Table, set: &str, shape: RowShape) -> Result<Rows, Error> {
        let list = |nft: &mut Self| {
            let mut found = Rows::new(shape);
            let whole = nft.list(table, set, |m| decode::rows(m, &mut found))?;
            found.sort();
            Ok(whole.then_some(found))
        };
        self.settled(list, Rows::len)
    }

    /// Lists until two listings agree; `list` returns `None` when it was disturbed.
    fn settled<T: PartialEq>(
        &mut self,
        mut list: impl FnMut(&mut Self) -> Result<Option<T>, Error>,
        len: impl Fn(&T) -> usize,
    ) -> Result<T, Error> {
        let mut last = None;
        for _ in 0..TRIES {
            let Some(found) = list(self)? else { continue };
            if (len(&found) <= NEVER_GREW && last.is_none()) || last.as_ref() == Some(&found) {
                return Ok(found);
            }
            last = Some(found);
            std::thread::sleep(SETTLE);
        }
        Err(Error::Torn("a set"))
    }

    /// Dumps the elements of a set; false when the dump was disturbed.
    fn list(&mut self, table: &Table, set: &str, visit: impl FnMut(&Message<'_>)) -> Result<bool, Error> {
        let body = |m: &mut Writer| {
            m.attr_str(1, &table.name);
            m.attr_str(2, set);
        };
        let operation = format!("list elements of set {set} of {table}");
        self.ask(message::GETSETELEM, flag::DUMP, table.family as u8, &operation, body, visit)
    }

    /// Dumps until a dump was not disturbed.
    fn dump<T>(
        &mut self,
        kind: u16,
        family: Family,
        operation: &str,
        body: impl Fn(&mut Writer),
        decode: impl Fn(&Message<'_>) -> Option<T>,
    ) -> Result<Vec<T>, Error> {
        for _ in 0..TRIES {
            let mut found = Vec::new();
            let visit = |m: &Message<'_>| found.extend(decode(m));
            if self.ask(kind, flag::DUMP, family as u8, operation, &body, visit)? {
                return Ok(found);
            }
        }
        Err(Error::Torn("nftables"))
    }

    fn ask(
        &mut self,
        kind: u16,
        flags: u16,
        family: u8,
        operation: &str,
        body: impl FnOnce(&mut Writer),
        visit: impl FnMut(&Message<'_>),
    ) -> Result<bool, Error> {
        let sequence = self.socket.reserve(1);
        // A dump ends with a message of its own; anything else must ask for one.
        let end = if flags & flag::DUMP == 0 { flag::ACK } else { 0 };
        let head = Head {
            kind: SUBSYSTEM | kind,
            flags: flag::REQUEST | flags | end,
            sequence,
            family,
            resource: 0,
        };
        let mut request = Writer::new();
        request.message(head, body);
        self.socket.exchange(&request, sequence, operation, visit)
    }

    fn send_batch(&mut self, batch: Batch, generation: Option<u32>) -> Result<(), Error> {
        if batch.is_empty() {
            return Ok(());
        }
        if batch.overflowed() {
            return Err(Error::TooLong);
        }
        self.socket.drain()?;
        let first = self.socket.reserve(batch.count().saturating_add(2));
        let (messages, operations) = batch.seal(first + 1);
        let mut begin = Writer::new();
        begin.message(bracket(BATCH_BEGIN, first), |m| {
            if let Some(generation) = generation {
                m.attr_u32(BATCH_GENERATION, generation);
            }
        });
        let mut end = Writer::new();
        let last = first + u32::try_from(operations.len()).unwrap_or(u32::MAX) + 1;
        end.message(bracket(BATCH_END, last), |_| {});
        self.socket.send(&[begin.bytes(), messages.bytes(), end.bytes()])?;
        self.outcome(first, &operations)
    }

    /// Reads all answers to a batch whose begin has the sequence number `first`.
    fn outcome(&mut self, first: u32, operations: &[String]) -> Result<(), Error> {
        let mut acknowledged = false;
        let mut failed: Option<Refusal> = None;
        while let Some(messages) = self.socket.receive()? {
            for message in messages {
                let Some(index) = message.sequence.checked_sub(first) else { continue };
                let index = usize::try_from(index).unwrap_or(usize::MAX);
                if index > operations.len() + 1 {
                    continue;
                }
                let operation = match index {
                    0 => "commit the batch",
                    at => operations.get(at - 1).map_or("end the batch", String::as_str),
                };
                match (refusal(&message, operation), &mut failed) {
                    (Answer::Refused(refusal), _) if refusal.errno == Errno::from_raw(ERESTART) => {
                        self.socket.drain()?;
                        return Err(Error::Stale);
                    }
                    (Answer::Refused(refusal), None) => failed = Some(refusal),
                    (Answer::Refused(_), Some(first)) => first.others += 1,
                    (Answer::Done, _) => acknowledged = true,
                    (Answer::Data, _) => {}
                }
            }
        }
        match failed {
            Some(refusal) => Err(refusal.into()),
            None if acknowledged => Ok(()),
            None => Err(Error::NoAnswer("commit the batch".to_owned())),
        }
    }
}

/// A table as the kernel lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableInfo {
    /// Its name.
    pub name: String,
    /// Its comment.
    pub comment: Option<String>,
    /// Chains and sets in it.
    pub objects: u32,
}

/// A rule as the kernel lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuleInfo {
    /// The chain it is in.
    pub chain: String,
    /// Its handle.
    pub handle: u64,
    /// Its comment.
    pub comment: Option<String>,
    /// Its expressions as the kernel writes them: equal for equal rules of one kernel, save for counters.
    pub expressions: Vec<u8>,
}

fn bracket(kind: u16, sequence: u32) -> Head {
    Head { kind, flags: flag::REQUEST, sequence, family: 0, resource: SUBSYSTEM >> 8 }
}
