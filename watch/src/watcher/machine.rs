// SPDX-License-Identifier: Apache-2.0
//! Which call a watch makes next. Pure: it is told what happened, and knows neither clock nor network.

/// A call to make.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Call {
    /// One page of a list.
    List {
        /// Whether the list must be as new as the cluster's store, or may come from the API server's cache.
        newest: bool,
        /// The rest of a list that has begun.
        token: Option<String>,
    },
    /// A watch from this resource version on.
    Watch {
        /// The last resource version that was heard of.
        version: String,
    },
}

/// Why a call failed, or a watch ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// The resource version, or the token of a list, is too old (410).
    Expired,
    /// The API server does not have this kind (404).
    Missing,
    /// The API server answered with another error.
    Refused,
    /// No answer, or the connection broke.
    Cut,
    /// The watch ended as watches do, after it had brought something.
    Ended,
    /// The watch ended before it brought anything.
    Fruitless,
    /// What it brought cannot be understood.
    Garbled,
    /// Silence for longer than bookmarks are apart.
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
            Self::Fruitless => "fruitless",
            Self::Garbled => "garbled",
            Self::Idle => "idle",
        }
    }
}

/// A list that has been refused its continuation, or a watch refused its version, this often in a row begins anew: the version
/// may be one that this API server will never reach, after a restore of its store.
const REFUSALS: u32 = 5;

#[derive(Clone, Debug)]
enum State {
    List { newest: bool, token: Option<String> },
    Watch { version: String },
}

/// Where a watch stands.
#[derive(Clone, Debug)]
pub(super) struct Machine {
    state: State,
    failures: u32,
    refusals: u32,
    /// Since something was heard.
    expiries: u32,
}

/// What a page means for the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PageIs {
    /// It begins a list.
    pub(super) first: bool,
    /// It completes the list.
    pub(super) last: bool,
}

impl Machine {
    pub(super) fn new() -> Self {
        Self { state: State::List { newest: false, token: None }, failures: 0, refusals: 0, expiries: 0 }
    }

    /// The call to make next.
    pub(super) fn call(&self) -> Call {
        match self.state.clone() {
            State::List { newest, token } => Call::List { newest, token },
            State::Watch { version } => Call::Watch { version },
        }
    }

    /// A page of a list came.
    pub(super) fn page(&mut self, version: String, next: Option<String>) -> PageIs {
        let (first, newest) = match &self.state {
            State::List { newest, token } => (token.is_none(), *newest),
            State::Watch { .. } => (true, true),
        };
        let last = next.is_none();
        self.state = if last { State::Watch { version } } else { State::List { newest, token: next } };
        PageIs { first, last }
    }

    /// An event or a bookmark came.
    pub(super) fn heard(&mut self, version: String) {
        self.failures = 0;
        self.refusals = 0;
        self.expiries = 0;
        self.state = State::Watch { version };
    }

    /// A call failed or a watch ended. Returns how many failures in a row there were; zero means go on at once.
    pub(super) fn failed(&mut self, failure: Failure) -> u32 {
        match failure {
            Failure::Ended => return 0,
            Failure::Missing | Failure::Refused => self.refusals = self.refusals.saturating_add(1),
            // The API server is there and has forgotten: what failed before it came back does not count.
            Failure::Expired if self.expiries == 0 => self.failures = 0,
            Failure::Cut | Failure::Fruitless | Failure::Idle | Failure::Expired | Failure::Garbled => {}
        }
        self.expiries = self.expiries.saturating_add(u32::from(failure == Failure::Expired));
        self.failures = self.failures.saturating_add(1);
        let begin_anew = match failure {
            Failure::Expired | Failure::Garbled => true,
            Failure::Missing | Failure::Refused => self.refusals >= REFUSALS,
            _ => false,
        };
        if begin_anew {
            self.refusals = 0;
            // From the store: the cache of another API server may be older than what is known already.
            self.state = State::List { newest: true, token: None };
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
        let mut machine = Machine::new();
        machine.page(version.to_owned(), None);
        machine
    }

    #[test]
    fn it_lists_by_pages_and_then_watches_from_the_lists_version() {
        let mut machine = Machine::new();
        assert_eq!(machine.call(), list(false, None));
        assert_eq!(machine.page("7".into(), Some("t".into())), PageIs { first: true, last: false });
        assert_eq!(machine.call(), list(false, Some("t")));
        assert_eq!(machine.page("7".into(), None), PageIs { first: false, last: true });
        assert_eq!(machine.call(), watch("7"));
        machine.heard("9".into());
        assert_eq!(machine.call(), watch("9"));
    }

    #[test]
    fn what_is_cut_goes_on_where_it_was() {
        for failure in [Failure::Cut, Failure::Fruitless, Failure::Idle, Failure::Ended, Failure::Refused] {
            let mut machine = watching("7");
            machine.failed(failure);
            assert_eq!(machine.call(), watch("7"), "{failure:?}");
        }
        let mut listing = Machine::new();
        listing.page("7".into(), Some("t".into()));
        listing.failed(Failure::Cut);
        assert_eq!(listing.call(), list(false, Some("t")));
    }

    #[test]
    fn what_is_lost_is_listed_again_from_the_store() {
        for failure in [Failure::Expired, Failure::Garbled] {
            let mut machine = watching("7");
            machine.failed(failure);
            assert_eq!(machine.call(), list(true, None), "{failure:?}");
            assert!(machine.page("9".into(), None).first);
        }
    }

    #[test]
    fn refused_again_and_again_it_begins_anew() {
        let mut machine = watching("7");
        for _ in 1..REFUSALS {
            machine.failed(Failure::Refused);
            assert_eq!(machine.call(), watch("7"));
        }
        machine.failed(Failure::Refused);
        assert_eq!(machine.call(), list(true, None));
    }

    #[test]
    fn failures_add_up_until_something_is_heard() {
        let mut machine = watching("7");
        assert_eq!([machine.failed(Failure::Cut), machine.failed(Failure::Cut)], [1, 2]);
        assert_eq!(machine.failed(Failure::Expired), 1, "an API server that came back is listed soon");
        machine.page("8".into(), None);
        assert_eq!(
            machine.failed(Failure::Expired),
            2,
            "a list alone proves nothing: its watch may fail for ever"
        );
        machine.page("9".into(), None);
        machine.heard("10".into());
        assert_eq!(machine.failed(Failure::Ended), 0);
        assert_eq!(machine.failed(Failure::Cut), 1);
    }
}
