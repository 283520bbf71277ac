// SPDX-License-Identifier: Apache-2.0
//! Target health from the reports of the edge hosts. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use steerage_edge_api::{
    EdgeTargetHealthSpec, IpFamily, Shard, Shards, TargetCounts, TargetState, TargetStatus, TargetUse,
};
use steerage_model::Family;
use steerage_provider_api::{Health, HealthState, PartHealth, TargetHealth};
use steerage_watch::is_older;

use crate::entry::Entry;
use crate::objects::HostContent;

/// Which edge host answers for which shards, as the hosts say.
#[derive(Clone, Debug, Default)]
pub(crate) struct ActiveHosts(Vec<ActiveHost>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct ActiveHost {
    name: String,
    shards: Shards,
    /// When the host said so. A dead host's object can get a new version from another client.
    at: Option<Time>,
    /// Of the object that says so.
    version: String,
}

impl ActiveHost {
    /// `None` of an edge host of an earlier version, whose reports say for themselves whether it is active.
    fn new(entry: &Entry<HostContent>) -> Option<Self> {
        let content = entry.content.as_ref().ok()?;
        let shards = content.spec.active_shards.as_ref()?.parse().ok()?;
        let at = content.changed_by_host().cloned();
        Some(Self { name: entry.name.clone(), shards, at, version: entry.version.clone() })
    }

    /// Whether this host spoke before the other one. The times are whole seconds.
    fn is_before(&self, other: &Self) -> bool {
        self.at < other.at || self.at == other.at && is_older(&self.version, &other.version)
    }
}

impl ActiveHosts {
    pub(crate) fn new<'a>(entries: impl Iterator<Item = &'a Entry<HostContent>>) -> Self {
        Self(entries.filter_map(ActiveHost::new).collect())
    }

    /// The same with another object of one host.
    pub(crate) fn with(mut self, name: &str, entry: Option<&Entry<HostContent>>) -> Self {
        self.0.retain(|host| host.name != name);
        self.0.extend(entry.and_then(ActiveHost::new));
        self
    }

    /// Whether the host says for which shards it answers.
    fn has(&self, name: &str) -> bool {
        self.0.iter().any(|host| host.name == name)
    }

    /// The host that answers for a shard: of several that say so the one that said it last. A dead host does not take back what it has
    /// said.
    fn of_shard(&self, shard: Shard) -> Option<&str> {
        let hosts = self.0.iter().filter(|host| host.shards.contains(shard));
        let last = hosts.reduce(|a, b| if a.is_before(b) { b } else { a });
        last.map(|host| host.name.as_str())
    }

    /// The host that answers for an address.
    pub(crate) fn of(&self, address: IpAddr) -> Option<&str> {
        self.of_shard(Shard::of(address))
    }

    /// The names of the hosts that answer for a shard.
    pub(crate) fn serving(&self) -> BTreeSet<&str> {
        Shard::all().filter_map(|shard| self.of_shard(shard)).collect()
    }

    /// The shards for which another host answers.
    pub(crate) fn differences(&self, other: &Self) -> Shards {
        Shard::all().filter(|shard| self.of_shard(*shard) != other.of_shard(*shard)).collect()
    }
}

/// The targets of one IP family.
#[derive(Debug, Default)]
struct FamilyHealth {
    /// Of all targets.
    states: BTreeMap<HealthState, usize>,
    listed: Vec<TargetHealth>,
}

impl FamilyHealth {
    fn add(&mut self, counted: impl Iterator<Item = (HealthState, usize)>, listed: Vec<TargetHealth>) {
        for (state, number) in counted {
            *self.states.entry(state).or_default() += number;
        }
        self.listed.extend(listed);
    }

    /// How many targets in each state are not listed.
    fn omitted(&self) -> impl Iterator<Item = (HealthState, usize)> {
        self.states.iter().map(|(state, number)| {
            let listed = self.listed.iter().filter(|target| target.state == *state).count();
            (*state, number.saturating_sub(listed))
        })
    }
}

/// The health of the targets of a load balancer with these addresses, from the reports of all hosts, and from those of shared targets,
/// by name. Of each address only the report of its active host counts. Without one no host serves the address, and the health is
/// unknown.
pub(crate) fn health<'a>(
    addresses: &[IpAddr],
    hosts: &ActiveHosts,
    reports: impl Iterator<Item = &'a EdgeTargetHealthSpec>,
    shared: impl Fn(&str) -> Option<&'a EdgeTargetHealthSpec>,
) -> Health {
    let mut found = BTreeMap::<Family, FamilyHealth>::new();
    let mut unknown: BTreeSet<Family> = addresses.iter().map(|address| Family::of(*address)).collect();
    let mut problems = Vec::new();
    for report in reports {
        let is_own = |address: &&IpAddr| match report.active {
            // Of a host of an earlier version. After its upgrade it is overwritten. If the host died while it was active, another one
            // names the shards.
            Some(active) if !hosts.has(&report.host) => active && hosts.of(**address).is_none(),
            _ => hosts.of(**address) == Some(&report.host),
        };
        let own = addresses.iter().filter(is_own);
        let families: BTreeSet<Family> = own.map(|address| Family::of(*address)).collect();
        if families.is_empty() {
            continue;
        }
        for status in report.targets.iter().filter(|_| report.active.is_some()) {
            let (family, target) = (Family::of(status.address), target(status));
            if families.contains(&family) {
                found.entry(family).or_default().add([(target.state, 1)].into_iter(), vec![target]);
            }
        }
        let referred: Vec<_> = report.shared_reports.iter().map(|name| shared(name)).collect();
        let is_whole = referred.iter().all(Option::is_some);
        for source in std::iter::once(report).chain(referred.into_iter().flatten()) {
            for counts in &source.counts {
                let family = family(counts.family);
                if families.contains(&family) {
                    let of_family =
                        source.targets.iter().filter(|status| Family::of(status.address) == family);
                    found.entry(family).or_default().add(states(counts), of_family.map(target).collect());
                    unknown.remove(&family);
                }
            }
        }
        if is_whole {
            // What it does not mention it does not serve.
            unknown.retain(|family| !families.contains(family));
        }
        if !report.problem.is_empty() {
            problems.push(TargetHealth {
                target: report.host.clone(),
                family: None,
                state: HealthState::Unused,
                reason: report.problem.clone(),
            });
        }
    }
    let mut omitted = BTreeMap::new();
    for (state, number) in found.values().flat_map(FamilyHealth::omitted).filter(|(_, number)| *number > 0) {
        *omitted.entry(state).or_default() += number;
    }
    let mut parts: Vec<_> = found.iter().filter_map(|(family, health)| part(*family, health)).collect();
    parts.extend(unknown.iter().map(|family| PartHealth { name: family.to_string(), is_served: None }));
    let mut targets: Vec<_> = found.into_values().flat_map(|health| health.listed).collect();
    targets.sort_by(|a, b| (&a.target, a.family).cmp(&(&b.target, b.family)));
    targets.extend(problems);
    Health { targets, omitted, parts, due: None }
}

/// `None` for a family without targets.
fn part(family: Family, health: &FamilyHealth) -> Option<PartHealth> {
    let mut states =
        health.states.iter().filter(|(_, number)| **number > 0).map(|(state, _)| *state).peekable();
    states.peek()?;
    Some(PartHealth::of(family.to_string(), states))
}

fn family(family: IpFamily) -> Family {
    match family {
        IpFamily::V4 => Family::V4,
        IpFamily::V6 => Family::V6,
    }
}

/// The number of targets in each state.
fn states(counts: &TargetCounts) -> impl Iterator<Item = (HealthState, usize)> + use<> {
    let TargetCounts { healthy, failed, without_endpoint, initial, refused, draining, .. } = *counts;
    let states = [
        (HealthState::Healthy, healthy),
        (HealthState::Unhealthy, failed.saturating_add(without_endpoint)),
        (HealthState::Initial, initial),
        (HealthState::Unused, refused),
        (HealthState::Draining, draining),
    ];
    states.into_iter().map(|(state, number)| (state, usize::try_from(number).unwrap_or(usize::MAX)))
}

fn state(status: &TargetStatus) -> HealthState {
    match (status.usage, status.state) {
        (Some(TargetUse::Draining), _) => HealthState::Draining,
        (_, TargetState::Initial) => HealthState::Initial,
        (_, TargetState::Healthy) => HealthState::Healthy,
        (_, TargetState::Unhealthy) => HealthState::Unhealthy,
        (_, TargetState::Refused) => HealthState::Unused,
    }
}

fn reason(status: &TargetStatus) -> &str {
    if status.reason.is_empty() { &status.use_reason } else { &status.reason }
}

fn target(status: &TargetStatus) -> TargetHealth {
    TargetHealth {
        target: status.node.clone(),
        family: Some(Family::of(status.address)),
        state: state(status),
        reason: reason(status).to_owned(),
    }
}

/// What of a report can change what is said about a load balancer: which states there are, and which targets are unused. The number of
/// healthy targets is not part of it: it changes all the time, and in a shared report it would concern thousands of load balancers.
/// Neither are the other states of a family with a healthy target: it is served, whatever they are.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ReportSummary<'a> {
    active: Option<bool>,
    problem: &'a str,
    shared: &'a [String],
    states: BTreeSet<(Family, HealthState)>,
    unused: usize,
    unused_targets: Vec<(&'a str, &'a str)>,
}

impl<'a> ReportSummary<'a> {
    pub(crate) fn of(report: &'a EdgeTargetHealthSpec) -> Self {
        let counted = report.counts.iter().flat_map(|counts| {
            let family = family(counts.family);
            states(counts).map(move |(state, number)| (family, state, number))
        });
        // Reports of earlier versions have no numbers.
        let is_counted = |status: &TargetStatus| {
            report.counts.iter().any(|counts| family(counts.family) == Family::of(status.address))
        };
        let listed = report.targets.iter().filter(|status| !is_counted(status));
        let listed = listed.map(|status| (Family::of(status.address), state(status), 1));
        let all: Vec<_> = counted.chain(listed).filter(|(_, _, number)| *number > 0).collect();
        let unused = report.targets.iter().filter(|status| state(status) == HealthState::Unused);
        let mut states: BTreeSet<_> = all.iter().map(|(family, state, _)| (*family, *state)).collect();
        for family in [Family::V4, Family::V6] {
            if states.contains(&(family, HealthState::Healthy)) {
                states.retain(|(of, state)| *of != family || *state == HealthState::Healthy);
            }
        }
        Self {
            active: report.active,
            problem: &report.problem,
            shared: &report.shared_reports,
            states,
            unused: all.iter().filter(|(_, state, _)| *state == HealthState::Unused).map(|(_, _, n)| n).sum(),
            unused_targets: unused.map(|status| (status.node.as_str(), reason(status))).collect(),
        }
    }
}

#[cfg(test)]
mod tests;
