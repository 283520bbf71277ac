// SPDX-License-Identifier: Apache-2.0
//! The faults to inject. Pure. The proxy asks once for every counted call.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;

use super::Call;

/// When a call is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CutPoint {
    /// Before the backend receives it.
    Before,
    /// After the backend has handled it; the provider gets no response.
    After,
}

/// The calls that a fault affects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Span {
    /// One call.
    Once,
    /// One call and all later ones.
    Onward,
    /// One call and, whether they match or not, all later ones.
    Rest,
    /// One call; all later ones, whether they match or not, are cut before the backend receives them.
    Crash,
}

/// A response from the proxy instead of the backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CannedResponse {
    /// HTTP status.
    pub status: u16,
    /// Content type.
    pub content_type: &'static str,
    /// Body.
    pub body: Bytes,
}

/// A fault of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Closes the connection without a response.
    Cut(CutPoint),
    /// Responds without calling the backend.
    Respond(CannedResponse),
    /// Calls the backend after this time.
    Delay(Duration),
}

pub(super) type Matches = Box<dyn Fn(&Call) -> bool + Send + Sync>;

struct Rule {
    matches: Matches,
    seen: usize,
    at: usize,
    span: Span,
    fault: Fault,
}

/// The rules for faults. Every rule counts every matching call. If several rules apply to a call, the first wins.
#[derive(Default)]
pub(super) struct Script {
    rules: Vec<Rule>,
    /// The name of the first call with a fault.
    faulty: Option<String>,
    /// That of all later calls.
    rest: Option<Fault>,
}

impl Script {
    pub(super) fn add(&mut self, matches: Matches, at: usize, span: Span, fault: Fault) {
        self.rules.push(Rule { matches, seen: 0, at, span, fault });
    }

    pub(super) fn next_fault(&mut self, call: &Call) -> Option<Fault> {
        if self.rest.is_some() {
            return self.rest.clone();
        }
        let mut fault = None;
        for rule in &mut self.rules {
            if !(rule.matches)(call) {
                continue;
            }
            rule.seen += 1;
            let now = match rule.span {
                Span::Once | Span::Rest | Span::Crash => rule.seen == rule.at,
                Span::Onward => rule.seen >= rule.at,
            };
            if now && fault.is_none() {
                fault = Some(rule.fault.clone());
                self.rest = match rule.span {
                    Span::Once | Span::Onward => None,
                    Span::Rest => fault.clone(),
                    Span::Crash => Some(Fault::Cut(CutPoint::Before)),
                };
            }
        }
        if fault.is_some() {
            self.faulty.get_or_insert_with(|| call.name.clone());
        }
        fault
    }

    pub(super) fn faulty(&self) -> Option<&str> {
        self.faulty.as_deref()
    }
}

/// Matches all calls but reads that were made since the last write already: those of a provider that waits for a change.
pub(super) fn not_repeated() -> Matches {
    let seen = Mutex::new(HashSet::new());
    Box::new(move |call| {
        let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
        if call.write {
            seen.clear();
            return true;
        }
        seen.insert((call.name.clone(), call.target.clone(), call.body.clone()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(name: &str) -> Call {
        Call { name: name.to_owned(), write: true, target: String::new(), body: Bytes::new() }
    }

    #[test]
    fn once_hits_one_call_and_onward_all_later_calls() {
        let mut script = Script::default();
        script.add(Box::new(|_| true), 2, Span::Once, Fault::Cut(CutPoint::After));
        script.add(Box::new(|_| true), 3, Span::Onward, Fault::Cut(CutPoint::Before));
        assert_eq!(script.next_fault(&call("a")), None);
        assert_eq!(script.faulty(), None);
        assert_eq!(script.next_fault(&call("a")), Some(Fault::Cut(CutPoint::After)));
        assert_eq!(script.faulty(), Some("a"));
        assert_eq!(script.next_fault(&call("a")), Some(Fault::Cut(CutPoint::Before)));
        assert_eq!(script.next_fault(&call("a")), Some(Fault::Cut(CutPoint::Before)));
    }

    #[test]
    fn nothing_reaches_the_backend_after_a_crash() {
        let mut script = Script::default();
        script.add(Box::new(|c| c.name == "b"), 1, Span::Crash, Fault::Cut(CutPoint::After));
        assert_eq!(script.next_fault(&call("a")), None);
        assert_eq!(script.next_fault(&call("b")), Some(Fault::Cut(CutPoint::After)));
        assert_eq!(script.next_fault(&call("a")), Some(Fault::Cut(CutPoint::Before)));
        assert_eq!(script.next_fault(&call("b")), Some(Fault::Cut(CutPoint::Before)));
    }

    #[test]
    fn rest_meets_the_same_fault() {
        let mut script = Script::default();
        let fault = Fault::Delay(Duration::from_secs(1));
        script.add(Box::new(|c| c.name == "b"), 1, Span::Rest, fault.clone());
        assert_eq!(script.next_fault(&call("a")), None);
        assert_eq!(script.next_fault(&call("b")), Some(fault.clone()));
        assert_eq!(script.next_fault(&call("a")), Some(fault));
    }

    #[test]
    fn read_that_repeats_one_since_the_last_write_is_not_counted() {
        let read = |name| Call { write: false, ..call(name) };
        let counts = not_repeated();
        for (call, is_counted) in [
            (read("a"), true),
            (read("a"), false),
            (read("b"), true),
            (read("a"), false),
            (call("b"), true),
            (call("b"), true),
            (read("a"), true),
        ] {
            assert_eq!(counts(&call), is_counted, "{call:?}");
        }
    }

    #[test]
    fn rule_counts_only_matching_calls() {
        let mut script = Script::default();
        script.add(Box::new(|c| c.name == "b"), 2, Span::Once, Fault::Cut(CutPoint::Before));
        assert_eq!(script.next_fault(&call("b")), None);
        assert_eq!(script.next_fault(&call("a")), None);
        assert_eq!(script.next_fault(&call("b")), Some(Fault::Cut(CutPoint::Before)));
        assert_eq!(script.next_fault(&call("b")), None);
    }
}
