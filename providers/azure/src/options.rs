// SPDX-License-Identifier: Apache-2.0
//! What the annotations of a Service request. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use steerage_model::{Family, shown};
use steerage_provider_api::Error;
use steerage_provider_cloud::annotation::{self, boolean, conflict, invalid};

use crate::annotations;
use crate::config::{is_name, is_path};

type Annotations = BTreeMap<String, String>;

/// Who may connect.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sources {
    pub(crate) ranges: BTreeSet<IpNet>,
    pub(crate) tags: BTreeSet<String>,
}

impl Sources {
    /// Whether every client may.
    pub(crate) fn is_everybody(&self) -> bool {
        self.ranges.is_empty() && self.tags.is_empty()
    }

    /// Those that a Service requests: the field, or else one of two annotations, and service tags.
    pub(crate) fn read(field: &[IpNet], annotations: &Annotations) -> Result<Self, Error> {
        let allowed = ranges(annotations, annotations::ALLOWED_IP_RANGES)?;
        let (mut ranges, place) = if field.is_empty() {
            (
                annotation::source_ranges(annotations)?,
                format!("the annotation {}", annotations::SOURCE_RANGES),
            )
        } else {
            (field.to_vec(), "spec.loadBalancerSourceRanges".to_owned())
        };
        if !ranges.is_empty() && !allowed.is_empty() {
            let name = annotations::ALLOWED_IP_RANGES;
            let problem = format!("The annotation {name} and {place} both list ranges.");
            return Err(conflict(&problem, "Keep one of them."));
        }
        ranges.extend(allowed);
        let tags = annotation::distinct(annotations, annotations::ALLOWED_SERVICE_TAGS)?.unwrap_or_default();
        // `Internet` and `*` are everybody: a Service that names one looks limited and is not.
        let is_tag = |tag: &&String| {
            tag.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_'))
                && *tag != "Internet"
        };
        if let Some(tag) = tags.iter().find(|tag| !is_tag(tag)) {
            let problem =
                format!("names `{}`, which is no service tag that limits clients", shown(tag.as_str()));
            return Err(invalid(annotations::ALLOWED_SERVICE_TAGS, &problem, "Correct or remove it."));
        }
        let ranges = ranges.iter().map(IpNet::trunc).collect();
        Ok(Self { ranges, tags: tags.into_iter().collect() })
    }
}

fn ranges(annotations: &Annotations, name: &str) -> Result<Vec<IpNet>, Error> {
    let Some(text) = annotations.get(name).filter(|text| !text.trim().is_empty()) else {
        return Ok(Vec::new());
    };
    let parsed = |item: &str| {
        item.trim().parse().map_err(|_| {
            let problem = format!("has the wrong value `{}`", shown(item));
            invalid(name, &problem, "Use ranges such as 192.0.2.0/24 or 2001:db8::/32, separated by commas.")
        })
    };
    text.split(',').map(parsed).collect()
}

/// The requests of one IP family.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct FamilyOptions {
    pub(crate) address: Option<IpAddr>,
    pub(crate) public_ip: Option<String>,
    pub(crate) prefix: Option<String>,
}

/// The requests, with the defaults.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Options {
    pub(crate) is_internal: bool,
    pub(crate) subnet: Option<String>,
    pub(crate) resource_group: Option<String>,
    pub(crate) tags: BTreeMap<String, String>,
    pub(crate) dns_label: Option<String>,
    pub(crate) idle_minutes: u32,
    pub(crate) has_tcp_reset: bool,
    v4: FamilyOptions,
    v6: FamilyOptions,
}

impl Options {
    pub(crate) fn read(annotations: &Annotations) -> Result<Self, Error> {
        let family = |family, address, public_ip, prefix| {
            Ok::<_, Error>(FamilyOptions {
                address: address_of(annotations, address, family)?,
                public_ip: name(annotations, public_ip)?,
                prefix: prefix_id(annotations, prefix)?,
            })
        };
        let options = Self {
            is_internal: boolean(annotations, annotations::INTERNAL)?.unwrap_or_default(),
            subnet: name(annotations, annotations::SUBNET)?,
            resource_group: name(annotations, annotations::RESOURCE_GROUP)?,
            tags: tags(annotations)?,
            dns_label: dns_label(annotations)?,
            idle_minutes: idle_minutes(annotations)?,
            has_tcp_reset: boolean(annotations, annotations::DISABLE_TCP_RESET)? != Some(true),
            v4: family(Family::V4, annotations::IPV4, annotations::PIP_NAME, annotations::PIP_PREFIX)?,
            v6: family(
                Family::V6,
                annotations::IPV6,
                annotations::PIP_NAME_IPV6,
                annotations::PIP_PREFIX_IPV6,
            )?,
        };
        let of_public = [
            annotations::PIP_NAME,
            annotations::PIP_NAME_IPV6,
            annotations::PIP_PREFIX,
            annotations::PIP_PREFIX_IPV6,
            annotations::PIP_TAGS,
            annotations::DNS_LABEL,
        ];
        let of_other = if options.is_internal { &of_public[..] } else { &[annotations::SUBNET] };
        if let Some(name) = of_other.iter().find(|name| annotations.contains_key(**name)) {
            let internal = annotations::INTERNAL;
            return Err(if options.is_internal {
                let problem = format!(
                    "Annotation {name} has no meaning for an internal Service ({internal}: \"true\")."
                );
                conflict(&problem, "Remove one of the two.")
            } else {
                let problem =
                    format!("Annotation {name} needs {internal}: \"true\", which the Service does not have.");
                conflict(&problem, &format!("Add it, or remove {name}."))
            });
        }
        Ok(options)
    }

    pub(crate) fn of(&self, family: Family) -> &FamilyOptions {
        match family {
            Family::V4 => &self.v4,
            Family::V6 => &self.v6,
        }
    }
}

fn checked(
    annotations: &Annotations,
    name: &str,
    is_right: impl Fn(&str) -> bool,
    advice: &str,
) -> Result<Option<String>, Error> {
    let Some(value) = annotations.get(name).map(|value| value.trim()) else { return Ok(None) };
    if is_right(value) {
        return Ok(Some(value.to_owned()));
    }
    Err(invalid(name, &format!("has the wrong value `{}`", shown(value)), advice))
}

/// A name is part of a path.
fn name(annotations: &Annotations, name: &str) -> Result<Option<String>, Error> {
    checked(annotations, name, is_name, "Use the name of a resource.")
}

fn prefix_id(annotations: &Annotations, name: &str) -> Result<Option<String>, Error> {
    let is_right = |value: &str| is_path(value, "publicIPPrefixes");
    checked(annotations, name, is_right, "Use the ID of a public IP prefix: /subscriptions/….")
}

fn dns_label(annotations: &Annotations) -> Result<Option<String>, Error> {
    let is_right = |value: &str| {
        (3..=63).contains(&value.len())
            && value.starts_with(|c: char| c.is_ascii_lowercase())
            && !value.ends_with('-')
            && value.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
    };
    let advice = "Use 3 to 63 lower-case letters, digits and hyphens that begin with a letter.";
    checked(annotations, annotations::DNS_LABEL, is_right, advice)
}

fn address_of(annotations: &Annotations, name: &str, family: Family) -> Result<Option<IpAddr>, Error> {
    let Some(text) = annotations.get(name).map(|value| value.trim()) else { return Ok(None) };
    match text.parse() {
        Ok(address) if Family::of(address) == family => Ok(Some(address)),
        _ => Err(invalid(
            name,
            &format!("has the wrong value `{}`", shown(text)),
            &format!("Use an {family} address."),
        )),
    }
}

fn idle_minutes(annotations: &Annotations) -> Result<u32, Error> {
    let name = annotations::IDLE_TIMEOUT;
    let Some(text) = annotations.get(name).map(|value| value.trim()) else { return Ok(4) };
    match text.parse() {
        Ok(minutes) if (4..=100).contains(&minutes) => Ok(minutes),
        _ => Err(invalid(name, &format!("has the wrong value `{}`", shown(text)), "Use 4 to 100.")),
    }
}

fn tags(annotations: &Annotations) -> Result<BTreeMap<String, String>, Error> {
    /// Of 50 tags, Steerage needs four.
    const MOST: usize = 40;
    let name = annotations::PIP_TAGS;
    let pairs = annotation::pairs(annotations, name)?;
    if pairs.len() > MOST {
        return Err(invalid(name, &format!("has more than {MOST} tags"), "Remove some."));
    }
    for pair in &pairs {
        let is_ours = pair.key.to_ascii_lowercase().starts_with("steerage.dev");
        // Those of cloud-provider-azure make it delete the public IP.
        let is_peers = pair.key.to_ascii_lowercase().starts_with("k8s-azure-");
        let is_wrong = pair.key.contains(['<', '>', '%', '&', '\\', '?', '/']) || pair.key.len() > 512;
        if is_ours || is_peers || is_wrong || pair.value.len() > 256 {
            let problem = format!("has the tag `{}`, which cannot be set", shown(&pair.key));
            return Err(invalid(name, &problem, "Correct or remove it."));
        }
    }
    Ok(pairs.into_iter().map(|pair| (pair.key, pair.value)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pairs: &[(&str, &str)]) -> Result<Options, (&'static str, String)> {
        let annotations = pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        Options::read(&annotations).map_err(|error| (error.reason(), error.to_string()))
    }

    #[test]
    fn annotations_replace_defaults() {
        let defaults = read(&[]).unwrap();
        assert!(!defaults.is_internal && defaults.has_tcp_reset && defaults.idle_minutes == 4);
        let options = read(&[
            (annotations::PIP_NAME, "mine"),
            (annotations::PIP_TAGS, "team=a"),
            (annotations::DNS_LABEL, "my-web"),
            (annotations::IDLE_TIMEOUT, " 30 "),
            (annotations::DISABLE_TCP_RESET, "true"),
        ])
        .unwrap();
        assert_eq!(options.of(Family::V4).public_ip.as_deref(), Some("mine"));
        assert_eq!((options.idle_minutes, options.has_tcp_reset), (30, false));
        assert_eq!(options.tags["team"], "a");
    }

    #[test]
    fn wrong_values_are_refused() {
        let prefix = "/subscriptions/s/resourceGroups/g/providers/Microsoft.Network/publicIPAddresses/a";
        for (name, value) in [
            (annotations::INTERNAL, "yes"),
            (annotations::IPV4, "2001:db8::1"),
            (annotations::IPV6, "10.0.0.1"),
            (annotations::PIP_NAME, "../a"),
            (annotations::PIP_PREFIX, prefix),
            (annotations::PIP_TAGS, "steerage.dev_uid=x"),
            (annotations::PIP_TAGS, "k8s-azure-service=x"),
            (annotations::PIP_TAGS, "a/b=x"),
            (annotations::DNS_LABEL, "1a"),
            (annotations::IDLE_TIMEOUT, "3"),
        ] {
            let (reason, message) = read(&[(name, value)]).unwrap_err();
            assert!(reason == "InvalidAnnotation" && message.contains(name), "{name}: {message}");
        }
        let both = read(&[(annotations::INTERNAL, "true"), (annotations::PIP_NAME, "a")]).unwrap_err();
        assert_eq!(both.0, "ConflictingAnnotations");
        for internal in [&[][..], &[(annotations::INTERNAL, "false")]] {
            let pairs = [internal, &[(annotations::SUBNET, "a")]].concat();
            let (reason, message) = read(&pairs).unwrap_err();
            assert_eq!(reason, "ConflictingAnnotations");
            assert!(message.contains("needs ") && message.contains("Add it, or remove"), "{message}");
        }
    }

    #[test]
    fn sources_come_from_one_place_and_never_admit_everybody_by_error() {
        let read = |field: &[&str], pairs: &[(&str, &str)]| {
            let field: Vec<IpNet> = field.iter().map(|range| range.parse().unwrap()).collect();
            let annotations = pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
            let sources = Sources::read(&field, &annotations.collect()).map_err(|error| error.reason())?;
            let ranges = sources.ranges.iter().map(ToString::to_string);
            Ok::<_, &str>(ranges.chain(sources.tags).collect::<Vec<_>>().join(" "))
        };
        assert_eq!(read(&[], &[]), Ok(String::new()));
        assert_eq!(read(&["10.1.2.3/8"], &[]), Ok("10.0.0.0/8".to_owned()));
        let (allowed, tags) = (annotations::ALLOWED_IP_RANGES, annotations::ALLOWED_SERVICE_TAGS);
        assert_eq!(read(&[], &[(allowed, "10.0.0.0/8, ::1/128")]), Ok("10.0.0.0/8 ::1/128".to_owned()));
        assert_eq!(read(&["10.0.0.0/8"], &[(tags, "AzureCloud")]), Ok("10.0.0.0/8 AzureCloud".to_owned()));
        assert_eq!(
            read(&["10.0.0.0/8"], &[(annotations::SOURCE_RANGES, "0.0.0.0/0")]),
            Ok("10.0.0.0/8".to_owned())
        );
        let old = annotations::SOURCE_RANGES;
        assert_eq!(read(&["10.0.0.0/8"], &[(allowed, "0.0.0.0/0")]), Err("ConflictingAnnotations"));
        let both = [(allowed, "0.0.0.0/0"), (old, "10.0.0.0/8")];
        assert_eq!(read(&[], &both), Err("ConflictingAnnotations"));
        assert_eq!(read(&[], &[(allowed, "192.0.2.0/24"), (old, " ")]), Ok("192.0.2.0/24".to_owned()));
        for (name, value) in [(allowed, "10.0.0.0/8,,"), (tags, "Internet"), (tags, "*"), (tags, "")] {
            assert_eq!(read(&[], &[(name, value)]), Err("InvalidAnnotation"), "{name} {value}");
        }
    }
}
