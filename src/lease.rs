// SPDX-License-Identifier: Apache-2.0
//! One writer: a `coordination.k8s.io` Lease that one of several controllers holds.
//!
//! Safe as long as no two machines' clocks differ in *speed* by as much as the lease's duration exceeds the holder's own deadline
//! (half as fast again): what clocks show is never compared. A candidate counts from the moment at which it saw the record change,
//! the holder from the moment before it sent the change, which was earlier. Every write names the version that it replaces.
//!
//! Called by the composition root alone; whoever writes asks [`Claim::is_held`] first. The process ends when the claim is lost.

mod candidate;
mod clock;
mod hold;
mod record;

pub(crate) use candidate::Timing;
#[cfg(test)]
pub(crate) use hold::LeaseError;
pub(crate) use hold::{Claim, Options, acquire};

#[cfg(test)]
mod tests;
