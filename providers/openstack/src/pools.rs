// SPDX-License-Identifier: Apache-2.0
//! Members whose check moves to another port. Pure: `diff` asks which pools may keep theirs, and which members come first.
//!
//! haproxy keeps the port of a server's check across its reloads: Octavia's agent writes the servers' state to a file, and Octavia's template
//! loads it. There a server has the member's ID, which stays when Octavia changes `monitor_port`, so haproxy would ask the first port until
//! somebody replaces the amphora. Only a new member is checked on another port: in another pool, or after the old one was removed.

use crate::desired::Members;
use crate::types::{Member, Pool};

/// Whether a member of the pool stays, and is checked on another port than it should be.
pub(crate) fn has_old_checks(pool: &Pool, wanted: &Members) -> bool {
    old_checks(pool, wanted).next().is_some()
}

fn old_checks<'a>(pool: &'a Pool, wanted: &'a Members) -> impl Iterator<Item = &'a Member> {
    // LVS, which forwards the others, follows a change in place.
    let is_haproxy = !matches!(pool.protocol.as_str(), "UDP" | "SCTP");
    let is_old = |member: &&Member| {
        wanted.get(&member.key()).is_some_and(|wanted| wanted.monitor_port != member.monitor_port)
    };
    pool.members.iter().filter(move |_| is_haproxy).filter(is_old)
}

/// The next members of a pool that stays although checks move to another port: those with the old port go, and come again with the new one.
/// Some serve meanwhile, unless there is only one. `None` if no check moves, or none does any more.
pub(crate) fn renewed(pool: &Pool, wanted: &Members) -> Option<Vec<Member>> {
    let old: Vec<Member> = old_checks(pool, wanted).cloned().collect();
    if old.is_empty() {
        return None;
    }
    let is_old = |member: &&Member| old.iter().any(|old| old.key() == member.key());
    let new: Vec<Member> = wanted.values().filter(|member| !is_old(member)).cloned().collect();
    if new.is_empty() {
        return Some(old[old.len().div_ceil(2)..].to_vec());
    }
    let is_there = new.iter().any(|new| pool.members.contains(new) && new.is_usable());
    Some(if is_there { new } else { [new, old].concat() })
}
