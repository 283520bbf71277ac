// SPDX-License-Identifier: Apache-2.0
//! Reads annotations that hold a list: `a,b`, or `key=value` pairs as the clouds' own controllers write them. Pure.

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;
use steerage_model::shown;
use steerage_provider_api::Error;

use crate::peers::nearest;
use crate::reasons;

/// One `key=value`. The value may contain `=`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pair {
    /// The key, trimmed and not empty.
    pub key: String,
    /// The value, trimmed.
    pub value: String,
}

/// An annotation whose value is wrong. `problem` continues "Annotation x …".
pub fn invalid(name: &str, problem: &str, advice: &str) -> Error {
    let message = format!("Annotation {name} {problem}. No load balancer is created or changed. {advice}");
    Error::invalid(reasons::INVALID_ANNOTATION, message)
}

/// Annotations that contradict each other, or the Service. `problem` is a sentence.
pub fn conflict(problem: &str, advice: &str) -> Error {
    let message = format!("{problem} No load balancer is created or changed. {advice}");
    Error::invalid(reasons::CONFLICTING_ANNOTATIONS, message)
}

/// An unknown key, with the nearest of those that are known, if one is close.
pub fn unknown_key<'a>(name: &str, key: &str, known: impl Iterator<Item = &'a str>) -> Error {
    let key = shown(key);
    let nearest = nearest(&key, known).map(|known| format!(". The nearest known one is {known}"));
    let problem = format!("names the unknown attribute {key}{}", nearest.unwrap_or_default());
    invalid(name, &problem, "Correct or remove the attribute.")
}

/// The annotation that every cloud's controllers read as `spec.loadBalancerSourceRanges`.
pub const SOURCE_RANGES: &str = "service.beta.kubernetes.io/load-balancer-source-ranges";

/// The ranges of [`SOURCE_RANGES`]; none without it, and if it is empty.
pub fn source_ranges(annotations: &BTreeMap<String, String>) -> Result<Vec<IpNet>, Error> {
    let Some(text) = annotations.get(SOURCE_RANGES) else { return Ok(Vec::new()) };
    if text.trim().is_empty() {
        return Ok(Vec::new());
    }
    // An empty item is no range: a list of them would admit everybody.
    let parsed = |item: &str| {
        item.trim().parse().map_err(|_| {
            let problem = format!("has the wrong value `{}`", shown(item));
            invalid(
                SOURCE_RANGES,
                &problem,
                "Use ranges such as 192.0.2.0/24 or 2001:db8::/32, separated by commas.",
            )
        })
    };
    text.split(',').map(parsed).collect()
}

/// Whether an annotation is `true`; `None` without it.
pub fn boolean(annotations: &BTreeMap<String, String>, name: &str) -> Result<Option<bool>, Error> {
    match annotations.get(name).map(|value| value.trim()) {
        None => Ok(None),
        Some("true") => Ok(Some(true)),
        Some("false") => Ok(Some(false)),
        Some(other) => {
            Err(invalid(name, &format!("has the unknown value `{}`", shown(other)), "Use true or false."))
        }
    }
}

/// The items of a list, trimmed, without empty ones.
pub fn items(text: &str) -> impl Iterator<Item = &str> {
    text.split(',').map(str::trim).filter(|item| !item.is_empty())
}

/// The items of an annotation's list; `None` without the annotation. Each must be there once, and one at least.
pub fn distinct(annotations: &BTreeMap<String, String>, name: &str) -> Result<Option<Vec<String>>, Error> {
    let Some(text) = annotations.get(name) else { return Ok(None) };
    let all: Vec<String> = items(text).map(str::to_owned).collect();
    if all.is_empty() {
        return Err(invalid(name, "is empty", "List the values, separated by commas, or remove it."));
    }
    let mut seen = BTreeSet::new();
    if let Some(item) = all.iter().find(|item| !seen.insert(*item)) {
        return Err(invalid(name, &format!("names `{}` twice", shown(item)), "Keep one."));
    }
    Ok(Some(all))
}

/// The pairs of an annotation; none without it.
pub fn pairs(annotations: &BTreeMap<String, String>, name: &str) -> Result<Vec<Pair>, Error> {
    let mut pairs: Vec<Pair> = Vec::new();
    for item in annotations.get(name).map(String::as_str).into_iter().flat_map(items) {
        let (key, value) =
            item.split_once('=').map(|(key, value)| (key.trim(), value.trim())).unwrap_or_default();
        if key.is_empty() {
            return Err(invalid(
                name,
                &format!("has the item `{}`, which is not key=value", shown(item)),
                "Correct the item. Commas separate items.",
            ));
        }
        if pairs.iter().any(|pair| pair.key == key) {
            return Err(invalid(name, &format!("has the key {} twice", shown(key)), "Keep one."));
        }
        pairs.push(Pair { key: key.to_owned(), value: value.to_owned() });
    }
    Ok(pairs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nearest_attribute_is_told_only_if_it_is_close() {
        let told =
            |key: &str| unknown_key("a", key, ["access_logs.s3.bucket", "ipv6"].into_iter()).to_string();
        for (key, nearest) in [
            ("access_log.s3.bucket", Some("access_logs.s3.bucket")),
            ("Access-Logs.S3.Bucket", Some("access_logs.s3.bucket")),
            ("ip_v6", Some("ipv6")),
            ("deletion_protection", None),
            ("", None),
        ] {
            let told = told(key);
            match nearest {
                Some(nearest) => {
                    assert!(told.contains(&format!("The nearest known one is {nearest}.")), "{told}");
                }
                None => {
                    assert!(!told.contains("nearest") && told.contains("the unknown attribute"), "{told}");
                }
            }
        }
    }

    #[test]
    fn pairs_are_trimmed_and_must_have_a_key_once() {
        let read = |text: &str| {
            let annotations = BTreeMap::from([("a".to_owned(), text.to_owned())]);
            let found = pairs(&annotations, "a").map_err(|error| error.to_string())?;
            Ok::<_, String>(found.into_iter().map(|p| format!("{}:{}", p.key, p.value)).collect::<Vec<_>>())
        };
        assert_eq!(read(" a = b ,, c=d=e,f="), Ok(["a:b", "c:d=e", "f:"].map(str::to_owned).into()));
        assert_eq!(read(""), Ok(Vec::new()));
        for (text, part) in [("a", "`a`"), ("=b", "`=b`"), ("a=b,a=c", "twice")] {
            assert!(read(text).unwrap_err().contains(part), "{text}");
        }
        assert!(pairs(&BTreeMap::new(), "a").unwrap().is_empty());
    }
}
