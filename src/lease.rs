// SPDX-License-Identifier: Apache-2.0
//! One writer: a `coordination.k8s.io` Lease that one of several controllers holds.
//!
//! Safe as long as no two machines' clocks differ in *speed* by as much as the lease's duration exceeds the holder's own deadline
//! (half as fast again): what clocks show is never compared. A candidate counts from the moment at which it saw the record change,
//! the holder from the moment before it sent the change, which was earlier. Every write names the version that it replaces.
//!
//! Called by the composition root alone; whoever writes asks [`Leadership::is_held`] first. The process ends when the leadership is lost.

mod candidate;
mod clock;
mod holder;
mod record;

pub(crate) use candidate::LeaseTiming;
#[cfg(test)]
pub(crate) use holder::LeaseError;
pub(crate) use holder::{Leadership, LeaseOptions, acquire};

#[cfg(test)]
mod tests;
