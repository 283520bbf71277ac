// SPDX-License-Identifier: Apache-2.0
//! The checks. Each begins and ends with a backend that holds nothing of the suite.

mod crash;
mod deletion;
mod foreign;
mod ownership;
mod steady;
mod targets;
mod throttle;

use futures::future::BoxFuture;

use crate::Harness;

pub use crash::{a_crash_in_change, a_crash_in_creation, a_crash_in_deletion, a_crash_in_replacement};
pub use deletion::deletion_is_idempotent;
pub use foreign::{foreign_fields_are_kept, foreign_objects_are_left_alone};
pub use ownership::{a_remade_service_leaves_nothing_of_the_old, owned_lists_exactly};
pub use steady::a_second_run_writes_nothing;
pub use targets::{
    a_refused_target_keeps_no_other_out, targets_are_added_before_others_leave, targets_can_all_leave,
};
pub use throttle::throttling_is_told_and_survived;

/// A check.
pub type Check<H> = for<'a> fn(&'a H) -> BoxFuture<'a, anyhow::Result<()>>;

macro_rules! checks {
    ($($name:ident),* $(,)?) => {
        /// All checks with their names, in the order in which [`crate::run`] runs them.
        pub fn all<H: Harness>() -> Vec<(&'static str, Check<H>)> {
            vec![$((stringify!($name), |harness| Box::pin($name(harness)))),*]
        }
    };
}

checks!(
    a_second_run_writes_nothing,
    targets_are_added_before_others_leave,
    a_refused_target_keeps_no_other_out,
    targets_can_all_leave,
    deletion_is_idempotent,
    owned_lists_exactly,
    a_remade_service_leaves_nothing_of_the_old,
    foreign_fields_are_kept,
    foreign_objects_are_left_alone,
    throttling_is_told_and_survived,
    a_crash_in_creation,
    a_crash_in_change,
    a_crash_in_replacement,
    a_crash_in_deletion,
);
