// SPDX-License-Identifier: Apache-2.0
//! Another program changes the tables of the program under test, with the real `nft`: the time without service, as a client sees it
//! that begins a flow every millisecond.
//!
//! Of a run, the longest time between two datagrams that arrive one after the other at the endpoints of the probe Service. Without
//! any change that is a millisecond or some, whatever else the machine does; it is measured, too.

use std::net::SocketAddrV4;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};

use super::{Bench, Trial};
use crate::objects::{probe_addresses, service_port};
use crate::report::Better::Less;
use crate::report::percentile;
use crate::testbed::At;
use crate::traffic::while_probing;
use crate::who::Who;

/// Time between two datagrams.
const INTERVAL: Duration = Duration::from_millis(1);
/// Traffic before a change, and after the repair.
const AROUND: Duration = Duration::from_millis(1500);
/// A change that is not repaired after this time is given up. kube-proxy compares its table once an hour, and after a failed write.
const LIMIT: Duration = Duration::from_secs(30);
/// Datagrams arrive again if they do for this long.
const STEADY: u32 = 20;

/// What is done to the tables, in words and as arguments of `nft`; `None`: nothing. The probe Service has that many endpoints.
fn changes(who: Who, to: SocketAddrV4, endpoints: usize) -> Vec<(&'static str, Option<String>)> {
    let (address, port) = (to.ip(), service_port::PROBE);
    if who == Who::Ours && endpoints != 3 {
        // All long lists are in one map.
        let map = if endpoints > 8 { "endpoints".to_owned() } else { format!("slots-{endpoints}") };
        return vec![
            ("nothing", None),
            ("flush ruleset", Some("flush ruleset".to_owned())),
            ("flush map", Some(format!("flush map ip steerage {map}"))),
            ("flush chain", Some("flush chain ip steerage services".to_owned())),
        ];
    }
    // Each of the three hashes of a flow leads to an endpoint.
    let slots =
        (0..3).map(|slot| format!("{address} . udp . {port} . {slot}")).collect::<Vec<_>>().join(", ");
    match who {
        Who::Ours => vec![
            ("nothing", None),
            ("flush ruleset", Some("flush ruleset".to_owned())),
            ("delete table", Some("delete table ip steerage".to_owned())),
            ("delete element", Some(format!("delete element ip steerage slots-3 {{ {slots} }}"))),
            ("flush map", Some("flush map ip steerage slots-3".to_owned())),
            ("flush chain", Some("flush chain ip steerage services".to_owned())),
        ],
        // Its next write after a change of an endpoint writes everything again, but not after the change of an element.
        Who::Peer => vec![
            ("nothing", None),
            ("flush ruleset", Some("flush ruleset".to_owned())),
            ("delete table", Some("delete table ip kube-proxy".to_owned())),
            (
                "delete element",
                Some(format!("delete element ip kube-proxy service-ips {{ {address} . udp . {port} }}")),
            ),
        ],
    }
}

pub(super) fn measure(bench: &mut Bench<'_>, trial: &Trial<'_>) -> Result<()> {
    let level = trial.level;
    let limit = LIMIT.min(bench.settings.limit);
    for (what, change) in
        changes(trial.who, bench.probe(), probe_addresses(bench.side, bench.settings.shape).len())
    {
        let name = format!("without service after {what}, {level} Services");
        let mut gaps = Vec::new();
        for _ in 0..if trial.who == Who::Ours { bench.settings.repairs } else { 1 } {
            match gap(bench, trial, change.as_deref(), limit).with_context(|| format!("after {what}"))? {
                Some(gap) => gaps.push(gap),
                None if trial.who == Who::Peer => {
                    bench.report.add_unfinished(&name, "ms", trial.who, limit.as_secs_f64() * 1000.0);
                    // A change of the probe's endpoints makes it write everything.
                    if what != "delete element" {
                        super::first_packet::one(bench, trial)?;
                    }
                }
                None => bail!("{what}: not repaired in {limit:?}"),
            }
        }
        if let Some(median) = percentile(&gaps, 50) {
            bench.report.add(&name, "ms", Less, trial.who, median * 1000.0);
        }
    }
    Ok(())
}

/// The longest time between two arrivals around a change; `None` if none came in time.
fn gap(
    bench: &Bench<'_>,
    trial: &Trial<'_>,
    change: Option<&str>,
    limit: Duration,
) -> Result<Option<Duration>> {
    let Trial { testbed, pods, .. } = *trial;
    while_probing(testbed, bench.probe(), INTERVAL, || {
        pods.record(true);
        sleep(AROUND);
        if let Some(change) = change {
            testbed.shell(At::Node, &format!("nft '{change}'"))?;
        }
        let changed = Instant::now();
        loop {
            sleep(AROUND);
            let since = pods.recorded().iter().filter(|at| **at > changed).count();
            if since >= usize::try_from(STEADY)? && changed.elapsed() >= AROUND {
                break;
            }
            if changed.elapsed() >= limit {
                pods.record(false);
                return Ok(None);
            }
        }
        let all = pods.recorded();
        pods.record(false);
        Ok(all.windows(2).map(|pair| pair[1] - pair[0]).max())
    })
}
