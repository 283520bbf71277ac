// SPDX-License-Identifier: Apache-2.0
//! What a Service's annotations ask for. Pure.

use std::collections::BTreeMap;

use steerage_model::shown;
use steerage_provider_api::Error;
use steerage_provider_cloud::annotation::{self, conflict, invalid};

use crate::annotations;
use crate::config::Config;

type Annotations = BTreeMap<String, String>;

/// A network tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tier {
    Premium,
    Standard,
}

impl Tier {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Premium => "PREMIUM",
            Self::Standard => "STANDARD",
        }
    }
}

/// What the annotations ask for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Options {
    pub(crate) is_internal: bool,
    pub(crate) tier: Tier,
    pub(crate) has_global_access: bool,
    /// Path of the addresses' subnet.
    pub(crate) subnetwork: String,
    /// Names of reserved addresses.
    pub(crate) addresses: Vec<String>,
    pub(crate) is_weighted: bool,
}

impl Options {
    pub(crate) fn read(of: &Annotations, config: &Config) -> Result<Self, Error> {
        let is_internal = kind(of, annotations::LOAD_BALANCER_TYPE)?;
        let is_internal_by_old = kind(of, annotations::OLD_LOAD_BALANCER_TYPE)?;
        let tier = match value(of, annotations::NETWORK_TIER) {
            None | Some("Premium") => Tier::Premium,
            Some("Standard") => Tier::Standard,
            Some(other) => return unknown(annotations::NETWORK_TIER, other, "Use Premium or Standard."),
        };
        let has_global_access = match value(of, annotations::GLOBAL_ACCESS) {
            None | Some("false") => false,
            Some("true") => true,
            Some(other) => return unknown(annotations::GLOBAL_ACCESS, other, "Use true or false."),
        };
        let is_weighted = match value(of, annotations::WEIGHTED) {
            None => false,
            Some("pods-per-node") => true,
            Some(other) => return unknown(annotations::WEIGHTED, other, "Use pods-per-node."),
        };
        let is_internal = is_internal || is_internal_by_old;
        if is_internal && value(of, annotations::NETWORK_TIER).is_some() {
            let problem = format!(
                "Internal load balancers have no network tier, and {} asks for one.",
                annotations::NETWORK_TIER
            );
            return Err(conflict(&problem, "Remove one of the annotations."));
        }
        if !is_internal && has_global_access {
            let problem = format!(
                "Only internal load balancers have global access, which {} asks for.",
                annotations::GLOBAL_ACCESS
            );
            return Err(conflict(&problem, "Remove the annotation."));
        }
        let subnet = name(of, annotations::SUBNET)?;
        let internal_subnet = name(of, annotations::INTERNAL_SUBNET)?;
        if let (Some(one), Some(other)) = (&subnet, &internal_subnet)
            && one != other
        {
            let (new, old) = (annotations::SUBNET, annotations::INTERNAL_SUBNET);
            return Err(conflict(&format!("{new} and {old} name different subnets."), "Remove one of them."));
        }
        let subnet = subnet.or(internal_subnet.filter(|_| is_internal));
        let subnetwork = subnet.map_or_else(
            || config.subnetwork.clone(),
            // A name is one beside the nodes' subnet, which may be a Shared VPC's.
            |name| match config.subnetwork.rsplit_once('/') {
                Some((beside, _)) => format!("{beside}/{name}"),
                None => name,
            },
        );
        let addresses = annotation::distinct(of, annotations::ADDRESSES)?.unwrap_or_default();
        if addresses.len() > 2 || addresses.iter().any(|address| !is_name(address)) {
            let advice = "Name one reserved address, or one of each IP family, separated by a comma.";
            return Err(invalid(annotations::ADDRESSES, "does not have one or two names", advice));
        }
        Ok(Self { is_internal, tier, has_global_access, subnetwork, addresses, is_weighted })
    }
}

fn value<'a>(of: &'a Annotations, name: &str) -> Option<&'a str> {
    of.get(name).map(|value| value.trim())
}

fn unknown<T>(name: &str, value: &str, advice: &str) -> Result<T, Error> {
    Err(invalid(name, &format!("has the unknown value `{}`", shown(value)), advice))
}

/// Whether the load balancer is internal.
fn kind(of: &Annotations, name: &str) -> Result<bool, Error> {
    match value(of, name) {
        None => Ok(false),
        Some(value) if value.eq_ignore_ascii_case("internal") => Ok(true),
        Some(other) => unknown(name, other, "Use Internal, or remove the annotation."),
    }
}

/// A name is a part of a path.
fn is_name(text: &str) -> bool {
    (1..=63).contains(&text.len())
        && text.starts_with(|c: char| c.is_ascii_lowercase())
        && text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
}

fn name(of: &Annotations, annotation: &str) -> Result<Option<String>, Error> {
    match value(of, annotation) {
        None => Ok(None),
        Some(text) if is_name(text) => Ok(Some(text.to_owned())),
        Some(text) => {
            let problem = format!("has the value `{}`, which is no name", shown(text));
            Err(invalid(annotation, &problem, "Use the name of a subnet in the region."))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::config;

    fn read(pairs: &[(&str, &str)]) -> Result<Options, (&'static str, String)> {
        let annotations = pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        Options::read(&annotations.collect(), &config()).map_err(|error| (error.reason(), error.to_string()))
    }

    #[test]
    fn load_balancers_are_external_in_the_premium_tier_by_default() {
        let options = read(&[]).unwrap();
        assert!(!options.is_internal && !options.has_global_access && !options.is_weighted);
        assert_eq!(
            (options.tier, options.subnetwork.as_str()),
            (Tier::Premium, "projects/p/regions/r/subnetworks/s")
        );
    }

    #[test]
    fn values_are_read() {
        let options = read(&[
            (annotations::OLD_LOAD_BALANCER_TYPE, "internal"),
            (annotations::GLOBAL_ACCESS, " true "),
            (annotations::INTERNAL_SUBNET, "other"),
            (annotations::ADDRESSES, "a4, a6"),
            (annotations::WEIGHTED, "pods-per-node"),
        ])
        .unwrap();
        assert!(options.is_internal && options.has_global_access && options.is_weighted);
        assert_eq!(options.subnetwork, "projects/p/regions/r/subnetworks/other");
        assert_eq!(options.addresses, ["a4", "a6"]);
        assert_eq!(read(&[(annotations::NETWORK_TIER, "Standard")]).unwrap().tier, Tier::Standard);
    }

    #[test]
    fn wrong_and_conflicting_values_are_refused() {
        let internal = (annotations::LOAD_BALANCER_TYPE, "Internal");
        for (pairs, reason, part) in [
            (&[(annotations::LOAD_BALANCER_TYPE, "External")][..], "InvalidAnnotation", "Use Internal"),
            (&[(annotations::NETWORK_TIER, "premium")], "InvalidAnnotation", "Premium or Standard"),
            (&[(annotations::GLOBAL_ACCESS, "yes")], "InvalidAnnotation", "true or false"),
            (&[(annotations::WEIGHTED, "yes")], "InvalidAnnotation", "pods-per-node"),
            (&[(annotations::SUBNET, "a/../b")], "InvalidAnnotation", "no name"),
            (&[(annotations::ADDRESSES, "a,b,c")], "InvalidAnnotation", "one or two"),
            (&[(annotations::ADDRESSES, "192.0.2.1")], "InvalidAnnotation", "names"),
            (
                &[internal, (annotations::NETWORK_TIER, "Premium")],
                "ConflictingAnnotations",
                "no network tier",
            ),
            (&[(annotations::GLOBAL_ACCESS, "true")], "ConflictingAnnotations", "Only internal"),
            (
                &[internal, (annotations::SUBNET, "a"), (annotations::INTERNAL_SUBNET, "b")],
                "ConflictingAnnotations",
                "different subnets",
            ),
        ] {
            let (got, message) = read(pairs).unwrap_err();
            assert!(got == reason && message.contains(part), "{pairs:?}: {got} {message}");
        }
    }
}
