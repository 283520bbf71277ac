// SPDX-License-Identifier: Apache-2.0
//! Renders the pages of `docs/reference` and compares them with the files.
//!
//! Each crate that owns a page has a test that renders it from the code and calls [`check`]. `hack/reference` runs these
//! tests with `STEERAGE_UPDATE_REFERENCE=1`, which rewrites the files instead. A dev-dependency only: it knows no program.

mod endpoints;
mod flags;
mod metrics;
mod schema;

use std::path::PathBuf;

use anyhow::Context as _;

pub use endpoints::{endpoints, exit_codes};
pub use flags::flags;
pub use metrics::metrics;
pub use schema::{Field, schema};

/// First line of every generated page.
const MARK: &str = "<!-- Generated from the code by hack/reference. Do not edit. -->";

/// Compares `docs/reference/<file>` with a page of this title, introduction and sections; each section starts with its
/// heading. With `STEERAGE_UPDATE_REFERENCE` set it writes the file instead.
///
/// Fails when the file differs, and names the first line that does.
pub fn check(file: &str, title: &str, introduction: &str, sections: &[String]) -> anyhow::Result<()> {
    let mut page = format!("{MARK}\n\n# {title}\n\n{}\n", wrap(introduction));
    for section in sections {
        page.push('\n');
        page.push_str(section.trim_end());
        page.push('\n');
    }
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../reference").join(file);
    if std::env::var_os("STEERAGE_UPDATE_REFERENCE").is_some() {
        return std::fs::write(&path, page).with_context(|| format!("cannot write {}", path.display()));
    }
    let stored = std::fs::read_to_string(&path).unwrap_or_default();
    let differs = stored.lines().chain([""]).zip(page.lines().chain([""])).find(|(old, new)| old != new);
    anyhow::ensure!(
        stored == page,
        "docs/reference/{file} is stale: run hack/reference and commit the result; first difference: {differs:?}"
    );
    Ok(())
}

/// A Markdown table. Line breaks and bars in cells are escaped.
pub fn table<const N: usize>(head: [&str; N], rows: impl IntoIterator<Item = [String; N]>) -> String {
    let line = |cells: [String; N]| format!("| {} |\n", cells.join(" | "));
    let mut table = line(head.map(str::to_owned));
    table.push_str(&line([(); N].map(|()| "---".to_owned())));
    for row in rows {
        table.push_str(&line(row.map(|cell| cell.trim().replace('\n', " ").replace('|', "\\|"))));
    }
    table
}

/// `text` as code, or nothing where it is empty.
pub(crate) fn code(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!("`{text}`") }
}

/// Breaks paragraphs at 100 columns.
pub fn wrap(text: &str) -> String {
    let paragraphs = text.split("\n\n").map(|paragraph| {
        let mut lines = vec![String::new()];
        for word in paragraph.split_whitespace() {
            let width = lines.last().map_or(0, |line| line.chars().count());
            if width > 0 && width + 1 + word.chars().count() > 100 {
                lines.push(String::new());
            }
            if let Some(line) = lines.last_mut() {
                if !line.is_empty() {
                    line.push(' ');
                }
                line.push_str(word);
            }
        }
        lines.join("\n")
    });
    paragraphs.collect::<Vec<_>>().join("\n\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paragraphs_are_wrapped_and_cells_are_escaped() {
        let long = "word ".repeat(30);
        assert!(wrap(&format!("{long}\n\nend")).lines().all(|line| line.chars().count() <= 100));
        assert_eq!(
            table(["a", "b"], [["x|y".to_owned(), String::new()]]),
            "| a | b |\n| --- | --- |\n| x\\|y |  |\n"
        );
    }

    #[test]
    fn reference_page_of_the_chart_is_current() -> anyhow::Result<()> {
        let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../charts/steerage/values.schema.json");
        let values: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(path)?)?;
        let mut sections = Vec::new();
        for (name, section) in values["properties"].as_object().into_iter().flatten() {
            let fields = schema(section);
            if fields.is_empty() {
                continue;
            }
            let row = |field: Field| {
                [code(&format!("{name}.{}", field.path)), field.kind, code(&field.default), field.description]
            };
            let rows = fields.into_iter().map(row);
            sections.push(format!("## {name}\n\n{}", table(["value", "type", "default", "meaning"], rows)));
        }
        check(
            "chart-values.md",
            "Chart values",
            "Values of the chart in `charts/steerage`. The chart's schema refuses any other.",
            &sections,
        )
    }
}
