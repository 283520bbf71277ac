// SPDX-License-Identifier: Apache-2.0
//! Tests of the suite itself: a correct provider passes, and every check detects a provider with the matching bug.

#![allow(clippy::unwrap_used)] // test code; the lint's own exception does not see helpers outside of test functions

mod toy;

use steerage_provider_conformance::checks;
use toy::{Bug, ToyHarness};

#[tokio::test]
async fn correct_provider_passes() {
    let harness = ToyHarness::start(None).await;
    steerage_provider_conformance::run(&harness).await.unwrap();
}

/// The check that must detect each bug.
const CAUGHT: [(Bug, &str); 24] = [
    (Bug::AlwaysWrites, "second_run_writes_nothing"),
    (Bug::ReadsTooMuch, "second_run_writes_nothing"),
    (Bug::ForgetsWhatItDid, "second_run_writes_nothing"),
    (Bug::RemovesFirst, "new_targets_are_added_before_old_are_removed"),
    (Bug::SendsAll, "new_targets_are_added_before_old_are_removed"),
    (Bug::OneBadStopsAll, "refused_target_does_not_block_others"),
    (Bug::KeepsTheLast, "all_targets_can_be_removed"),
    (Bug::SetsTargetsOfNothing, "targets_follow_without_a_structure"),
    (Bug::ReplacesSources, "removed_sources_leave_without_a_structure"),
    (Bug::DeletesBlindly, "deletion_is_idempotent"),
    (Bug::RemembersOwners, "owned_lists_all_owners"),
    (Bug::IgnoresUid, "recreated_service_replaces_old_resources"),
    (Bug::DropsFields, "foreign_fields_are_kept"),
    (Bug::AdoptsByName, "foreign_objects_are_not_changed"),
    (Bug::SwallowsThrottling, "throttling_is_reported_and_survived"),
    (Bug::CreatesUntracked, "creation_and_deletion_survive_crash_after_any_write"),
    (Bug::TrustsItsCache, "change_survives_crash_after_any_write"),
    (Bug::ReplacesInPlace, "replacement_survives_crash_after_any_write"),
    (Bug::DeletesTheOwnerFirst, "creation_and_deletion_survive_crash_after_any_write"),
    (Bug::RemembersForEver, "any_order_of_calls_leads_to_the_goal"),
    (Bug::DeletesBlindly, "any_order_of_calls_leads_to_the_goal"),
    (Bug::IgnoresUid, "any_order_of_calls_leads_to_the_goal"),
    (Bug::TrustsItsCache, "any_order_of_calls_leads_to_the_goal"),
    (Bug::RemovesStrangers, "services_do_not_disturb_each_other"),
];

#[tokio::test]
async fn every_check_catches_its_bug() {
    let checks = checks::all::<ToyHarness>();
    for (name, _) in &checks {
        assert!(CAUGHT.iter().any(|(_, caught_by)| caught_by == name), "no bug for {name}");
    }
    for (bug, name) in CAUGHT {
        let (_, check) = checks.iter().find(|(n, _)| *n == name).unwrap();
        let harness = ToyHarness::start(Some(bug)).await;
        let outcome = check(&harness).await;
        assert!(outcome.is_err(), "{name} does not catch {bug:?}");
    }
}
