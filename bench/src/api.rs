// SPDX-License-Identifier: Apache-2.0
//! Creates objects at the API server from JSON.

use anyhow::{Context as _, Result};
use kube::Api;
use kube::api::PostParams;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// Creates an object, and returns what the API server made of it.
pub(crate) async fn create<K>(api: &Api<K>, object: Value) -> Result<K>
where
    K: kube::Resource + Clone + std::fmt::Debug + DeserializeOwned + serde::Serialize,
{
    let object: K = serde_json::from_value(object)?;
    let name = object.meta().name.clone().unwrap_or_default();
    api.create(&PostParams::default(), &object).await.with_context(|| format!("cannot make {name}"))
}
