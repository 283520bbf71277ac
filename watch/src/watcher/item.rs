// SPDX-License-Identifier: Apache-2.0
//! An object that is projected while its JSON is parsed, as `kube_runtime::watcher` needs it. Pure.

use std::borrow::Cow;
use std::fmt;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use kube::core::DynamicResourceScope;
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;
use steerage_model::Key;

use crate::Kind;

/// The path of a collection, all that is needed to request it.
#[derive(Clone)]
pub(super) struct Collection(pub(super) String);

/// An object. It is never malformed itself: one unreadable object must not fail the list or the watch that contains it.
pub(super) struct Item<K: Kind> {
    /// Name, namespace and resource version.
    meta: ObjectMeta,
    /// The projection, `None` if Steerage does not use the object, or why it is unreadable.
    pub(super) projected: Result<Option<K::Object>, String>,
    /// Problems of fields that were left out.
    pub(super) notes: Vec<String>,
}

impl<K: Kind> Item<K> {
    pub(super) fn key(&self) -> Key {
        let ObjectMeta { namespace, name, .. } = &self.meta;
        Key::new(namespace.as_deref().unwrap_or_default(), name.as_deref().unwrap_or_default())
    }

    pub(super) fn version(&self) -> String {
        self.meta.resource_version.clone().unwrap_or_default()
    }
}

#[derive(Deserialize)]
struct Head {
    metadata: HeadMeta,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct HeadMeta {
    namespace: Option<String>,
    name: String,
    resource_version: Option<String>,
}

impl<'de, K: Kind> Deserialize<'de> for Item<K> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // Possible because a watch event has its type before the object: otherwise the object would have been parsed already.
        let json = <&RawValue>::deserialize(deserializer)?.get();
        let Head { metadata: HeadMeta { namespace, name, resource_version } } =
            serde_json::from_str(json).map_err(serde::de::Error::custom)?;
        let mut notes = Vec::new();
        let projected = K::project(json, &mut notes).map_err(|error| error.to_string());
        let meta = ObjectMeta { name: Some(name), namespace, resource_version, ..ObjectMeta::default() };
        Ok(Self { meta, projected, notes })
    }
}

impl<K: Kind> Clone for Item<K> {
    fn clone(&self) -> Self {
        let Self { meta, projected, notes } = self;
        Self { meta: meta.clone(), projected: projected.clone(), notes: notes.clone() }
    }
}

impl<K: Kind> fmt::Debug for Item<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.key(), f)
    }
}

/// Only the path and the metadata are used.
impl<K: Kind> Resource for Item<K> {
    type DynamicType = Collection;
    type Scope = DynamicResourceScope;

    fn kind(_: &Collection) -> Cow<'_, str> {
        Cow::default()
    }

    fn group(_: &Collection) -> Cow<'_, str> {
        Cow::default()
    }

    fn version(_: &Collection) -> Cow<'_, str> {
        Cow::default()
    }

    fn plural(_: &Collection) -> Cow<'_, str> {
        Cow::default()
    }

    fn url_path(Collection(path): &Collection, _: Option<&str>) -> String {
        path.clone()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.meta
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.meta
    }
}
