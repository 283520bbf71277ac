// SPDX-License-Identifier: Apache-2.0
//! Compares `docs/agent-rules.md` with the sources: it has all 48 rules, and every test that it names exists.

use std::collections::BTreeSet;
use std::path::Path;

const PAGE: &str = include_str!("../../../docs/agent-rules.md");

/// The directories with tests of the rules.
const SOURCES: [&str; 6] =
    ["agent/src", "agent/tests", "model/src", "nft/tests", "watch/src", "e2e/suite/src/cases"];

/// The rules by number, each with the names in its last column.
fn rules() -> Vec<(u32, Vec<&'static str>)> {
    let row = |line: &'static str| {
        let cells: Vec<_> = line.trim_matches('|').split('|').collect();
        let number = cells.first()?.trim().parse().ok()?;
        let tests = cells.last()?.split('`').skip(1).step_by(2);
        Some((number, tests.collect()))
    };
    PAGE.lines().filter_map(row).collect()
}

/// The names of all tests in `directory`: functions with a test attribute, and cases of the end-to-end suite.
fn tests(directory: &Path, found: &mut BTreeSet<String>) {
    for entry in
        std::fs::read_dir(directory).expect("a directory").map(|entry| entry.expect("an entry").path())
    {
        if entry.is_dir() {
            tests(&entry, found);
        } else if entry.extension().is_some_and(|extension| extension == "rs") {
            let text = std::fs::read_to_string(&entry).expect("text");
            let case = entry.components().any(|part| part.as_os_str() == "cases");
            let mut marked = false;
            for line in text.lines().map(str::trim) {
                if let Some((_, rest)) = line.split_once("fn ").filter(|_| marked || case) {
                    found.extend(rest.split_once(['(', '<']).map(|(name, _)| name.to_owned()));
                }
                marked = line == "#[test]" || line.starts_with("#[tokio::test");
            }
        }
    }
}

#[test]
fn every_rule_names_existing_tests() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace");
    let mut known = BTreeSet::new();
    for directory in SOURCES {
        tests(&root.join(directory), &mut known);
    }
    let rules = rules();
    assert_eq!(rules.iter().map(|(number, _)| *number).collect::<Vec<_>>(), (1..=48).collect::<Vec<_>>());
    for (number, tests) in rules {
        assert!(!tests.is_empty(), "rule {number} has no test");
        for test in tests {
            assert!(known.contains(test), "rule {number}: there is no test {test}");
        }
    }
}
