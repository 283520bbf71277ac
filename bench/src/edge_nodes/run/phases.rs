// SPDX-License-Identifier: Apache-2.0
//! The phases: start, rest, and one change after the other, each with what it costs the edge hosts. `run` calls them in turn, and has
//! what they wait for.

use std::time::{Duration, Instant};

use anyhow::Result;

use super::super::cluster::node_address;
use super::super::hosts::Hosts;
use super::super::sample::{Sample, cpu_rates, mib};
use super::super::world::{self, LINK, Traffic};
use super::{ALL, Run};
use crate::report::Better;

/// Between two moves of endpoints.
const BETWEEN_MOVES: Duration = Duration::from_millis(250);

impl Run<'_> {
    pub(super) fn start(&mut self) -> Result<()> {
        let before = self.each_host().map(|host| world::traffic(host, LINK)).collect::<Result<Vec<_>>>()?;
        let begun = Instant::now();
        for host in self.each_host() {
            self.hosts.start(self.world, host)?;
        }
        let programmed = match self.wait_until_programmed(self.each_host().collect(), begun) {
            Ok(programmed) => programmed,
            Err(error) => {
                self.unfinished_start(begun, &before);
                return Err(error);
            }
        };
        for (took, sample) in &programmed {
            self.add("start: time until all tables are right", "s", took.as_secs_f64());
            self.add("start: CPU time until then", "s", sample.usage.cpu.as_secs_f64());
        }
        let took = self.wait_until_rest(begun)?;
        self.results.add("start: time until rest", "s", Better::Less, ALL, took.as_secs_f64());
        let samples = self.samples()?;
        self.start_costs("start", &samples, &before);
        let status = self.server.status_writes();
        let mut add = |what: &str, unit, value| self.results.add(what, unit, Better::Less, ALL, value);
        add("start: status objects written", "objects", status.count as f64);
        add("start: bytes of status objects", "MiB", mib(status.bytes));
        Ok(())
    }

    /// What it cost until it was given up: lower bounds. Of processes that were stopped only the nodes' counts are left.
    fn unfinished_start(&mut self, begun: Instant, before: &[Traffic]) {
        const PHASE: &str = "start, not finished";
        self.add(&format!("{PHASE}: time"), "s", begun.elapsed().as_secs_f64());
        let right: Vec<_> = self.each_host().map(|host| self.count_right(host) as f64).collect();
        self.add_each(&format!("{PHASE}: Services whose tables are right"), "Services", &right);
        if let Ok(samples) = self.samples() {
            self.start_costs(PHASE, &samples, before);
        } else {
            let asked = |host| self.nodes.asked(host).statements() as f64;
            let asked: Vec<_> = self.each_host().map(asked).collect();
            self.add_each(&format!("{PHASE}: answered requests for statements"), "requests", &asked);
        }
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

    pub(super) fn rest(&mut self) -> Result<()> {
        let counted = |host| Ok(Hosts::metrics(host)?.sum("steerage_edge_statement_requests_total"));
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
        let cpu = cpu_rates(&before, &after);
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
        self.rest = Some(cpu);
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

    pub(super) fn move_endpoints(&mut self) -> Result<()> {
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
            self.wait_until_rest(Instant::now())?;
            let cpu = self.beyond_rest(&before, &self.samples()?);
            let each: Vec<_> = cpu.iter().map(|cpu| cpu * 1e3 / f64::from(moved)).collect();
            self.add_each("an endpoint moves: CPU time beyond rest", "ms", &each);
        }
        Ok(())
    }

    pub(super) fn add_services(&mut self) -> Result<()> {
        for _ in 0..self.settings.changes {
            let before = self.samples()?;
            let service = self.cluster.add_service();
            self.nodes.add_service(&self.cluster, service);
            self.wait_until_rest(Instant::now())?;
            let stated = self.samples()?;
            let begun = Instant::now();
            self.put_load_balancer(service);
            let each = self.wait_for(begun, |run, tables| run.is_right(tables, service))?;
            self.wait_until_rest(Instant::now())?;
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

    pub(super) fn silence_nodes(&mut self) -> Result<()> {
        for _ in 0..self.settings.changes {
            let Some(node) = self.cluster.busy_node() else { break };
            let (services, address) = (self.cluster.services_of(node), node_address(node));
            let before = self.samples()?;
            let begun = Instant::now();
            self.nodes.set_silent(node, true);
            world::set_unreachable(node, true)?;
            let each = self.wait_for(begun, |_, tables| {
                services.iter().all(|service| !tables.addresses_of(*service).contains(&address))
            })?;
            self.wait_until_rest(Instant::now())?;
            let silent = self.samples()?;
            for took in &each {
                self.add("a node is silent: time until no table has it", "s", took.as_secs_f64());
            }
            let cpu = self.beyond_rest(&before, &silent);
            self.add_each("a node is silent: CPU time beyond rest", "s", &cpu);
            let begun = Instant::now();
            world::set_unreachable(node, false)?;
            self.nodes.set_silent(node, false);
            let each = self.wait_for(begun, |run, tables| {
                services.iter().all(|service| run.is_right(tables, *service))
            })?;
            self.wait_until_rest(Instant::now())?;
            let after = self.samples()?;
            for took in &each {
                self.add("a node answers again: time until its tables are right", "s", took.as_secs_f64());
            }
            let cpu = self.beyond_rest(&silent, &after);
            self.add_each("a node answers again: CPU time beyond rest", "s", &cpu);
        }
        Ok(())
    }

    pub(super) fn restart(&mut self) -> Result<()> {
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
            let took = self.wait_until_rest(begun)?;
            let usage = self.hosts.usage(0)?;
            self.add("restart: time until rest", "s", took.as_secs_f64());
            self.add("restart: CPU time until then, of that process", "s", usage.cpu.as_secs_f64());
            self.add("restart: peak memory", "MiB", mib(usage.peak));
        }
        Ok(())
    }
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
