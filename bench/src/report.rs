// SPDX-License-Identifier: Apache-2.0
//! The results of all runs: medians, spread and ratios. Pure.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use serde_json::{Value, json};

use crate::who::Who;

/// Which values are better.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Better {
    /// For times and memory.
    Less,
    /// For rates.
    More,
}

/// One value for each run.
#[derive(Clone, Debug, Default)]
struct Values {
    values: Vec<f64>,
    /// The measured work did not end, so the values are lower bounds.
    unfinished: bool,
}

#[derive(Clone, Debug)]
struct Metric {
    unit: &'static str,
    better: Better,
    values: BTreeMap<Who, Values>,
}

/// All metrics, in the order of their first value.
#[derive(Clone, Debug)]
pub struct Report {
    /// What our program and its peer are called.
    titles: [&'static str; 2],
    names: Vec<String>,
    metrics: BTreeMap<String, Metric>,
}

impl Report {
    /// An empty report on these programs.
    pub fn new(ours: &'static str, peer: &'static str) -> Self {
        Self { titles: [ours, peer], names: Vec::new(), metrics: BTreeMap::new() }
    }

    /// Adds the value of one run.
    pub fn add(&mut self, name: &str, unit: &'static str, better: Better, who: Who, value: f64) {
        self.values(name, unit, better, who).values.push(value);
    }

    /// Adds a lower bound: the work was given up after this value.
    pub fn add_unfinished(&mut self, name: &str, unit: &'static str, who: Who, value: f64) {
        let values = self.values(name, unit, Better::Less, who);
        values.values.push(value);
        values.unfinished = true;
    }

    fn values(&mut self, name: &str, unit: &'static str, better: Better, who: Who) -> &mut Values {
        if !self.metrics.contains_key(name) {
            self.names.push(name.to_owned());
        }
        let fresh = || Metric { unit, better, values: BTreeMap::new() };
        self.metrics.entry(name.to_owned()).or_insert_with(fresh).values.entry(who).or_default()
    }

    /// The values of a metric, one for each run.
    pub fn of(&self, name: &str, who: Who) -> Vec<f64> {
        let metric = self.metrics.get(name).and_then(|metric| metric.values.get(&who));
        metric.map(|values| values.values.clone()).unwrap_or_default()
    }

    /// Adds the metrics of another report, which has none of the same name.
    pub fn extend(&mut self, other: Self) {
        self.names.extend(other.names);
        self.metrics.extend(other.metrics);
    }

    /// `{metric: {unit, ours: {median, min, max}, peer: {name, median, min, max}, ratio}}`. A ratio above 1 means that ours is
    /// better. A side that was not measured is null. `unfinished` marks lower bounds.
    pub fn json(&self) -> Value {
        let entry = |name: &String| {
            let metric = &self.metrics[name];
            let side = |who| {
                let values = metric.values.get(&who)?;
                let Summary { median, min, max } = summary(&values.values)?;
                let mut side =
                    json!({ "median": median, "min": min, "max": max, "runs": values.values.len() });
                if who == Who::Peer {
                    side["name"] = json!(self.titles[1]);
                }
                if values.unfinished {
                    side["unfinished"] = json!(true);
                }
                Some(side)
            };
            let value = json!({
                "unit": metric.unit, "ours": side(Who::Ours), "peer": side(Who::Peer), "ratio": metric.ratio(),
            });
            (name.clone(), value)
        };
        Value::Object(self.names.iter().map(entry).collect())
    }

    /// A table in Markdown.
    pub fn markdown(&self) -> String {
        let mut text = format!(
            "| metric | unit | {} | {} | ratio |\n| --- | --- | --- | --- | --- |\n",
            self.titles[0], self.titles[1]
        );
        for name in &self.names {
            let metric = &self.metrics[name];
            let cell = |who| match metric
                .values
                .get(&who)
                .and_then(|values| Some((values, summary(&values.values)?)))
            {
                None => "–".to_owned(),
                Some((values, _)) if values.unfinished => {
                    format!("unfinished after {}", number(values.values[0]))
                }
                Some((values, Summary { median, .. })) if values.values.len() == 1 => number(median),
                Some((_, Summary { median, min, max })) => {
                    format!("{} ({} … {})", number(median), number(min), number(max))
                }
            };
            let more = if metric.values.values().any(|values| values.unfinished) { "> " } else { "" };
            let ratio = metric.ratio().map_or("–".to_owned(), |ratio| format!("{more}{}", number(ratio)));
            let _ = writeln!(
                text,
                "| {name} | {} | {} | {} | {ratio} |",
                metric.unit,
                cell(Who::Ours),
                cell(Who::Peer)
            );
        }
        text
    }
}

impl Metric {
    fn ratio(&self) -> Option<f64> {
        let median = |who| Some(summary(&self.values.get(&who)?.values)?.median);
        let (ours, peer) = (median(Who::Ours)?, median(Who::Peer)?);
        let (above, below) = if self.better == Better::Less { (peer, ours) } else { (ours, peer) };
        (below > 0.0).then(|| above / below)
    }
}

/// Median, least and most.
pub(crate) struct Summary {
    pub(crate) median: f64,
    pub(crate) min: f64,
    pub(crate) max: f64,
}

/// Of the values of all runs.
pub(crate) fn summary(values: &[f64]) -> Option<Summary> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (min, max) = (*sorted.first()?, *sorted.last()?);
    let middle = sorted.len() / 2;
    let median = if sorted.len().is_multiple_of(2) {
        f64::midpoint(sorted[middle - 1], sorted[middle])
    } else {
        sorted[middle]
    };
    Some(Summary { median, min, max })
}

/// Formats with three significant digits.
pub(crate) fn number(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        size if size >= 1.0 => format!("{value:.2}"),
        0.0 => "0".to_owned(),
        _ => format!("{value:.3}"),
    }
}

/// The percentile in seconds: the smallest sample that at least `percent` of the samples do not exceed. `None` without samples.
pub fn percentile(samples: &[Duration], percent: usize) -> Option<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_unstable();
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).map(Duration::as_secs_f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report() -> Report {
        let mut report = Report::new("agent", "kube-proxy");
        for value in [1.0, 3.0, 2.0] {
            report.add("time", "s", Better::Less, Who::Ours, value);
            report.add("time", "s", Better::Less, Who::Peer, value * 100.0);
            report.add("rate", "1/s", Better::More, Who::Ours, 30.0);
        }
        report.add("rate", "1/s", Better::More, Who::Peer, 20.0);
        report.add("alone", "s", Better::Less, Who::Ours, 0.0);
        report.add("long", "s", Better::Less, Who::Ours, 2.0);
        report.add_unfinished("long", "s", Who::Peer, 60.0);
        report
    }

    #[test]
    fn json_has_documented_shape() {
        let json = report().json();
        assert_eq!(
            json["time"],
            json!({
                "unit": "s",
                "ours": { "median": 2.0, "min": 1.0, "max": 3.0, "runs": 3 },
                "peer": { "name": "kube-proxy", "median": 200.0, "min": 100.0, "max": 300.0, "runs": 3 },
                "ratio": 100.0,
            })
        );
        assert_eq!((&json["rate"]["ratio"], &json["alone"]["peer"]), (&json!(1.5), &Value::Null));
        assert_eq!(
            (&json["long"]["ratio"], &json["long"]["peer"]["unfinished"]),
            (&json!(30.0), &json!(true))
        );
    }

    #[test]
    fn table_marks_lower_bounds() {
        let text = report().markdown();
        assert!(text.contains("| time | s | 2.00 (1.00 … 3.00) | 200 (100 … 300) | 100 |"), "{text}");
        assert!(text.contains("| long | s | 2.00 | unfinished after 60.0 | > 30.0 |"), "{text}");
        assert!(text.contains("| alone | s | 0 | – | – |"), "{text}");
    }

    #[test]
    fn percentiles_are_samples() {
        let samples: Vec<_> = (1..=50).rev().map(Duration::from_secs).collect();
        assert_eq!((percentile(&samples, 50), percentile(&samples, 99)), (Some(25.0), Some(50.0)));
        assert_eq!(percentile(&[], 50), None);
    }
}
