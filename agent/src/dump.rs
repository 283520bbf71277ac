// SPDX-License-Identifier: Apache-2.0
//! The wanted tables beside the kernel's, with differences marked, as `steerage-agent dump` prints them. Only [`compare`] does
//! I/O: it reads the kernel.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use steerage_nft::{Error, Row};

use crate::kernel::{ChainRules, FAMILIES, KernelTable, WrittenRules, read_table};
use crate::plan::{Desired, Frontend};
use crate::rules::{
    BaseRuleset, Elements, LOCAL_OFFSET, ListDigest, Ruleset, RulesetConfig, SetId, UsedSets, difference,
};

/// A comparison as text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Comparison {
    /// One line each: `=` on both sides, `-` missing in the kernel, `+` only in the kernel, `!` different.
    pub text: String,
    /// The number of lines not marked `=`.
    pub differences: usize,
}

/// Compares with the kernel of the calling thread's network namespace. `written`: the rules as the kernel should list them. `all`: lists
/// elements that do not differ, too.
pub fn compare(ruleset: &Ruleset, written: &WrittenRules, all: bool) -> Result<Comparison, Error> {
    let mut comparison = Comparison::default();
    list_services(ruleset.desired(), &mut comparison.text);
    for (model, family) in FAMILIES {
        let base_ruleset = BaseRuleset::new(family, ruleset.config());
        let kernel = read_table(model, &base_ruleset)?;
        let wanted = ruleset.all_elements(model);
        comparison.table(family.name(), &base_ruleset, &wanted, kernel.as_ref(), all);
        if let (Some(kernel), Some(written)) = (&kernel, written.get(&model)) {
            comparison.rules(&base_ruleset, written, kernel);
        }
    }
    let _ = writeln!(comparison.text, "{} difference(s)", comparison.differences);
    Ok(comparison)
}

/// What the kernel of the calling thread's network namespace has, for where no agent answers: all tables, with their elements if `all`.
pub fn kernel_tables(all: bool) -> Result<String, Error> {
    let mut text = String::new();
    for (name, kernel) in read_tables()? {
        let Some(kernel) = kernel else {
            let _ = writeln!(text, "no table {name} steerage");
            continue;
        };
        let layout = kernel.layout.as_deref().unwrap_or("none");
        let dormant = if kernel.is_dormant { ", dormant: no packet sees its chains" } else { "" };
        let _ = writeln!(text, "table {name} steerage: {layout}{dormant}");
        for (chain, (rules, _)) in &kernel.chains {
            let _ = writeln!(text, "  chain {chain}, {rules} rule(s)");
        }
        for (id, rows) in kernel.elements.sets() {
            let _ = writeln!(text, "  {}, {} element(s)", id.name(), rows.len());
            for row in rows.iter().filter(|_| all) {
                let _ = writeln!(text, "    {}", describe(*id, row));
            }
        }
    }
    Ok(text)
}

/// The elements of the kernel of the calling thread's network namespace that concern packets to a frontend, for where no agent answers.
pub fn kernel_elements(frontend: &Frontend) -> Result<String, Error> {
    let mut text = String::new();
    let key = format!("{} {}/{}", frontend.addr, frontend.port, frontend.protocol);
    let address = frontend.addr.to_string();
    for (_, kernel) in read_tables()? {
        let mut lists = BTreeSet::new();
        for (id, rows) in kernel.iter().flat_map(|kernel| kernel.elements.sets()) {
            for line in rows.iter().map(|row| describe(*id, row)) {
                let rest = line.strip_prefix(&key).filter(|rest| rest.is_empty() || rest.starts_with(' '));
                if rest.is_some() || line == address {
                    lists.extend(rest.and_then(|rest| rest.strip_prefix(" -> ")).map(str::to_owned));
                    let _ = writeln!(text, "{:<10}{}: {line}", "element", id.name());
                }
            }
        }
        let endpoints = kernel.iter().filter_map(|kernel| kernel.elements.of_set(SetId::Endpoints));
        for line in endpoints.flat_map(steerage_nft::Rows::iter).map(|row| describe(SetId::Endpoints, row)) {
            if lists.iter().any(|list| line.strip_prefix(list).is_some_and(|rest| rest.starts_with(" slot ")))
            {
                let _ = writeln!(text, "{:<10}{}: {line}", "element", SetId::Endpoints.name());
            }
        }
    }
    if text.is_empty() {
        let _ = writeln!(
            text,
            "{:<10}no element of the kernel's tables concerns packets to {frontend}",
            "verdict"
        );
    }
    Ok(text)
}

/// Both tables, with all sets that they may have.
fn read_tables() -> Result<Vec<(&'static str, Option<KernelTable>)>, Error> {
    let config = RulesetConfig { used: UsedSets::all(), forward_to_peers: true, ..RulesetConfig::default() };
    let read = |(model, family): (_, steerage_nft::Family)| {
        Ok((family.name(), read_table(model, &BaseRuleset::new(family, &config))?))
    };
    FAMILIES.into_iter().map(read).collect()
}

fn list_services(desired: &Desired, text: &mut String) {
    let mut frontends: BTreeMap<_, usize> = BTreeMap::new();
    for (frontend, _) in desired.actions() {
        if let Some(owner) = desired.owners(frontend).next() {
            *frontends.entry(owner).or_default() += 1;
        }
    }
    let _ = writeln!(text, "services");
    for key in desired.services() {
        let count = frontends.get(key).copied().unwrap_or_default();
        let _ = write!(text, "  {key}: {count} frontend(s)");
        if let Some(health) = desired.health(key) {
            let count = |count: Option<usize>| count.map_or("-".to_owned(), |count| count.to_string());
            let (v4, v6) = (count(health.v4), count(health.v6));
            let _ = write!(text, ", health-check port {} (ready here: IPv4 {v4}, IPv6 {v6})", health.port);
        }
        text.push('\n');
    }
}

impl Comparison {
    fn line(&mut self, mark: char, text: &str) {
        self.differences += usize::from(mark != '=');
        let _ = writeln!(self.text, "{mark} {text}");
    }

    fn table(
        &mut self,
        family: &str,
        base_ruleset: &BaseRuleset,
        wanted: &Elements,
        kernel: Option<&KernelTable>,
        all: bool,
    ) {
        let Some(kernel) = kernel else {
            self.line('-', &format!("table {family} steerage, {} element(s)", wanted.len()));
            return;
        };
        let layout = kernel.layout.as_deref().unwrap_or("none");
        if layout == base_ruleset.version {
            self.line('=', &format!("table {family} steerage: {layout}"));
        } else {
            self.line(
                '!',
                &format!("table {family} steerage: {}, the kernel: {layout}", base_ruleset.version),
            );
        }
        if kernel.is_dormant {
            self.line('!', &format!("table {family} steerage is dormant: no packet sees its chains"));
        }
        self.chains(base_ruleset, kernel);
        let ours: BTreeSet<_> = base_ruleset.sets.iter().map(|(name, _)| name).collect();
        for name in &ours {
            if !kernel.sets.contains(name) {
                self.line('-', &format!("set {name}"));
            }
        }
        for name in kernel.sets.iter().filter(|name| !ours.contains(name)) {
            self.line('+', &format!("set {name}"));
        }
        self.elements(base_ruleset, wanted, &kernel.elements, all);
    }

    fn chains(&mut self, base_ruleset: &BaseRuleset, kernel: &KernelTable) {
        for chain in &base_ruleset.chains {
            let rules = chain.rules.len();
            match kernel.chains.get(&chain.name) {
                None => self.line('-', &format!("chain {}, {rules} rule(s)", chain.name)),
                Some((count, Some(digest))) if (*count, digest) == (rules, &chain.digest) => {
                    self.line('=', &format!("chain {}, {rules} rule(s)", chain.name));
                }
                Some((count, _)) => {
                    self.line(
                        '!',
                        &format!("chain {}, {rules} rule(s), the kernel: {count}, or others", chain.name),
                    );
                }
            }
        }
        let ours = |name: &str| base_ruleset.chains.iter().any(|chain| chain.name == name);
        for (name, (count, _)) in kernel.chains.iter().filter(|(name, _)| !ours(name)) {
            self.line('+', &format!("chain {name}, {count} rule(s)"));
        }
    }

    /// Chains whose digest is right.
    fn rules(&mut self, base_ruleset: &BaseRuleset, written: &ChainRules, kernel: &KernelTable) {
        for chain in &base_ruleset.chains {
            let [wanted, found] = [written, &kernel.rules].map(|rules| rules.get(&chain.name));
            if wanted != found && wanted.map(Vec::len) == found.map(Vec::len) {
                self.line('!', &format!("chain {}, a rule of the kernel is another one", chain.name));
            }
            if let Some(info) = kernel.chain_infos.iter().find(|info| info.name == chain.name)
                && (!chain.chain.runs_as(info) || !chain.chain.has_policy_of(info))
            {
                self.line(
                    '!',
                    &format!("chain {}, the kernel's has another hook, priority or policy", chain.name),
                );
            }
        }
    }

    fn elements(&mut self, base_ruleset: &BaseRuleset, wanted: &Elements, kernel: &Elements, all: bool) {
        let changes = difference(kernel, wanted);
        let count = |elements: &Elements, id: SetId| {
            elements.sets().find(|(of, _)| **of == id).map_or(0, |(_, rows)| rows.len())
        };
        for id in &base_ruleset.filled {
            let mut lines: BTreeMap<String, char> = BTreeMap::new();
            let mut mark = |rows: Option<&steerage_nft::Rows>, mark| {
                for row in rows.into_iter().flat_map(steerage_nft::Rows::iter) {
                    lines.entry(describe(*id, row)).or_insert(mark);
                }
            };
            mark(changes.add.get(id), '-');
            mark(changes.delete.get(id), '+');
            let differ = !lines.is_empty();
            if all {
                let (_, rows) = wanted.sets().find(|(of, _)| *of == id).unzip();
                for row in rows.into_iter().flat_map(steerage_nft::Rows::iter) {
                    lines.entry(describe(*id, row)).or_insert('=');
                }
            }
            let (wanted_count, kernel_count) = (count(wanted, *id), count(kernel, *id));
            let name = id.name();
            let _ = if differ {
                writeln!(self.text, "! {name}, {wanted_count} element(s), the kernel: {kernel_count}")
            } else {
                writeln!(self.text, "= {name}, {wanted_count} element(s)")
            };
            for (line, mark) in lines {
                self.line(mark, &format!("  {name}: {line}"));
            }
        }
    }
}

/// An element as text.
fn describe(id: SetId, row: Row<'_>) -> String {
    let mut text = fields(id, row.key);
    if let Some(end) = row.end {
        let _ = write!(text, " to {}", fields(id, end));
    }
    if let Some(peer) = row.data.filter(|_| id == SetId::Peers) {
        let _ = write!(text, " -> node {}", addr(peer));
    } else if let Some(digest) = row.data.filter(|_| id == SetId::Digests).and_then(ListDigest::decode) {
        let _ = write!(text, " -> {} endpoint(s), {}", digest.length, digest.hash_text());
    } else if let Some(list) = row.data.and_then(|data| <[u8; 4]>::try_from(data).ok()) {
        let _ = write!(text, " -> list {:08x}", u32::from_ne_bytes(list));
    } else if let Some((target, port)) =
        row.data.and_then(|data| data.split_at_checked(data.len().saturating_sub(4)))
    {
        let _ = write!(text, " -> {} {}", addr(target), number(port, u16::from_be_bytes));
    }
    text
}

fn fields(id: SetId, key: &[u8]) -> String {
    let frontend = |key: &[u8]| {
        let (ip, rest) = key.split_at_checked(key.len().saturating_sub(8)).unwrap_or_default();
        let (protocol, port) = rest.split_at_checked(4).unwrap_or_default();
        let protocol = match protocol.first() {
            Some(6) => "TCP".to_owned(),
            Some(17) => "UDP".to_owned(),
            Some(132) => "SCTP".to_owned(),
            other => format!("{other:?}"),
        };
        format!("{} {}/{protocol}", addr(ip), number(port, u16::from_be_bytes))
    };
    match id {
        SetId::ClusterAddresses => addr(key),
        SetId::Hairpins => addr(&key[..key.len() / 2]),
        SetId::Slots(_) | SetId::Peers => {
            let (key, slot) = key.split_at_checked(key.len().saturating_sub(4)).unwrap_or_default();
            let slot = slot.try_into().map_or(0, u32::from_ne_bytes);
            match slot.checked_sub(LOCAL_OFFSET) {
                Some(slot) => format!("{} local slot {slot}", frontend(key)),
                None => format!("{} slot {slot}", frontend(key)),
            }
        }
        SetId::Endpoints => {
            let (list, slot) = key.split_at_checked(4).unwrap_or_default();
            let [list, slot] = [list, slot].map(|word| word.try_into().map_or(0, u32::from_ne_bytes));
            format!("list {list:08x} slot {slot}")
        }
        SetId::Shares(_) => format!("namespace {:08x}", key.try_into().map_or(0, u32::from_ne_bytes)),
        SetId::Digests => format!("list {:08x}", key.try_into().map_or(0, u32::from_ne_bytes)),
        SetId::Sticky(_) => {
            let (hash, key) = key.split_at_checked(4).unwrap_or_default();
            format!("{} endpoint {:08x}", frontend(key), hash.try_into().map_or(0, u32::from_ne_bytes))
        }
        SetId::Sources(_) => {
            let (list, source) = key.split_at_checked(4).unwrap_or_default();
            format!("list {:08x} {}", list.try_into().map_or(0, u32::from_ne_bytes), addr(source))
        }
        _ => frontend(key),
    }
}

fn addr(bytes: &[u8]) -> String {
    let v4 = <[u8; 4]>::try_from(bytes).map(|octets| IpAddr::V4(Ipv4Addr::from(octets)));
    let v6 = <[u8; 16]>::try_from(bytes).map(|octets| IpAddr::V6(Ipv6Addr::from(octets)));
    v4.or(v6).map_or_else(|_| format!("{bytes:?}"), |addr| addr.to_string())
}

/// The number in the first two bytes.
fn number(bytes: &[u8], read: fn([u8; 2]) -> u16) -> u16 {
    bytes.first_chunk().copied().map_or(0, read)
}
