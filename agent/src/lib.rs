// SPDX-License-Identifier: Apache-2.0
//! The node agent: serves Services on its node with nftables, and answers the load balancers' health checks.
//!
//! Watches feed an index; a pure plan ([`plan`]) says what the node should do; [`rules`] turns it into the content of kernel
//! tables; [`kernel`] writes them; [`health`] answers load balancers; [`agent`] is the loop that joins them.

pub mod agent;
pub mod check;
pub mod debug_request;
pub mod debug_socket;
pub mod dump;
pub mod edge_tunnel;
pub mod explain;
pub mod foreign;
mod hash;
pub mod health;
pub mod input;
pub mod instance_lock;
pub mod kernel;
pub mod kernel_release;
pub mod kube_proxy_config;
pub mod local_node;
pub mod metrics;
pub mod node_annotations;
pub mod peers;
pub mod plan;
pub mod rules;
pub mod sandbox;
pub mod settings;
