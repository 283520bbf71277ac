// SPDX-License-Identifier: Apache-2.0
//! From what the node should do (`crate::plan`) to what the kernel holds: one constant base ruleset of chains, and elements of maps
//! for everything that varies. Pure; `crate::kernel` writes it.
//!
//! The layout, in a table `steerage` per family. What is sent to a cluster address is ours, and so is what is sent to a frontend
//! elsewhere, a key (address, protocol, port) of the set `frontends`. Where a frontend leads stands in one of the maps `slots-N`,
//! by the number of its endpoints: the key is the frontend and a random number below N. Up to eight endpoints have a map of
//! exactly their number; more share slot tables, filled evenly. A frontend of external policy Local has a second list in the
//! same maps, at numbers from [`layout::LOCAL_OFFSET`] on. A packet may walk past one map before a commit and past the other
//! after it, so all maps are asked twice, and what then still has no endpoint is dropped, or rejected at a port of a cluster
//! address that leads nowhere: no packet to a frontend ever goes on untranslated.

mod base_ruleset;
mod elements;
mod hash;
mod layout;
mod slots;

pub use base_ruleset::{BaseRuleset, RulesetChain, RulesetConfig};
pub use elements::{Changes, Elements, affected_elements, all_elements, difference};
pub use hash::endpoint_hash;
pub use layout::{LOCAL_OFFSET, SetId, TABLE};

#[cfg(test)]
mod tests;
