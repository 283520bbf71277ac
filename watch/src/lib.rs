// SPDX-License-Identifier: Apache-2.0
//! From the Kubernetes API to the model: the client, the watches and the projections; and back: events that users read.
//!
//! Called by the composition roots of controller, agent and edge, which feed what the streams bring into a
//! [`Index`]. It decides nothing about load balancers, and writes nothing to the cluster but events.

mod backoff;
mod client;
pub mod events;
mod index;
mod kind;
mod metrics;
mod staleness;
mod store;
mod watcher;

pub use client::{ClientArgs, ClientError, client};
pub use index::{Dirty, Index};
pub use kind::{EndpointSlices, Kind, Malformed, Nodes, Selectors, ServiceCidrs, Services};
pub use staleness::Staleness;
pub use store::{Event, Object, Store};
pub use watcher::{Timing, Watches};
