// SPDX-License-Identifier: Apache-2.0
//! Tests of the suite itself: a right provider passes, and every check catches the provider that is wrong in its way.

#![allow(clippy::unwrap_used)] // test code; the lint's own exception does not see helpers outside of test functions

mod toy;

use steerage_provider_conformance::checks;
use toy::{Bug, ToyHarness};

#[tokio::test]
async fn a_right_provider_passes() {
    let harness = ToyHarness::start(None).await;
    steerage_provider_conformance::run(&harness).await.unwrap();
}

/// Which check must catch which wrong provider.
const CAUGHT: [(Bug, &str); 16] = [
    (Bug::AlwaysWrites, "a_second_run_writes_nothing"),
    (Bug::ReadsTooMuch, "a_second_run_writes_nothing"),
    (Bug::RemovesFirst, "targets_are_added_before_others_leave"),
    (Bug::SendsAll, "targets_are_added_before_others_leave"),
    (Bug::OneBadStopsAll, "a_refused_target_keeps_no_other_out"),
    (Bug::KeepsTheLast, "targets_can_all_leave"),
    (Bug::DeletesBlindly, "deletion_is_idempotent"),
    (Bug::RemembersOwners, "owned_lists_exactly"),
    (Bug::IgnoresUid, "a_remade_service_leaves_nothing_of_the_old"),
    (Bug::DropsFields, "foreign_fields_are_kept"),
    (Bug::AdoptsByName, "foreign_objects_are_left_alone"),
    (Bug::SwallowsThrottling, "throttling_is_told_and_survived"),
    (Bug::LosesTrack, "a_crash_in_creation"),
    (Bug::TrustsItsCache, "a_crash_in_change"),
    (Bug::ReplacesInPlace, "a_crash_in_replacement"),
    (Bug::DeletesTheOwnerFirst, "a_crash_in_deletion"),
];

#[tokio::test]
async fn every_check_catches_a_wrong_provider() {
    let checks = checks::all::<ToyHarness>();
    for (name, _) in &checks {
        assert!(CAUGHT.iter().any(|(_, caught_by)| caught_by == name), "no wrong provider for {name}");
    }
    for (bug, name) in CAUGHT {
        let (_, check) = checks.iter().find(|(n, _)| *n == name).unwrap();
        let harness = ToyHarness::start(Some(bug)).await;
        let outcome = check(&harness).await;
        assert!(outcome.is_err(), "{name} does not catch {bug:?}");
    }
}
