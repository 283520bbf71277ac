// SPDX-License-Identifier: Apache-2.0
//! The controller with an API server in memory, which answers at once: what remains is the controller's own time.

use std::fs;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, Result};

use super::cell::{Cell, Moves, Size};
use super::memory::MemoryServer;
use super::peer::{self, Cluster};
use super::program::{Program, Programs};
use super::results::{Results, Writes};
use super::{HANGING, Scale, objects};
use crate::plot::{self, Chart};
use crate::who::Who;

/// Before the names of these results.
const PREFIX: &str = "API server in memory, ";
/// Numbers of processes, which the other part of the benchmark does not reach.
const FIRST_PROCESS: usize = 1000;
/// Those of the peer.
const FIRST_OF_PEER: usize = 1500;
/// The points of a plot, as parts of the largest number.
const POINTS: [f64; 5] = [0.01, 0.1, 0.25, 0.5, 1.0];

/// Measures starts, changes of nodes, and `rate` changes of endpoints per second.
pub(super) fn measure(scale: &Scale, programs: &Programs, rate: u32, results: &mut Results) -> Result<()> {
    let size = Size { services: scale.services, nodes: scale.nodes, endpoints: scale.endpoints };
    let mut cell = Cell::new(programs, size, FIRST_PROCESS)?;
    let program = start_and_change_nodes(&mut cell, scale.runs, results, &mut Point::default())?;
    let mut add = |what: &str, Moves { per_second, delays, cpu, node_joins }: &Moves| {
        let name = format!("{PREFIX}{rate} changes of endpoints per second{what}");
        results.add_delays(&format!("{name}: time until the provider call"), delays);
        results.add(Who::Ours, &format!("{name}: CPU"), "% of a core", cpu * 100.0);
        results.add_rate(&format!("{name}: changes made"), *per_second);
        if let Some(change) = node_joins {
            let metric = format!("{PREFIX}{HANGING}");
            results.add(Who::Ours, &metric, "s", change.reached.as_secs_f64());
        }
    };
    add("", &cell.move_endpoints(&program, rate, scale.period, false)?);
    let what = ", one Service's provider calls hang (the others' time)";
    add(what, &cell.move_endpoints(&program, rate, scale.period, true)?);
    program.end()
}

/// Measures the peer, if there is one, with an API server of its own.
pub(super) fn measure_peer(scale: &Scale, programs: &Programs, results: &mut Results) -> Result<()> {
    if programs.peer.is_none() {
        return Ok(());
    }
    let programs = Programs { json_only: true, ..programs.clone() };
    let mut cluster = MemoryCluster::start(scale, &programs.folder)?;
    peer::measure(&mut cluster, &programs, scale, PREFIX, FIRST_OF_PEER, results)
}

/// Nodes in memory, and later Services.
struct MemoryCluster {
    server: MemoryServer,
    services: u32,
    nodes: u32,
}

impl MemoryCluster {
    fn start(scale: &Scale, folder: &Path) -> Result<Self> {
        let server = MemoryServer::start(folder)?;
        let mut cluster = Self { server, services: scale.services, nodes: 0 };
        for _ in 0..scale.nodes {
            cluster.add_node()?;
        }
        Ok(cluster)
    }
}

impl Cluster for MemoryCluster {
    fn kubeconfig(&self) -> &Path {
        self.server.kubeconfig()
    }

    fn create_services(&mut self) -> Result<()> {
        for number in 0..self.services {
            let service = objects::unclassed(objects::allocated_service(number));
            self.server.put("services", &objects::service_name(number), service);
        }
        Ok(())
    }

    fn add_node(&mut self) -> Result<()> {
        self.server.put("nodes", &objects::node_name(self.nodes), objects::whole_node(self.nodes));
        self.nodes += 1;
        Ok(())
    }

    fn remove_node(&mut self) -> Result<()> {
        self.nodes -= 1;
        self.server.delete("nodes", &objects::node_name(self.nodes));
        Ok(())
    }

    fn writes(&self) -> Result<Writes> {
        Ok(self.server.writes())
    }

    fn last_list(&self) -> Option<Instant> {
        self.server.last_list()
    }
}

/// The medians at one size, for the plots.
#[derive(Default)]
struct Point {
    restart_cpu: Vec<f64>,
    join_cpu: Vec<f64>,
    peak: Vec<f64>,
}

fn start_and_change_nodes(
    cell: &mut Cell,
    runs: u16,
    results: &mut Results,
    point: &mut Point,
) -> Result<Program> {
    let (mut program, first) = cell.start()?;
    results.add_start(Who::Ours, &format!("{PREFIX}first start"), &first);
    for _ in 0..runs {
        program.end()?;
        let start;
        (program, start) = cell.start()?;
        results.add_start(Who::Ours, &format!("{PREFIX}restart"), &start);
        point.restart_cpu.push(start.cpu);
        point.peak.push(start.peak_mebibytes);
    }
    for _ in 0..runs {
        for (verb, change) in [("joins", cell.add_node(&program)?), ("leaves", cell.remove_node(&program)?)] {
            results.add_node_change(Who::Ours, &format!("{PREFIX}a node {verb}"), &change);
            if verb == "joins" {
                point.join_cpu.push(change.cpu);
            }
        }
    }
    Ok(program)
}

/// Measures starts and changes of nodes with more and more Services, then nodes, and draws them into `plots`.
pub(super) fn draw(scale: &Scale, programs: &Programs, plots: &Path, results: &mut Results) -> Result<()> {
    fs::create_dir_all(plots).with_context(|| format!("cannot create {}", plots.display()))?;
    let all = Size { services: scale.services, nodes: scale.nodes, endpoints: scale.endpoints };
    let by_services: Vec<Size> =
        POINTS.map(|part| Size { services: part_of(all.services, part), ..all }).into();
    let by_nodes: Vec<Size> = POINTS.map(|part| Size { nodes: part_of(all.nodes, part), ..all }).into();
    let mut process = FIRST_PROCESS;
    let mut series = |sizes: &[Size]| -> Result<Vec<Point>> {
        let mut points = Vec::new();
        for size in sizes {
            results.set_scale(size.services, size.nodes);
            let (mut cell, mut point) = (Cell::new(programs, *size, process)?, Point::default());
            process += FIRST_PROCESS;
            start_and_change_nodes(&mut cell, scale.runs, results, &mut point)?.end()?;
            points.push(point);
        }
        Ok(points)
    };
    let services = charts(series(&by_services)?, &by_services, |size| size.services);
    let nodes = charts(series(&by_nodes)?, &by_nodes, |size| size.nodes);
    for (file, title, charts) in [
        ("controller-services.svg", format!("Services, with {} nodes", all.nodes), services),
        ("controller-nodes.svg", format!("nodes, with {} Services", all.services), nodes),
    ] {
        let file = plots.join(file);
        fs::write(&file, plot::svg("Cost", &title, plot::Scale::Linear, &charts))
            .with_context(|| format!("cannot write {}", file.display()))?;
    }
    Ok(())
}

/// At least two: half of the Services have another steering.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "parts of a positive number")]
fn part_of(number: u32, part: f64) -> u32 {
    ((f64::from(number) * part) as u32).max(2)
}

fn charts(points: Vec<Point>, sizes: &[Size], x: fn(&Size) -> u32) -> Vec<Chart> {
    let (mut restart, mut join, mut peak) = (Vec::new(), Vec::new(), Vec::new());
    for (size, point) in sizes.iter().zip(points) {
        restart.push((x(size), point.restart_cpu));
        join.push((x(size), point.join_cpu));
        peak.push((x(size), point.peak));
    }
    vec![
        Chart { title: "restart: CPU, s", values: restart, bound: Vec::new() },
        Chart { title: "a node joins: CPU, s", values: join, bound: Vec::new() },
        Chart { title: "restart: peak resident memory, MiB", values: peak, bound: Vec::new() },
    ]
}
