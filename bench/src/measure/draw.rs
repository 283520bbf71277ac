// SPDX-License-Identifier: Apache-2.0
//! What the agent costs against the number of endpoints of a Service, with as many endpoints in all: start, restart, kernel memory and
//! the kernel's time of a change, drawn.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};

use super::{Measure, Settings, run};
use crate::objects::Shape;
use crate::plot::{Chart, Scale, svg};
use crate::report::Report;
use crate::subject::Programs;
use crate::testbed::DriverNetns;
use crate::who::Who;

/// Endpoints of each Service.
const POINTS: [u32; 7] = [3, 10, 30, 100, 300, 1000, 3000];

/// How much is drawn.
#[derive(Clone, Copy, Debug)]
pub struct Extent {
    /// Endpoints in all, a multiple of 3,000.
    pub endpoints: u32,
}

/// Measures the agent alone, as `settings` say, and draws into the directory `plots`. Calls `save` with the results so far after each
/// number of endpoints.
pub fn draw(
    settings: &Settings,
    extent: Extent,
    programs: &Programs,
    folder: &Path,
    driver: &DriverNetns,
    plots: &Path,
    save: impl Fn(&Report) -> Result<()>,
) -> Result<Report> {
    fs::create_dir_all(plots).with_context(|| format!("cannot create {}", plots.display()))?;
    let mut report = Report::new(Who::Ours.title(), Who::Peer.title());
    for endpoints in POINTS {
        let point = Settings {
            levels: vec![extent.endpoints / endpoints],
            shape: Shape::Even(endpoints),
            measures: [Measure::Restart, Measure::Kernel].into(),
            subjects: vec![Who::Ours],
            ..settings.clone()
        };
        let folder = folder.join(endpoints.to_string());
        fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        report.extend(run(&point, programs, &folder, driver, |_| Ok(()))?);
        save(&report)?;
    }
    let file = plots.join("agent-endpoints.svg");
    let x = format!("endpoints of each Service, {} in all", extent.endpoints);
    fs::write(&file, svg("Cost", &x, Scale::Logarithmic, &charts(&report, extent)))
        .with_context(|| format!("cannot write {}", file.display()))?;
    Ok(report)
}

fn charts(report: &Report, extent: Extent) -> Vec<Chart> {
    let chart = |title, kind: &str, what: &str| {
        let values = POINTS.map(|endpoints| {
            let name = format!("{kind}, {} Services: {what}", extent.endpoints / endpoints);
            (endpoints, report.of(&name, Who::Ours))
        });
        Chart { title, values: values.to_vec(), bound: Vec::new() }
    };
    vec![
        chart("start, from the initial list: s", "start", "initial list to fully programmed"),
        chart("restart, from the initial list: s", "restart", "initial list to rules confirmed"),
        chart("kernel memory of the rules, MiB", "start", "kernel memory of the ruleset"),
        chart("kernel time of a change, µs", "kernel time of an endpoint change", "p50"),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Better;

    #[test]
    fn every_chart_has_every_number_of_endpoints() {
        let extent = Extent { endpoints: 9000 };
        let mut report = Report::new("agent", "kube-proxy");
        for endpoints in POINTS {
            let services = extent.endpoints / endpoints;
            for name in [
                format!("start, {services} Services: initial list to fully programmed"),
                format!("start, {services} Services: kernel memory of the ruleset"),
                format!("restart, {services} Services: initial list to rules confirmed"),
                format!("kernel time of an endpoint change, {services} Services: p50"),
            ] {
                report.add(&name, "s", Better::Less, Who::Ours, f64::from(endpoints));
            }
        }
        for chart in charts(&report, extent) {
            let expected = POINTS.map(|endpoints| (endpoints, vec![f64::from(endpoints)]));
            assert_eq!(chart.values, expected, "{}", chart.title);
        }
    }
}
