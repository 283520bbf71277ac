// SPDX-License-Identifier: Apache-2.0
//! Leader election by a `coordination.k8s.io` Lease: at most one controller replica writes.
//!
//! Safe while no two clocks differ in *speed* by more than the margin between the lease duration and the renew deadline (half as
//! fast again by default). Times from different machines are never compared: a candidate counts from the moment when it observed a
//! change of the record, and the holder from the moment before it sent that change, which is earlier. Every write names the version
//! that it replaces.
//!
//! Called by the composition root. Writers ask [`Leadership::is_held`] first. The process ends when the Lease is lost.

mod candidate;
pub(crate) mod clock;
mod holder;
mod record;

pub(crate) use candidate::LeaseTiming;
#[cfg(test)]
pub(crate) use holder::LeaseError;
pub(crate) use holder::{Leadership, LeaseOptions, acquire};

#[cfg(test)]
mod tests;
