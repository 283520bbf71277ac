// SPDX-License-Identifier: Apache-2.0
//! How many lines the log has about what Services request: a tenant must not fill the disk of every node, nor keep the lines about
//! another tenant's Services out of the log. Pure, but for the lines that say that lines were left out.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

/// Lines in each minute about the Services of a namespace, and about all.
const OF_NAMESPACE: u32 = 20;
const OF_ALL: u32 = 200;
const MINUTE: Duration = Duration::from_mins(1);

/// The lines of the current minute.
#[derive(Debug, Default)]
pub(super) struct LogLines {
    began: Option<Instant>,
    /// Those about all, and after the last one those that were left out.
    written: u32,
    /// Those that were written or left out, by namespace; of as many namespaces as lines may be written.
    namespaces: BTreeMap<String, u32>,
    left_out: u64,
}

/// What to do with a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Write,
    /// It is the first of its namespace in this minute, or the first of all, that is left out.
    LeaveOutFirst,
    LeaveOut,
}

impl LogLines {
    /// What to do with one more line about a namespace, and how many were left out in an earlier minute.
    fn step(&mut self, namespace: &str, now: Instant) -> (Step, u64) {
        let mut left_out = 0;
        if self.began.is_none_or(|began| now.duration_since(began) >= MINUTE) {
            left_out = self.left_out;
            *self = Self { began: Some(now), ..Self::default() };
        }
        let step = if self.written < OF_ALL {
            let step = count_up(self.namespaces.entry(namespace.to_owned()).or_default(), OF_NAMESPACE);
            self.written += u32::from(step == Step::Write);
            step
        } else {
            count_up(&mut self.written, OF_ALL)
        };
        self.left_out += u64::from(step != Step::Write);
        (step, left_out)
    }

    /// Whether a line about a namespace may be written now. Writes a line about those that were left out.
    pub(super) fn may_write(&mut self, namespace: &str) -> bool {
        let (step, left_out) = self.step(namespace, Instant::now());
        if left_out > 0 {
            tracing::warn!(left_out, "lines about Services that are not served as requested were left out");
        }
        if step == Step::LeaveOutFirst {
            tracing::warn!(
                namespace,
                "further lines about Services that are not served as requested are left out for a minute"
            );
        }
        step == Step::Write
    }
}

fn count_up(count: &mut u32, limit: u32) -> Step {
    *count = count.saturating_add(1);
    match (*count).cmp(&(limit + 1)) {
        Ordering::Less => Step::Write,
        Ordering::Equal => Step::LeaveOutFirst,
        Ordering::Greater => Step::LeaveOut,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(lines: &mut LogLines, namespace: &str, now: Instant) -> usize {
        (0..1000).filter(|_| lines.step(namespace, now).0 == Step::Write).count()
    }

    #[test]
    fn lines_about_one_namespace_leave_room_for_others() {
        let (mut lines, start) = (LogLines::default(), Instant::now());
        assert_eq!(written(&mut lines, "noisy", start), 20);
        assert_eq!(written(&mut lines, "quiet", start), 20);
        let others: usize = (0..2000).map(|n| written(&mut lines, &n.to_string(), start)).sum();
        assert_eq!(others, 160, "all together have a limit, too");
        assert!(lines.namespaces.len() <= 200, "{}", lines.namespaces.len());
    }

    #[test]
    fn lines_left_out_are_announced_once_and_counted() {
        let (mut lines, start) = (LogLines::default(), Instant::now());
        let steps: Vec<_> = (0..100).map(|_| lines.step("a", start)).collect();
        assert_eq!(steps.iter().filter(|step| **step == (Step::LeaveOutFirst, 0)).count(), 1);
        assert_eq!(lines.step("a", start + MINUTE / 2), (Step::LeaveOut, 0));
        assert_eq!(lines.step("b", start + MINUTE / 2), (Step::Write, 0));
        assert_eq!(lines.step("b", start + MINUTE), (Step::Write, 81));
        assert_eq!(lines.step("b", start + 2 * MINUTE), (Step::Write, 0));
    }
}
