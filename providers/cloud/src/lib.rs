// SPDX-License-Identifier: Apache-2.0
//! What the providers of all clouds need, and none writes itself.
//!
//! These decide and do no I/O: [`names`] and [`marks`] say where resources are and whose, [`annotation`] and [`PeerAnnotations`] read
//! what users request, [`failure`] turns a cloud's error into the provider's, [`LastAttempt`] and [`Refusals`] keep what was refused from
//! being asked again. [`AddressOwners`] lets one Service have an address, [`Keyed`] lets one call at a time change an object, [`Lines`]
//! gives those that come again their turns, [`ToReconcile`] has owners that a provider asks the controller to reconcile, [`Recent`] shares
//! a read, [`Joined`] makes one list of many reads, [`Budget`] paces calls, in which namespaces take turns, [`ApiMetrics`] counts requests,
//! [`http`] sends those of clients that are Steerage's own.
//! It decides on no call to a cloud and knows no cloud's types; the edge's provider uses only what reads annotations.

mod address_owners;
pub mod annotation;
mod api_metrics;
mod budget;
pub mod failure;
pub mod http;
mod joined;
mod keyed;
mod last_attempt;
mod line;
pub mod marks;
pub mod names;
mod peers;
pub mod reasons;
mod recent;
mod refusals;
pub mod shared;
mod to_reconcile;

pub use address_owners::AddressOwners;
pub use api_metrics::{Api, ApiMetrics, RequestResult};
pub use budget::{Budget, CallLimit, MeteredBudget, Rate, UsedUp};
pub use joined::Joined;
pub use keyed::Keyed;
pub use last_attempt::LastAttempt;
pub use line::Lines;
pub use marks::ClusterId;
pub use peers::{PeerAnnotation, PeerAnnotations};
pub use recent::{AfterFailure, Recent};
pub use refusals::Refusals;
pub use to_reconcile::ToReconcile;

/// A cloud, as messages, flags and metrics name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cloud {
    /// Its name in text, such as `AWS`.
    pub title: &'static str,
    /// The provider's name, with which its flags and metrics begin.
    pub name: &'static str,
}
