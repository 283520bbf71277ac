// SPDX-License-Identifier: Apache-2.0
//! Real packets through the agent's rules: a client, a node and pods as network namespaces, TCP and UDP, IPv4 and IPv6. Needs
//! root and the commands `ip`, `nft` and `nsenter`.

mod affinity;
mod agent;
mod churn;
mod cluster;
mod drops;
mod entry;
mod explain;
mod handshakes;
mod kernels;
mod life;
mod link;
mod long_lists;
mod peers;
mod policies;
mod sctp;
mod shared_address;
mod tenants;
mod trace;
mod unserved;
