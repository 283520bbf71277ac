// SPDX-License-Identifier: Apache-2.0
//! A program's metrics as a Markdown table, read from what its registry encodes.

use std::collections::BTreeSet;

use crate::{code, table};

/// The section for the metrics in `text`, which is in the `OpenMetrics` format.
///
/// The registry leaves out families that have no sample yet: the caller must have counted something in each.
pub fn metrics(text: &str) -> String {
    let mut rows = Vec::new();
    let described = text.lines().filter_map(|line| line.strip_prefix("# HELP ")?.split_once(' '));
    for (name, help) in described {
        let kind =
            text.lines().find_map(|line| line.strip_prefix(&format!("# TYPE {name} "))).unwrap_or_default();
        let suffix = match kind {
            "counter" => "_total",
            "info" => "_info",
            _ => "",
        };
        let labels: Vec<_> = labels(text, name).into_iter().map(|label| code(&label)).collect();
        let help = help.trim_end_matches('.').to_owned();
        rows.push([code(&format!("{name}{suffix}")), kind.to_owned(), labels.join(", "), help]);
    }
    format!("## Metrics\n\n{}", table(["metric", "type", "labels", "meaning"], rows))
}

/// The names of the labels that samples of `metric` carry, but for a histogram's `le`.
fn labels(text: &str, metric: &str) -> BTreeSet<String> {
    let mut labels = BTreeSet::new();
    for line in text.lines() {
        let Some((name, rest)) = line.split_once('{') else { continue };
        let suffix = name.strip_prefix(metric);
        if !suffix
            .is_some_and(|suffix| ["", "_total", "_info", "_bucket", "_sum", "_count"].contains(&suffix))
        {
            continue;
        }
        let pairs = rest.split('}').next().unwrap_or_default().split(',');
        labels.extend(pairs.filter_map(|pair| Some(pair.split_once('=')?.0.to_owned())));
    }
    labels.remove("le");
    labels
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_and_histograms_are_listed_with_their_labels() {
        let text = "# HELP a_calls Calls made.\n# TYPE a_calls counter\na_calls_total{code=\"1\",to=\"b\"} 1\n\
                    # HELP a_time_seconds Time.\n# TYPE a_time_seconds histogram\na_time_seconds_bucket{le=\"1\"} 1\n# EOF\n";
        let table = metrics(text);
        assert!(table.contains("| `a_calls_total` | counter | `code`, `to` | Calls made |\n"), "{table}");
        assert!(table.contains("| `a_time_seconds` | histogram |  | Time |\n"), "{table}");
    }
}
