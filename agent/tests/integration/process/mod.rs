// SPDX-License-Identifier: Apache-2.0
//! The agent as a process under traffic, on a node of network namespaces with a real API server: crashes, API outages, foreign
//! changes, a second agent, upgrades. Needs root, the commands `ip`, `nft`, `nsenter` and `setpriv`, and the programs of
//! `hack/prepare`.

mod alone;
mod budgets;
mod edge_tunnel;
mod external_ips;
mod faults;
mod firewalls;
mod foreign;
mod kube_proxy_leftovers;
mod replacement;
mod scene;
mod service_cidrs;
mod statements;
mod steady;
mod traffic;
mod upgrade;
