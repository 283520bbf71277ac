// SPDX-License-Identifier: Apache-2.0
//! The tags beside those that say whose a resource is: what the annotation for further tags names, and two that remember what
//! annotations set, so that it can be taken back. Pure. `diff` uses it.
//!
//! A remembering tag is written before what it remembers, and shrinks only after that is taken back: whenever a change ends halfway, it
//! names at least what annotations set.

use std::collections::{BTreeMap, BTreeSet};

use steerage_provider_api::Error;

use crate::annotations::TAGS;
use crate::attributes::{OF_BALANCERS, OF_GROUPS};
use crate::client::Tags;
use crate::list::{self, Pair};
use crate::names;

/// Tag: the attributes that annotations name, by their marks.
pub(crate) const ATTRIBUTES_TAG: &str = "steerage.dev/attributes";
/// Tag: the keys of further tags, by their digests.
pub(crate) const TAGS_TAG: &str = "steerage.dev/tags";
/// All keys of Steerage begin with it.
const OWN_PREFIX: &str = "steerage.dev/";
/// A tag's value has 256 characters, and a digest needs 7 of them.
const MAX_TAGS: usize = 36;

/// What a resource carries besides the tags that say whose it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Labels {
    /// Further tags.
    pub(crate) tags: Tags,
    /// Keys of the attributes that annotations name.
    pub(crate) attributes: BTreeSet<&'static str>,
}

/// The calls that bring the labels of a resource in place: `first` before its attributes change, the others after.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Relabel {
    pub(crate) first: Tags,
    pub(crate) remove: Vec<String>,
    pub(crate) last: Tags,
}

/// Reads the annotation for further tags.
pub(crate) fn further_tags(annotations: &BTreeMap<String, String>) -> Result<Tags, Error> {
    let mut tags = Tags::new();
    for Pair { key, value } in list::pairs(annotations, TAGS)? {
        let is_allowed = |text: &str| text.chars().all(|c| c.is_alphanumeric() || " +-=._:/@".contains(c));
        let lower = key.to_ascii_lowercase();
        let wrong = if lower.starts_with(OWN_PREFIX) {
            "which says whose the resource is"
        } else if lower.starts_with("aws:") {
            "which AWS reserves for itself"
        } else if key.chars().count() > 128 || value.chars().count() > 256 {
            "which is longer than AWS's limit: 128 characters for a key, 256 for a value"
        } else if !is_allowed(&key) || !is_allowed(&value) {
            "with characters that AWS does not take: only letters, digits, spaces and + - = . _ : / @"
        } else {
            tags.insert(key, value);
            continue;
        };
        return Err(list::invalid(
            TAGS,
            &format!("has the tag {key}, {wrong}"),
            "Correct or remove the tag.",
        ));
    }
    if tags.len() > MAX_TAGS {
        let problem = format!("has {} tags, but Steerage supports {MAX_TAGS}", tags.len());
        return Err(list::invalid(TAGS, &problem, "Remove some."));
    }
    Ok(tags)
}

fn digest(key: &str) -> String {
    names::digest(&["tag", key])[..6].to_owned()
}

/// The attributes that the tags of a resource remember. A mark of a later version stays unknown.
pub(crate) fn remembered(tags: &Tags) -> BTreeSet<&'static str> {
    let marks: BTreeSet<&str> = words(tags, ATTRIBUTES_TAG).collect();
    let known = OF_BALANCERS.iter().chain(OF_GROUPS);
    known.filter(|attribute| marks.contains(attribute.mark)).map(|attribute| attribute.key).collect()
}

fn words<'a>(tags: &'a Tags, key: &str) -> impl Iterator<Item = &'a str> {
    tags.get(key).map(|text| text.split(' ')).into_iter().flatten().filter(|word| !word.is_empty())
}

impl Labels {
    /// The tags of a new resource.
    pub(crate) fn all(&self) -> Tags {
        let mut all = self.tags.clone();
        all.extend(self.memory(&Tags::new()));
        all
    }

    /// The remembering tags, of the labels and of what `seen` remembers.
    fn memory(&self, seen: &Tags) -> Tags {
        let known = OF_BALANCERS.iter().chain(OF_GROUPS);
        let marks = known.filter(|attribute| self.attributes.contains(attribute.key));
        let marks = marks.map(|attribute| attribute.mark.to_owned());
        let digests = self.tags.keys().map(|key| digest(key));
        let text = |words: BTreeSet<String>| words.into_iter().collect::<Vec<_>>().join(" ");
        let join = |own: BTreeSet<String>, key: &str| {
            let all = text(words(seen, key).map(str::to_owned).chain(own.clone()).collect());
            // Many tags are replaced by many others: at worst, an interruption leaves old ones.
            (key.to_owned(), if all.chars().count() > 256 { text(own) } else { all })
        };
        let both = [join(marks.collect(), ATTRIBUTES_TAG), join(digests.collect(), TAGS_TAG)];
        both.into_iter().filter(|(_, value)| !value.is_empty()).collect()
    }

    /// The calls from the tags of a resource to these labels.
    pub(crate) fn relabel(&self, seen: &Tags) -> Relabel {
        let differs = |now: &Tags, (key, value): &(String, String)| now.get(key) != Some(value);
        let memory = self.memory(seen);
        let first = self.tags.clone().into_iter().chain(memory).filter(|tag| differs(seen, tag)).collect();
        let mut now = seen.clone();
        now.extend(Tags::clone(&first));
        let digests: BTreeSet<&str> = words(&now, TAGS_TAG).collect();
        let is_left = |key: &&String| {
            !key.starts_with(OWN_PREFIX)
                && !self.tags.contains_key(*key)
                && digests.contains(digest(key).as_str())
        };
        let last = self.memory(&Tags::new());
        let unneeded = [ATTRIBUTES_TAG, TAGS_TAG].map(str::to_owned).into_iter();
        let unneeded = unneeded.filter(|key| now.contains_key(key) && !last.contains_key(key));
        let remove = now.keys().filter(is_left).cloned().chain(unneeded).collect();
        let last = last.into_iter().filter(|tag| differs(&now, tag)).collect();
        Relabel { first, remove, last }
    }

    /// Whether a resource with these tags has the labels.
    pub(crate) fn are_on(&self, seen: &Tags) -> bool {
        self.relabel(seen) == Relabel::default()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn labels(tags: &[&str], attributes: &[&'static str]) -> Labels {
        Labels {
            tags: tags.iter().map(|key| ((*key).to_owned(), "x".to_owned())).collect(),
            attributes: attributes.iter().copied().collect(),
        }
    }

    fn apply(relabel: &Relabel, seen: &mut Tags, calls: usize) {
        if calls > 0 {
            seen.extend(relabel.first.clone());
        }
        if calls > 1 {
            seen.retain(|key, _| !relabel.remove.contains(key));
        }
        if calls > 2 {
            seen.extend(relabel.last.clone());
        }
    }

    fn any_labels() -> impl Strategy<Value = Labels> {
        let tags = proptest::sample::subsequence(vec!["a", "b", "c", "d"], 0..4);
        let keys: Vec<&'static str> = OF_BALANCERS.iter().map(|attribute| attribute.key).collect();
        (tags, proptest::sample::subsequence(keys, 0..4)).prop_map(|(tags, keys)| labels(&tags, &keys))
    }

    proptest! {
        /// Whichever call fails: the labels come in place, tags of others stay, and what annotations set is never forgotten.
        #[test]
        fn interrupted_relabelling_converges(from in any_labels(), to in any_labels(), cut in 0..3usize) {
            let other = ("d-of-others".to_owned(), "y".to_owned());
            let mut seen = from.all();
            seen.extend([other.clone()]);
            prop_assert!(from.are_on(&seen));
            apply(&to.relabel(&seen), &mut seen, cut);
            let known = remembered(&seen);
            prop_assert!(cut == 0 || to.attributes.is_subset(&known));
            prop_assert!(cut > 1 || from.attributes.is_subset(&known));
            apply(&to.relabel(&seen), &mut seen, 3);
            prop_assert!(to.are_on(&seen));
            let mut expected = to.all();
            expected.extend([other]);
            prop_assert_eq!(seen, expected);
        }
    }

    #[test]
    fn service_without_labels_has_no_further_tags() {
        assert_eq!(Labels::default().all(), Tags::new());
        let others = Tags::from([("team".to_owned(), "shop".to_owned())]);
        assert!(Labels::default().are_on(&others));
    }

    #[test]
    fn memory_fits_into_a_tag() {
        let marks: Vec<&str> = OF_BALANCERS.iter().map(|attribute| attribute.mark).collect();
        assert!(marks.join(" ").len() <= 256);
        let marks: Vec<&str> = OF_GROUPS.iter().map(|attribute| attribute.mark).collect();
        assert!(marks.join(" ").len() <= 256);
        let keys: Vec<String> = (0..MAX_TAGS).map(|i| format!("key-{i}")).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        assert!(labels(&keys, &[]).all()[TAGS_TAG].len() <= 256);
    }

    #[test]
    fn further_tags_are_checked() {
        let read = |text: &str| {
            let annotations = BTreeMap::from([(TAGS.to_owned(), text.to_owned())]);
            further_tags(&annotations).map_err(|error| (error.reason(), error.to_string()))
        };
        let tags = read("team=shop, cost center = 12").unwrap();
        assert_eq!((tags["team"].as_str(), tags["cost center"].as_str()), ("shop", "12"));
        let long = format!("a={}", "x".repeat(257));
        let many = (0..37).map(|i| format!("k{i}=v")).collect::<Vec<_>>().join(",");
        for (text, part) in [
            ("steerage.dev/uid=other", "whose"),
            ("Steerage.dev/new=1", "whose"),
            ("aws:name=x", "reserves"),
            ("a=b!c", "characters"),
            ("a=1,a=2", "twice"),
            ("team", "key=value"),
            (long.as_str(), "longer"),
            (many.as_str(), "36"),
        ] {
            let (reason, message) = read(text).unwrap_err();
            assert_eq!(reason, "InvalidAnnotation");
            assert!(message.contains(part), "{message}");
        }
    }
}
