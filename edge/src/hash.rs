// SPDX-License-Identifier: Apache-2.0
//! Hashes that are the same on every host and in every version: all edge hosts compute the same tables from them.
//!
//! They are the API's, because the controller computes shards too.

pub(crate) use steerage_edge_api::hash::{bytes, mix64};
