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

/// The annotations that [`names::is_kept`] keeps. The others, some of them long, are skipped.
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
                    if names::is_kept(&name) {
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

/// Parses an address or a network as the API server reads those in objects from before it was strict: 010.1.0.0/16 is 10.1.0.0/16.
pub(super) fn address_or_note<T: FromStr>(field: &str, text: &str, notes: &mut Vec<String>) -> Option<T> {
    let parsed = without_leading_zeros(text.trim()).parse().ok();
    if parsed.is_none() {
        notes.push(format!("{field}: ignoring the invalid value `{text}`"));
    }
    parsed
}

/// An IPv4 address or network without the zeros before the numbers of its address; anything else as it is.
fn without_leading_zeros(text: &str) -> Cow<'_, str> {
    let (address, length) = text.find('/').map_or((text, ""), |at| text.split_at(at));
    // Nearly always.
    if !address.contains('.')
        || address.contains(':')
        || !address.split('.').any(|n| n.starts_with('0') && n != "0")
    {
        return text.into();
    }
    let shorten = |number: &str| match number.trim_start_matches('0') {
        "" if !number.is_empty() => "0".to_owned(),
        rest => rest.to_owned(),
    };
    let numbers: Vec<String> = address.split('.').map(shorten).collect();
    format!("{}{length}", numbers.join(".")).into()
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

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use ipnet::IpNet;

    use super::*;

    #[test]
    fn leading_zeros_of_ipv4_are_decimal() {
        let parse = |text: &str| {
            let mut notes = Vec::new();
            let address = address_or_note::<IpAddr>("f", text, &mut notes).map(|ip| ip.to_string());
            let net = address_or_note::<IpNet>("f", text, &mut notes).map(|net| net.to_string());
            address.or(net)
        };
        for (text, expected) in [
            ("10.0.0.1", Some("10.0.0.1")),
            (" 010.000.00.08 ", Some("10.0.0.8")),
            ("010.1.0.0/16", Some("10.1.0.0/16")),
            ("0.0.0.0/0", Some("0.0.0.0/0")),
            ("fd00::01", Some("fd00::1")),
            ("::ffff:10.0.0.1", Some("::ffff:10.0.0.1")),
            ("10.0.0", None),
            ("10.0..1", None),
            ("0x10.0.0.1", None),
            ("10.0.0.256", None),
        ] {
            assert_eq!(parse(text).as_deref(), expected, "{text}");
        }
    }
}
