// SPDX-License-Identifier: Apache-2.0
//! The agent's writer on a real kernel: `nft` can list everything, updates equal a full load, and rejected writes change
//! nothing. Each test runs in its own network namespace. Needs root and the `nft` command.

mod adoption;
mod changed_rules;
mod cluster;
mod dumping;
mod large_updates;
mod listing;
mod ruleset;
mod updates;
mod used_sets;
