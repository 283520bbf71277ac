// SPDX-License-Identifier: Apache-2.0
//! When and how a node is asked next for a statement. Pure, called by `statement_task`, which waits.

use std::time::{Duration, Instant};

use super::node_statement::StatementResult;

/// The least time between the beginnings of two requests: 50 a second, however often something changes.
const MIN_PERIOD: Duration = Duration::from_millis(20);
/// The same for a node whose answers have been news for long: what it says all the time must not keep the engine from others. The
/// agent gathers what changes meanwhile.
const LONG_RUN_PERIOD: Duration = Duration::from_millis(200);
/// So many answers may be news at once before that; each `LONG_RUN_PERIOD` without one gives one back.
const BURST: u32 = 50;
/// The pause after an answer that is no statement is a part of the time for which there has been none: an agent that starts states
/// soon, a node without an agent never.
const PAUSE_PARTS: u32 = 4;
/// The shortest pause, or the interval of the node's checks if that is shorter.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const MAX_PAUSE: Duration = Duration::from_secs(10);

#[derive(Debug, Default)]
pub(super) struct StatementSchedule {
    /// The revision that is known.
    after: Option<String>,
    /// Whether the last request was answered by a statement.
    is_answered: bool,
    /// Since when there has been no statement, if the last answer was none.
    without_since: Option<Instant>,
    /// Of [`BURST`], how many were used, at this time.
    used: Option<(u32, Instant)>,
}

impl StatementSchedule {
    /// The revision after which changes are asked for.
    pub(super) fn after(&self) -> Option<&str> {
        self.after.as_deref()
    }

    /// How long the node may hold the next request. Without a statement before it, it is a probe, which the node answers at once.
    pub(super) fn wait(&self, interval: Duration) -> Duration {
        if self.is_answered { interval } else { Duration::ZERO }
    }

    /// The time from the request that brought news to the next one.
    fn period_after_news(&mut self, now: Instant) -> Duration {
        let (used, at) = self.used.unwrap_or((0, now));
        let given_back = now.saturating_duration_since(at).as_millis() / LONG_RUN_PERIOD.as_millis();
        let used = used.saturating_sub(u32::try_from(given_back).unwrap_or(u32::MAX));
        // What is left of a period must not be lost, or nothing would ever be given back.
        let at = if used == 0 || given_back > 0 { now } else { at };
        let used = (used + 1).min(BURST);
        self.used = Some((used, at));
        if used < BURST { MIN_PERIOD } else { LONG_RUN_PERIOD }
    }

    /// A request that was held up to [`wait`](Self::wait) has ended; when the next one is due.
    pub(super) fn record(
        &mut self,
        result: &StatementResult,
        interval: Duration,
        begun: Instant,
        ended: Instant,
    ) -> Instant {
        let wait = self.wait(interval);
        self.is_answered = false;
        match result {
            StatementResult::Stated(statement) => {
                let is_news = statement.complete || self.after.as_ref() != Some(&statement.revision);
                self.after = Some(statement.revision.clone());
                (self.is_answered, self.without_since) = (true, None);
                // An agent that does not hold requests must not be asked without end.
                begun + if is_news { self.period_after_news(ended) } else { wait.max(MIN_PERIOD) }
            }
            StatementResult::Unanswered(_) if self.after.is_some() => begun + interval.max(MIN_PERIOD),
            StatementResult::NotStated(_) | StatementResult::Unanswered(_) => {
                self.after = None;
                let without = ended.duration_since(*self.without_since.get_or_insert(ended));
                ended + (without / PAUSE_PARTS).clamp(interval.min(FIRST_PAUSE), MAX_PAUSE)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use steerage_model::Statement;

    const INTERVAL: Duration = Duration::from_secs(5);

    fn stated(revision: &str, complete: bool) -> StatementResult {
        let ports = [(30_000, Some(1))].into();
        let revision = revision.to_owned();
        StatementResult::Stated(Statement { revision, complete, healthy: true, ports, edge_tunnel: None })
    }

    /// Follows a schedule whose requests take so long.
    struct Asker {
        schedule: StatementSchedule,
        now: Instant,
    }

    impl Asker {
        /// The revision, the wait, and the time from the beginning of the request to the next one, in milliseconds.
        fn ask(&mut self, took: u64, result: &StatementResult) -> (Option<String>, u128, u128) {
            let (after, wait) = (self.schedule.after().map(str::to_owned), self.schedule.wait(INTERVAL));
            let begun = self.now;
            let ended = begun + Duration::from_millis(took);
            let due = self.schedule.record(result, INTERVAL, begun, ended);
            self.now = due.max(ended);
            (after, wait.as_millis(), self.now.duration_since(begun).as_millis())
        }
    }

    fn asker() -> Asker {
        Asker { schedule: StatementSchedule::default(), now: Instant::now() }
    }

    #[test]
    fn statement_is_followed_by_a_request_that_is_held() {
        let (mut asker, known) = (asker(), |revision: &str| Some(revision.to_owned()));
        for (took, result, expected) in [
            (3, stated("a1", true), (None, 0, 20)),
            (900, stated("a2", false), (known("a1"), 5000, 900)),
            (1, stated("a3", false), (known("a2"), 5000, 20)),
            (5000, stated("a3", false), (known("a3"), 5000, 5000)),
            (1, stated("a3", false), (known("a3"), 5000, 5000)),
            (2, stated("b1", true), (known("a3"), 5000, 20)),
        ] {
            assert_eq!(asker.ask(took, &result), expected, "{result:?}");
        }
    }

    #[test]
    fn node_that_changes_without_end_is_asked_less_often() {
        let mut asker = asker();
        let mut ask = |number: u32, took| asker.ask(took, &stated(&format!("a{number}"), number == 0)).2;
        let periods: Vec<_> = (0..60).map(|number| ask(number, 0)).collect();
        assert!(periods[..45].iter().all(|period| *period == 20), "{periods:?}");
        assert!(periods[56..].iter().all(|period| *period == 200), "{periods:?}");
        // 20 in a second are a burst again after ten seconds of rest.
        assert_eq!(ask(60, 10_000), 10_000);
        let periods: Vec<_> = (61..81).map(|number| ask(number, 0)).collect();
        assert!(periods.iter().all(|period| *period == 20), "{periods:?}");
    }

    #[test]
    fn node_without_an_agent_is_asked_rarely() {
        let mut asker = asker();
        let refused = StatementResult::NotStated("refused".to_owned());
        let mut pauses = || asker.ask(0, &refused).2;
        assert_eq!([(); 7].map(|()| pauses()), [1000, 1000, 1000, 1000, 1000, 1250, 1562]);
        assert_eq!([(); 12].map(|()| pauses())[11], 10_000);
        assert_eq!(asker.ask(0, &StatementResult::Unanswered(String::new())).2, 10_000, "never stated");
        asker.ask(0, &stated("a", true));
        assert_eq!(asker.ask(0, &refused).2, 1000, "an agent that restarts");
        assert_eq!(asker.ask(0, &refused).0, None, "it will not know the revision");
    }

    #[test]
    fn silent_node_is_asked_once_in_an_interval_for_what_changed() {
        let mut asker = asker();
        asker.ask(0, &stated("a", true));
        let silent = StatementResult::Unanswered("no route".to_owned());
        let known = Some("a".to_owned());
        assert_eq!(asker.ask(7000, &silent), (known.clone(), 5000, 7000));
        assert_eq!(asker.ask(2000, &silent), (known.clone(), 0, 5000));
        assert_eq!(asker.ask(5, &silent), (known.clone(), 0, 5000));
        assert_eq!(asker.ask(5, &stated("a", false)), (known.clone(), 0, 20));
        assert_eq!(asker.ask(5000, &stated("a", false)), (known, 5000, 5000));
    }
}
