// SPDX-License-Identifier: Apache-2.0
//! The results of all contenders: medians, spread, ratios to the edge, and the goals. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use serde_json::{Value, json};

use crate::report::{Better, Summary, number, summary};

/// What the ratios are to.
pub const OURS: &str = "steerage-edge";
/// How the names of metrics of pairs of hosts begin.
pub const FAILURE: &str = "active host";

#[derive(Clone, Debug)]
struct Metric {
    name: String,
    unit: &'static str,
    better: Better,
    values: BTreeMap<&'static str, Vec<f64>>,
}

/// All metrics, in the order of their first value.
#[derive(Clone, Debug, Default)]
pub struct Results {
    metrics: Vec<Metric>,
}

/// A goal of the edge.
#[derive(Clone, Copy, Debug)]
pub enum Goal {
    /// The median of this metric is at most this.
    AtMost(f64),
    /// The median is at most so many times that of this contender.
    TimesPeer(f64, &'static str),
}

impl Results {
    /// Adds the value of one round.
    pub fn add(&mut self, name: &str, unit: &'static str, better: Better, who: &'static str, value: f64) {
        let index = self.metrics.iter().position(|metric| metric.name == name).unwrap_or_else(|| {
            self.metrics.push(Metric { name: name.to_owned(), unit, better, values: BTreeMap::new() });
            self.metrics.len() - 1
        });
        self.metrics[index].values.entry(who).or_default().push(value);
    }

    fn median(&self, name: &str, who: &str) -> Option<f64> {
        let metric = self.metrics.iter().find(|metric| metric.name == name)?;
        Some(summary(metric.values.get(who)?)?.median)
    }

    /// A table of contenders and one of pairs of hosts: the value, its spread, and how many times worse than the edge it is.
    pub fn markdown(&self) -> String {
        let (pairs, contenders): (Vec<_>, Vec<_>) =
            self.metrics.iter().partition(|metric| metric.name.starts_with(FAILURE));
        let tables = [contenders, pairs].into_iter().filter(|metrics| !metrics.is_empty());
        tables.map(|metrics| table(&metrics)).collect::<Vec<_>>().join("\n")
    }

    /// `{metric: {unit, contender: {median, min, max, rounds, ratio}}}`. A ratio above 1 means that the edge is better.
    pub fn json(&self) -> Value {
        let mut all = serde_json::Map::new();
        for metric in &self.metrics {
            let mut entry = json!({ "unit": metric.unit });
            for (who, values) in &metric.values {
                if let Some(Summary { median, min, max }) = summary(values) {
                    entry[*who] = json!({
                        "median": median, "min": min, "max": max, "rounds": values.len(), "ratio": metric.ratio(who),
                    });
                }
            }
            all.insert(metric.name.clone(), entry);
        }
        Value::Object(all)
    }

    /// The goals that were measured, and whether this run meets them.
    pub fn goals(&self, goals: &[(String, Goal)]) -> String {
        let mut text = "| goal | measured | met |\n| --- | --- | --- |\n".to_owned();
        for (name, goal) in goals {
            let Some(ours) = self.median(name, OURS) else { continue };
            let (wanted, shown, met) = match goal {
                Goal::AtMost(most) => {
                    (format!("{name}: at most {}", number(*most)), number(ours), ours <= *most)
                }
                Goal::TimesPeer(times, peer) => {
                    let Some(theirs) = self.median(name, peer).filter(|value| *value > 0.0) else { continue };
                    let wanted = format!("{name}: at most {} of {peer}'s", number(*times));
                    (wanted, number(ours / theirs), ours <= times * theirs)
                }
            };
            let _ = writeln!(text, "| {wanted} | {shown} | {} |", if met { "yes" } else { "no" });
        }
        text
    }
}

fn table(metrics: &[&Metric]) -> String {
    let columns: BTreeSet<_> = metrics.iter().flat_map(|metric| metric.values.keys().copied()).collect();
    let mut text = "| metric | unit |".to_owned();
    for column in &columns {
        let _ = write!(text, " {column} |");
    }
    let _ = writeln!(text, "\n| --- | --- |{}", " --- |".repeat(columns.len()));
    for metric in metrics {
        let _ = write!(text, "| {} | {} |", metric.name, metric.unit);
        for who in &columns {
            let _ = write!(text, " {} |", metric.cell(who));
        }
        text.push('\n');
    }
    text
}

impl Metric {
    fn cell(&self, who: &str) -> String {
        let Some(values) = self.values.get(who) else { return "–".to_owned() };
        let Some(Summary { median, min, max }) = summary(values) else { return "–".to_owned() };
        let mut text = number(median);
        if values.len() > 1 {
            let _ = write!(text, " ({} … {})", number(min), number(max));
        }
        if let Some(ratio) = self.ratio(who) {
            let _ = write!(text, ", {} ×", number(ratio));
        }
        text
    }

    /// How many times worse than the edge.
    fn ratio(&self, who: &str) -> Option<f64> {
        let median = |who: &str| Some(summary(self.values.get(who)?)?.median);
        let (ours, theirs) = (median(OURS)?, median(who)?);
        let (above, below) = if self.better == Better::Less { (theirs, ours) } else { (ours, theirs) };
        (who != OURS && below > 0.0).then(|| above / below)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn results() -> Results {
        let mut results = Results::default();
        for value in [2.0, 1.0, 3.0] {
            results.add("CPU", "µs", Better::Less, OURS, value);
            results.add("CPU", "µs", Better::Less, "HAProxy", 10.0 * value);
            results.add("rate", "1/s", Better::More, OURS, 100.0);
        }
        results.add("rate", "1/s", Better::More, "HAProxy", 50.0);
        results
    }

    #[test]
    fn peers_have_the_ratio_to_the_edge() {
        let text = results().markdown();
        assert!(text.contains("| CPU | µs | 20.0 (10.0 … 30.0), 10.0 × | 2.00 (1.00 … 3.00) |"), "{text}");
        assert!(text.contains("| rate | 1/s | 50.0, 2.00 × |"), "{text}");
        assert_eq!(results().json()["CPU"]["HAProxy"]["ratio"], json!(10.0));
        assert_eq!(results().json()["CPU"][OURS]["ratio"], Value::Null);
    }

    #[test]
    fn goals_that_were_not_measured_are_left_out() {
        let goal = |name: &str, goal| (name.to_owned(), goal);
        let text = results().goals(&[
            goal("CPU", Goal::AtMost(1.5)),
            goal("CPU", Goal::TimesPeer(0.2, "HAProxy")),
            goal("CPU", Goal::TimesPeer(0.2, "Envoy")),
            goal("memory", Goal::AtMost(64.0)),
        ]);
        assert!(text.contains("| CPU: at most 1.50 | 2.00 | no |"), "{text}");
        assert!(text.contains("| CPU: at most 0.200 of HAProxy's | 0.100 | yes |"), "{text}");
        assert!(!text.contains("Envoy") && !text.contains("memory"), "{text}");
    }
}
