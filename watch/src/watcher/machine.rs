// SPDX-License-Identifier: Apache-2.0
//! The state machine of a watch: which call comes next. Pure: no clock, no network.

/// A call to make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Call {
    /// One page of a list.
    List {
        /// Whether the list must be consistent with etcd, or may come from the API server's cache.
        newest: bool,
        /// The continuation of a list that has begun.
        token: Option<String>,
    },
    /// A watch from this resource version on.
    Watch {
        /// The last resource version that the watch reached.
        version: String,
    },
}

/// Why a call failed, or a watch ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// The resource version, or the token of a list, is too old (410).
    Expired,
    /// The API server does not serve this resource (404).
    Missing,
    /// The API server answered with another error.
    Refused,
    /// No response, or the connection broke.
    Cut,
    /// The watch ended normally, after an event or a bookmark.
    Ended,
    /// The watch ended without an event or a bookmark.
    Empty,
    /// Unreadable data.
    Malformed,
    /// No data for longer than the interval of bookmarks.
    Idle,
}

impl Failure {
    /// The label in metrics.
    pub(super) fn reason(self) -> &'static str {
        match self {
            Self::Expired => "expired",
            Self::Missing => "missing",
            Self::Refused => "refused",
            Self::Cut => "cut",
            Self::Ended => "ended",
            Self::Empty => "empty",
            Self::Malformed => "malformed",
            Self::Idle => "idle",
        }
    }
}

/// After so many refusals in a row the watch lists again: after a restore of etcd, the API server may never reach the version
/// that the watch asks for.
const REFUSALS: u32 = 5;

#[derive(Clone, Debug)]
enum MachineState {
    List { newest: bool, token: Option<String> },
    Watch { version: String },
}

/// The state of a watch.
#[derive(Clone, Debug)]
pub(super) struct Machine {
    state: MachineState,
    failures: u32,
    refusals: u32,
    /// Since the last event or bookmark.
    expiries: u32,
}

/// The position of a page in its list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PagePosition {
    /// Whether it starts the list.
    pub(super) first: bool,
    /// Whether it completes the list.
    pub(super) last: bool,
}

impl Machine {
    /// `newest`: also the first list must be consistent.
    pub(super) fn new(newest: bool) -> Self {
        Self { state: MachineState::List { newest, token: None }, failures: 0, refusals: 0, expiries: 0 }
    }

    /// The call to make next.
    pub(super) fn call(&self) -> Call {
        match self.state.clone() {
            MachineState::List { newest, token } => Call::List { newest, token },
            MachineState::Watch { version } => Call::Watch { version },
        }
    }

    /// A page of a list arrived.
    pub(super) fn page(&mut self, version: String, next: Option<String>) -> PagePosition {
        let (first, newest) = match &self.state {
            MachineState::List { newest, token } => (token.is_none(), *newest),
            MachineState::Watch { .. } => (true, true),
        };
        let last = next.is_none();
        self.state =
            if last { MachineState::Watch { version } } else { MachineState::List { newest, token: next } };
        PagePosition { first, last }
    }

    /// An event or a bookmark of this version arrived.
    pub(super) fn reached(&mut self, version: String) {
        self.failures = 0;
        self.refusals = 0;
        self.expiries = 0;
        self.state = MachineState::Watch { version };
    }

    /// A call failed or a watch ended. Returns the number of failures in a row; zero: retry at once.
    pub(super) fn failed(&mut self, failure: Failure) -> u32 {
        match failure {
            Failure::Ended => return 0,
            Failure::Missing | Failure::Refused => self.refusals = self.refusals.saturating_add(1),
            // The API server responds again: earlier failures do not count.
            Failure::Expired if self.expiries == 0 => self.failures = 0,
            Failure::Cut | Failure::Empty | Failure::Idle | Failure::Expired | Failure::Malformed => {}
        }
        self.expiries = self.expiries.saturating_add(u32::from(failure == Failure::Expired));
        self.failures = self.failures.saturating_add(1);
        let relist = match failure {
            Failure::Expired | Failure::Malformed => true,
            Failure::Missing | Failure::Refused => self.refusals >= REFUSALS,
            _ => false,
        };
        if relist {
            self.refusals = 0;
            // Consistent: the cache of another API server may be older than the store here.
            self.state = MachineState::List { newest: true, token: None };
        }
        self.failures
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(newest: bool, token: Option<&str>) -> Call {
        Call::List { newest, token: token.map(str::to_owned) }
    }

    fn watch(version: &str) -> Call {
        Call::Watch { version: version.to_owned() }
    }

    fn watching(version: &str) -> Machine {
        let mut machine = Machine::new(false);
        machine.page(version.to_owned(), None);
        machine
    }

    #[test]
    fn pages_are_listed_before_the_watch_starts_at_their_version() {
        let mut machine = Machine::new(false);
        assert_eq!(machine.call(), list(false, None));
        assert_eq!(machine.page("7".into(), Some("t".into())), PagePosition { first: true, last: false });
        assert_eq!(machine.call(), list(false, Some("t")));
        assert_eq!(machine.page("7".into(), None), PagePosition { first: false, last: true });
        assert_eq!(machine.call(), watch("7"));
        machine.reached("9".into());
        assert_eq!(machine.call(), watch("9"));
    }

    #[test]
    fn first_list_is_consistent_on_request() {
        assert_eq!(Machine::new(true).call(), list(true, None));
    }

    #[test]
    fn cut_watch_or_list_resumes_where_it_was() {
        for failure in [Failure::Cut, Failure::Empty, Failure::Idle, Failure::Ended, Failure::Refused] {
            let mut machine = watching("7");
            machine.failed(failure);
            assert_eq!(machine.call(), watch("7"), "{failure:?}");
        }
        let mut listing = Machine::new(false);
        listing.page("7".into(), Some("t".into()));
        listing.failed(Failure::Cut);
        assert_eq!(listing.call(), list(false, Some("t")));
    }

    #[test]
    fn expired_or_malformed_watch_relists_consistently() {
        for failure in [Failure::Expired, Failure::Malformed] {
            let mut machine = watching("7");
            machine.failed(failure);
            assert_eq!(machine.call(), list(true, None), "{failure:?}");
            assert!(machine.page("9".into(), None).first);
        }
    }

    #[test]
    fn repeated_refusal_leads_to_a_relist() {
        let mut machine = watching("7");
        for _ in 1..REFUSALS {
            machine.failed(Failure::Refused);
            assert_eq!(machine.call(), watch("7"));
        }
        machine.failed(Failure::Refused);
        assert_eq!(machine.call(), list(true, None));
    }

    #[test]
    fn failures_add_up_until_data_arrives() {
        let mut machine = watching("7");
        assert_eq!([machine.failed(Failure::Cut), machine.failed(Failure::Cut)], [1, 2]);
        assert_eq!(machine.failed(Failure::Expired), 1, "a recovered API server is listed soon");
        machine.page("8".into(), None);
        assert_eq!(
            machine.failed(Failure::Expired),
            2,
            "a list alone is no success: its watch may fail every time"
        );
        machine.page("9".into(), None);
        machine.reached("10".into());
        assert_eq!(machine.failed(Failure::Ended), 0);
        assert_eq!(machine.failed(Failure::Cut), 1);
    }
}
