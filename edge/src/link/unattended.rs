// SPDX-License-Identifier: Apache-2.0
//! Finds hosts whose kernel answers for VIPs that this host serves although no process runs there, as where the last process of a
//! group ended before this host began. Clients whose packets go there reach old targets, and no heartbeat shows it. Pure; `conflicts` sends
//! the probes and passes the answers.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use crate::link::mac::Mac;

/// How often a VIP is probed while a dead host is known: one after the other.
const INTERVAL: Duration = Duration::from_secs(30);
/// An answer comes within this time.
const ANSWER_TIME: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
pub(super) struct UnattendedHosts {
    /// The VIP that was probed last, and when.
    probed: Option<(IpAddr, Instant)>,
    /// To how many probes in a row each host has answered, and to which last.
    answers: BTreeMap<Mac, (u32, Instant)>,
}

impl UnattendedHosts {
    /// Whether it is time for a probe.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        self.probed.is_none_or(|(_, at)| now >= at + INTERVAL)
    }

    /// The next VIP to probe, of those that this host serves.
    pub(super) fn next_probe(&mut self, served: &BTreeSet<IpAddr>, now: Instant) -> Option<IpAddr> {
        let after = |(vip, _): (IpAddr, Instant)| served.range(vip..).find(|next| **next > vip);
        let vip = *self.probed.and_then(after).or(served.first())?;
        self.probed = Some((vip, now));
        Some(vip)
    }

    /// Whether an answer may come.
    pub(super) fn is_waiting(&self, now: Instant) -> bool {
        self.probed.is_some_and(|(_, at)| now < at + ANSWER_TIME)
    }

    /// A host claims a VIP.
    pub(super) fn on_claim(&mut self, vip: IpAddr, by: Mac, now: Instant) {
        let Some((probed, at)) = self.probed.filter(|(_, at)| now < *at + ANSWER_TIME) else { return };
        let (count, last) = self.answers.get(&by).copied().unwrap_or((0, at));
        if probed == vip && (count == 0 || last != at) {
            self.answers.insert(by, (count + 1, at));
        }
    }

    /// The hosts that have answered to two probes in a row: one that has just ended, or begun, answers to one.
    pub(super) fn hosts(&mut self, now: Instant) -> BTreeSet<Mac> {
        if let Some((_, at)) = self.probed.filter(|_| !self.is_waiting(now)) {
            self.answers.retain(|_, (_, to)| *to == at);
        }
        self.answers.iter().filter(|(_, (count, _))| *count > 1).map(|(mac, _)| *mac).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: Mac = [2, 0, 0, 0, 0, 9];

    fn vips() -> BTreeSet<IpAddr> {
        ["10.0.0.100", "10.0.0.101", "fd00::100"].map(|vip| vip.parse().expect("address")).into()
    }

    #[test]
    fn vips_are_probed_in_turn() {
        let (mut hosts, mut now, vips) = (UnattendedHosts::default(), Instant::now(), vips());
        assert_eq!(hosts.next_probe(&BTreeSet::new(), now), None);
        let mut probed = Vec::new();
        for _ in 0..4 {
            assert!(hosts.is_due(now));
            probed.extend(hosts.next_probe(&vips, now));
            assert!(!hosts.is_due(now + INTERVAL / 2));
            assert!(hosts.is_waiting(now) && !hosts.is_waiting(now + ANSWER_TIME));
            now += INTERVAL;
        }
        assert_eq!(probed, vips.iter().chain(vips.first()).copied().collect::<Vec<_>>());
    }

    #[test]
    fn host_that_answers_twice_is_found_until_it_is_silent() {
        let (mut hosts, mut now, vips) = (UnattendedHosts::default(), Instant::now(), vips());
        let mut probe = |hosts: &mut UnattendedHosts, answers: bool| {
            let vip = hosts.next_probe(&vips, now).expect("a VIP");
            let other = *vips.iter().find(|other| **other != vip).expect("another");
            hosts.on_claim(other, OLD, now);
            hosts.on_claim(vip, [2; 6], now + ANSWER_TIME);
            // A host may answer several times.
            for _ in 0..if answers { 2 } else { 0 } {
                hosts.on_claim(vip, OLD, now + ANSWER_TIME / 2);
            }
            let found = hosts.hosts(now + ANSWER_TIME);
            now += INTERVAL;
            found
        };
        assert_eq!(probe(&mut hosts, true), BTreeSet::new());
        assert_eq!(probe(&mut hosts, true), [OLD].into());
        assert_eq!(probe(&mut hosts, true), [OLD].into());
        assert_eq!(probe(&mut hosts, false), BTreeSet::new());
        assert_eq!(probe(&mut hosts, true), BTreeSet::new(), "once again");
    }
}
