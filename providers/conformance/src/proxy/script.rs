// SPDX-License-Identifier: Apache-2.0
//! The faults to inject. Pure. The proxy asks once for every counted call.

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

type Matches = Box<dyn Fn(&Call) -> bool + Send + Sync>;

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
    fault_fired: bool,
    crashed: bool,
}

impl Script {
    pub(super) fn add(&mut self, matches: Matches, at: usize, span: Span, fault: Fault) {
        self.rules.push(Rule { matches, seen: 0, at, span, fault });
    }

    pub(super) fn next_fault(&mut self, call: &Call) -> Option<Fault> {
        if self.crashed {
            return Some(Fault::Cut(CutPoint::Before));
        }
        let mut fault = None;
        for rule in &mut self.rules {
            if !(rule.matches)(call) {
                continue;
            }
            rule.seen += 1;
            let now = match rule.span {
                Span::Once | Span::Crash => rule.seen == rule.at,
                Span::Onward => rule.seen >= rule.at,
            };
            if now && fault.is_none() {
                fault = Some(rule.fault.clone());
                self.crashed = rule.span == Span::Crash;
            }
        }
        self.fault_fired |= fault.is_some();
        fault
    }

    pub(super) fn fault_fired(&self) -> bool {
        self.fault_fired
    }
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
        assert!(!script.fault_fired());
        assert_eq!(script.next_fault(&call("a")), Some(Fault::Cut(CutPoint::After)));
        assert!(script.fault_fired());
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
    fn rule_counts_only_matching_calls() {
        let mut script = Script::default();
        script.add(Box::new(|c| c.name == "b"), 2, Span::Once, Fault::Cut(CutPoint::Before));
        assert_eq!(script.next_fault(&call("b")), None);
        assert_eq!(script.next_fault(&call("a")), None);
        assert_eq!(script.next_fault(&call("b")), Some(Fault::Cut(CutPoint::Before)));
        assert_eq!(script.next_fault(&call("b")), None);
    }
}
