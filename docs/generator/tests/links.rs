// SPDX-License-Identifier: Apache-2.0
//! Every relative link between Markdown files names a file that exists and, after `#`, a heading in it; and no line is longer
//! than 100 columns where it can be broken.
#![allow(clippy::expect_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Folders with other people's files, or with what a build made.
const SKIPPED: [&str; 3] = ["target", "vendor", "node_modules"];

/// All Markdown files below `folder` with their lines outside code blocks.
fn pages(folder: &Path, found: &mut BTreeMap<PathBuf, Vec<String>>) {
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        if path.is_dir() {
            if (!name.starts_with('.') || name == ".github") && !SKIPPED.contains(&name.as_str()) {
                pages(&path, found);
            }
        } else if path.extension().is_some_and(|extension| extension == "md") {
            let text = std::fs::read_to_string(&path).expect("text");
            let mut in_code = false;
            let mut lines = Vec::new();
            for line in text.lines() {
                let fence = line.trim_start().starts_with("```");
                in_code ^= fence;
                if !in_code && !fence {
                    lines.push(line.to_owned());
                }
            }
            found.insert(path.canonicalize().expect("a path"), lines);
        }
    }
}

/// The anchor that GitHub gives a heading.
fn anchor(heading: &str) -> String {
    let text = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = text.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

/// Whether the line may be longer than 100 columns: a table row, or nothing but one link.
fn may_be_long(line: &str) -> bool {
    let text = line.trim_start_matches([' ', '-', '*']).trim_end();
    line.starts_with('|') || (text.starts_with('[') && text.ends_with(')') && links(text).count() == 1)
}

#[test]
fn lines_are_wrapped_at_100_columns() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut all = BTreeMap::new();
    pages(&root, &mut all);
    // Wrapped by the generator, but for tables.
    let generated = root.join("docs/reference").canonicalize().expect("a folder");
    let mut long = Vec::new();
    for (page, lines) in all.iter().filter(|(page, _)| !page.starts_with(&generated)) {
        for line in lines.iter().filter(|line| line.chars().count() > 100 && !may_be_long(line)) {
            long.push(format!("{}: {line}", page.display()));
        }
    }
    assert!(long.is_empty(), "longer than 100 columns:\n{}", long.join("\n"));
}

fn links(line: &str) -> impl Iterator<Item = &str> {
    line.split("](").skip(1).filter_map(|rest| rest.split_once(')').map(|(link, _)| link))
}

#[test]
fn links_between_pages_resolve() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut all = BTreeMap::new();
    pages(&root, &mut all);
    assert!(all.len() > 10, "the pages were not found");
    let mut broken = Vec::new();
    for (page, lines) in &all {
        for link in lines.iter().flat_map(|line| links(line)) {
            if link.contains("://") || link.starts_with("mailto:") {
                continue;
            }
            let (file, fragment) = link.split_once('#').unwrap_or((link, ""));
            let target = if file.is_empty() { page.clone() } else { page.with_file_name("").join(file) };
            let Ok(target) = target.canonicalize() else {
                broken.push(format!("{}: no file {link}", page.display()));
                continue;
            };
            let headings = all.get(&target).into_iter().flatten().filter(|line| line.starts_with('#'));
            if !fragment.is_empty() && !headings.map(|line| anchor(line)).any(|found| found == fragment) {
                broken.push(format!("{}: no heading for {link}", page.display()));
            }
        }
    }
    assert!(broken.is_empty(), "broken links:\n{}", broken.join("\n"));
}
