// SPDX-License-Identifier: Apache-2.0
//! The measured times as tables, JSON and a plot. Pure.

use std::fmt::Write as _;
use std::time::Duration;

use serde_json::{Value, json};

use super::cell::{Cell, Signal};
use super::moves::MoveTimes;
use crate::plot::{self, Chart};
use crate::report::{number, percentile};

/// The cells and the times of their moves.
pub(super) struct Results(Vec<(Cell, Vec<MoveTimes>)>);

impl Results {
    pub(super) fn new(cells: &[Cell], times: Vec<Vec<MoveTimes>>) -> Self {
        Self(cells.iter().copied().zip(times).collect())
    }

    fn signals(&self) -> impl Iterator<Item = Signal> {
        Signal::ALL.into_iter().filter(|signal| self.0.iter().any(|(cell, _)| cell.signal == *signal))
    }

    fn thresholds(&self) -> Vec<u32> {
        let mut all: Vec<_> = self.0.iter().map(|(cell, _)| cell.threshold).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    fn moves(&self, is_meant: impl Fn(&Cell) -> bool) -> impl Iterator<Item = (Cell, MoveTimes)> {
        let cells = self.0.iter().filter(move |(cell, _)| is_meant(cell));
        cells.flat_map(|(cell, times)| times.iter().map(|times| (*cell, *times)))
    }

    /// The times in which a node still got packets, in intervals.
    fn in_intervals(&self, signal: Signal, threshold: u32) -> Vec<f64> {
        let of = |cell: &Cell| (cell.signal, cell.threshold) == (signal, threshold);
        self.moves(of).map(|(cell, times)| times.left.as_secs_f64() / cell.interval.as_secs_f64()).collect()
    }

    /// A table of times, and for probes one of intervals.
    pub(super) fn markdown(&self) -> String {
        let mut text =
            "| signal | moves | last packet: p50 ms | p90 ms | p99 ms | max ms | joined: p50 ms | p99 ms |\n\
                        |---|---|---|---|---|---|---|---|\n"
                .to_owned();
        for signal in self.signals() {
            let times: Vec<_> = self.moves(|cell| cell.signal == signal).map(|(_, times)| times).collect();
            let sorted = |time: fn(&MoveTimes) -> Duration| {
                let mut all: Vec<_> = times.iter().map(time).collect();
                all.sort_unstable();
                all
            };
            let (left, joined) = (sorted(|times| times.left), sorted(|times| times.joined));
            let ms = |times: &[Duration], percent| number(percentile(times, percent).unwrap_or(0.0) * 1e3);
            let _ = writeln!(
                text,
                "| {} | {} | {} | {} | {} | {} | {} | {} |",
                signal.title(),
                times.len(),
                ms(&left, 50),
                ms(&left, 90),
                ms(&left, 99),
                ms(&left, 100),
                ms(&joined, 50),
                ms(&joined, 99)
            );
        }
        if self.signals().any(Signal::is_by_probes) {
            text.push_str("\n| probes: unhealthy threshold | moves | last packet: p50 intervals | min | max | (threshold + 1) intervals |\n|---|---|---|---|---|---|\n");
            for threshold in self.thresholds() {
                let mut values = self.in_intervals(Signal::Probes, threshold);
                values.sort_by(f64::total_cmp);
                let (Some(min), Some(max)) = (values.first(), values.last()) else { continue };
                let median = values[values.len() / 2];
                let count = values.len();
                let bound = threshold + 1;
                let _ = writeln!(
                    text,
                    "| {threshold} | {count} | {} | {} | {} | {bound} |",
                    number(median),
                    number(*min),
                    number(*max)
                );
            }
        }
        text
    }

    /// Every move.
    pub(super) fn json(&self) -> Value {
        let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
        let cell = |(cell, times): &(Cell, Vec<MoveTimes>)| {
            json!({
                "signal": cell.signal.title(), "interval_ms": milliseconds(cell.interval),
                "threshold": cell.threshold,
                "left_ms": times.iter().map(|times| milliseconds(times.left)).collect::<Vec<_>>(),
                "joined_ms": times.iter().map(|times| milliseconds(times.joined)).collect::<Vec<_>>(),
            })
        };
        self.0.iter().map(cell).collect()
    }

    /// One chart for each signal: the times in intervals against the threshold, and the proposal's bound.
    pub(super) fn svg(&self) -> String {
        let thresholds = self.thresholds();
        let chart = |signal: Signal| Chart {
            title: signal.title(),
            values: thresholds
                .iter()
                .map(|threshold| (*threshold, self.in_intervals(signal, *threshold)))
                .collect(),
            bound: thresholds.iter().map(|threshold| (*threshold, f64::from(threshold + 1))).collect(),
        };
        let charts: Vec<_> = self.signals().map(chart).collect();
        let title = "Intervals from a node's change to the last packet sent to it";
        plot::svg(title, "unhealthy threshold", plot::Scale::Linear, &charts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn results() -> Results {
        let cell = |signal, milliseconds, threshold, service| Cell {
            signal,
            interval: Duration::from_millis(milliseconds),
            threshold,
            service,
        };
        let times = |milliseconds: &[u64]| {
            let time = |left: &u64| MoveTimes {
                left: Duration::from_millis(*left),
                joined: Duration::from_millis(4),
            };
            milliseconds.iter().map(time).collect()
        };
        Results(vec![
            (cell(Signal::Statements, 100, 2, 0), times(&[1, 2, 3])),
            (cell(Signal::Probes, 100, 2, 1), times(&[150, 200])),
            (cell(Signal::Probes, 1000, 2, 2), times(&[1700])),
        ])
    }

    #[test]
    fn times_are_shown_in_milliseconds_and_for_probes_in_intervals() {
        let text = results().markdown();
        assert!(text.contains("| health-check, statements | 3 | 2.00 |"), "{text}");
        assert!(text.contains("| 2 | 3 | 1.70 | 1.50 | 2.00 | 3 |"), "{text}");
    }

    #[test]
    fn plot_has_a_chart_for_each_signal_with_the_bound() {
        let text = results().svg();
        assert_eq!(text.matches("class=\"bound\"").count(), 2, "{text}");
        assert!(text.contains("health-check, probes"));
        assert_eq!(results().json()[1]["left_ms"], json!([150.0, 200.0]));
    }
}
