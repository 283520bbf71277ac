// SPDX-License-Identifier: Apache-2.0
//! Listings over a connection to nftables: tables, chains, rules, sets and elements.
//!
//! A dump spans several messages and is not atomic. The kernel marks one that a change interrupted; such a dump is repeated,
//! a bounded number of times.

use std::collections::BTreeMap;
use std::time::Duration;

use nix::errno::Errno;

use crate::batch::{message, write_keys};
use crate::connection::{ATTEMPTS, Nft};
use crate::decode;
use crate::error::Error;
use crate::info::{ChainInfo, RuleInfo, SetInfo, TableInfo};
use crate::rows::{RowShape, Rows};
use crate::set::Element;
use crate::table::{Family, Table};
use crate::wire::{Message, Writer, flag};

/// The kernel has never resized the hash table of a set with at most this many elements.
const NEVER_RESIZED: usize = 32;
/// Keys of one request. Each is answered by a message of its own: this many fit into the receive buffer.
const KEYS: usize = 1024;
/// Wait between two listings that should agree.
const SETTLE_TIME: Duration = Duration::from_millis(5);

impl Nft {
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
        Ok(self.chain_infos(table)?.into_iter().map(|info| info.name).collect())
    }

    /// The chains of a table.
    pub fn chain_infos(&mut self, table: &Table) -> Result<Vec<ChainInfo>, Error> {
        let all = self.all_chains(table.family)?;
        Ok(all.into_iter().filter(|info| info.table == table.name).collect())
    }

    /// The chains of all tables of a family.
    pub fn all_chains(&mut self, family: Family) -> Result<Vec<ChainInfo>, Error> {
        self.dump(message::GETCHAIN, family, "list chains", |_| {}, decode::chain)
    }

    /// The rules of a chain, in order.
    pub fn rules_of_chain(&mut self, table: &Table, chain: &str) -> Result<Vec<RuleInfo>, Error> {
        let only = |m: &mut Writer| {
            m.attr_str(1, &table.name);
            m.attr_str(2, chain);
        };
        let all = self.dump(message::GETRULE, table.family, "list rules", only, decode::rule)?;
        let is_asked = |(of, rule): &(String, RuleInfo)| *of == table.name && rule.chain == chain;
        Ok(all.into_iter().filter(is_asked).map(|(_, rule)| rule).collect())
    }

    /// A table's rules, chain by chain, in order.
    pub fn rules(&mut self, table: &Table) -> Result<Vec<RuleInfo>, Error> {
        let only = |m: &mut Writer| m.attr_str(1, &table.name);
        let all = self.dump(message::GETRULE, table.family, "list rules", only, decode::rule)?;
        Ok(all.into_iter().filter(|(of, _)| *of == table.name).map(|(_, rule)| rule).collect())
    }

    /// The names of a table's sets and maps.
    pub fn sets(&mut self, table: &Table) -> Result<Vec<String>, Error> {
        Ok(self.set_infos(table)?.into_iter().map(|info| info.name).collect())
    }

    /// A table's sets and maps.
    pub fn set_infos(&mut self, table: &Table) -> Result<Vec<SetInfo>, Error> {
        let only = |m: &mut Writer| m.attr_str(1, &table.name);
        let all = self.dump(message::GETSET, table.family, "list sets", only, decode::set)?;
        Ok(all.into_iter().filter(|(of, _)| *of == table.name).map(|(_, info)| info).collect())
    }

    /// The counters of a table by name, with their packets. Nothing if there is no such table.
    pub fn counters(&mut self, table: &Table) -> Result<BTreeMap<String, u64>, Error> {
        let only = |m: &mut Writer| m.attr_str(1, &table.name);
        let all = self.dump(message::GETOBJ, table.family, "list counters", only, decode::counter)?;
        let of_table = all.into_iter().filter(|(of, ..)| *of == table.name);
        Ok(of_table.map(|(_, name, packets)| (name, packets)).collect())
    }

    /// The elements of a set or map, without timeouts, sorted. Complete, see [`Nft::rows`].
    pub fn elements(&mut self, table: &Table, set: &str) -> Result<Vec<Element>, Error> {
        let list = |nft: &mut Self| {
            let mut found = Vec::new();
            let complete = nft.dump_elements(table, set, |m| found.extend(decode::elements(m)))?;
            found.sort_unstable();
            found.dedup();
            Ok(complete.then_some(found))
        };
        self.list_until_stable(list, Vec::len)
    }

    /// The elements of a set that packets fill, with their remaining time, sorted by key. This is a single listing and may
    /// lack elements: under traffic no two listings agree.
    pub fn expiring(&mut self, table: &Table, set: &str) -> Result<Vec<Element>, Error> {
        let mut found = Vec::new();
        self.dump_elements(table, set, |m| found.extend(decode::expiring(m)))?;
        found.sort_unstable();
        found.dedup_by(|later, first| later.key == first.key);
        Ok(found)
    }

    /// The elements with this shape of a set, or of a map to values, sorted. The kernel's work grows with the square of the
    /// size: 0.1 s for 90,000 elements.
    ///
    /// After a set has grown, the kernel moves its elements to a larger hash table in the background. A listing then lacks
    /// elements without an error. So a set that may have grown is listed until two listings agree.
    pub fn rows(&mut self, table: &Table, set: &str, shape: RowShape) -> Result<Rows, Error> {
        self.list_until_stable(|nft| nft.rows_once(table, set, shape), Rows::len)
    }

    /// Like [`Nft::rows`], by a single listing: for a set that has not grown for some 100 ms. `None` if a change interrupted it.
    pub fn rows_once(&mut self, table: &Table, set: &str, shape: RowShape) -> Result<Option<Rows>, Error> {
        let mut found = Rows::new(shape);
        let complete = self.dump_elements(table, set, |m| decode::rows(m, &mut found))?;
        found.sort();
        Ok(complete.then_some(found))
    }

    /// The elements with these keys, as far as they exist, sorted. The kernel's work is in proportion to the number of keys, and to those
    /// that do not exist twice as much. Unlike a listing, this misses no element that is there, and nothing interrupts it; but it does
    /// not tell of other keys, and changes may come between one key and the next.
    pub fn rows_at(
        &mut self,
        table: &Table,
        set: &str,
        shape: RowShape,
        keys: impl IntoIterator<Item = impl AsRef<[u8]>>,
    ) -> Result<Rows, Error> {
        let keys: Vec<_> = keys.into_iter().collect();
        let operation = format!("read elements of set {set} of {table}");
        let mut found = Rows::new(shape);
        let (mut rest, mut most) = (keys.as_slice(), KEYS);
        while !rest.is_empty() {
            let (part, before) = (&rest[..rest.len().min(most)], found.len());
            let body = |m: &mut Writer| {
                m.attr_str(1, &table.name);
                m.attr_str(2, set);
                m.nest(3, |list| {
                    for key in part {
                        list.nest(1, |out| write_keys(out, key.as_ref(), None));
                    }
                });
            };
            let visit = |m: &Message<'_>| decode::rows(m, &mut found);
            let done = match self.request(message::GETSETELEM, 0, table.family as u8, &operation, body, visit)
            {
                Ok(_) => part.len(),
                // The kernel stops at the first key that does not exist.
                Err(Error::Kernel(error)) if error.errno == Errno::ENOENT => found.len() - before + 1,
                Err(error) => return Err(error),
            };
            // Where one does not exist, the next one often does not either.
            most = if done < part.len() || found.len() == before { 1 } else { (2 * most).min(KEYS) };
            rest = rest.get(done..).unwrap_or_default();
        }
        found.sort();
        Ok(found)
    }

    /// Lists until two listings agree. `list` returns `None` if it was interrupted.
    fn list_until_stable<T: PartialEq>(
        &mut self,
        mut list: impl FnMut(&mut Self) -> Result<Option<T>, Error>,
        len: impl Fn(&T) -> usize,
    ) -> Result<T, Error> {
        let mut last = None;
        for _ in 0..ATTEMPTS {
            let Some(found) = list(self)? else { continue };
            if (len(&found) <= NEVER_RESIZED && last.is_none()) || last.as_ref() == Some(&found) {
                return Ok(found);
            }
            last = Some(found);
            std::thread::sleep(SETTLE_TIME);
        }
        Err(Error::DumpInterrupted("list elements"))
    }

    /// Dumps the elements of a set once. Returns false if the dump was interrupted.
    fn dump_elements(
        &mut self,
        table: &Table,
        set: &str,
        visit: impl FnMut(&Message<'_>),
    ) -> Result<bool, Error> {
        let body = |m: &mut Writer| {
            m.attr_str(1, &table.name);
            m.attr_str(2, set);
        };
        let operation = format!("list elements of set {set} of {table}");
        self.request(message::GETSETELEM, flag::DUMP, table.family as u8, &operation, body, visit)
    }

    /// Repeats a dump until it is not interrupted.
    fn dump<T>(
        &mut self,
        kind: u16,
        family: Family,
        operation: &'static str,
        body: impl Fn(&mut Writer),
        decode: impl Fn(&Message<'_>) -> Option<T>,
    ) -> Result<Vec<T>, Error> {
        for _ in 0..ATTEMPTS {
            let mut found = Vec::new();
            let visit = |m: &Message<'_>| found.extend(decode(m));
            if self.request(kind, flag::DUMP, family as u8, operation, &body, visit)? {
                return Ok(found);
            }
        }
        Err(Error::DumpInterrupted(operation))
    }
}
