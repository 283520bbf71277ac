// SPDX-License-Identifier: Apache-2.0
//! The kernel's part of one change of endpoints: a transaction against the table that the agent has left, all Services in it.
//!
//! An endpoint of a Service of three goes and comes again: three elements of one map are deleted, two of another are added, and the
//! reverse. Timed from the transaction's sending to its acknowledgement; as with the agent, somebody listens for others' changes,
//! but does not read what it is told.

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
use crate::subject::Who;
use crate::world::{At, World};

/// So many changes.
const CHANGES: u32 = 4000;
/// Services that follow each other in the order of changes are so far from each other, a prime.
const STRIDE: u32 = 7919;
/// TCP.
const PROTOCOL: Field = Field::Proto(6);

/// Measures in the node where the agent has just ended.
pub(super) fn measure(bench: &mut Bench<'_>, world: &World, level: u32) -> Result<()> {
    let services: Vec<_> = bench.cluster.services().iter().map(|service| service.cluster).collect();
    let samples = world.inside(At::Node, || change_all(&services))??;
    for percent in [50, 99] {
        let name = format!("kernel's part of a change, {level} Services: p{percent}");
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

/// The elements of a Service's cluster address with its first endpoints.
fn rows(frontend: Ipv4Addr, targets: &[Ipv4Addr], count: u32) -> Rows {
    let mut rows = Rows::new(SetId::Slots(count).row_shape(Family::V4));
    for (slot, target) in (0..count).zip(targets) {
        let key = [Field::V4(frontend), PROTOCOL, Field::Port(ECHO), Field::Number(slot)];
        rows.push_entry(&key, &[Field::V4(*target), Field::Port(port::ECHO)]);
    }
    rows
}
