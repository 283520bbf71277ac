// SPDX-License-Identifier: Apache-2.0
//! The measurements of a run: tables, printed at its end and written to files.

use std::fmt::Write as _;
use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use anyhow::Result;
use serde::Serialize;

use crate::service_proxy::ServiceProxy;

/// Tables in the order of their first row.
#[derive(Default)]
pub struct Report(Mutex<Vec<Table>>);

#[derive(Clone, Serialize)]
struct Table {
    title: String,
    columns: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Report {
    /// Adds a row to the table with this title.
    pub fn row(&self, title: &str, columns: &[&str], row: Vec<String>) {
        let Ok(mut tables) = self.0.lock() else { return };
        if let Some(table) = tables.iter_mut().find(|table| table.title == title) {
            table.rows.push(row);
            return;
        }
        let columns = columns.iter().map(ToString::to_string).collect();
        tables.push(Table { title: title.to_owned(), columns, rows: vec![row] });
    }

    /// Prints all tables.
    pub fn print(&self) {
        for table in self.tables() {
            println!("\n{}", markdown(&table));
        }
    }

    /// Writes all tables: as Markdown where the file's name ends so, else as JSON.
    pub fn write(&self, file: &Path, service_proxy: ServiceProxy) -> Result<()> {
        let tables = self.tables();
        let text = if file.extension().is_some_and(|extension| extension == "md") {
            tables.iter().map(markdown).collect::<Vec<_>>().join("\n")
        } else {
            serde_json::to_string_pretty(
                &serde_json::json!({ "service_proxy": service_proxy.as_str(), "tables": tables }),
            )?
        };
        Ok(std::fs::write(file, text)?)
    }

    fn tables(&self) -> Vec<Table> {
        self.0.lock().map(|tables| tables.clone()).unwrap_or_default()
    }
}

fn markdown(table: &Table) -> String {
    let mut text = format!("### {}\n\n", table.title);
    let mut line = |cells: &[String]| {
        let _ = writeln!(text, "| {} |", cells.join(" | "));
    };
    line(&table.columns);
    line(&vec!["---".to_owned(); table.columns.len()]);
    table.rows.iter().for_each(|row| line(row));
    text
}

/// Milliseconds.
pub fn ms(time: Duration) -> String {
    format!("{:.0}", time.as_secs_f64() * 1000.0)
}

/// Milliseconds with one decimal.
pub fn fine_ms(time: Duration) -> String {
    format!("{:.1}", time.as_secs_f64() * 1000.0)
}

/// The value below which `percent` of the sorted values lie; zero of none.
pub fn percentile(sorted: &[Duration], percent: usize) -> Duration {
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_were_measured() {
        let sorted: Vec<_> = (1..=50).map(Duration::from_millis).collect();
        assert_eq!(percentile(&sorted, 50), Duration::from_millis(25));
        assert_eq!(percentile(&sorted, 99), Duration::from_millis(50));
        assert_eq!(percentile(&sorted, 100), Duration::from_millis(50));
        assert_eq!(percentile(&[], 50), Duration::ZERO);
    }

    #[test]
    fn rows_of_one_title_share_a_table() {
        let report = Report::default();
        report.row("t", &["a"], vec!["1".into()]);
        report.row("t", &["a"], vec!["2".into()]);
        assert_eq!(markdown(&report.tables()[0]), "### t\n\n| a |\n| --- |\n| 1 |\n| 2 |\n");
    }
}
