// SPDX-License-Identifier: Apache-2.0
//! Parsing that all kinds share. Only used fields are allocated.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};
use steerage_model::{Protocol, names};

/// The fields of `metadata` that projections use.
#[derive(Debug, Default, serde::Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Meta {
    #[serde(default)]
    pub(super) namespace: String,
    pub(super) name: String,
    #[serde(default)]
    pub(super) uid: String,
    pub(super) generation: Option<i64>,
    pub(super) creation_timestamp: Option<String>,
    pub(super) deletion_timestamp: Option<IgnoredAny>,
    #[serde(default, deserialize_with = "or_default")]
    pub(super) finalizers: Vec<String>,
    #[serde(default, deserialize_with = "or_default")]
    pub(super) labels: BTreeMap<String, String>,
    #[serde(default, deserialize_with = "or_default")]
    pub(super) annotations: Annotations,
}

/// The annotations under [`names::KEPT_ANNOTATIONS`]. The others, some of them long, are skipped.
#[derive(Debug, Default)]
pub(super) struct Annotations(pub(super) BTreeMap<String, String>);

impl<'de> Deserialize<'de> for Annotations {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Kept;

        #[derive(serde::Deserialize)]
        struct Name<'a>(#[serde(borrow)] Cow<'a, str>);

        impl<'de> Visitor<'de> for Kept {
            type Value = Annotations;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("annotations")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Annotations, A::Error> {
                let mut kept = BTreeMap::new();
                while let Some(Name(name)) = map.next_key()? {
                    if names::KEPT_ANNOTATIONS.iter().any(|prefix| name.starts_with(prefix)) {
                        kept.insert(name.into_owned(), map.next_value()?);
                    } else {
                        map.next_value::<IgnoredAny>()?;
                    }
                }
                Ok(Annotations(kept))
            }
        }

        deserializer.deserialize_map(Kept)
    }
}

/// Reads `null` as empty: the API server writes an empty list or map as `null`, or leaves it out.
pub(super) fn or_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

/// Collects without spare capacity: projections are many and long-lived.
pub(super) fn exact<T>(items: impl Iterator<Item = T>) -> Vec<T> {
    let mut items: Vec<_> = items.collect();
    items.shrink_to_fit();
    items
}

/// Parses `text`, or adds a note that the value of `field` is left out.
pub(super) fn parse_or_note<T: FromStr>(field: &str, text: &str, notes: &mut Vec<String>) -> Option<T> {
    let parsed = text.trim().parse().ok();
    if parsed.is_none() {
        notes.push(format!("{field}: ignoring the invalid value `{text}`"));
    }
    parsed
}

/// Parses the protocol of a port, by default TCP, or adds a note that the port of `field` is left out.
pub(super) fn protocol_or_note(field: &str, text: Option<&str>, notes: &mut Vec<String>) -> Option<Protocol> {
    match text {
        None | Some("" | "TCP") => Some(Protocol::Tcp),
        Some("UDP") => Some(Protocol::Udp),
        Some("SCTP") => Some(Protocol::Sctp),
        Some(other) => {
            notes.push(format!("{field}: ignoring a port with the unknown protocol `{other}`"));
            None
        }
    }
}
