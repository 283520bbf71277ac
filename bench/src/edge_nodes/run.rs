// SPDX-License-Identifier: Apache-2.0
//! One run: what all phases need, and their order. What each measures is in `phases`.

mod phases;

use std::fmt;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use super::cluster::{Cluster, NODE_SET, load_balancer, node_set, object_name};
use super::hosts::Hosts;
use super::nodes::Nodes;
use super::sample::{Sample, cpu_rates, mib};
use super::tables::Tables;
use super::world::{self, API_LINK, LINK, World};
use crate::controller::memory::MemoryServer;
use crate::edge::results::Results;
use crate::report::Better;

/// Time between two looks at tables while hosts start.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);
/// After a look at a host's metrics, which costs the host something.
const METRICS_INTERVAL: Duration = Duration::from_millis(300);
/// Time between two looks while one change is under way.
const CLOSE_LOOK_INTERVAL: Duration = Duration::from_micros(200);
/// Hosts rest when they have written no status for so long, and used no more CPU time than is usual.
const QUIET: Duration = Duration::from_secs(2);
/// What is usual: so many times that of the measured rest, and a part of a core besides.
const USUAL: (f64, f64) = (1.3, 0.05);
/// The same before the rest is measured: as in the time before, as far as these parts of a core, and less than that.
const STEADY: (f64, f64) = (0.1, 0.9);

/// The columns of the results.
const EACH: &str = "a host";
const ALL: &str = "all hosts";

/// The shape of one run, but for the cluster.
#[derive(Clone, Copy, Debug)]
pub(super) struct Settings {
    pub(super) interval: Duration,
    pub(super) period: Duration,
    pub(super) moves: u32,
    pub(super) changes: u32,
    pub(super) limit: Duration,
}

/// The run cannot continue, and that is a result.
#[derive(Clone, Debug)]
pub(super) struct Stopped(String);

impl fmt::Display for Stopped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Stopped {}

type Phase<'a> = fn(&mut Run<'a>) -> Result<()>;

pub(super) struct Run<'a> {
    world: &'a World,
    server: &'a MemoryServer,
    nodes: &'a Nodes,
    hosts: Hosts,
    cluster: Cluster,
    settings: Settings,
    json: Option<PathBuf>,
    tables: Vec<Option<Tables>>,
    /// CPU time of each host in a second of rest, in seconds, once it is measured.
    rest: Option<Vec<f64>>,
    results: Results,
    notes: Vec<String>,
}

impl<'a> Run<'a> {
    pub(super) fn new(
        world: &'a World,
        server: &'a MemoryServer,
        nodes: &'a Nodes,
        hosts: Hosts,
        cluster: Cluster,
        settings: Settings,
        json: Option<PathBuf>,
    ) -> Self {
        let count = usize::from(world.hosts);
        Self {
            world,
            server,
            nodes,
            hosts,
            cluster,
            settings,
            json,
            tables: (0..count).map(|_| None).collect(),
            rest: None,
            results: Results::default(),
            notes: Vec::new(),
        }
    }

    pub(super) fn note(&mut self, note: String) {
        self.notes.push(note);
    }

    /// What was measured so far.
    pub(super) fn report(&self) -> String {
        let (services, nodes, hosts) = (self.cluster.services(), self.cluster.nodes, self.world.hosts);
        let settings = self.settings;
        format!(
            "{services} Services at the end, {nodes} nodes, {hosts} edge hosts; interval {:?}, rest {:?}\n\n{}\n{}",
            settings.interval,
            settings.period,
            self.results.markdown(),
            self.notes.join("\n")
        )
    }

    /// All phases.
    pub(super) fn measure(&mut self) -> Result<()> {
        self.server.put("edgenodesets", NODE_SET, node_set(self.cluster.nodes));
        for service in 0..self.cluster.services() {
            self.put_load_balancer(service);
        }
        let phases: [(&str, Phase<'a>); 6] = [
            ("start", Self::start),
            ("rest", Self::rest),
            ("moves of endpoints", Self::move_endpoints),
            ("new Services", Self::add_services),
            ("silent nodes", Self::silence_nodes),
            ("restarts", Self::restart),
        ];
        for (name, phase) in phases {
            eprintln!("{name}");
            let result = phase(self).with_context(|| name.to_owned());
            // The guard's reason says more than what the phase missed.
            if let Some(reason) = self.hosts.exceeded() {
                self.save()?;
                return Err(Stopped(format!("{name}: {reason}")).into());
            }
            self.save()?;
            result?;
        }
        self.check_all()
    }

    fn save(&self) -> Result<()> {
        let Some(file) = &self.json else { return Ok(()) };
        std::fs::write(file, format!("{:#}\n", self.results.json()))
            .with_context(|| format!("cannot write {}", file.display()))
    }

    fn put_load_balancer(&self, service: u32) {
        let object = load_balancer(service, self.settings.interval);
        self.server.put("edgeloadbalancers", &object_name(service), object);
    }

    fn each_host(&self) -> std::ops::Range<usize> {
        0..usize::from(self.world.hosts)
    }

    /// Adds a value of one host.
    fn add(&mut self, what: &str, unit: &'static str, value: f64) {
        self.results.add(what, unit, Better::Less, EACH, value);
    }

    /// Adds the values of all hosts, and their sum.
    fn add_each(&mut self, what: &str, unit: &'static str, values: &[f64]) {
        for value in values {
            self.add(what, unit, *value);
        }
        self.results.add(what, unit, Better::Less, ALL, values.iter().sum());
    }

    fn sample(&self, host: usize) -> Result<Sample> {
        Ok(Sample {
            at: Instant::now(),
            usage: self.hosts.usage(host)?,
            link: world::traffic(host, LINK)?,
            api: world::traffic(host, API_LINK)?,
            asked: self.nodes.asked(host),
        })
    }

    fn samples(&self) -> Result<Vec<Sample>> {
        self.each_host().map(|host| self.sample(host)).collect()
    }

    /// CPU seconds of each host since then, beyond those of as long a rest.
    fn beyond_rest(&self, before: &[Sample], after: &[Sample]) -> Vec<f64> {
        let used = cpu_rates(before, after);
        let times =
            before.iter().zip(after).map(|(before, after)| after.at.duration_since(before.at).as_secs_f64());
        let rest = self.rest.clone().unwrap_or_else(|| vec![0.0; used.len()]);
        used.iter()
            .zip(&rest)
            .zip(times)
            .map(|((used, rest), time)| ((used - rest) * time).max(0.0))
            .collect()
    }

    /// At the end every kernel must have what the cluster's state asks for, or what was measured was something else.
    fn check_all(&mut self) -> Result<()> {
        for host in self.each_host() {
            let wrong = self.first_wrong(host, 0);
            ensure!(wrong.is_none(), "at the end, host {} has another table for Service {wrong:?}", host + 1);
        }
        let peaks: Vec<_> = self.samples()?.iter().map(|sample| mib(sample.usage.peak)).collect();
        self.add_each("at the end: peak memory", "MiB", &peaks);
        self.save()?;
        let asked: Vec<_> = self.each_host().map(|host| self.nodes.asked(host)).collect();
        let others: u64 = asked.iter().map(|asked| asked.others).sum();
        self.note(format!(
            "At the end all tables of all hosts were those of the cluster. The nodes got {others} requests that were none for a statement."
        ));
        Ok(())
    }

    fn is_right(&self, tables: &Tables, service: u32) -> bool {
        tables.addresses_of(service) == self.cluster.addresses_of(service)
    }

    /// The first Service from this one on whose table is not what the cluster's state asks for.
    fn first_wrong(&mut self, host: usize, from: u32) -> Option<u32> {
        let services = self.cluster.services();
        let place = self.tables.get_mut(host)?;
        if place.is_none() {
            // Not yet made.
            *place = Hosts::tables(self.world, host).ok();
        }
        let Some(tables) = self.tables.get(host).and_then(Option::as_ref) else { return Some(from) };
        (from..services).find(|service| !self.is_right(tables, *service))
    }

    /// The number of Services whose table is what the cluster's state asks for.
    fn count_right(&self, host: usize) -> usize {
        let Some(tables) = self.tables.get(host).and_then(Option::as_ref) else { return 0 };
        (0..self.cluster.services()).filter(|service| self.is_right(tables, *service)).count()
    }

    /// Waits until these hosts are ready, have heard all nodes, and have all tables right. Returns what each had used then.
    fn wait_until_programmed(
        &mut self,
        hosts: Vec<usize>,
        begun: Instant,
    ) -> Result<Vec<(Duration, Sample)>> {
        let mut waiting: Vec<_> = hosts.into_iter().map(|host| (host, 0)).collect();
        let mut done = Vec::new();
        while !waiting.is_empty() {
            self.check(begun)?;
            let mut still = Vec::new();
            for (host, from) in waiting {
                if let Some(wrong) = self.first_wrong(host, from) {
                    still.push((host, wrong));
                } else if self.has_heard_all(host)? && self.first_wrong(host, 0).is_none() {
                    done.push((begun.elapsed(), self.sample(host)?));
                } else {
                    still.push((host, 0));
                    thread::sleep(METRICS_INTERVAL);
                }
            }
            waiting = still;
            thread::sleep(LOOK_INTERVAL);
        }
        Ok(done)
    }

    fn has_heard_all(&self, host: usize) -> Result<bool> {
        if !Hosts::is_ready(host)? {
            return Ok(false);
        }
        // An answer that is late or cut is none.
        let metrics = Hosts::metrics(host).ok();
        let stating =
            metrics.and_then(|metrics| metrics.value("steerage_edge_statement_nodes{by=\"statements\"}"));
        Ok(stating == Some(f64::from(self.cluster.nodes)))
    }

    /// Waits until the hosts rest. Returns when that began.
    fn wait_until_rest(&mut self, begun: Instant) -> Result<Duration> {
        let mut earlier: Vec<f64> = Vec::new();
        loop {
            self.check(begun)?;
            let (writes, before) = (self.server.status_writes(), self.samples()?);
            self.pause(QUIET)?;
            let cpu = cpu_rates(&before, &self.samples()?);
            let is_usual = is_usual(&cpu, self.rest.as_deref(), &earlier);
            if is_usual && self.server.status_writes() == writes {
                return Ok(before
                    .first()
                    .map_or_else(|| begun.elapsed(), |sample| sample.at.duration_since(begun)));
            }
            earlier = cpu;
        }
    }

    /// Waits until `is_done` of each host's tables, and returns when that was.
    fn wait_for(
        &mut self,
        begun: Instant,
        is_done: impl Fn(&Self, &Tables) -> bool,
    ) -> Result<Vec<Duration>> {
        let mut took = vec![None; self.tables.len()];
        while took.iter().any(Option::is_none) {
            for (place, tables) in took.iter_mut().zip(&self.tables) {
                let tables = tables.as_ref().context("a host has no tables")?;
                if place.is_none() && is_done(self, tables) {
                    *place = Some(begun.elapsed());
                }
            }
            self.check(begun)?;
            thread::sleep(CLOSE_LOOK_INTERVAL);
        }
        Ok(took.into_iter().flatten().collect())
    }

    fn pause(&mut self, time: Duration) -> Result<()> {
        let begun = Instant::now();
        while begun.elapsed() < time {
            self.hosts.check()?;
            thread::sleep(LOOK_INTERVAL.min(time.saturating_sub(begun.elapsed())));
        }
        Ok(())
    }

    /// Fails if a host has ended, or what began then takes too long.
    fn check(&mut self, begun: Instant) -> Result<()> {
        self.hosts.check()?;
        let limit = self.settings.limit;
        if begun.elapsed() > limit {
            return Err(Stopped(format!("stopped: not done within --limit, {limit:?}")).into());
        }
        Ok(())
    }
}

/// Whether the hosts use as much CPU time as at rest, or as in the time before if rest is not known yet.
fn is_usual(cpu: &[f64], rest: Option<&[f64]>, earlier: &[f64]) -> bool {
    if let Some(rest) = rest {
        return cpu.iter().zip(rest).all(|(cpu, rest)| *cpu <= USUAL.0 * rest + USUAL.1);
    }
    let is_steady = |(cpu, earlier): (&f64, &f64)| (cpu - earlier).abs() <= STEADY.0 && *cpu <= STEADY.1;
    earlier.len() == cpu.len() && cpu.iter().zip(earlier).all(is_steady)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rest_is_what_was_measured_or_what_stays_the_same() {
        assert!(!is_usual(&[0.1], None, &[]), "nothing to compare with");
        assert!(!is_usual(&[0.1], None, &[0.5]) && is_usual(&[0.1], None, &[0.15]));
        assert!(!is_usual(&[1.0, 0.1], None, &[1.0, 0.1]), "busy all the time");
        assert!(is_usual(&[0.12, 0.1], Some(&[0.1, 0.1]), &[]));
        assert!(!is_usual(&[0.12, 0.3], Some(&[0.1, 0.1]), &[0.12, 0.3]));
    }
}
