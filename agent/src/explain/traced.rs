// SPDX-License-Identifier: Apache-2.0
//! The way of a live packet through all tables of the host, as text. Pure: [`crate::kernel::trace_packet`] follows the packet.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;

use steerage_nft::{RuleInfo, Table, TraceEvent, TraceStep, Verdict};

use crate::rules::TABLE;

/// The rules of tables: by table and handle, the rule's number in its chain from 1 on, and the rule.
#[derive(Debug, Clone, Default)]
pub struct KnownRules(BTreeMap<(String, u64), (usize, RuleInfo)>);

impl KnownRules {
    /// Adds the rules of a table, in order.
    pub fn add(&mut self, table: &Table, rules: Vec<RuleInfo>) {
        let mut numbers: BTreeMap<String, usize> = BTreeMap::new();
        for rule in rules {
            let number = numbers.entry(rule.chain.clone()).or_default();
            *number += 1;
            self.0.insert((table.to_string(), rule.handle), (*number, rule));
        }
    }

    /// Whether a rule is known.
    pub fn contains(&self, table: &Table, handle: u64) -> bool {
        self.0.contains_key(&(table.to_string(), handle))
    }
}

/// A packet's way.
#[derive(Debug, Clone)]
pub struct TracedPacket {
    /// In the order in which the packet took them.
    pub steps: Vec<TraceStep>,
    /// The rules that it met.
    pub rules: KnownRules,
    /// The names of the host's interfaces.
    pub interfaces: BTreeMap<u32, String>,
}

impl TracedPacket {
    /// Whether the packet ends with this step.
    pub fn is_end(step: &TraceStep) -> bool {
        matches!(step.event, TraceEvent::Rule(_, Some(Verdict::Drop)) | TraceEvent::Policy { drops: true })
    }

    /// The step in words.
    fn step(&self, step: &TraceStep) -> String {
        match &step.event {
            TraceEvent::Rule(handle, verdict) => {
                let verdict = verdict.as_ref().map_or_else(|| "another verdict".to_owned(), verdict_text);
                format!("{}: {verdict}", self.rule(step, *handle))
            }
            TraceEvent::Return => "end: return".to_owned(),
            TraceEvent::Policy { drops } => format!("policy: {}", if *drops { "drop" } else { "accept" }),
        }
    }

    /// A rule's number in its chain. Of foreign rules also the comment, and the handle that `nft -a list ruleset` prints.
    fn rule(&self, step: &TraceStep, handle: u64) -> String {
        let Some((number, rule)) = self.rules.0.get(&(step.table.to_string(), handle)) else {
            return format!("rule with handle {handle}");
        };
        if step.table.name == TABLE {
            let reason = rule.counter().map(|reason| format!(" ({reason})")).unwrap_or_default();
            return format!("rule {number}{reason}");
        }
        let comment = rule.comment.as_ref().map(|comment| format!(" \"{comment}\"")).unwrap_or_default();
        format!("rule {number}{comment} (handle {handle})")
    }

    fn interface(&self, index: Option<u32>) -> Option<String> {
        let index = index?;
        Some(self.interfaces.get(&index).cloned().unwrap_or_else(|| format!("interface {index}")))
    }

    fn verdict(&self) -> String {
        match self.steps.last() {
            Some(last) if Self::is_end(last) => {
                let by = match &last.event {
                    TraceEvent::Rule(handle, _) => {
                        format!("dropped or rejected by {}", self.rule(last, *handle))
                    }
                    TraceEvent::Policy { .. } | TraceEvent::Return => "dropped by the policy".to_owned(),
                };
                format!("{by} of chain {} of table {}", last.chain, last.table)
            }
            _ => {
                let out = self.steps.iter().rev().find_map(|step| self.interface(step.output));
                let to = out.map_or_else(|| " to this host".to_owned(), |out| format!(" and left by {out}"));
                format!("no table dropped it: it went on{to}")
            }
        }
    }
}

fn verdict_text(verdict: &Verdict) -> String {
    match verdict {
        Verdict::Drop => "drop".to_owned(),
        Verdict::Accept => "accept".to_owned(),
        Verdict::Continue => "continue".to_owned(),
        Verdict::Jump(chain) => format!("jump to {chain}"),
        Verdict::Goto(chain) => format!("go to {chain}"),
        Verdict::Return => "return".to_owned(),
    }
}

impl fmt::Display for TracedPacket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut ends: Option<(SocketAddr, SocketAddr)> = None;
        let mut table = None;
        for step in &self.steps {
            if let Some(now) = step.ends.filter(|now| ends != Some(*now)) {
                let (source, destination) = now;
                let (name, by) = match (ends, self.interface(step.input)) {
                    (None, Some(input)) => ("packet", format!(", received from {input}")),
                    (None, None) => ("packet", ", sent by this host".to_owned()),
                    (Some(_), _) => ("now", String::new()),
                };
                writeln!(f, "{name:<10}{source} to {destination}{by}")?;
                ends = Some(now);
            }
            if table != Some(&step.table) {
                writeln!(f, "{:<10}{}", "table", step.table)?;
                table = Some(&step.table);
            }
            writeln!(f, "{:<10}{}, {}", "", step.chain, self.step(step))?;
        }
        writeln!(f, "{:<10}{}", "verdict", self.verdict())
    }
}

#[cfg(test)]
mod tests {
    use steerage_nft::Family;

    use super::*;

    fn step(table: &str, chain: &str, event: TraceEvent, to: Option<&str>) -> TraceStep {
        let at = |text: &str| text.parse::<SocketAddr>().expect("an address");
        TraceStep {
            packet: 1,
            table: Table::new(Family::Ip, table),
            chain: chain.to_owned(),
            event,
            ends: to.map(|to| (at("203.0.113.9:1000"), at(to))),
            input: Some(2),
            output: None,
        }
    }

    #[test]
    fn way_names_tables_chains_rules_and_the_new_destination() {
        let rule = |chain: &str, handle, comment: Option<&str>| RuleInfo {
            chain: chain.to_owned(),
            handle,
            comment: comment.map(str::to_owned),
            expressions: Vec::new(),
        };
        let mut rules = KnownRules::default();
        rules.add(
            &Table::new(Family::Ip, TABLE),
            vec![rule("prerouting", 7, None), rule("prerouting", 9, None)],
        );
        rules.add(&Table::new(Family::Ip, "firewall"), vec![rule("forward", 4, Some("no web"))]);
        assert!(
            rules.contains(&Table::new(Family::Ip, TABLE), 9)
                && !rules.contains(&Table::new(Family::Ip6, TABLE), 9)
        );
        let goto = TraceEvent::Rule(9, Some(Verdict::Goto("services".to_owned())));
        let steps = vec![
            step(TABLE, "prerouting", goto, Some("192.0.2.1:80")),
            step(TABLE, "services", TraceEvent::Rule(30, Some(Verdict::Accept)), None),
            step("firewall", "forward", TraceEvent::Rule(4, Some(Verdict::Drop)), Some("10.0.0.1:8080")),
        ];
        let mut packet = TracedPacket { steps, rules, interfaces: [(2, "eth0".to_owned())].into() };
        assert_eq!(
            packet.to_string(),
            "packet    203.0.113.9:1000 to 192.0.2.1:80, received from eth0\n\
             table     ip steerage\n          prerouting, rule 2: go to services\n          services, rule with handle 30: accept\n\
             now       203.0.113.9:1000 to 10.0.0.1:8080\n\
             table     ip firewall\n          forward, rule 1 \"no web\" (handle 4): drop\n\
             verdict   dropped or rejected by rule 1 \"no web\" (handle 4) of chain forward of table ip firewall\n"
        );
        packet.steps.pop();
        assert!(
            packet.to_string().ends_with("verdict   no table dropped it: it went on to this host\n"),
            "{packet}"
        );
    }
}
