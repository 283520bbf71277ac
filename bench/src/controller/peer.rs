// SPDX-License-Identifier: Apache-2.0
//! The peer through the controller's measurements: the upstream service controller, with a provider that answers at once.
//!
//! It starts before there are Services. After any other start its queue holds every node, and for each it compares all load balancers
//! that it knows by then, so that a change of one node could not be measured.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

use super::objects;
use super::program::{Program, Programs};
use super::results::{NodeChange, Results, Start, Writes};
use super::{HANGING, Scale};
use crate::who::Who;

/// What the measurements need of an API server with nodes.
pub(super) trait Cluster {
    fn kubeconfig(&self) -> &Path;
    /// Creates the Services.
    fn create_services(&mut self) -> Result<()>;
    /// Adds one node.
    fn add_node(&mut self) -> Result<()>;
    /// Removes the node that was added last.
    fn remove_node(&mut self) -> Result<()>;
    /// All writes so far.
    fn writes(&self) -> Result<Writes>;
    /// When the last list was answered, if the times of plans count from there.
    fn last_list(&self) -> Option<Instant>;
}

/// A change of the nodes.
type Change<C> = fn(&mut C) -> Result<()>;

/// Measures changes of nodes and restarts. `prefix` begins the names of the results, and `number` is of the first process.
pub(super) fn measure<C: Cluster>(
    cluster: &mut C,
    programs: &Programs,
    scale: &Scale,
    prefix: &str,
    number: usize,
    results: &mut Results,
) -> Result<()> {
    let program = programs.start(Who::Peer, cluster.kubeconfig(), number)?;
    program.rest();
    cluster.create_services()?;
    program.wait_done(scale.services)?;
    let rest = program.rest();
    ensure!(!rest.is_bound, "the peer does not come to rest after the Services were created: raise --limit");
    let changes: [(&str, Change<C>); 2] = [("joins", C::add_node), ("leaves", C::remove_node)];
    for _ in 0..scale.runs {
        for (verb, change) in changes {
            let what = format!("{prefix}a node {verb}");
            match change_node(cluster, &program, scale, change)? {
                Some(change) => results.add_node_change(Who::Peer, &what, &change),
                None => add_unreached(
                    results,
                    &format!("{what}: time until the provider has the nodes"),
                    programs,
                ),
            }
        }
    }
    program.hang(&objects::service_name(0))?;
    // The first join makes the call that hangs.
    join_for_others(cluster, &program, scale)?;
    let metric = format!("{prefix}{HANGING}");
    match join_for_others(cluster, &program, scale)? {
        Some(reached) => results.add(Who::Peer, &metric, "s", reached.as_secs_f64()),
        None => add_unreached(results, &metric, programs),
    }
    program.end()?;
    cluster.remove_node()?;
    cluster.remove_node()?;
    for run in 1..=usize::from(scale.runs) {
        let start = restart(cluster, programs, scale, number + run)?;
        results.add_start(Who::Peer, &format!("{prefix}restart"), &start);
    }
    Ok(())
}

/// `None` if some load balancers did not follow.
fn change_node<C: Cluster>(
    cluster: &mut C,
    program: &Program,
    scale: &Scale,
    change: Change<C>,
) -> Result<Option<NodeChange>> {
    let idle = program.idle_rate();
    let (writes, cpu, calls) = (cluster.writes()?, program.cpu_seconds(), program.updated()?);
    let begun = Instant::now();
    change(cluster)?;
    if !program.wait_updated(calls, scale.services)? {
        return Ok(None);
    }
    let reached = begun.elapsed();
    program.rest();
    Ok(Some(NodeChange {
        reached,
        cpu: (program.cpu_seconds() - cpu - idle * begun.elapsed().as_secs_f64()).max(0.0),
        writes: cluster.writes()?.since(writes),
        provider_calls: program.updated()? - calls,
    }))
}

/// The time until all load balancers but one have the nodes, after a node joined. `None` if some did not follow.
fn join_for_others(cluster: &mut impl Cluster, program: &Program, scale: &Scale) -> Result<Option<Duration>> {
    let (calls, begun) = (program.updated()?, Instant::now());
    cluster.add_node()?;
    let reached = program.wait_updated(calls, scale.services - 1)?;
    Ok(reached.then(|| begun.elapsed()))
}

fn restart(cluster: &impl Cluster, programs: &Programs, scale: &Scale, number: usize) -> Result<Start> {
    let before = cluster.writes()?;
    let program = programs.start(Who::Peer, cluster.kubeconfig(), number)?;
    let since_start = program.wait_done(scale.services)?;
    let done = Instant::now();
    let listed = cluster.last_list();
    let (cpu, rest) = (program.cpu_seconds(), program.rest());
    let planned = listed.map_or(since_start, |listed| done.saturating_duration_since(listed));
    let writes = cluster.writes()?.since(before);
    let start = Start { planned, cpu, rest, peak_mebibytes: program.peak_mebibytes(), writes };
    program.end()?;
    Ok(start)
}

fn add_unreached(results: &mut Results, metric: &str, programs: &Programs) {
    results.add_bound(Who::Peer, metric, "s", programs.limit.as_secs_f64());
}
