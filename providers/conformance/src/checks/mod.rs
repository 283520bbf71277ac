// SPDX-License-Identifier: Apache-2.0
//! The checks. Each begins and ends with a backend that holds nothing of the suite.

mod crash;
mod deletion;
mod foreign;
mod orders;
mod ownership;
mod steady;
mod targets;
mod throttle;
mod together;

use futures::future::BoxFuture;

use crate::Harness;

pub use crash::{
    change_survives_crash_after_any_write, creation_and_deletion_survive_crash_after_any_write,
    replacement_survives_crash_after_any_write,
};
pub use deletion::deletion_is_idempotent;
pub use foreign::{foreign_fields_are_kept, foreign_objects_are_not_changed};
pub use orders::any_order_of_calls_leads_to_the_goal;
pub use ownership::{owned_lists_all_owners, recreated_service_replaces_old_resources};
pub use steady::second_run_writes_nothing;
pub use targets::{
    all_targets_can_be_removed, new_targets_are_added_before_old_are_removed,
    refused_target_does_not_block_others, removed_sources_leave_without_a_structure,
    targets_follow_without_a_structure,
};
pub use throttle::throttling_is_reported_and_survived;
pub use together::services_do_not_disturb_each_other;

/// A check of one guarantee.
pub type Check<H> = for<'a> fn(&'a H) -> BoxFuture<'a, anyhow::Result<()>>;

macro_rules! checks {
    ($($name:ident),* $(,)?) => {
        /// All checks with their names, in the order of [`crate::run`].
        pub fn all<H: Harness>() -> Vec<(&'static str, Check<H>)> {
            vec![$((stringify!($name), |harness| Box::pin($name(harness)))),*]
        }
    };
}

checks!(
    second_run_writes_nothing,
    new_targets_are_added_before_old_are_removed,
    refused_target_does_not_block_others,
    all_targets_can_be_removed,
    targets_follow_without_a_structure,
    removed_sources_leave_without_a_structure,
    deletion_is_idempotent,
    owned_lists_all_owners,
    recreated_service_replaces_old_resources,
    foreign_fields_are_kept,
    foreign_objects_are_not_changed,
    throttling_is_reported_and_survived,
    creation_and_deletion_survive_crash_after_any_write,
    change_survives_crash_after_any_write,
    replacement_survives_crash_after_any_write,
    any_order_of_calls_leads_to_the_goal,
    services_do_not_disturb_each_other,
);
