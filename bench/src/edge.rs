// SPDX-License-Identifier: Apache-2.0
//! The edge beside other load balancers, in network namespaces of this machine: client, router, switch, two load-balancer hosts,
//! nodes. One contender at a time works on the first host, with the same Services and the same traffic, in turn over several rounds.
//!
//! What a contender costs is the CPU time of its processes and of the kernel threads that receive its host's frames ([`cpu`]).
//! Rates and times are measured without these threads, as the kernel works by default, and are those of the whole testbed: client,
//! router and nodes are on the same cores.

#![allow(clippy::cast_precision_loss, reason = "counts far below 2^52")]

pub mod change;
pub mod configs;
pub mod contender;
pub mod empty_program;
pub mod failover;
pub mod kernel;
pub mod load;
pub mod results;

use std::env;
use std::fs;
use std::net::IpAddr;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use clap::ValueEnum as _;
use nix::net::if_::if_nametoindex;
use steerage_model::Family;

use crate::edge_bed::cpu::{self, CpuMeter};
use crate::edge_bed::{self, Bed, Host, Size};
use crate::host;
use crate::report::{Better, percentile};
use crate::usage;
use contender::{Contender, Programs, Running};
use empty_program::EmptyProgram;
use failover::{Failure, Pair};
use load::Servers;
use results::{FAILURE, Goal, Results};

/// Services that have traffic.
const BUSY: u32 = 64;
/// Threads of the client for the rate of new connections.
const CLIENTS: u8 = 8;
/// Datagrams per second for the CPU time of one: few enough that none is lost.
const RATE: u32 = 20_000;
/// Changes of a Service's targets in each round, an even number: at the end they are as before.
const CHANGES: u8 = 6;
/// The time between them.
const PAUSE: Duration = Duration::from_millis(300);
/// The number of Services at which goals are looked at.
const GOAL: u32 = 10_000;

/// The flags of `steerage-bench edge`.
#[derive(Debug, clap::Args)]
pub struct Flags {
    /// Run a short version: 1,000 Services, 3 rounds, one failure of each kind
    #[arg(long)]
    quick: bool,
    /// Write the results as JSON to this file, after every round
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Measure with these numbers of Services [default: 1000,10000; with --quick 1000]
    #[arg(long, value_delimiter = ',', value_name = "COUNT,…", value_parser = clap::value_parser!(u32).range(1..=20_000))]
    services: Vec<u32>,
    /// Measure over these IP families [default: 4,6; with --quick 4]
    #[arg(long, value_parser = parse_family, value_delimiter = ',', value_name = "4,6")]
    families: Vec<Family>,
    /// Measure each contender this many times [default: 5; with --quick 3]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..))]
    rounds: Option<u16>,
    /// Measure only these contenders
    #[arg(long, value_enum, value_delimiter = ',', value_name = "NAME,…")]
    only: Vec<Contender>,
    /// Let a host fail this many times in each way; 0 disables [default: 3; with --quick 1]
    #[arg(long, value_name = "COUNT")]
    failures: Option<u16>,
    /// Measure this steerage-edge [default: the one in the directory of this program]
    #[arg(long, value_name = "FILE")]
    edge: Option<PathBuf>,
}

/// One run's settings.
struct Run<'a> {
    bed: &'a Bed,
    programs: &'a Programs,
    servers: &'a Servers,
    /// Length of each measurement.
    time: Duration,
}

impl Flags {
    /// Measures and prints the results.
    pub fn run(self) -> Result<()> {
        let Self { quick, json, mut services, mut families, rounds, only, failures, edge } = self;
        if services.is_empty() {
            services = if quick { vec![1000] } else { vec![1000, GOAL] };
        }
        if families.is_empty() {
            families = if quick { vec![Family::V4] } else { vec![Family::V4, Family::V6] };
        }
        let rounds = rounds.unwrap_or(if quick { 3 } else { 5 });
        let failures = failures.unwrap_or(if quick { 1 } else { 3 });
        let programs = Programs::new(edge)?;
        let mut contenders = if only.is_empty() { Contender::value_variants().to_vec() } else { only };
        let mut notes = Vec::new();
        contenders.retain(|contender| {
            let missing = contender.missing(&programs);
            notes.extend(missing.iter().map(|why| format!("{} was not measured: {why}.", contender.title())));
            missing.is_none()
        });
        ensure!(!contenders.is_empty(), "nothing to measure: {}", notes.join(" "));
        usage::sweep();
        let folder = env::temp_dir().join(format!("steerage-bench-{}", std::process::id()));
        fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        let load_before = host::load();
        let bed = Bed::new(&folder, Size::OF_COMPARISON)?;
        let servers = Servers::start(&bed)?;
        let (told, seen) = cpu::known_load()?;
        notes.push(format!(
            "A process that used {told:.2?} of CPU time by its own clock used {seen:.2?} by the meter of CPU time."
        ));
        let run = Run {
            bed: &bed,
            programs: &programs,
            servers: &servers,
            time: Duration::from_secs(if quick { 1 } else { 3 }),
        };
        let mut results = Results::default();
        let save = |results: &Results| match &json {
            Some(file) => fs::write(file, format!("{:#}\n", results.json()))
                .with_context(|| format!("cannot write {}", file.display())),
            None => Ok(()),
        };
        for (services, family) in
            services.iter().flat_map(|count| families.iter().map(move |family| (*count, *family)))
        {
            let mut contenders = contenders.clone();
            contenders.retain(|contender| {
                let why = contender::too_many(*contender, services);
                let title = contender.title();
                notes.extend(
                    why.iter()
                        .map(|why| format!("{title} was not measured with {services} Services: {why}.")),
                );
                why.is_none()
            });
            for round in 0..usize::from(rounds) {
                // Another one begins each round.
                for index in 0..contenders.len() {
                    let contender = contenders[(index + round) % contenders.len()];
                    let shape = shape(services, family);
                    eprintln!("{shape}, round {}: {}", round + 1, contender.title());
                    run.measure(contender, family, services, &mut results)
                        .with_context(|| format!("{} with {shape}", contender.title()))?;
                    save(&results)?;
                }
            }
        }
        run.fail(failures, &mut results, &mut notes)?;
        save(&results)?;
        println!(
            "{}; {rounds} rounds; load before {load_before:.1}, after {:.1}\n",
            host::describe(),
            host::load()
        );
        let goals: Vec<_> = families.into_iter().flat_map(goals).collect();
        println!("{}\n{}", results.markdown(), results.goals(&goals));
        for note in &notes {
            println!("{note}");
        }
        drop(bed);
        // After a failure the logs are kept.
        let _ = fs::remove_dir_all(&folder);
        Ok(())
    }
}

impl Run<'_> {
    /// One round of one contender.
    fn measure(
        &self,
        contender: Contender,
        family: Family,
        services: u32,
        results: &mut Results,
    ) -> Result<()> {
        let Self { bed, programs, .. } = *self;
        let mut running = Running::start(bed, programs, contender, family, Host(1), services)?;
        let targets = Running::targets(contender, family, busy_services(services).into_iter());
        let who = contender.title();
        let label = |what: &str| format!("{}: {what}", shape(services, family));
        let mut add = |what: &str, unit, better, value| results.add(&label(what), unit, better, who, value);
        if !matches!(contender, Contender::Direct | Contender::Routed) {
            add("start to first answer", "s", Better::Less, running.started_in.as_secs_f64());
            Self::memory(&running, &mut add)?;
        }
        // Neighbours and caches.
        load::requests(bed, &targets, CLIENTS, self.time / 4)?;
        if contender != Contender::Direct {
            self.costs(&running, &targets, &mut add)?;
        }
        self.rates(contender, &targets, &mut add)?;
        self.changes(&running, &mut add)?;
        if contender == Contender::Edge {
            let adopted = running.restart_edge(bed, programs)?;
            add("restart to ready, with what is in the kernel", "ms", Better::Less, milliseconds(adopted));
        }
        running.end(bed, programs)
    }

    fn memory(running: &Running, add: &mut impl FnMut(&str, &'static str, Better, f64)) -> Result<()> {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        add("resident memory", "MiB", Better::Less, mib(running.group.resident_bytes()));
        add("kernel memory", "MiB", Better::Less, mib(running.group.kernel_bytes()?));
        if running.contender == Contender::Edge {
            let maps = kernel::maps(&running.processes());
            add("maps but flows", "MiB", Better::Less, mib(maps.others));
            if maps.flows > 0 {
                let each = maps.flow_bytes as f64 / maps.flows as f64;
                add("maps of a million flows", "MiB", Better::Less, each * 1e6 / f64::from(1 << 20));
            }
        }
        Ok(())
    }

    /// CPU time of the host.
    fn costs(
        &self,
        running: &Running,
        targets: &[IpAddr],
        add: &mut impl FnMut(&str, &'static str, Better, f64),
    ) -> Result<()> {
        let bed = self.bed;
        bed.set_threaded(true)?;
        let meter = CpuMeter::new(running.host, running.processes())?;
        let (took, rest) = meter.during(|| {
            let begun = Instant::now();
            thread::sleep(self.time);
            Ok(begun.elapsed())
        })?;
        add("CPU time at rest", "ms/s", Better::Less, milliseconds(rest.total()) / took.as_secs_f64());
        let rest = (rest, took);
        let served = self.servers.served();
        let (round, cpu) = meter.during(|| load::requests(bed, targets, CLIENTS, self.time)?.checked())?;
        let cpu = cpu.beyond(round.took, rest);
        let connections = round.times.len() as f64;
        add("CPU time of a connection", "µs", Better::Less, cpu.total().as_secs_f64() * 1e6 / connections);
        if running.contender.is_proxy() {
            add("of which the process", "µs", Better::Less, cpu.programs.as_secs_f64() * 1e6 / connections);
        }
        if running.contender != Contender::Routed {
            let each: Vec<_> =
                self.servers.served().iter().zip(&served).map(|(after, before)| after - before).collect();
            add("imbalance of connections", "%", Better::Less, imbalance(&each));
        }
        if running.contender.has_udp() {
            let (sent, cpu) = meter.during(|| load::datagrams(bed, targets, self.time, Some(RATE)))?;
            let cpu = cpu.beyond(sent.took, rest);
            ensure!(sent.arrived > 0, "no datagram arrived");
            let each = cpu.total().as_secs_f64() * 1e9 / sent.arrived as f64;
            add("CPU time of a packet", "ns", Better::Less, each);
            self.program_times(running, targets, add)?;
        }
        bed.set_threaded(false)
    }

    /// What the kernel says of the edge's program. Of a host that only routes, of a program that does nothing: so much of it is the
    /// kernel's own, and what any program costs with the caches as they are.
    fn program_times(
        &self,
        running: &Running,
        targets: &[IpAddr],
        add: &mut impl FnMut(&str, &'static str, Better, f64),
    ) -> Result<()> {
        let attach = || {
            if_nametoindex(running.host.interface().as_str())
                .map_err(Into::into)
                .and_then(EmptyProgram::attach)
        };
        let (processes, name, _attached) = match running.contender {
            Contender::Edge => (running.processes(), "of which the program", None),
            Contender::Routed => match self.bed.inside(&running.host.netns(), attach)? {
                Ok(program) => {
                    let own = i32::try_from(std::process::id())?;
                    (vec![own], "an empty program in the place of the edge's", Some(program))
                }
                Err(error) => {
                    eprintln!("no empty program is measured: {error}");
                    return Ok(());
                }
            },
            _ => return Ok(()),
        };
        for (rate, when) in [(Some(RATE), ""), (None, ", at full rate")] {
            let statistics = kernel::Statistics::begin(&processes)?;
            let sent = load::datagrams(self.bed, targets, self.time, rate)?;
            let program = statistics.end(&processes)?;
            ensure!(program.runs >= sent.arrived, "the program saw fewer packets than arrived");
            add(&format!("{name}{when}"), "ns", Better::Less, program.nanoseconds_each());
        }
        Ok(())
    }

    /// Rates and times of the whole testbed.
    fn rates(
        &self,
        contender: Contender,
        targets: &[IpAddr],
        add: &mut impl FnMut(&str, &'static str, Better, f64),
    ) -> Result<()> {
        let round = load::requests(self.bed, targets, CLIENTS, self.time)?.checked()?;
        let rate = round.times.len() as f64 / round.took.as_secs_f64();
        add("new connections", "1/s", Better::More, rate);
        let round = load::requests(self.bed, targets, 1, self.time)?.checked()?;
        for percent in [50, 99] {
            let time = percentile(&round.times, percent).unwrap_or_default() * 1e6;
            add(&format!("a request on a new connection, p{percent}"), "µs", Better::Less, time);
        }
        if contender.has_udp() {
            let sent = load::datagrams(self.bed, targets, self.time, None)?;
            let rate = sent.arrived as f64 / sent.took.as_secs_f64();
            add("packets", "1/s", Better::More, rate);
        }
        Ok(())
    }

    /// The targets of a Service change and change back.
    fn changes(
        &self,
        running: &Running,
        add: &mut impl FnMut(&str, &'static str, Better, f64),
    ) -> Result<()> {
        for number in 0..CHANGES {
            let took = change::measure(self.bed, self.servers, running, number % 2 == 0)?;
            if let Some(took) = took {
                add(
                    "a change of targets, until a connection goes by it",
                    "ms",
                    Better::Less,
                    milliseconds(took),
                );
            }
            // What the change causes besides is not the next one's.
            thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// The active host fails.
    fn fail(&self, failures: u16, results: &mut Results, notes: &mut Vec<String>) -> Result<()> {
        for round in 0..failures {
            for pair in Pair::ALL {
                let missing = match pair {
                    Pair::Edges => Contender::Edge.missing(self.programs),
                    _ => Contender::Haproxy
                        .missing(self.programs)
                        .or_else(|| contender::absent_program("keepalived")),
                };
                if let Some(why) = missing {
                    if round == 0 {
                        notes.push(format!("{} was not measured: {why}.", pair.title()));
                    }
                    continue;
                }
                for (failure, what) in [
                    (Failure::Process, "kill -9 of its processes"),
                    (Failure::Host, "disconnected and killed"),
                ] {
                    eprintln!("failure {} of {}: {what}", round + 1, pair.title());
                    let gap = pair
                        .fail(self.bed, self.programs, failure)
                        .with_context(|| format!("{}: {what}", pair.title()))?;
                    let name = format!("{FAILURE}, {what}: time without service");
                    results.add(&name, "ms", Better::Less, pair.title(), milliseconds(gap));
                }
            }
        }
        Ok(())
    }
}

/// How the names of metrics begin.
fn shape(services: u32, family: Family) -> String {
    match family {
        Family::V4 => format!("{services} Services"),
        Family::V6 => format!("{services} Services, IPv6"),
    }
}

/// What `--families` lists.
fn parse_family(text: &str) -> Result<Family, String> {
    match text {
        "4" => Ok(Family::V4),
        "6" => Ok(Family::V6),
        _ => Err("an IP family is 4 or 6".to_owned()),
    }
}

/// The goals of the edge, which are printed beside what was measured. None fails a run.
fn goals(family: Family) -> Vec<(String, Goal)> {
    let at = |what: &str, goal| (format!("{}: {what}", shape(GOAL, family)), goal);
    let connection = "CPU time of a connection";
    vec![
        at("of which the program", Goal::AtMost(200.0)),
        at("of which the program, at full rate", Goal::AtMost(200.0)),
        at(connection, Goal::TimesPeer(0.2, Contender::Haproxy.title())),
        at(connection, Goal::TimesPeer(0.2, Contender::Envoy.title())),
        at("restart to ready, with what is in the kernel", Goal::AtMost(200.0)),
        at("maps but flows", Goal::AtMost(64.0)),
        at("maps of a million flows", Goal::AtMost(128.0)),
        at("imbalance of connections", Goal::AtMost(2.0)),
    ]
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// The Services that have traffic: from all of them, and each node serves as many of these.
fn busy_services(services: u32) -> Vec<u32> {
    let nodes = u32::from(edge_bed::NODES);
    let step = (services / BUSY / nodes * nodes).max(1);
    let number = |index| if step == 1 { index } else { index * step + index % nodes };
    (0..BUSY.min(services)).map(number).collect()
}

/// How much more than the mean the busiest node got, in percent.
fn imbalance(each: &[u64]) -> f64 {
    let (sum, most) = (each.iter().sum::<u64>(), each.iter().max().copied().unwrap_or(0));
    if sum == 0 { 0.0 } else { (most as f64 * each.len() as f64 / sum as f64 - 1.0) * 100.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busy_services_need_each_node_equally() {
        for services in [BUSY, 1000, 10_000] {
            let busy = busy_services(services);
            assert!(busy.iter().all(|service| *service < services), "{busy:?}");
            let mut counts = [0; edge_bed::NODES as usize];
            for node in busy.iter().flat_map(|service| configs::nodes_of(*service)) {
                counts[usize::from(node)] += 1;
            }
            assert_eq!(counts, [48; edge_bed::NODES as usize], "{services}");
        }
    }

    #[test]
    fn imbalance_is_the_excess_of_the_busiest() {
        assert!((imbalance(&[100, 110, 90, 100]) - 10.0).abs() < 1e-9);
        assert!(imbalance(&[]).abs() < 1e-9 && imbalance(&[0, 0]).abs() < 1e-9);
    }
}
