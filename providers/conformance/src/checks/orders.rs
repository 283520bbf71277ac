// SPDX-License-Identifier: Apache-2.0
//! Calls in any order, complete or not.

use anyhow::{Context as _, ensure};
use steerage_provider_api::{Compare, Error, GroupTargets, LoadBalancer, Owner, Provider, RequestedSources};

use crate::converge::{Goal, converge, ensure_same};
use crate::{CutPoint, Harness, fixture};

/// Sequences of calls. Each is the same in every run.
const SEQUENCES: u64 = 4;
/// Calls of a sequence.
const STEPS: usize = 10;

/// Whatever was called before, in whatever order, and wherever it was cut off: the goal is reached from there, and is what it is when it
/// is reached at once. The calls are those that the controller makes, each once, so that many end halfway.
pub async fn any_order_of_calls_leads_to_the_goal<H: Harness>(harness: &H) -> anyhow::Result<()> {
    let [earlier, owner] = [1, 2].map(|incarnation| fixture::owner("any-order", incarnation));
    for seed in 0..SEQUENCES {
        let mut random = fastrand::Rng::with_seed(seed);
        let goal = wish(harness, &mut random, &owner);
        let made_at_once = harness.fresh().await?;
        converge(&made_at_once, &goal).await?;
        let expected = harness.snapshot().await?;
        Goal::Absent(owner.clone()).reach(&made_at_once).await?;

        let mut history = Vec::new();
        let mut provider = harness.fresh().await?;
        // The Service is deleted and created again once.
        let recreated_at = random.usize(0..STEPS);
        for step in 0..STEPS {
            let current = if step < recreated_at { &earlier } else { &owner };
            let cut = random.bool().then(|| (random.usize(1..8), CutPoint::After));
            if let Some((call, point)) = cut {
                harness.proxy().reset();
                harness.proxy().crash_at(call, point);
            }
            let (name, result) = call(harness, &mut random, &provider, current).await?;
            let is_cut = cut.is_some() && harness.proxy().fault_fired();
            harness.proxy().reset();
            history.push(format!("{name}{}", if is_cut { ", cut" } else { "" }));
            // The others end halfway too; the next call goes on.
            if let Err(error @ Error::Invalid { .. }) = result {
                anyhow::bail!("sequence {seed}, {history:?}: {error}");
            }
            // A process that dies is followed by one that knows nothing.
            if is_cut || random.u8(0..4) == 0 {
                provider = harness.fresh().await?;
                history.push("another process".to_owned());
            }
        }
        let context = || format!("sequence {seed}, {history:?}");
        Goal::Absent(earlier.clone()).reach(&provider).await.with_context(context)?;
        converge(&provider, &goal).await.with_context(context)?;
        ensure_same("the goal", &expected, &harness.snapshot().await?).with_context(context)?;
        Goal::Absent(owner.clone()).reach(&harness.fresh().await?).await.with_context(context)?;
        let left = harness.fresh().await?.owned().await.with_context(context)?;
        ensure!(left.is_empty(), "sequence {seed}, {history:?}: {left:?} is left");
    }
    Ok(())
}

/// What is wanted of the Service: one of two structures, with some targets and source ranges.
fn wish(harness: &impl Harness, random: &mut fastrand::Rng, owner: &Owner) -> LoadBalancer {
    let structure =
        if random.bool() { fixture::first(harness, owner) } else { fixture::second(harness, owner) };
    let ranges: &[&str] = if random.u8(0..3) == 0 { &["10.0.0.0/8", "192.0.2.0/24"] } else { &[] };
    let source_ranges = ranges.iter().filter_map(|range| range.parse().ok()).collect();
    LoadBalancer { source_ranges, ..fixture::with_targets(harness, &structure, &indices(random)) }
}

/// Some of the harness's targets, one at least.
fn indices(random: &mut fastrand::Rng) -> Vec<usize> {
    let mut chosen: Vec<usize> = (0..4).filter(|_| random.bool()).collect();
    if chosen.is_empty() {
        chosen.push(random.usize(0..4));
    }
    chosen
}

/// Makes one call of those that the controller makes. Returns its name and result.
async fn call<H: Harness>(
    harness: &H,
    random: &mut fastrand::Rng,
    provider: &impl Provider,
    owner: &Owner,
) -> anyhow::Result<(&'static str, Result<(), Error>)> {
    Ok(match random.u8(0..8) {
        0..=3 => {
            let compare = if random.bool() { Compare::InPlace } else { Compare::Remembered };
            let lb = wish(harness, random, owner);
            ("apply", provider.apply(&lb, compare).await.map(drop))
        }
        4 => {
            let targets = GroupTargets::of_nodes(fixture::targets(harness, &indices(random)));
            ("set_targets", provider.set_targets(owner, &targets).await.map(drop))
        }
        5 => {
            let ranges = vec!["10.1.0.0/16".parse()?];
            let requested = RequestedSources { ranges, ..RequestedSources::default() };
            ("restrict_sources", provider.restrict_sources(owner, &requested).await.map(drop))
        }
        6 => ("target_health", provider.target_health(owner).await.map(drop)),
        _ => ("delete", provider.delete(owner).await.map(drop)),
    })
}
