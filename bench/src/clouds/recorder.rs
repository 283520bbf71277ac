// SPDX-License-Identifier: Apache-2.0
//! A proxy in front of a cloud that records each call with its time. It does not change or delay any.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;
use steerage_provider_conformance::{CallKind, Proxy, Request, Upstream};
use tokio::runtime::Runtime;

/// What a call does.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Action {
    /// The API that it is of, where a cloud has several.
    pub(super) api: &'static str,
    pub(super) name: String,
    /// It changes nothing.
    pub(super) is_read: bool,
    /// False of what a program calls all the time, also at rest.
    pub(super) tells_of_work: bool,
}

type Log = Arc<Mutex<Vec<(Instant, Action)>>>;

/// The proxy and its record.
pub(super) struct Recorder {
    proxy: Proxy,
    log: Log,
}

impl Recorder {
    /// `action` is `None` for what does not count.
    pub(super) fn start(
        runtime: &Runtime,
        cloud: SocketAddr,
        action: fn(&Request) -> Option<Action>,
    ) -> Result<Self> {
        let log = Log::default();
        let recorded = Arc::clone(&log);
        let record = move |request: &Request| {
            if let Some(action) = action(request) {
                lock(&recorded).push((Instant::now(), action));
            }
            // The record here has times; that of the proxy would only take memory.
            CallKind::Background
        };
        let proxy = runtime.block_on(Proxy::start(Upstream::http(cloud), record))?;
        Ok(Self { proxy, log })
    }

    /// Address of the cloud, for a program that is measured.
    pub(super) fn addr(&self) -> SocketAddr {
        self.proxy.addr()
    }

    /// Forgets all calls.
    pub(super) fn reset(&self) {
        lock(&self.log).clear();
    }

    /// When the last call was made that tells of work.
    pub(super) fn last_work(&self) -> Option<Instant> {
        lock(&self.log).iter().rev().find(|(_, action)| action.tells_of_work).map(|(at, _)| *at)
    }

    /// The calls since the last reset.
    pub(super) fn counts(&self) -> Counts {
        let log = lock(&self.log);
        Counts::of(log.iter().map(|(_, action)| (action.clone(), 1)))
    }
}

fn lock(log: &Log) -> MutexGuard<'_, Vec<(Instant, Action)>> {
    log.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Numbers of calls by action.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts(BTreeMap<Action, u32>);

impl Counts {
    pub(super) fn of(calls: impl IntoIterator<Item = (Action, u32)>) -> Self {
        let mut counts = Self::default();
        for (action, count) in calls {
            *counts.0.entry(action).or_default() += count;
        }
        counts
    }

    pub(super) fn calls(&self) -> impl Iterator<Item = (&Action, u32)> {
        self.0.iter().map(|(action, count)| (action, *count))
    }

    pub(super) fn total(&self) -> u32 {
        self.0.values().sum()
    }

    pub(super) fn writes(&self) -> u32 {
        self.calls().filter(|(action, _)| !action.is_read).map(|(_, count)| count).sum()
    }

    /// By name of the action, which no two APIs of a cloud share.
    pub(super) fn by_action(&self) -> BTreeMap<&str, u32> {
        self.calls().map(|(action, count)| (action.name.as_str(), count)).collect()
    }
}

/// What one program did in one phase.
#[derive(Clone, Debug)]
pub(super) struct Phase {
    pub(super) counts: Counts,
    /// From the change to the last call.
    pub(super) took: Duration,
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Actions of one API; what begins with `Describe` is a read.
    pub(in crate::clouds) fn counts(calls: &[(&str, u32)]) -> Counts {
        let action = |name: &str| Action {
            api: "elbv2",
            name: name.to_owned(),
            is_read: name.starts_with("Describe"),
            tells_of_work: true,
        };
        Counts::of(calls.iter().map(|(name, count)| (action(name), *count)))
    }

    #[test]
    fn writes_are_what_reads_nothing() {
        let counts = counts(&[("RegisterTargets", 3), ("DescribeListeners", 4), ("AddTags", 2)]);
        assert_eq!((counts.total(), counts.writes()), (9, 5));
        assert_eq!(counts.by_action()["AddTags"], 2);
    }
}
