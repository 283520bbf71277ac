// SPDX-License-Identifier: Apache-2.0
//! What a host reports of a group of targets: numbers of all, and a bounded list. Pure, made by `targets` with each group; `status`
//! writes it.
//!
//! An object of the API server has a limit, and a list of all targets would change with each of thousands of nodes.

use std::sync::Arc;

use steerage_edge_api::{
    HealthCheck, IpFamily, SharedTargets, TargetCounts, TargetState, TargetStatus, TargetUse,
};

use crate::hash;

/// Targets in a list.
pub(crate) const MAX_LISTED: usize = 100;
/// So many targets of each kind of trouble are listed before others of the same kind: none hides the others.
const FIRST_OF_KIND: usize = 10;
/// Characters of a reason. A node or an annotation can make it long.
const MAX_REASON: usize = 160;

/// A target that a group holds.
#[derive(Clone, Debug)]
pub(crate) struct TrackedTarget {
    pub(crate) status: TargetStatus,
    /// It is unhealthy, and said that it has no local endpoint.
    pub(crate) lacks_endpoint: bool,
}

/// Numbers of targets that a group does not hold.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct UntrackedCounts {
    pub(crate) without_endpoint: usize,
    /// Their health is not decided yet.
    pub(crate) untried: usize,
}

/// The targets of a node set that load balancers share, and the name of their reports without that of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SharedGroup {
    pub(crate) name: String,
    pub(crate) targets: SharedTargets,
    pub(crate) family: IpFamily,
}

impl SharedGroup {
    /// The name is the same in each process, so that the next one finds the report.
    pub(crate) fn new(targets: SharedTargets, family: IpFamily) -> Self {
        let SharedTargets { node_set, health_check, panic_threshold_percent, slow_start_milliseconds } =
            &targets;
        let HealthCheck {
            protocol,
            port,
            path,
            interval_milliseconds,
            timeout_milliseconds,
            healthy_threshold,
            unhealthy_threshold,
        } = health_check;
        let text = format!(
            "{family:?} {protocol:?} {port} {interval_milliseconds} {timeout_milliseconds} {healthy_threshold} \
             {unhealthy_threshold} {panic_threshold_percent:?} {slow_start_milliseconds:?} {path:?}"
        );
        Self { name: format!("{node_set}.{:016x}", hash::bytes(text.as_bytes())), targets, family }
    }
}

/// What is reported of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GroupReport {
    /// What other load balancers may share; `None` if the targets are those of one load balancer.
    pub(crate) shared: Option<Arc<SharedGroup>>,
    pub(crate) counts: TargetCounts,
    /// By node and address.
    pub(crate) targets: Vec<TargetStatus>,
}

/// Why a target is listed: what matters most comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    Failed,
    /// Gets connections although it is not healthy.
    UsedUnhealthy,
    Refused,
    Draining,
    Filling,
    Initial,
    Active,
    /// Healthy, and gets none.
    Spare,
}

impl GroupReport {
    /// `tracked` are the targets that have an endpoint, or trouble. Others without an endpoint may be among them.
    pub(crate) fn new(
        shared: Option<Arc<SharedGroup>>,
        family: IpFamily,
        tracked: Vec<TrackedTarget>,
        others: UntrackedCounts,
    ) -> Self {
        let number = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
        let (without_endpoint, initial) = (number(others.without_endpoint), number(others.untried));
        let mut counts = TargetCounts {
            family,
            total: without_endpoint.saturating_add(initial),
            healthy: 0,
            failed: 0,
            without_endpoint,
            initial,
            refused: 0,
            draining: 0,
            active: 0,
            filling: 0,
            omitted: 0,
        };
        let mut ranked = Vec::new();
        for target in tracked {
            count(&mut counts, &target);
            if let Some(rank) = rank(&target) {
                ranked.push((rank, target.status));
            }
        }
        let targets = listed(ranked);
        counts.omitted = counts.total.saturating_sub(u32::try_from(targets.len()).unwrap_or(u32::MAX));
        Self { shared, counts, targets }
    }

    /// Whether no target is healthy, while there are targets that should be.
    pub(crate) fn is_unserved(&self) -> bool {
        self.counts.healthy == 0 && self.counts.total > self.counts.without_endpoint
    }
}

fn count(counts: &mut TargetCounts, TrackedTarget { status, lacks_endpoint }: &TrackedTarget) {
    counts.total += 1;
    let state = match (status.usage, status.state) {
        (Some(TargetUse::Draining), _) => &mut counts.draining,
        (_, TargetState::Initial) => &mut counts.initial,
        (_, TargetState::Healthy) => &mut counts.healthy,
        (_, TargetState::Unhealthy) if *lacks_endpoint => &mut counts.without_endpoint,
        (_, TargetState::Unhealthy) => &mut counts.failed,
        (_, TargetState::Refused) => &mut counts.refused,
    };
    *state += 1;
    match status.usage {
        Some(TargetUse::Active) => counts.active += 1,
        Some(TargetUse::Filling) => counts.filling += 1,
        Some(TargetUse::Draining | TargetUse::Inactive) | None => {}
    }
}

/// `None` for a target that only has no endpoint.
fn rank(TrackedTarget { status, lacks_endpoint }: &TrackedTarget) -> Option<Rank> {
    Some(match (status.usage, status.state) {
        (Some(TargetUse::Draining), _) => Rank::Draining,
        (Some(TargetUse::Filling), _) => Rank::Filling,
        (Some(TargetUse::Active), TargetState::Healthy) => Rank::Active,
        (Some(TargetUse::Active), _) => Rank::UsedUnhealthy,
        (_, TargetState::Refused) => Rank::Refused,
        (_, TargetState::Initial) => Rank::Initial,
        (_, TargetState::Unhealthy) if *lacks_endpoint => return None,
        (_, TargetState::Unhealthy) => Rank::Failed,
        (_, TargetState::Healthy) => Rank::Spare,
    })
}

/// The most important ones.
fn listed(mut ranked: Vec<(Rank, TargetStatus)>) -> Vec<TargetStatus> {
    fn place(status: &TargetStatus) -> (&str, std::net::IpAddr) {
        (&status.node, status.address)
    }
    if ranked.len() > MAX_LISTED {
        ranked.sort_by(|a, b| (a.0, place(&a.1)).cmp(&(b.0, place(&b.1))));
        let (mut first, mut others) = (Vec::new(), Vec::new());
        let (mut kind, mut of_kind) = (None, 0);
        for (rank, status) in ranked {
            if kind.replace(rank) != Some(rank) {
                of_kind = 0;
            }
            of_kind += 1;
            if of_kind <= FIRST_OF_KIND { first.push((rank, status)) } else { others.push((rank, status)) }
        }
        first.extend(others);
        first.truncate(MAX_LISTED);
        ranked = first;
    }
    let mut listed: Vec<_> = ranked.into_iter().map(|(_, status)| shortened(status)).collect();
    listed.sort_by(|a, b| place(a).cmp(&place(b)));
    listed
}

fn shortened(mut status: TargetStatus) -> TargetStatus {
    for reason in [&mut status.reason, &mut status.use_reason] {
        if let Some((end, _)) = reason.char_indices().nth(MAX_REASON) {
            reason.truncate(end);
            reason.push('…');
        }
    }
    status
}

#[cfg(test)]
mod tests;
