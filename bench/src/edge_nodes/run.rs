// SPDX-License-Identifier: Apache-2.0
//! The phases: start, rest, and one change after the other, each with what it costs the edge hosts.

use std::fmt;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};

use super::cluster::{Cluster, NODE_SET, load_balancer, node_address, node_set, object_name};
use super::hosts::{Hosts, Usage};
use super::nodes::{Asked, Nodes};
use super::tables::Tables;
use super::world::{API_LINK, LINK, Traffic, World};
use crate::controller::memory::MemoryServer;
use crate::edge::results::Results;
use crate::report::Better;

/// Time between two looks at tables while hosts start.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);
/// After a look at a host's metrics, which costs the host something.
const METRICS_INTERVAL: Duration = Duration::from_millis(300);
/// Time between two looks while one change is under way.
const CLOSE_LOOK_INTERVAL: Duration = Duration::from_micros(200);
/// Hosts rest when they have written no status for so long.
const QUIET: Duration = Duration::from_secs(3);
/// What follows a change costs CPU time for so long.
const AFTER_CHANGE: Duration = Duration::from_secs(3);
/// Between two moves of endpoints.
const BETWEEN_MOVES: Duration = Duration::from_millis(250);

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

/// All that a host and the nodes have counted by now.
#[derive(Clone, Copy, Debug)]
struct Sample {
    at: Instant,
    usage: Usage,
    link: Traffic,
    api: Traffic,
    asked: Asked,
}

pub(super) struct Run<'a> {
    world: &'a World,
    server: &'a MemoryServer,
    nodes: &'a Nodes,
    hosts: Hosts,
    cluster: Cluster,
    settings: Settings,
    json: Option<PathBuf>,
    tables: Vec<Option<Tables>>,
    /// CPU time of each host in a second of rest, in seconds.
    rest: Vec<f64>,
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
            rest: vec![0.0; count],
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
        let phases: [(&str, fn(&mut Self) -> Result<()>); 6] = [
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
                self.note(format!("{name}: {reason}."));
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
            link: self.world.traffic(host, LINK)?,
            api: self.world.traffic(host, API_LINK)?,
            asked: self.nodes.asked(host),
        })
    }

    fn samples(&self) -> Result<Vec<Sample>> {
        self.each_host().map(|host| self.sample(host)).collect()
    }

    /// CPU seconds of each host since then, beyond those of as long a rest.
    fn beyond_rest(&self, before: &[Sample], after: &[Sample]) -> Vec<f64> {
        let pairs = before.iter().zip(after).zip(&self.rest);
        pairs
            .map(|((before, after), rest)| {
                let used = after.usage.cpu.saturating_sub(before.usage.cpu).as_secs_f64();
                (used - rest * after.at.duration_since(before.at).as_secs_f64()).max(0.0)
            })
            .collect()
    }

    fn start(&mut self) -> Result<()> {
        let before =
            self.each_host().map(|host| self.world.traffic(host, LINK)).collect::<Result<Vec<_>>>()?;
        let begun = Instant::now();
        for host in self.each_host() {
            self.hosts.start(self.world, host)?;
        }
        let programmed = match self.wait_until_programmed(self.each_host().collect(), begun) {
            Ok(programmed) => programmed,
            Err(error) => {
                // What it cost until then is a lower bound.
                if let Ok(samples) = self.samples() {
                    self.start_costs("start, not finished", &samples, &before);
                }
                return Err(error);
            }
        };
        for (took, sample) in &programmed {
            self.add("start: time until all tables are right", "s", took.as_secs_f64());
            self.add("start: CPU time until then", "s", sample.usage.cpu.as_secs_f64());
        }
        let took = self.wait_until_quiet(begun)?;
        self.results.add(
            "start: time until no status is written",
            "s",
            Better::Less,
            ALL,
            took.as_secs_f64(),
        );
        let samples = self.samples()?;
        self.start_costs("start", &samples, &before);
        let status = self.server.status_writes();
        let mut add = |what: &str, unit, value| self.results.add(what, unit, Better::Less, ALL, value);
        add("start: status objects written", "objects", status.count as f64);
        add("start: bytes of status objects", "MiB", mib(status.bytes));
        Ok(())
    }

    fn start_costs(&mut self, phase: &str, samples: &[Sample], before: &[Traffic]) {
        let of = |value: fn(&Sample) -> f64| samples.iter().map(value).collect::<Vec<_>>();
        self.add_each(&format!("{phase}: CPU time"), "s", &of(|sample| sample.usage.cpu.as_secs_f64()));
        self.add_each(&format!("{phase}: peak memory"), "MiB", &of(|sample| mib(sample.usage.peak)));
        self.add_each(
            &format!("{phase}: answered requests for statements"),
            "requests",
            &of(|sample| sample.asked.statements() as f64),
        );
        self.add_each(
            &format!("{phase}: of which complete"),
            "requests",
            &of(|sample| sample.asked.complete as f64),
        );
        self.add_each(
            &format!("{phase}: bytes of answers, by the nodes"),
            "MiB",
            &of(|sample| mib(sample.asked.bytes)),
        );
        let link: Vec<_> =
            samples.iter().zip(before).map(|(sample, before)| sample.link.since(*before)).collect();
        let received: Vec<_> = link.iter().map(|link| mib(link.received)).collect();
        let sent: Vec<_> = link.iter().map(|link| mib(link.sent)).collect();
        self.add_each(&format!("{phase}: bytes received on the link"), "MiB", &received);
        self.add_each(&format!("{phase}: bytes sent on the link"), "MiB", &sent);
    }

    fn rest(&mut self) -> Result<()> {
        let counted =
            |host| Ok(Hosts::metrics(self.world, host)?.sum("steerage_edge_statement_requests_total"));
        let metrics_before = self.each_host().map(counted).collect::<Result<Vec<_>>>()?;
        let status_before = self.server.status_writes();
        let before = self.samples()?;
        self.pause(self.settings.period)?;
        let after = self.samples()?;
        let status = self.server.status_writes().count - status_before.count;
        let metrics_after = self.each_host().map(counted).collect::<Result<Vec<_>>>()?;
        let pairs: Vec<_> = before.iter().zip(&after).collect();
        let rate = |value: fn(&Sample, &Sample) -> f64| {
            let of = |(before, after): &(&Sample, &Sample)| {
                value(before, after) / after.at.duration_since(before.at).as_secs_f64()
            };
            pairs.iter().map(of).collect::<Vec<_>>()
        };
        let cpu = rate(|before, after| after.usage.cpu.saturating_sub(before.usage.cpu).as_secs_f64());
        let percent: Vec<_> = cpu.iter().map(|cpu| cpu * 100.0).collect();
        let requests = rate(|before, after| after.asked.since(before.asked).statements() as f64);
        let received = rate(|before, after| after.link.since(before.link).received as f64 / 1024.0);
        let sent = rate(|before, after| after.link.since(before.link).sent as f64 / 1024.0);
        let packets = rate(|before, after| {
            let link = after.link.since(before.link);
            (link.received_packets + link.sent_packets) as f64
        });
        let api = rate(|before, after| {
            let api = after.api.since(before.api);
            (api.received + api.sent) as f64 / 1024.0
        });
        let resident: Vec<_> = after.iter().map(|sample| mib(sample.usage.resident)).collect();
        let of_nodes: u64 =
            pairs.iter().map(|(before, after)| after.asked.since(before.asked).statements()).sum();
        let of_hosts: f64 = metrics_after.iter().sum::<f64>() - metrics_before.iter().sum::<f64>();
        self.rest = cpu;
        self.add_each("rest: CPU", "% of a core", &percent);
        self.add_each("rest: resident memory", "MiB", &resident);
        self.add_each("rest: answered requests for statements", "1/s", &requests);
        self.add_each("rest: received on the link", "KiB/s", &received);
        self.add_each("rest: sent on the link", "KiB/s", &sent);
        self.add_each("rest: packets on the link", "1/s", &packets);
        self.add_each("rest: to and from the API server", "KiB/s", &api);
        self.results.add("rest: status objects written", "objects", Better::Less, ALL, status as f64);
        let expected = f64::from(self.cluster.nodes) * f64::from(self.world.hosts);
        self.note(format!(
            "At rest the nodes counted {of_nodes} answered requests, and the hosts' own metrics {of_hosts} in a time that is longer by \
             the reading of the metrics. One for each node, host and interval would be {:.0}.",
            expected * self.settings.period.as_secs_f64() / self.settings.interval.as_secs_f64()
        ));
        Ok(())
    }

    fn move_endpoints(&mut self) -> Result<()> {
        let before = self.samples()?;
        let mut moved = 0;
        for _ in 0..self.settings.moves {
            let Some(change) = self.cluster.move_endpoint() else { break };
            let begun = Instant::now();
            self.nodes.move_endpoint(change);
            let each = self.wait_for(begun, |run, tables| run.is_right(tables, change.service))?;
            let slowest = each.iter().copied().max().unwrap_or_default();
            for took in each {
                self.add("an endpoint moves: time until the table is right", "ms", milliseconds(took));
            }
            self.results.add(
                "an endpoint moves: time until the table is right",
                "ms",
                Better::Less,
                ALL,
                milliseconds(slowest),
            );
            moved += 1;
            self.pause(BETWEEN_MOVES)?;
        }
        if moved > 0 {
            self.pause(AFTER_CHANGE)?;
            let cpu = self.beyond_rest(&before, &self.samples()?);
            let each: Vec<_> = cpu.iter().map(|cpu| cpu * 1e3 / f64::from(moved)).collect();
            self.add_each("an endpoint moves: CPU time beyond rest", "ms", &each);
        }
        Ok(())
    }

    fn add_services(&mut self) -> Result<()> {
        for _ in 0..self.settings.changes {
            let before = self.samples()?;
            let service = self.cluster.add_service();
            self.nodes.add_service(&self.cluster, service);
            self.pause(AFTER_CHANGE)?;
            let stated = self.samples()?;
            let begun = Instant::now();
            self.put_load_balancer(service);
            let each = self.wait_for(begun, |run, tables| run.is_right(tables, service))?;
            self.pause(AFTER_CHANGE)?;
            let after = self.samples()?;
            for took in &each {
                self.add("a Service is added: time until the table is right", "ms", milliseconds(*took));
            }
            let stating = self.beyond_rest(&before, &stated);
            self.add_each("a Service is added: CPU time when all nodes state its port", "s", &stating);
            let cpu = self.beyond_rest(&stated, &after);
            self.add_each("a Service is added: CPU time when its object comes", "s", &cpu);
        }
        Ok(())
    }

    fn silence_nodes(&mut self) -> Result<()> {
        for _ in 0..self.settings.changes {
            let Some(node) = self.cluster.busy_node() else { break };
            let (services, address) = (self.cluster.services_of(node), node_address(node));
            let before = self.samples()?;
            let begun = Instant::now();
            self.nodes.set_silent(node, true);
            self.world.set_unreachable(node, true)?;
            let each = self.wait_for(begun, |_, tables| {
                services.iter().all(|service| !tables.addresses_of(*service).contains(&address))
            })?;
            self.pause(AFTER_CHANGE)?;
            let silent = self.samples()?;
            for took in &each {
                self.add("a node is silent: time until no table has it", "s", took.as_secs_f64());
            }
            let cpu = self.beyond_rest(&before, &silent);
            self.add_each("a node is silent: CPU time beyond rest", "s", &cpu);
            let begun = Instant::now();
            self.world.set_unreachable(node, false)?;
            self.nodes.set_silent(node, false);
            let each = self.wait_for(begun, |run, tables| {
                services.iter().all(|service| run.is_right(tables, *service))
            })?;
            self.pause(AFTER_CHANGE)?;
            let after = self.samples()?;
            for took in &each {
                self.add("a node answers again: time until its tables are right", "s", took.as_secs_f64());
            }
            let cpu = self.beyond_rest(&silent, &after);
            self.add_each("a node answers again: CPU time beyond rest", "s", &cpu);
        }
        Ok(())
    }

    fn restart(&mut self) -> Result<()> {
        for _ in 0..self.settings.changes {
            self.hosts.kill(0)?;
            let begun = Instant::now();
            self.hosts.start(self.world, 0)?;
            let programmed = self.wait_until_programmed(vec![0], begun)?;
            for (took, sample) in &programmed {
                self.add(
                    "restart: time until ready, all nodes heard and all tables right",
                    "s",
                    took.as_secs_f64(),
                );
                self.add("restart: CPU time until then", "s", sample.usage.cpu.as_secs_f64());
            }
            let took = self.wait_until_quiet(begun)?;
            let usage = self.hosts.usage(0)?;
            self.add("restart: time until no status is written", "s", took.as_secs_f64());
            self.add("restart: CPU time until then, of that process", "s", usage.cpu.as_secs_f64());
            self.add("restart: peak memory", "MiB", mib(usage.peak));
        }
        Ok(())
    }

    /// At the end every kernel must have what the cluster's state asks for, or what was measured was something else.
    fn check_all(&mut self) -> Result<()> {
        for host in self.each_host() {
            let wrong = self.first_wrong(host, 0);
            ensure!(wrong.is_none(), "at the end, host {} has another table for Service {wrong:?}", host + 1);
        }
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
        if !Hosts::is_ready(self.world, host)? {
            return Ok(false);
        }
        // An answer that is late or cut is none.
        let metrics = Hosts::metrics(self.world, host).ok();
        let stating =
            metrics.and_then(|metrics| metrics.value("steerage_edge_statement_nodes{by=\"statements\"}"));
        Ok(stating == Some(f64::from(self.cluster.nodes)))
    }

    /// Waits until hosts write no status any more. Returns when that began.
    fn wait_until_quiet(&mut self, begun: Instant) -> Result<Duration> {
        let (mut writes, mut since) = (self.server.status_writes(), Instant::now());
        while since.elapsed() < QUIET {
            self.check(begun)?;
            thread::sleep(LOOK_INTERVAL);
            let now = self.server.status_writes();
            if now != writes {
                (writes, since) = (now, Instant::now());
            }
        }
        Ok(since.duration_since(begun))
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

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
