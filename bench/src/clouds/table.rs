// SPDX-License-Identifier: Apache-2.0
//! The tables of a run, and its JSON. Pure.

use std::fmt::Write as _;
use std::time::Duration;

use serde_json::{Value, json};

use super::cloud::Vendor;
use super::phases::{Measured, Step};
use super::recorder::{Counts, Phase};
use crate::report::{Better, Report};
use crate::who::Who;

/// All measurements with one cloud: one for each program and number of Services.
pub(super) struct Results {
    vendor: Vendor,
    of: Vec<(Who, u32, Measured)>,
}

impl Results {
    pub(super) fn new(vendor: Vendor) -> Self {
        Self { vendor, of: Vec::new() }
    }

    pub(super) fn add(&mut self, who: Who, services: u32, measured: Measured) {
        self.of.push((who, services, measured));
    }

    fn levels(&self) -> Vec<u32> {
        let mut levels: Vec<_> = self.of.iter().map(|(_, services, _)| *services).collect();
        levels.sort_unstable();
        levels.dedup();
        levels
    }

    fn of(&self, who: Who, services: u32) -> Option<&Measured> {
        let is_it = |of: &&(Who, u32, Measured)| of.0 == who && of.1 == services;
        self.of.iter().find(is_it).map(|(_, _, measured)| measured)
    }

    fn phase(&self, who: Who, services: u32, step: Step) -> Option<&Phase> {
        self.of(who, services)?.phases.iter().find(|(of, _)| *of == step).map(|(_, phase)| phase)
    }

    /// A line of a table, with the cells that the cloud has.
    fn line(&self, cells: &[&str], goal: &str, rates: &[&str]) -> String {
        let has_goals = Step::ALL.iter().any(|step| self.vendor.goal(*step, 1).is_some());
        let has_rates = self.vendor.time_by_rates(&Counts::default()).is_some();
        let (calls, times) = cells.split_at(4);
        let goal = has_goals.then_some(goal);
        let all = calls.iter().copied().chain(goal).chain(times.iter().copied());
        let all: Vec<_> = all.chain(rates.iter().copied().filter(|_| has_rates)).collect();
        format!("| {} |\n", all.join(" | "))
    }

    /// Calls, with writes in parentheses, the time, and the time by the cloud's rates; then calls by action with the most Services.
    pub(super) fn markdown(&self) -> String {
        let [ours, peer] = Who::ALL.map(|who| self.vendor.title(who));
        let (calls, time) = (format!("calls (writes), {ours}"), format!("time, {ours}"));
        let (goal, rates) = (format!("goal of {ours}"), format!("by the cloud's rates, {ours}"));
        let mut text = self.line(&["phase", "Services", &calls, peer, &time, peer], &goal, &[&rates, peer]);
        text += &self.line(&["---"; 6], "---", &["---"; 2]);
        for step in Step::ALL {
            for services in self.levels() {
                let cells = |cell: &dyn Fn(&Phase) -> String| {
                    Who::ALL.map(|who| self.phase(who, services, step).map_or("–".to_owned(), cell))
                };
                let [calls, calls_of_peer] =
                    cells(&|phase| format!("{} ({})", phase.counts.total(), phase.counts.writes()));
                let [took, took_of_peer] = cells(&|phase| seconds(phase.took));
                let by_rates = |phase: &Phase| {
                    self.vendor.time_by_rates(&phase.counts).map_or_else(String::new, seconds)
                };
                let [rates, rates_of_peer] = cells(&by_rates);
                let goal =
                    self.vendor.goal(step, services).map_or("–".to_owned(), |goal| format!("≤ {goal}"));
                let of = services.to_string();
                let cells = [step.title(), &of, &calls, &calls_of_peer, &took, &took_of_peer];
                text += &self.line(&cells, &goal, &[&rates, &rates_of_peer]);
            }
        }
        if let Some(most) = self.levels().last() {
            let _ = write!(
                text,
                "\nCalls by action, {most} Services:\n\n| phase | {ours} | {peer} |\n| --- | --- | --- |\n"
            );
            for step in Step::ALL {
                let [ours, peer] = Who::ALL.map(|who| {
                    self.phase(who, *most, step).map_or("–".to_owned(), |phase| list(&phase.counts))
                });
                let _ = writeln!(text, "| {} | {ours} | {peer} |", step.title());
            }
            let _ = writeln!(text);
            for who in Who::ALL {
                if let Some(measured) = self.of(who, *most) {
                    let (left, title) = (measured.left_over, self.vendor.title(who));
                    let what = self.vendor.left_over();
                    let _ = writeln!(text, "Left after {most} Services of {title}: {left} {what}.");
                }
            }
        }
        text
    }

    /// The shape of [`Report::json`], and for each phase an entry with the calls by action.
    pub(super) fn json(&self) -> Value {
        let [ours, peer] = Who::ALL.map(|who| self.vendor.title(who));
        let mut report = Report::new(ours, peer);
        let mut actions = serde_json::Map::new();
        for (who, services, measured) in &self.of {
            for (step, phase) in &measured.phases {
                let what = format!("{}, {services} Services", step.title());
                let counts = &phase.counts;
                let mut add = |metric: &str, unit: &'static str, value: f64| {
                    report.add(&format!("{what}: {metric}"), unit, Better::Less, *who, value);
                };
                add("calls", "", f64::from(counts.total()));
                add("writes", "", f64::from(counts.writes()));
                add("time", "s", phase.took.as_secs_f64());
                if let Some(time) = self.vendor.time_by_rates(counts) {
                    add("time by the cloud's rates", "s", time.as_secs_f64());
                }
                let entry = actions.entry(format!("{what}: calls by action")).or_insert_with(|| json!({}));
                entry[who.name()] = json!(counts.by_action());
            }
            let what = format!("{} left over, {services} Services", self.vendor.left_over());
            let left = u32::try_from(measured.left_over).unwrap_or(u32::MAX);
            report.add(&what, "", Better::Less, *who, f64::from(left));
        }
        let mut all = report.json();
        if let Value::Object(entries) = &mut all {
            entries.extend(actions);
        }
        all
    }
}

fn list(counts: &Counts) -> String {
    let actions: Vec<_> =
        counts.by_action().iter().map(|(action, count)| format!("{action} {count}")).collect();
    if actions.is_empty() { "none".to_owned() } else { actions.join(", ") }
}

fn seconds(time: Duration) -> String {
    if time.is_zero() { "0".to_owned() } else { format!("{:.1} s", time.as_secs_f64()) }
}

#[cfg(test)]
mod tests {
    use super::super::recorder::tests::counts;
    use super::*;

    fn measured(calls: u32, left_over: usize) -> Measured {
        let counts = counts(&[("DescribeListeners", calls), ("RegisterTargets", 24)]);
        Measured {
            phases: vec![(Step::NodeOut, Phase { counts, took: Duration::from_millis(1500) })],
            left_over,
        }
    }

    fn results(vendor: Vendor) -> Results {
        let mut results = Results::new(vendor);
        results.add(Who::Ours, 10, measured(1, 0));
        results.add(Who::Peer, 10, measured(2, 7));
        results
    }

    #[test]
    fn row_has_calls_writes_goal_and_times() {
        let text = results(Vendor::Aws).markdown();
        let row = "| a node leaves | 10 | 25 (24) | 26 (24) | ≤ 10 | 1.5 s | 1.5 s | 1.0 s | 1.0 s |";
        assert!(text.contains(row), "{text}");
        assert!(text.contains("| create | 10 | – | – | ≤ 80 | – | – | – | – |"), "{text}");
        assert!(text.contains("DescribeListeners 2, RegisterTargets 24"), "{text}");
        assert!(text.contains("10 Services of cloud-provider-aws: 7 target groups"), "{text}");
    }

    #[test]
    fn cloud_without_goals_and_rates_has_no_columns_for_them() {
        let text = results(Vendor::Openstack).markdown();
        assert!(text.contains("| a node leaves | 10 | 25 (24) | 26 (24) | 1.5 s | 1.5 s |\n"), "{text}");
        assert!(!text.contains("goal") && !text.contains("rates"), "{text}");
    }

    #[test]
    fn json_has_each_program_and_its_actions() {
        let json = results(Vendor::Aws).json();
        let calls = &json["a node leaves, 10 Services: calls"];
        assert_eq!((&calls["ours"]["median"], &calls["peer"]["median"]), (&json!(25.0), &json!(26.0)));
        let actions = &json["a node leaves, 10 Services: calls by action"];
        assert_eq!(actions["peer"], json!({"DescribeListeners": 2, "RegisterTargets": 24}));
    }
}
