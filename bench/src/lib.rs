// SPDX-License-Identifier: Apache-2.0
//! Side-by-side benchmarks of Steerage and its peers.
//!
//! Each program under test runs as a real process against one real API server, in a [`world`] of its own: a client, a node and
//! its pods, network namespaces that differ in nothing else. What is measured is seen from outside: packets, answers, the
//! kernel's accounts, the API server's audit log. It never asserts on speed; it fails where the measured work was not done.

pub mod args;
pub mod cluster;
pub mod host;
pub mod measure;
pub mod objects;
pub mod report;
pub mod subject;
pub mod traffic;
pub mod usage;
pub mod world;
