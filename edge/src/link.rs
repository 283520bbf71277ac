// SPDX-License-Identifier: Apache-2.0
//! The link that clients' routers, edge hosts and nodes share: the host's network, the edge's own frames, and the other hosts.

pub(crate) mod ability;
pub(crate) mod announce;
pub(crate) mod conflicts;
pub(crate) mod damping;
pub(crate) mod election;
pub(crate) mod frames;
pub(crate) mod groups;
pub(crate) mod heartbeat;
pub(crate) mod mac;
pub(crate) mod membership;
pub(crate) mod packet;
pub(crate) mod route;
mod sending;
mod unattended;
