// SPDX-License-Identifier: Apache-2.0
//! A problem of work that is repeated every second or so: it is logged once, and again only when it differs. Pure.

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct LoggedProblem(Option<String>);

impl LoggedProblem {
    /// The work has been repeated, with this problem or without one. Returns whether that differs from the last time.
    pub(crate) fn set(&mut self, problem: Option<String>) -> bool {
        std::mem::replace(&mut self.0, problem) != self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn problem_is_news_once() {
        let mut logged = LoggedProblem::default();
        let mut is_news = |problem: Option<&str>| logged.set(problem.map(str::to_owned));
        let problems = [None, Some("one"), Some("one"), Some("two"), None, None, Some("two")];
        assert_eq!(problems.map(&mut is_news), [false, true, false, true, true, false, true]);
    }
}
