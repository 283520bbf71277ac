// SPDX-License-Identifier: Apache-2.0
//! The tags beside those that say whose a resource is: what the annotation for further tags names, and two that remember what
//! annotations set, so that it can be taken back. Pure. `diff` uses it.
//!
//! A remembering tag is written before what it remembers, and shrinks only after that is taken back: whenever a change ends halfway, it
//! names at least what annotations set. Where AWS's limits leave no room for the old and the new together, the old leave first.

use std::collections::{BTreeMap, BTreeSet};

use steerage_model::shown;
use steerage_provider_api::Error;
use steerage_provider_cloud::annotation::{self, Pair};

use crate::annotations::TAGS;
use crate::attributes::{OF_BALANCERS, OF_GROUPS};
use crate::client::Tags;
use crate::names;

/// Tag: the attributes that annotations name, by their marks.
pub(crate) const ATTRIBUTES_TAG: &str = "steerage.dev/attributes";
/// Tag: the keys of further tags, by their digests.
pub(crate) const TAGS_TAG: &str = "steerage.dev/tags";
/// All keys of Steerage begin with it.
const OWN_PREFIX: &str = "steerage.dev/";
/// AWS's limit for a tag's value, in characters.
const MAX_VALUE: usize = 256;
/// A digest needs 7 characters of a tag's value.
const MAX_TAGS: usize = 36;
/// AWS's limit for one resource.
const MAX_ON_RESOURCE: usize = 50;

/// What a resource carries besides the tags that say whose it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Labels {
    /// Further tags.
    pub(crate) tags: Tags,
    /// Keys of the attributes that annotations name.
    pub(crate) attributes: BTreeSet<&'static str>,
}

/// The calls that bring the labels of a resource in place: `room` and `first` before its attributes change, the others after.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Relabel {
    /// Keys that leave early, because there is no room for them beside the new ones.
    pub(crate) room: Vec<String>,
    pub(crate) first: Tags,
    pub(crate) remove: Vec<String>,
    pub(crate) last: Tags,
}

/// Reads the annotation for further tags.
pub(crate) fn further_tags(annotations: &BTreeMap<String, String>) -> Result<Tags, Error> {
    let mut tags = Tags::new();
    for Pair { key, value } in annotation::pairs(annotations, TAGS)? {
        let is_allowed = |text: &str| text.chars().all(|c| c.is_alphanumeric() || " +-=._:/@".contains(c));
        let lower = key.to_ascii_lowercase();
        let wrong = if lower.starts_with(OWN_PREFIX) {
            "whose prefix steerage.dev/ is reserved for Steerage"
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
        return Err(annotation::invalid(
            TAGS,
            &format!("has the tag {}, {wrong}", shown(&key)),
            "Correct or remove the tag.",
        ));
    }
    if tags.len() > MAX_TAGS {
        let problem = format!("has {} tags, but Steerage supports {MAX_TAGS}", tags.len());
        return Err(annotation::invalid(TAGS, &problem, "Remove some."));
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
        all.extend(self.memory(&Tags::new(), &Tags::new()));
        all
    }

    fn digests(&self) -> BTreeSet<String> {
        self.tags.keys().map(|key| digest(key)).collect()
    }

    /// The remembering tags: of the labels, of the attributes in one memory, and of the further tags in another.
    fn memory(&self, attributes: &Tags, tags: &Tags) -> Tags {
        let known = OF_BALANCERS.iter().chain(OF_GROUPS);
        let marks = known.filter(|attribute| self.attributes.contains(attribute.key));
        let marks: BTreeSet<String> = marks.map(|attribute| attribute.mark.to_owned()).collect();
        let join = |own: BTreeSet<String>, seen: &Tags, key: &str| {
            let all: BTreeSet<String> = words(seen, key).map(str::to_owned).chain(own).collect();
            (key.to_owned(), all.into_iter().collect::<Vec<_>>().join(" "))
        };
        let both = [join(marks, attributes, ATTRIBUTES_TAG), join(self.digests(), tags, TAGS_TAG)];
        both.into_iter().filter(|(_, value)| !value.is_empty()).collect()
    }

    /// The further tags on a resource that an annotation named, and none names now.
    fn left(&self, seen: &Tags) -> Vec<String> {
        let mut digests = self.digests();
        digests.extend(words(seen, TAGS_TAG).map(str::to_owned));
        let is_left = |key: &&String| {
            !key.starts_with(OWN_PREFIX) && !self.tags.contains_key(*key) && digests.contains(&digest(key))
        };
        seen.keys().filter(is_left).cloned().collect()
    }

    /// The calls from the tags of a resource to these labels.
    pub(crate) fn relabel(&self, seen: &Tags) -> Relabel {
        let with = |memory: Tags| {
            let mut all = seen.clone();
            all.extend(self.tags.clone().into_iter().chain(memory));
            all
        };
        let mut left = self.left(seen);
        let mut now = with(self.memory(seen, seen));
        let is_long = now.get(TAGS_TAG).is_some_and(|text| text.chars().count() > MAX_VALUE);
        let mut room = Vec::new();
        if is_long || !left.is_empty() && now.len() > MAX_ON_RESOURCE {
            // Afterwards, none of those that were remembered is there.
            room = std::mem::take(&mut left);
            now = with(self.memory(seen, &Tags::new()));
            now.retain(|key, _| !room.contains(key));
        }
        let differs = |now: &Tags, (key, value): &(&String, &String)| now.get(*key) != Some(*value);
        let own = |(key, value): (&String, &String)| (key.clone(), value.clone());
        let first = now.iter().filter(|tag| differs(seen, tag)).map(own).collect();
        let last = self.memory(&Tags::new(), &Tags::new());
        let unneeded = [ATTRIBUTES_TAG, TAGS_TAG].map(str::to_owned).into_iter();
        let unneeded = unneeded.filter(|key| now.contains_key(key) && !last.contains_key(key));
        let remove = left.into_iter().chain(unneeded).collect();
        let last = last.iter().filter(|tag| differs(&now, tag)).map(own).collect();
        Relabel { room, first, remove, last }
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

    /// As AWS, which checks every call.
    fn add(seen: &mut Tags, tags: &Tags) {
        seen.extend(tags.clone());
        assert!(seen.len() <= MAX_ON_RESOURCE, "{} tags", seen.len());
        assert!(seen.values().all(|value| value.chars().count() <= MAX_VALUE), "{seen:?}");
    }

    fn apply(relabel: &Relabel, seen: &mut Tags, calls: usize) {
        if calls > 0 {
            seen.retain(|key, _| !relabel.room.contains(key));
        }
        if calls > 1 {
            add(seen, &relabel.first);
        }
        if calls > 2 {
            seen.retain(|key, _| !relabel.remove.contains(key));
        }
        if calls > 3 {
            add(seen, &relabel.last);
        }
    }

    fn keys(range: std::ops::Range<usize>) -> Vec<String> {
        range.map(|index| format!("key-{index:02}")).collect()
    }

    fn of_keys(keys: &[String]) -> Labels {
        labels(&keys.iter().map(String::as_str).collect::<Vec<_>>(), &[])
    }

    fn any_labels() -> impl Strategy<Value = Labels> {
        let few = proptest::sample::subsequence(keys(0..4), 0..4);
        let tags = prop_oneof![few, proptest::sample::subsequence(keys(0..72), 0..=MAX_TAGS)];
        let attributes: Vec<&'static str> = OF_BALANCERS.iter().map(|attribute| attribute.key).collect();
        (tags, proptest::sample::subsequence(attributes, 0..4)).prop_map(|(tags, attributes)| Labels {
            attributes: attributes.into_iter().collect(),
            ..of_keys(&tags)
        })
    }

    proptest! {
        /// Whichever call fails: the labels come in place, tags of others stay, and what annotations set is never forgotten.
        #[test]
        fn interrupted_relabelling_converges(
            from in any_labels(),
            to in any_labels(),
            cuts in proptest::collection::vec(0..4usize, 1..3),
        ) {
            let other = ("d-of-others".to_owned(), "y".to_owned());
            let mut seen = from.all();
            seen.extend([other.clone()]);
            prop_assert!(from.are_on(&seen));
            for cut in &cuts {
                apply(&to.relabel(&seen), &mut seen, *cut);
            }
            let (known, cut) = (remembered(&seen), cuts.into_iter().max().unwrap_or_default());
            prop_assert!(cut < 2 || to.attributes.is_subset(&known));
            prop_assert!(cut > 2 || from.attributes.is_subset(&known));
            apply(&to.relabel(&seen), &mut seen, 4);
            prop_assert!(to.are_on(&seen));
            let mut expected = to.all();
            expected.extend([other]);
            prop_assert_eq!(seen, expected);
        }
    }

    /// Not even their digests fit into one tag. AWS keeps 8 tags of others beside them.
    #[test]
    fn all_tags_are_replaced_by_others() {
        for count in [19, 30, MAX_TAGS] {
            let (from, to) = (of_keys(&keys(0..count)), of_keys(&keys(count..2 * count)));
            let others: Tags = (0..44 - MAX_TAGS).map(|i| (format!("other-{i}"), "y".to_owned())).collect();
            let owner = (0..4).map(|i| (format!("steerage.dev/{i}"), "z".to_owned()));
            let others: Tags = others.into_iter().chain(owner).collect();
            for cut in 0..=4 {
                let mut seen = from.all();
                seen.extend(others.clone());
                apply(&to.relabel(&seen), &mut seen, cut);
                apply(&to.relabel(&seen), &mut seen, 4);
                let mut expected = to.all();
                expected.extend(others.clone());
                assert_eq!(seen, expected, "{count} tags, cut after {cut} calls");
                assert!(to.are_on(&seen));
            }
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
