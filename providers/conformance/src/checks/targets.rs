// SPDX-License-Identifier: Apache-2.0
//! Changes of target sets.

use std::borrow::Borrow;
use std::collections::BTreeSet;

use anyhow::{Context as _, bail, ensure};
use steerage_provider_api::{
    AdmittedSources, GroupTargets, LoadBalancer, Owner, Provider, RequestedSources, Target, TargetSet,
};

use crate::converge::{Goal, converge_restricted, converge_targets, ensure_same};
use crate::{CutPoint, Harness, converge, converge_remembered, fixture};

/// After every write of a change, all old or all new targets are registered, and the group is never empty. Calls that carry a
/// difference do not name targets that stay.
pub async fn new_targets_are_added_before_old_are_removed<H: Harness>(harness: &H) -> anyhow::Result<()> {
    let owner = fixture::owner("add-first", 1);
    let lb = fixture::first(harness, &owner);
    for (from, to) in
        [(&[0, 1][..], &[1, 2][..]), (&[0, 1], &[2, 3]), (&[0], &[0, 1, 2, 3]), (&[0, 1, 2], &[1])]
    {
        let [old, new] = [from, to].map(|indices| fixture::with_targets(harness, &lb, indices));
        for write in 1.. {
            let provider = harness.fresh().await?;
            converge(&provider, &old).await?;
            let proxy = harness.proxy();
            proxy.reset();
            proxy.crash_at_write(write, CutPoint::After);
            // The crash makes this fail; the check is about what it leaves behind.
            let outcome = converge_remembered(&provider, &new).await;
            let (faulty, calls) = (proxy.faulty(), proxy.calls());
            proxy.reset();
            let (olds, news) = (names(&old.nodes().targets), names(&new.nodes().targets));
            for (group, now) in harness.targets(&owner).await? {
                ensure!(
                    now.is_superset(&olds) || now.is_superset(&news),
                    "from {olds:?} to {news:?}, after write {write}, {}: {now:?} in {group} is neither all the old nor all the new",
                    faulty.as_deref().unwrap_or("none")
                );
            }
            let stay: BTreeSet<_> = olds.intersection(&news).cloned().collect();
            for named in calls.iter().filter_map(|c| harness.nodes_in(c)) {
                ensure!(named.is_disjoint(&stay), "{stay:?} stay, but a call names {named:?}");
            }
            if faulty.is_none() {
                outcome.context("no call was cut")?;
                ensure!(write > 1, "the targets changed without a write");
                ensure_targets(harness, &owner, &new.nodes().targets).await?;
                break;
            }
            // The next iteration starts from the old targets again.
        }
    }
    Goal::Absent(owner).reach(&harness.fresh().await?).await
}

/// A bad target is refused with a reason every time it is requested. The others are registered.
pub async fn refused_target_does_not_block_others<H: Harness>(harness: &H) -> anyhow::Result<()> {
    let owner = fixture::owner("refused", 1);
    let lb = fixture::first(harness, &owner);
    let only_good = fixture::with_targets(harness, &lb, &[0, 1, 2]);
    let bad = harness.bad_target();
    let good = [harness.target(0), harness.target(1), harness.target(2)];
    let mut targets = good.to_vec();
    targets.insert(1, bad.clone());
    let lb = lb.with_nodes(TargetSet::own(targets));
    let provider = harness.fresh().await?;
    for round in ["first", "second", "with a fresh instance"] {
        let fresh = harness.fresh().await?;
        let instance = if round == "with a fresh instance" { &fresh } else { &provider };
        let outcome = converge(instance, &lb).await.with_context(|| round.to_owned())?;
        match outcome.refused.as_slice() {
            [(node, reason)] if *node == bad.node && !reason.is_empty() => {}
            other => bail!("{round}: refused is {other:?}, not {} with a reason", bad.node),
        }
        ensure_targets(harness, &owner, &good).await.with_context(|| round.to_owned())?;
    }
    // Without the bad target nothing is refused.
    let outcome = converge(&provider, &only_good).await?;
    ensure!(outcome.refused.is_empty(), "still refused: {:?}", outcome.refused);
    ensure_targets(harness, &owner, &good).await?;
    Goal::Absent(owner).reach(&provider).await
}

/// An empty set removes all targets, and a later set adds targets again.
pub async fn all_targets_can_be_removed<H: Harness>(harness: &H) -> anyhow::Result<()> {
    let owner = fixture::owner("empty", 1);
    let lb = fixture::first(harness, &owner);
    let provider = harness.fresh().await?;
    for indices in [&[0, 1][..], &[], &[1, 2], &[]] {
        let lb = fixture::with_targets(harness, &lb, indices);
        converge_remembered(&provider, &lb).await?;
        ensure_targets(harness, &owner, &lb.nodes().targets).await?;
    }
    Goal::Absent(owner).reach(&provider).await
}

/// Where no structure can be planned, the targets of the one in place follow all the same, also with a fresh instance. Nothing is
/// created where there is none.
pub async fn targets_follow_without_a_structure<H: Harness>(harness: &H) -> anyhow::Result<()> {
    let owner = fixture::owner("kept", 1);
    let empty = harness.snapshot().await?;
    let lb = fixture::first(harness, &owner);
    let provider = harness.fresh().await?;
    set_targets(&provider, &owner, &fixture::targets(harness, &[0])).await?;
    ensure_same("targets without a load balancer", &empty, &harness.snapshot().await?)?;
    let last = fixture::with_targets(harness, &lb, &[2, 3]);
    converge(&provider, &last).await?;
    let expected = harness.snapshot().await?;
    converge(&provider, &fixture::with_targets(harness, &lb, &[0, 1])).await?;
    for (instance, indices) in [(provider, &[1, 2][..]), (harness.fresh().await?, &[2, 3])] {
        let set = fixture::targets(harness, indices);
        set_targets(&instance, &owner, &set).await?;
        ensure_targets(harness, &owner, &set.targets).await?;
    }
    ensure_same("the last targets", &expected, &harness.snapshot().await?)?;
    Goal::Absent(owner).reach(&harness.fresh().await?).await
}

/// Where no structure can be planned, clients that the Service no longer admits cannot connect all the same, and no others can: also with
/// a fresh instance. Nothing is created where there is no load balancer.
pub async fn removed_sources_leave_without_a_structure<H: Harness>(harness: &H) -> anyhow::Result<()> {
    let owner = fixture::owner("restricted", 1);
    let empty = harness.snapshot().await?;
    let from = |ranges: &[&str]| -> anyhow::Result<RequestedSources> {
        let ranges = ranges.iter().map(|range| range.parse()).collect::<Result<_, _>>()?;
        Ok(RequestedSources { ranges, ..RequestedSources::default() })
    };
    let provider = harness.fresh().await?;
    let none = provider.restrict_sources(&owner, &from(&["10.1.0.0/16"])?).await?;
    ensure!(none.is_none(), "{none:?}");
    ensure_same("sources without a load balancer", &empty, &harness.snapshot().await?)?;
    let lb = fixture::with_targets(harness, &fixture::first(harness, &owner), &[0]);
    let with = |sources: RequestedSources| LoadBalancer { source_ranges: sources.ranges, ..lb.clone() };
    converge(&provider, &with(from(&["10.1.0.0/16"])?)).await?;
    let expected = harness.snapshot().await?;
    for requested in [&["192.0.2.0/24", "10.1.0.0/16"][..], &["10.1.0.0/16"]] {
        let instance = harness.fresh().await?;
        converge(&instance, &with(from(&["10.0.0.0/8", "198.51.100.0/24"])?)).await?;
        for instance in [instance, harness.fresh().await?] {
            let admitted = converge_restricted(&instance, &owner, &from(requested)?).await?;
            let only = AdmittedSources::Only(BTreeSet::from(["10.1.0.0/16".to_owned()]));
            ensure!(admitted == Some(only), "{requested:?}: {admitted:?}");
            ensure_same("the sources that are left", &expected, &harness.snapshot().await?)?;
        }
    }
    Goal::Absent(owner).reach(&harness.fresh().await?).await
}

async fn set_targets(provider: &impl Provider, owner: &Owner, set: &TargetSet) -> anyhow::Result<()> {
    let outcome = converge_targets(provider, owner, &GroupTargets::of_nodes(set.clone())).await?;
    ensure!(outcome.refused.is_empty(), "{outcome:?}");
    Ok(())
}

async fn ensure_targets<H: Harness>(
    harness: &H,
    owner: &Owner,
    expected: &[impl Borrow<Target>],
) -> anyhow::Result<()> {
    let (groups, expected) = (harness.targets(owner).await?, names(expected));
    ensure!(!groups.is_empty(), "there is no target group");
    for (group, now) in groups {
        ensure!(now == expected, "the targets in {group} are {now:?}, not {expected:?}");
    }
    Ok(())
}

fn names(targets: &[impl Borrow<Target>]) -> BTreeSet<String> {
    targets.iter().map(|target| target.borrow().node.clone()).collect()
}
