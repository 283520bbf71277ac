// SPDX-License-Identifier: Apache-2.0
//! The Kubernetes client of all programs: watches, projections, the [`Store`] and the [`Index`] that they keep current, and the
//! recorder of events.
//!
//! Called by the composition roots of controller, agent and edge. It decides nothing about load balancers, and writes only events
//! to the cluster.

mod backoff;
mod client;
mod cluster_uid;
pub mod events;
mod index;
mod kind;
mod metrics;
mod relist;
mod staleness;
mod store;
mod watcher;

pub use backoff::Backoff;
pub use client::{ClientArgs, ClientError, RequestMetrics, client, counted_client};
pub use cluster_uid::{ClusterUidError, cluster_uid};
pub use index::{Dirty, Index};
pub use kind::{EndpointSlices, Kind, Malformed, Nodes, Pods, Selectors, ServiceCidrs, Services};
pub use metrics::register_sample_metrics;
pub use staleness::Staleness;
pub use store::{Event, Object, Store, is_older};
pub use watcher::{Timing, Watches};
