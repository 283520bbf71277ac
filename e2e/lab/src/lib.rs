// SPDX-License-Identifier: Apache-2.0
//! A real Kubernetes cluster in network namespaces of one machine: addresses, topology, processes and verbs.
//!
//! The binary `steerage-lab` (behind `hack/lab`) is a thin shell over this library; the end-to-end suite opens a
//! running lab with [`Lab::open`]. Nothing here ever puts a link, an address or a rule into the machine's own
//! network namespace.

pub mod addresses;
pub mod archive;
pub mod aws;
pub mod cgroup;
pub mod command;
pub mod config;
pub mod control_plane;
pub mod credentials;
pub mod daemon;
pub mod down;
pub mod edge;
pub mod error;
pub mod images;
pub mod install;
pub mod manifests;
pub mod netns;
pub mod node;
pub mod node_init;
pub mod off_link;
pub mod openstack;
pub mod packet_socket;
pub mod passthrough;
pub mod probe;
pub mod progress;
pub mod report;
pub mod state;
pub mod topology;
pub mod up;

pub use addresses::{Cloud, Host, Plan, Role, ServiceProxy};
pub use error::{Error, Result};
pub use netns::in_netns;
pub use state::Lab;
