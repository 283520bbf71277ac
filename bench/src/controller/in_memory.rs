// SPDX-License-Identifier: Apache-2.0
//! The controller with an API server in memory, which answers at once: what remains is the controller's own time.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};

use super::Scale;
use super::cell::{Cell, Moves, NodeChange, Size, Start};
use super::plot::{self, Chart};
use super::program::Program;
use super::results::Results;

/// Before the names of these results.
const PREFIX: &str = "API server in memory";
/// Numbers of processes, which the other part of the benchmark does not reach.
const FIRST_PROCESS: usize = 1000;
/// The points of a plot, as parts of the largest number.
const POINTS: [f64; 5] = [0.01, 0.1, 0.25, 0.5, 1.0];

/// Measures starts, changes of nodes, and `rate` changes of endpoints per second.
pub(super) fn measure(
    scale: &Scale,
    controller: &Path,
    folder: &Path,
    rate: u32,
    results: &mut Results,
) -> Result<()> {
    let size = Size { services: scale.services, nodes: scale.nodes, endpoints: scale.endpoints };
    let mut cell = Cell::new(controller, folder, size, FIRST_PROCESS)?;
    let program = start_and_change_nodes(&mut cell, scale.runs, results, &mut Point::default())?;
    let mut add = |what: &str, Moves { per_second, delays, cpu }: &Moves| {
        let name = format!("{PREFIX}, {rate} changes of endpoints per second{what}");
        results.add_delays(&format!("{name}: time until the provider call"), delays);
        results.add(&format!("{name}: CPU"), "% of a core", cpu * 100.0);
        results.add_rate(&format!("{name}: changes made"), *per_second);
    };
    add("", &cell.move_endpoints(&program, rate, scale.period, false)?);
    let what = ", one Service's provider calls hang (the others' time)";
    add(what, &cell.move_endpoints(&program, rate, scale.period, true)?);
    program.end()
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
    let mut add_start = |what: &str, Start { planned, cpu, peak_mebibytes, writes }: &Start| {
        let planning = "time from the end of the lists until everything is planned";
        results.add(&format!("{PREFIX}, {what}: {planning}"), "s", planned.as_secs_f64());
        results.add(&format!("{PREFIX}, {what}: CPU"), "s", *cpu);
        results.add(&format!("{PREFIX}, {what}: peak resident memory"), "MiB", *peak_mebibytes);
        results.add(&format!("{PREFIX}, {what}: writes"), "", f64::from(*writes));
    };
    let (mut program, first) = cell.start()?;
    add_start("first start", &first);
    for _ in 0..runs {
        program.end()?;
        let start;
        (program, start) = cell.start()?;
        add_start("restart", &start);
        point.restart_cpu.push(start.cpu);
        point.peak.push(start.peak_mebibytes);
    }
    for _ in 0..runs {
        for (verb, change) in [("joins", cell.add_node(&program)?), ("leaves", cell.remove_node(&program)?)] {
            let NodeChange { written, cpu, writes } = change;
            let name = format!("{PREFIX}, a node {verb}");
            results.add(&format!("{name}: time until the node set is written"), "s", written.as_secs_f64());
            results.add(&format!("{name}: CPU"), "s", cpu);
            results.add(&format!("{name}: writes"), "", f64::from(writes));
            if verb == "joins" {
                point.join_cpu.push(cpu);
            }
        }
    }
    Ok(program)
}

/// Measures starts and changes of nodes with more and more Services, then nodes, and draws them into `plots`.
pub(super) fn draw(
    scale: &Scale,
    controller: &Path,
    folder: &Path,
    plots: &Path,
    results: &mut Results,
) -> Result<()> {
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
            let (mut cell, mut point) = (Cell::new(controller, folder, *size, process)?, Point::default());
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
        fs::write(&file, plot::svg(&title, &charts))
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
        Chart { title: "restart: CPU, s", values: restart },
        Chart { title: "a node joins: CPU, s", values: join },
        Chart { title: "restart: peak resident memory, MiB", values: peak },
    ]
}
