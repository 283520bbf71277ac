// SPDX-License-Identifier: Apache-2.0
//! One event under load: from a known beginning, with connections that are open before it, until all are asked once more.

use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use steerage_meter::capture::now;
use steerage_meter::load::{Load, Shape};
use steerage_meter::loss::{LossKind, Measurement};

use super::events::Event;
use super::world::{World, clients};

/// From the opening of the last idle connection to the event, and from the event to the end of the load.
const AROUND: Duration = Duration::from_secs(3);
/// How often the meter's test of itself is tried.
const ATTEMPTS: usize = 3;
/// Packets of each kind that are dropped in the meter's test of itself.
const DROPPED: usize = 5;

/// What the clients of one family lived through.
#[derive(Clone, Debug)]
pub(super) struct Row {
    pub(super) event: &'static str,
    pub(super) has_moved: bool,
    /// How often the event happened.
    pub(super) times: u32,
    pub(super) family: String,
    /// When the event began, since the Unix epoch.
    pub(super) at: Duration,
    pub(super) measured: Measurement,
    /// Segments that the nodes have sent again meanwhile, to the clients of both families.
    pub(super) sent_again: u64,
    pub(super) is_kept: bool,
}

/// Lets an event happen for as long, and at least once.
pub(super) fn measure(
    world: &mut World,
    event: &Event,
    has_moved: bool,
    shape: Shape,
    period: Duration,
) -> Result<Vec<Row>> {
    world.begin(event.nodes, event.hosts)?;
    let sent_before = world.sent_again()?;
    let load = Load::start(clients(), shape);
    let outcome = happen(world, event, has_moved, shape, period);
    let measured = load.end()?;
    let sent_again = world.sent_again()? - sent_before;
    let (at, times) = outcome.with_context(|| event.name.to_owned())?;
    world.hosts.running()?;
    let row = |(family, measured): (String, Measurement)| {
        let ran = measured.connections > 0 && measured.exchanges > 0 && measured.datagrams > 0;
        ensure!(ran, "{}: the load did not run: {measured:?}", event.name);
        let is_kept = event.promise.is_kept(&measured, at);
        Ok(Row { event: event.name, has_moved, times, family, at, measured, sent_again, is_kept })
    };
    measured.into_iter().map(row).collect()
}

/// When it happened first, and how often.
fn happen(
    world: &mut World,
    event: &Event,
    has_moved: bool,
    shape: Shape,
    period: Duration,
) -> Result<(Duration, u32)> {
    sleep(shape.opening_time() + AROUND);
    if has_moved {
        world.move_slots()?;
    }
    let (at, begun, mut times) = (now(), Instant::now(), 0);
    loop {
        (event.happen)(world)?;
        times += 1;
        if !event.repeats || begun.elapsed() >= period {
            break;
        }
    }
    // A load that is longer than the event measures what comes late.
    sleep(AROUND.max(period.saturating_sub(begun.elapsed())));
    Ok((at, times))
}

/// The meter must report what is dropped on the way, as often as the rule counts it, and nothing else. On a machine without a free
/// core more can be lost, so that it is tried again.
pub(super) fn test_meter(world: &mut World, shape: Shape) -> Result<()> {
    let mut outcome = Ok(());
    for _ in 0..ATTEMPTS {
        outcome = try_meter(world, shape);
        if outcome.is_ok() {
            break;
        }
    }
    outcome
}

fn try_meter(world: &mut World, shape: Shape) -> Result<()> {
    world.begin(3, 2)?;
    let kinds = [
        ("tcp flags & (syn | ack) == syn", LossKind::SynRetransmitted),
        ("tcp dport 80 tcp flags & psh == psh", LossKind::DataRetransmitted),
        ("udp dport 80", LossKind::DatagramUnanswered),
    ];
    let load = Load::start(clients(), shape);
    sleep(shape.opening_time() + AROUND);
    for (matches, _) in kinds {
        let rule = format!(
            "nft 'add table inet fault; add chain inet fault forward {{ type filter hook forward priority 0; }}; \
                  add rule inet fault forward {matches} limit rate 1/day burst {DROPPED} packets counter drop'"
        );
        world.bed.shell("router", &rule)?;
        sleep(AROUND);
        let listed = world.bed.shell("router", "nft list table inet fault; nft delete table inet fault")?;
        ensure!(
            listed.contains(&format!("packets {DROPPED} ")),
            "the rule did not drop what it should: {listed}"
        );
    }
    sleep(AROUND);
    let mut found = Measurement::default();
    for (_, measured) in load.end()? {
        found.losses.extend(measured.losses);
    }
    let mut counts = found.counts();
    counts.retain(|kind, _| !kind.is_slow());
    let expected = kinds.map(|(_, kind)| (kind, DROPPED)).into();
    ensure!(
        counts == expected,
        "the meter was to report {DROPPED} of three kinds, and reports {}",
        found.kinds()
    );
    Ok(())
}
