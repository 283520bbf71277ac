// SPDX-License-Identifier: Apache-2.0
//! What the provider keeps of an object, and the watch that delivers it.

use std::collections::BTreeMap;
use std::marker::PhantomData;

use serde::de::{DeserializeOwned, IgnoredAny};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use serde_json::value::RawValue;
use steerage_model::Key;
use steerage_provider_api::Owner;
use steerage_watch::{Kind, Malformed, Object};

use crate::spec;

/// One object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry<S> {
    pub(crate) name: String,
    pub(crate) uid: String,
    /// Its resource version, the precondition of writes.
    pub(crate) version: String,
    /// Its owner; `None` for an object that Steerage does not manage.
    pub(crate) owner: Option<Owner>,
    /// Whether Steerage's label is set, with or without an owner.
    pub(crate) managed: bool,
    /// Whether it is being deleted.
    pub(crate) deleting: bool,
    /// `spec` and `status`, or the object's JSON where this version cannot read them.
    pub(crate) content: Result<S, Value>,
}

/// The used fields of `metadata`. The managed fields, most of an object's JSON, are skipped.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Meta {
    name: String,
    #[serde(default)]
    uid: String,
    #[serde(default)]
    resource_version: String,
    deletion_timestamp: Option<IgnoredAny>,
    labels: Option<BTreeMap<String, String>>,
}

#[derive(Deserialize)]
struct Head {
    metadata: Meta,
}

/// Responses contain objects as watches do.
impl<'de, S: DeserializeOwned> Deserialize<'de> for Entry<S> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let json = <&RawValue>::deserialize(deserializer)?.get();
        Self::parse(json).map_err(serde::de::Error::custom)
    }
}

impl<S: DeserializeOwned> Entry<S> {
    /// Reads an object; `S` is read from all of it but `metadata`. Two passes cost less than a tree of JSON values.
    pub(crate) fn parse(json: &str) -> Result<Self, serde_json::Error> {
        let Head { metadata } = serde_json::from_str(json)?;
        let content = match serde_json::from_str(json) {
            Ok(content) => Ok(content),
            Err(_) => Err(serde_json::from_str(json)?),
        };
        Ok(Self::with_content(metadata, content))
    }

    fn with_content(meta: Meta, content: Result<S, Value>) -> Self {
        let labels = meta.labels.as_ref();
        Self {
            owner: spec::owner(labels),
            managed: labels.and_then(|l| l.get(spec::MANAGED_BY)).is_some_and(|v| v == spec::MANAGER),
            deleting: meta.deletion_timestamp.is_some(),
            name: meta.name,
            uid: meta.uid,
            version: meta.resource_version,
            content,
        }
    }
}

impl<S: Eq> Object for Entry<S> {
    type Key = String;

    fn key(&self) -> String {
        self.name.clone()
    }

    fn version(&self) -> Option<&str> {
        Some(&self.version)
    }
}

/// A change of an object.
#[derive(Clone, Debug)]
pub(crate) struct Change<S> {
    /// The old state; `None` if the object is new.
    pub(crate) old: Option<Entry<S>>,
    /// The new state; `None` if the object was deleted.
    pub(crate) new: Option<Entry<S>>,
}

/// The objects of one type in the namespace.
#[derive(Clone, Debug)]
pub(crate) struct EntryKind<S> {
    /// The plural.
    pub(crate) name: &'static str,
    pub(crate) path: String,
    pub(crate) content: PhantomData<fn() -> S>,
}

impl<S: Clone + DeserializeOwned + Eq + Send + 'static> Kind for EntryKind<S> {
    type Object = Entry<S>;

    fn name(&self) -> &'static str {
        self.name
    }

    fn path(&self) -> String {
        self.path.clone()
    }

    /// The cache also takes the responses to the provider's writes.
    fn consistent(&self) -> bool {
        true
    }

    fn key(&self, key: Key) -> String {
        key.name().to_owned()
    }

    fn project(json: &str, _: &mut Vec<String>) -> Result<Option<Entry<S>>, Malformed> {
        Ok(Some(Entry::parse(json)?))
    }
}

#[cfg(test)]
mod tests {
    use steerage_edge_api::EdgeNodeSetSpec;

    use super::*;
    use crate::objects::NodeSetContent;

    fn project(spec: &str) -> Entry<NodeSetContent> {
        let json = format!(
            r#"{{"apiVersion": "steerage.dev/v1alpha1", "kind": "EdgeNodeSet", "metadata": {{"name": "all",
                "uid": "u", "resourceVersion": "7", "labels": {{"app.kubernetes.io/managed-by": "steerage"}}}},
                "spec": {spec}}}"#
        );
        EntryKind::<NodeSetContent>::project(&json, &mut Vec::new()).expect("readable").expect("an object")
    }

    #[test]
    fn object_is_projected_with_its_version_and_owner() {
        let entry = project(r#"{"targets": []}"#);
        assert_eq!((entry.key(), entry.version()), ("all".to_owned(), Some("7")));
        assert!(entry.uid == "u" && entry.managed && entry.owner.is_none() && !entry.deleting);
        assert_eq!(entry.content.expect("readable").spec, EdgeNodeSetSpec::default());
    }

    #[test]
    fn unreadable_content_is_kept_as_json() {
        let entry = project(r#"{"targets": 7, "addresses": ["10.9.0.1"]}"#);
        assert_eq!(entry.version(), Some("7"));
        let raw = entry.content.expect_err("unreadable");
        assert_eq!(raw.pointer("/spec/addresses/0").and_then(Value::as_str), Some("10.9.0.1"));
    }
}
