// SPDX-License-Identifier: Apache-2.0
//! Shards of the VIPs. They are the API's, because the controller computes them too.

pub(crate) use steerage_edge_api::{Shard, Shards};
