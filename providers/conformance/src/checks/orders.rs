// SPDX-License-Identifier: Apache-2.0
//! Calls in any order, complete or not.

use anyhow::{Context as _, ensure};
use steerage_provider_api::{Compare, Error, GroupTargets, LoadBalancer, Owner, Provider, RequestedSources};

use crate::converge::{Goal, converge, converge_without_comparison, ensure_same};
use crate::{CutPoint, Harness, fixture};

/// Sequences of calls. Each is the same in every run.
const SEQUENCES: u64 = 12;
/// Calls before the goal is wanted; and once more, when it was reached.
const STEPS: usize = 6;

/// Whatever was called before, in whatever order, and wherever it was cut off: the goal is reached from there, and is what it is when it
/// is reached at once. The calls are those that the controller makes, each once, so that many end halfway. The last ones ask for no
/// comparison: a provider that believes what it was asked for, not what it completed, stops short of the goal.
pub async fn any_order_of_calls_leads_to_the_goal<H: Harness>(harness: &H) -> anyhow::Result<()> {
    for seed in 0..SEQUENCES {
        let mut history = Vec::new();
        sequence(harness, seed, &mut history)
            .await
            .with_context(|| format!("sequence {seed}, {}", history.join("; ")))?;
    }
    Ok(())
}

async fn sequence<H: Harness>(harness: &H, seed: u64, history: &mut Vec<String>) -> anyhow::Result<()> {
    let [earlier, owner] = [1, 2].map(|incarnation| fixture::owner("any-order", incarnation));
    let mut random = fastrand::Rng::with_seed(seed);
    let goal = wish(harness, &mut random, &owner);
    let made_at_once = harness.fresh().await?;
    converge(&made_at_once, &goal).await?;
    let expected = harness.snapshot().await?;
    Goal::Absent(owner.clone()).reach(&made_at_once).await?;

    let mut provider = harness.fresh().await?;
    // In half of the sequences one process hardly ever ends, so that what it remembers counts.
    let restarts = if random.bool() { 3 } else { 20 };
    // The Service is deleted and created again once. What is left of the earlier one goes before or after that.
    let recreated_at = random.usize(0..STEPS);
    let is_gone_first = random.bool();
    for step in 0..2 * STEPS {
        if step == STEPS {
            if is_gone_first {
                Goal::Absent(earlier.clone()).reach(&provider).await?;
            }
            converge_without_comparison(&provider, &goal).await?;
            Goal::Absent(earlier.clone()).reach(&provider).await?;
            ensure_same("the goal", &expected, &harness.snapshot().await?)?;
            history.push("the goal".to_owned());
        }
        let current = if step < recreated_at { &earlier } else { &owner };
        // Often what is wanted at the end: a provider must know then what became of it since.
        let lb = if current == &owner && random.bool() {
            goal.clone()
        } else {
            wish(harness, &mut random, current)
        };
        if random.bool() {
            // Early more often than late: a change of little may end after two calls.
            let last = random.usize(2..9);
            harness.proxy().crash_at(random.usize(1..last), CutPoint::After);
        }
        let (name, result) = call(harness, &mut random, &provider, &lb).await?;
        let is_cut = harness.proxy().fault_fired();
        harness.proxy().reset();
        history.push(format!("{name}{}", if is_cut { ", cut" } else { "" }));
        // The others end halfway too; the next call goes on.
        if let Err(error @ Error::Invalid { .. }) = result {
            return Err(error.into());
        }
        // The process died, and the next one knows nothing; or it had no answers for a while, and goes on.
        if random.u8(0..restarts) == 0 {
            provider = harness.fresh().await?;
            history.push("another process".to_owned());
        }
    }
    converge_without_comparison(&provider, &goal).await?;
    ensure_same("the goal once more", &expected, &harness.snapshot().await?)?;
    Goal::Absent(owner).reach(&harness.fresh().await?).await?;
    let left = harness.fresh().await?.owned().await?;
    ensure!(left.is_empty(), "{left:?} is left");
    Ok(())
}

/// What is wanted of the Service: one of two structures, with some targets and source ranges.
pub(super) fn wish(harness: &impl Harness, random: &mut fastrand::Rng, owner: &Owner) -> LoadBalancer {
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
    lb: &LoadBalancer,
) -> anyhow::Result<(&'static str, Result<(), Error>)> {
    let owner = &lb.owner;
    Ok(match random.u8(0..8) {
        0..=3 => {
            let compare = if random.bool() { Compare::InPlace } else { Compare::Remembered };
            ("apply", provider.apply(lb, compare).await.map(drop))
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
