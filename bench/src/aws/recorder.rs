// SPDX-License-Identifier: Apache-2.0
//! A proxy in front of moto that records each call with its time. It does not change or delay any.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;
use steerage_provider_conformance::{CallKind, Proxy, Request, Upstream};
use steerage_testmoto::classify;
use tokio::runtime::Runtime;

use super::rates::{self, Api};

/// Read by Steerage all the time, about once a minute for each target group: the only call that does not tell that work continues.
const HEALTH: &str = "DescribeTargetHealth";

#[derive(Clone, Debug)]
struct RecordedCall {
    at: Instant,
    api: Api,
    action: String,
}

type Log = Arc<Mutex<Vec<RecordedCall>>>;

/// The proxy and its record.
pub(super) struct Recorder {
    proxy: Proxy,
    log: Log,
}

impl Recorder {
    pub(super) fn start(runtime: &Runtime, moto: SocketAddr) -> Result<Self> {
        let log = Log::default();
        let recorded = Arc::clone(&log);
        let record = move |request: &Request| {
            let kind = classify(request);
            if let CallKind::Read(action) | CallKind::Write(action) = &kind {
                let (at, api) = (Instant::now(), api_of(request));
                lock(&recorded).push(RecordedCall { at, api, action: action.clone() });
            }
            // The record here has times; that of the proxy would only take memory.
            CallKind::Background
        };
        let proxy = runtime.block_on(Proxy::start(Upstream::http(moto), record))?;
        Ok(Self { proxy, log })
    }

    /// Address of both APIs.
    pub(super) fn addr(&self) -> SocketAddr {
        self.proxy.addr()
    }

    /// Forgets all calls.
    pub(super) fn reset(&self) {
        lock(&self.log).clear();
    }

    /// When the last call was made that tells of work.
    pub(super) fn last_work(&self) -> Option<Instant> {
        lock(&self.log).iter().rev().find(|call| call.action != HEALTH).map(|call| call.at)
    }

    /// The calls since the last reset.
    pub(super) fn counts(&self) -> Counts {
        let mut counts = Counts::default();
        for call in lock(&self.log).iter() {
            *counts.0.entry((call.api, call.action.clone())).or_default() += 1;
        }
        counts
    }
}

/// The service in the scope of the credential: `…/us-east-1/ec2/aws4_request`.
fn api_of(request: &Request) -> Api {
    let header = request.headers().get(http::header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    if header.is_some_and(|header| header.contains("/ec2/")) { Api::Ec2 } else { Api::Elbv2 }
}

fn lock(log: &Log) -> MutexGuard<'_, Vec<RecordedCall>> {
    log.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Numbers of calls by action.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts(BTreeMap<(Api, String), u32>);

impl Counts {
    /// Calls of ELBv2.
    #[cfg(test)]
    pub(super) fn of(calls: &[(&str, u32)]) -> Self {
        Self(calls.iter().map(|(action, count)| ((Api::Elbv2, (*action).to_owned()), *count)).collect())
    }

    pub(super) fn total(&self) -> u32 {
        self.0.values().sum()
    }

    pub(super) fn writes(&self) -> u32 {
        let writes = self.0.iter().filter(|((_, action), _)| !rates::is_read(action));
        writes.map(|(_, count)| count).sum()
    }

    /// See [`rates::least_time`].
    pub(super) fn time_by_rates(&self) -> Duration {
        rates::least_time(self.0.iter().map(|((api, action), count)| (*api, action.as_str(), *count)))
    }

    /// By name of the action, which no two of the APIs share.
    pub(super) fn by_action(&self) -> BTreeMap<&str, u32> {
        self.0.iter().map(|((_, action), count)| (action.as_str(), *count)).collect()
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
mod tests {
    use super::*;

    #[test]
    fn writes_are_what_neither_describes_nor_gets() {
        let counts = Counts::of(&[("RegisterTargets", 3), ("DescribeListeners", 4), ("AddTags", 2)]);
        assert_eq!((counts.total(), counts.writes()), (9, 5));
        assert_eq!(counts.by_action()["AddTags"], 2);
    }
}
