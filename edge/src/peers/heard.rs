// SPDX-License-Identifier: Apache-2.0
//! The hosts whose flows this host has: they have sent a complete list since they connected, for which this host lacked nothing. Owned by
//! `exchange`; `routes` reads it. A host that lacks flows of others should get no packets from routers yet.

use std::collections::{BTreeMap, BTreeSet};

use tokio::sync::watch;

use super::confirmed::SessionId;
use crate::channel::send_if_changed;
use crate::link::mac::Mac;

#[derive(Debug)]
pub(crate) struct HeardHosts {
    sessions: BTreeMap<SessionId, Heard>,
    hosts: watch::Sender<BTreeSet<Mac>>,
}

#[derive(Debug)]
struct Heard {
    host: Mac,
    is_complete: bool,
}

impl HeardHosts {
    pub(crate) fn new(hosts: watch::Sender<BTreeSet<Mac>>) -> Self {
        Self { sessions: BTreeMap::new(), hosts }
    }

    pub(crate) fn begin_session(&mut self, session: SessionId, host: Mac) {
        self.sessions.insert(session, Heard { host, is_complete: false });
    }

    /// A complete list has ended. `is_complete`: whether this host has all that it names.
    pub(crate) fn on_list(&mut self, session: SessionId, is_complete: bool) {
        if let Some(heard) = self.sessions.get_mut(&session) {
            heard.is_complete |= is_complete;
        }
        self.publish();
    }

    pub(crate) fn end_session(&mut self, session: SessionId) {
        self.sessions.remove(&session);
        self.publish();
    }

    fn publish(&self) {
        let complete = self.sessions.values().filter(|heard| heard.is_complete);
        send_if_changed(&self.hosts, complete.map(|heard| heard.host).collect());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_is_heard_from_its_first_list_without_gaps_until_its_session_ends() {
        let (sender, hosts) = watch::channel(BTreeSet::new());
        let mut heard = HeardHosts::new(sender);
        let is_heard = || hosts.borrow().contains(&[1; 6]);
        heard.begin_session(1, [1; 6]);
        assert!(!is_heard());
        heard.on_list(1, false);
        assert!(!is_heard());
        heard.on_list(1, true);
        heard.on_list(1, false);
        assert!(is_heard(), "what it tells later may be of a change that this host is about to make");
        // It connects again before the end of the first session is seen.
        heard.begin_session(2, [1; 6]);
        heard.on_list(2, true);
        heard.end_session(1);
        assert!(is_heard());
        heard.end_session(2);
        assert!(!is_heard());
        heard.on_list(3, true);
        assert!(hosts.borrow().is_empty(), "no session");
    }
}
