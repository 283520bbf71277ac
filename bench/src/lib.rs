// SPDX-License-Identifier: Apache-2.0
//! Side-by-side benchmarks of Steerage and its peers.
//!
//! Each program runs as a real process against one real API server, in its own [`testbed`]: network namespaces for a client, a
//! node and pods. Everything is measured from outside: packets, responses, CPU and memory accounting of the kernel, the API
//! server's audit log. A benchmark never fails because something is slow. It fails if the measured work was not done.

mod api;
pub mod args;
pub mod clouds;
pub mod cluster;
pub mod controller;
pub mod edge;
pub mod edge_bed;
pub mod edge_loss;
pub mod edge_nodes;
pub mod edge_window;
pub mod host;
pub mod measure;
pub mod objects;
mod plot;
pub mod report;
pub mod subject;
pub mod testbed;
pub mod traffic;
pub mod usage;
pub mod who;
