// SPDX-License-Identifier: Apache-2.0
//! Kernel time of one endpoint change: a transaction on the table that the agent left behind, with all Services in it.
//!
//! One endpoint of a Service is removed and added again. With few, each change deletes the elements of one map and adds those of
//! another; with many, an element is replaced, as if another endpoint had come. Timed from sending the transaction to its acknowledgement. As with the agent, a monitor is subscribed; it does
//! not read its notifications.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use steerage_agent::rules::{self, SetId, TABLE};
use steerage_model::Family;
use steerage_nft::{Batch, Field, Monitor, Nft, Rows, Table};

use super::Bench;
use crate::objects::service_port::ECHO;
use crate::objects::{Shape, Side, port};
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
    let shape = bench.settings.shape;
    let samples = testbed.inside(At::Node, || change_all(&services, shape))??;
    for percent in [50, 99] {
        let name = format!("kernel time of an endpoint change, {level} Services: p{percent}");
        let time = percentile(&samples, percent).context("no sample")?;
        bench.report.add(&name, "µs", Less, Who::Ours, time * 1e6);
    }
    Ok(())
}

fn change_all(services: &[Ipv4Addr], shape: Shape) -> Result<Vec<Duration>> {
    let mut nft = Nft::open()?;
    let monitor = Monitor::open()?;
    let table = Table::new(steerage_nft::Family::Ip, TABLE);
    let lists = lists(&mut nft, &table)?;
    let mut samples = Vec::new();
    for round in 0..CHANGES {
        let number = usize::try_from(round / 2 * STRIDE)? % services.len();
        let targets = shape.addresses(u32::try_from(number)?, Side::A);
        let mut batch = Batch::new();
        if let Some(list) = lists.get(&services[number]) {
            let other = shape.addresses(u32::try_from(number)?, Side::B);
            let new = if round % 2 == 0 { other.first() } else { targets.first() };
            let row = first_of_list(*list, *new.context("no endpoint")?);
            batch.delete_rows(&table, &SetId::Endpoints.name(), &row);
            batch.add_rows(&table, &SetId::Endpoints.name(), row.iter());
            let digest = digest(*list, shape.endpoints(u32::try_from(number)?), round);
            batch.delete_rows(&table, &SetId::Digests.name(), &digest);
            batch.add_rows(&table, &SetId::Digests.name(), digest.iter());
        } else {
            let endpoints = shape.endpoints(u32::try_from(number)?);
            let rows = |count: u32| rows(services[number], &targets, count);
            let (of, to) =
                if round % 2 == 0 { (endpoints, endpoints - 1) } else { (endpoints - 1, endpoints) };
            if of > 0 {
                batch.delete_rows(&table, &SetId::Slots(of).name(), &rows(of));
            }
            if to > 0 {
                batch.add_rows(&table, &SetId::Slots(to).name(), rows(to).iter());
            }
        }
        let begun = Instant::now();
        nft.commit(batch).with_context(|| format!("change {round}"))?;
        samples.push(begun.elapsed());
    }
    drop(monitor);
    Ok(samples)
}

/// The numbers of long lists, by cluster IP.
fn lists(nft: &mut Nft, table: &Table) -> Result<BTreeMap<Ipv4Addr, u32>> {
    let set = SetId::Lists(rules::Side::Cluster);
    let rows = nft.rows(table, &set.name(), set.row_shape(Family::V4))?;
    let list = |row: steerage_nft::Row<'_>| {
        let addr = row.key.first_chunk::<4>()?;
        Some((Ipv4Addr::from(*addr), u32::from_ne_bytes(row.data?.try_into().ok()?)))
    };
    Ok(rows.iter().filter_map(list).collect())
}

/// The element of the first slot of a list.
fn first_of_list(list: u32, target: Ipv4Addr) -> Rows {
    let mut rows = Rows::new(SetId::Endpoints.row_shape(Family::V4));
    let key = [Field::Number(list), Field::Number(0)];
    rows.push_entry(&key, &[Field::V4(target), Field::Port(port::ECHO)]);
    rows
}

/// The digest of a list, of other endpoints in each round.
fn digest(list: u32, endpoints: u32, round: u32) -> Rows {
    let mut rows = Rows::new(SetId::Digests.row_shape(Family::V4));
    rows.push_entry(&[Field::Number(list)], &[endpoints, round, round].map(Field::Number));
    rows
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
