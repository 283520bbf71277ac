// SPDX-License-Identifier: Apache-2.0
//! Kernel time of one endpoint change: a transaction on the table that the agent left behind, with all Services in it.
//!
//! One endpoint of a Service with three is removed and added again. Each change deletes the elements of one map and adds those
//! of another. Timed from sending the transaction to its acknowledgement. As with the agent, a monitor is subscribed; it does
//! not read its notifications.

use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use steerage_agent::rules::{SetId, TABLE};
use steerage_model::Family;
use steerage_nft::{Batch, Field, Monitor, Nft, Rows, Table};

use super::Bench;
use crate::objects::service_port::ECHO;
use crate::objects::{ENDPOINTS, Side, addresses, port};
use crate::report::Better::Less;
use crate::report::percentile;
use crate::testbed::{At, Testbed};
use crate::who::Who;

/// Number of changes.
const CHANGES: u32 = 4000;
/// Distance between consecutively changed Services: a prime, so that all Services are reached.
const STRIDE: u32 = 7919;
const TCP: Field = Field::Proto(6);

/// Measures in the node of the agent, after the agent has ended.
pub(super) fn measure(bench: &mut Bench<'_>, testbed: &Testbed, level: u32) -> Result<()> {
    let services: Vec<_> = bench.cluster.services().iter().map(|service| service.cluster).collect();
    let samples = testbed.inside(At::Node, || change_all(&services))??;
    for percent in [50, 99] {
        let name = format!("kernel time of an endpoint change, {level} Services: p{percent}");
        let time = percentile(&samples, percent).context("no sample")?;
        bench.report.add(&name, "µs", Less, Who::Ours, time * 1e6);
    }
    Ok(())
}

fn change_all(services: &[Ipv4Addr]) -> Result<Vec<Duration>> {
    let mut nft = Nft::open()?;
    let monitor = Monitor::open()?;
    let table = Table::new(steerage_nft::Family::Ip, TABLE);
    let mut samples = Vec::new();
    for round in 0..CHANGES {
        let number = usize::try_from(round / 2 * STRIDE)? % services.len();
        let targets = addresses(u32::try_from(number)?, Side::A);
        let rows = |count: u32| rows(services[number], &targets, count);
        let (of, to) = if round % 2 == 0 { (ENDPOINTS, ENDPOINTS - 1) } else { (ENDPOINTS - 1, ENDPOINTS) };
        let mut batch = Batch::new();
        batch.delete_rows(&table, &SetId::Slots(of).name(), &rows(of));
        batch.add_rows(&table, &SetId::Slots(to).name(), rows(to).iter());
        let begun = Instant::now();
        nft.commit(batch).with_context(|| format!("change {round}"))?;
        samples.push(begun.elapsed());
    }
    drop(monitor);
    Ok(samples)
}

/// The elements of a Service's cluster IP for its first `count` endpoints.
fn rows(frontend: Ipv4Addr, targets: &[Ipv4Addr], count: u32) -> Rows {
    let mut rows = Rows::new(SetId::Slots(count).row_shape(Family::V4));
    for (slot, target) in (0..count).zip(targets) {
        let key = [Field::V4(frontend), TCP, Field::Port(ECHO), Field::Number(slot)];
        rows.push_entry(&key, &[Field::V4(*target), Field::Port(port::ECHO)]);
    }
    rows
}
