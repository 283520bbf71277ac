// SPDX-License-Identifier: Apache-2.0
//! The node agent: serves Services on its node with nftables, and answers the load balancers' health checks.
//!
//! From the model's index a pure plan ([`plan`]) says what the node should do; [`rules`] turns it into elements of kernel maps;
//! [`kernel`] writes them.

pub mod kernel;
pub mod plan;
pub mod rules;
