// SPDX-License-Identifier: Apache-2.0
//! What was read last of each load balancer or target group, for those of which a call fails.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use anyhow::Result;

/// The object is gone: it was listed before.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gone;

impl fmt::Display for Gone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("it is gone")
    }
}

impl std::error::Error for Gone {}

/// The objects of a kind by ARN.
#[derive(Debug)]
pub(crate) struct LastRead<T> {
    known: BTreeMap<String, T>,
    /// Those whose failure was logged. It may last, and the account is read twice a second.
    failing: BTreeSet<String>,
}

impl<T> Default for LastRead<T> {
    fn default() -> Self {
        Self { known: BTreeMap::new(), failing: BTreeSet::new() }
    }
}

impl<T: Clone> LastRead<T> {
    /// All objects after a read of those that are listed now. One that failed is as it was; one that is gone, or never was read, is left
    /// out.
    pub(crate) fn take(&mut self, read: Vec<(String, Result<T>)>) -> BTreeMap<String, T> {
        let (mut last, logged) = (std::mem::take(&mut self.known), std::mem::take(&mut self.failing));
        for (arn, result) in read {
            let error = match result {
                Ok(found) => {
                    self.known.insert(arn, found);
                    continue;
                }
                Err(error) => error,
            };
            if !logged.contains(&arn) {
                eprintln!("reading {arn} failed; the others are read: {error:#}");
            }
            if !error.is::<Gone>()
                && let Some(before) = last.remove(&arn)
            {
                self.known.insert(arn.clone(), before);
            }
            self.failing.insert(arn);
        }
        self.known.clone()
    }
}

#[cfg(test)]
mod tests {
    use anyhow::{Context as _, anyhow};

    use super::*;

    #[test]
    fn object_that_fails_stays_as_it_was_and_one_that_is_gone_leaves() {
        let mut last = LastRead::default();
        let shown = |last: &mut LastRead<u8>, read: [(&str, Result<u8>); 2]| {
            let read = read.into_iter().map(|(arn, result)| (arn.to_owned(), result)).collect();
            last.take(read)
                .into_iter()
                .map(|(arn, value)| format!("{arn}{value}"))
                .collect::<Vec<_>>()
                .join(" ")
        };
        assert_eq!(shown(&mut last, [("a", Ok(1)), ("b", Err(anyhow!("unread")))]), "a1");
        assert_eq!(shown(&mut last, [("a", Err(anyhow!("no answer"))), ("b", Ok(2))]), "a1 b2");
        let gone = Err(Gone).context("DescribeListeners");
        assert_eq!(shown(&mut last, [("a", gone), ("b", Err(anyhow!("no answer")))]), "b2");
        assert_eq!(
            shown(&mut last, [("a", Err(anyhow!("no answer"))), ("b", Ok(3))]),
            "b3",
            "what is gone stays so"
        );
    }
}
