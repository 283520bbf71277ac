// SPDX-License-Identifier: Apache-2.0
//! Which fault happens to which call. Pure; the proxy asks once for every counted call.

use std::time::Duration;

use bytes::Bytes;

use super::Call;

/// On which side of the backend a call is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// The backend never sees it.
    Before,
    /// The backend has done it; the provider never hears.
    After,
}

/// How long a fault lasts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Span {
    /// One call.
    Once,
    /// That call and all that follow.
    Onward,
}

/// An answer in the backend's stead.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The HTTP status.
    pub status: u16,
    /// The content type.
    pub content_type: &'static str,
    /// The body.
    pub body: Bytes,
}

/// What happens to a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The connection is closed without an answer.
    Cut(When),
    /// The backend never sees it; this is answered.
    Answer(Answer),
    /// It reaches the backend only after this time.
    Delay(Duration),
}

type Matches = Box<dyn Fn(&Call) -> bool + Send + Sync>;

struct Rule {
    matches: Matches,
    seen: usize,
    at: usize,
    span: Span,
    fault: Fault,
}

/// The faults to come. The first rule whose turn it is wins; every rule counts every call that matches it.
#[derive(Default)]
pub(super) struct Script {
    rules: Vec<Rule>,
    struck: bool,
}

impl Script {
    pub(super) fn add(&mut self, matches: Matches, at: usize, span: Span, fault: Fault) {
        self.rules.push(Rule { matches, seen: 0, at, span, fault });
    }

    pub(super) fn strike(&mut self, call: &Call) -> Option<Fault> {
        let mut fault = None;
        for rule in &mut self.rules {
            if !(rule.matches)(call) {
                continue;
            }
            rule.seen += 1;
            let now = match rule.span {
                Span::Once => rule.seen == rule.at,
                Span::Onward => rule.seen >= rule.at,
            };
            if now && fault.is_none() {
                fault = Some(rule.fault.clone());
            }
        }
        self.struck |= fault.is_some();
        fault
    }

    pub(super) fn struck(&self) -> bool {
        self.struck
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(name: &str) -> Call {
        Call { name: name.to_owned(), write: true, target: String::new(), body: Bytes::new() }
    }

    #[test]
    fn the_nth_call_is_struck_and_those_after_it_by_their_own_rule() {
        let mut script = Script::default();
        script.add(Box::new(|_| true), 2, Span::Once, Fault::Cut(When::After));
        script.add(Box::new(|_| true), 3, Span::Onward, Fault::Cut(When::Before));
        assert_eq!(script.strike(&call("a")), None);
        assert!(!script.struck());
        assert_eq!(script.strike(&call("a")), Some(Fault::Cut(When::After)));
        assert!(script.struck());
        assert_eq!(script.strike(&call("a")), Some(Fault::Cut(When::Before)));
        assert_eq!(script.strike(&call("a")), Some(Fault::Cut(When::Before)));
    }

    #[test]
    fn a_rule_counts_only_what_it_matches() {
        let mut script = Script::default();
        script.add(Box::new(|c| c.name == "b"), 2, Span::Once, Fault::Cut(When::Before));
        assert_eq!(script.strike(&call("b")), None);
        assert_eq!(script.strike(&call("a")), None);
        assert_eq!(script.strike(&call("b")), Some(Fault::Cut(When::Before)));
        assert_eq!(script.strike(&call("b")), None);
    }
}
