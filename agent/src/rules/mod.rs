// SPDX-License-Identifier: Apache-2.0
//! Turns desired frontends (`crate::plan`) into the content of kernel tables: a constant base ruleset, and elements of sets and
//! maps for everything that varies. Pure; `crate::kernel` writes it.
//!
//! Each family has a table `steerage`. Packets to a cluster address are the agent's, and so are packets to another frontend: a
//! key (address, protocol, port) of the set `frontends`. Up to eight endpoints of a frontend are in one of the maps `slots-N`, by
//! their number: the key is the frontend and a hash of the flow below N. A frontend of external policy Local has a second list in
//! the same maps, at numbers from [`LOCAL_OFFSET`] on. More endpoints are in the map `endpoints`, in a list that all frontends of the
//! Service's port share: `lists` has its number, and a set `long-N` tells the range of hashes. Likewise `restricted` has the number of
//! a frontend's list of allowed sources in the sets `sources-N`. No rule reads the map `digests`: it tells a new process what the lists
//! hold. A table has the sets `sources-N`, `long-N` and those of affinity, with the rules that look in them, only if a Service needs them.
//!
//! Lookups are not atomic to a packet: it may pass one map before a commit and the next one after it. So the packet walks all
//! maps twice. If it has no endpoint then, it is dropped, or rejected at a port of a cluster address that no Service has. No packet
//! to a frontend leaves untranslated.

mod affinity;
mod base_ruleset;
mod chains;
mod drops;
mod elements;
mod features;
mod first_elements;
mod forget;
mod layout;
mod list_digests;
mod long_lists;
mod namespaces;
mod numbers;
mod peers;
mod reduce;
mod ruleset;
mod ruleset_chain;
mod source_lists;
mod stale_flows;
mod steps;
mod used_sets;

pub use crate::hash::{endpoint_hash, flow_seed};
pub use affinity::AFFINITY_LIMITED;
pub use base_ruleset::BaseRuleset;
#[cfg(test)]
pub(crate) use base_ruleset::COMPUTED;
pub use drops::DropReason;
pub use elements::{Changes, Elements, difference};
pub use features::{Feature, Features, Without};
pub use first_elements::first_elements;
pub use forget::{CLIENT_MAPS, is_kept};
pub use layout::{LOCAL_OFFSET, SetId, Side, TABLE};
pub use list_digests::{ListDigest, differing_lists, list_digests, list_of_frontend, list_of_key, slot_keys};
pub use long_lists::{KernelLists, kernel_lists};
pub use peers::TO_PEERS;
pub use ruleset::{Difference, KernelState, Ruleset};
pub use ruleset_chain::{RulesetChain, RulesetConfig};
pub use stale_flows::{StaleFlows, deleted_udp_frontends};
pub use steps::{LARGEST_STEP, repair_steps, steps};
pub use used_sets::UsedSets;

#[cfg(test)]
mod kernel_needs_tests;
#[cfg(test)]
mod tests;
