// SPDX-License-Identifier: Apache-2.0
//! Whether a load balancer has an IPv6 prefix of each of its subnets for source NAT, and which prefixes. Pure. `source_nat_sync` makes the
//! changes.
//!
//! On a `dualstack` load balancer, AWS takes a listener with UDP only with these prefixes, and only for IPv6 targets.

use std::collections::BTreeMap;

use ipnet::Ipv6Net;
use steerage_model::shown;
use steerage_provider_api::{Error, LoadBalancer};
use steerage_provider_cloud::annotation;

use crate::annotations::{IP_ADDRESS_TYPE, SOURCE_NAT, SOURCE_NAT_PREFIXES, SUBNETS};
use crate::ip_address_type::IpAddressType;
use crate::placement::Placed;

/// In place of a prefix: AWS chooses one.
pub(crate) const AUTO_ASSIGNED: &str = "auto_assigned";
/// AWS takes prefixes of this length only.
const PREFIX_LENGTH: u8 = 80;

/// Prefixes by the ID of their subnet.
pub(crate) type Prefixes = BTreeMap<String, Ipv6Net>;

/// The source NAT of a load balancer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum SourceNat {
    #[default]
    Off,
    /// With these prefixes. In the other subnets AWS chooses them, or does not show them yet.
    On(Prefixes),
}

impl SourceNat {
    pub(crate) fn is_on(&self) -> bool {
        matches!(self, Self::On(_))
    }

    /// AWS's name.
    pub(crate) fn as_str(&self) -> &'static str {
        if self.is_on() { "on" } else { "off" }
    }

    /// What a call says of the prefix in a subnet.
    pub(crate) fn prefix(&self, subnet: &str) -> Option<String> {
        let Self::On(prefixes) = self else { return None };
        Some(prefixes.get(subnet).map_or_else(|| AUTO_ASSIGNED.to_owned(), ToString::to_string))
    }

    /// What a call changed it to. Its answer may not show that yet.
    pub(crate) fn or_requested(self, requested: Self) -> Self {
        match (self, requested) {
            (Self::On(shown), Self::On(requested)) => Self::On(requested.into_iter().chain(shown).collect()),
            (_, requested) => requested,
        }
    }

    /// The same with other subnets: those that stay keep their prefixes.
    pub(crate) fn with_subnets(&self, placed: &Placed, wanted: &Prefixes) -> Self {
        let Self::On(present) = self else { return Self::Off };
        let all = wanted.iter().chain(present).map(|(id, prefix)| (id.clone(), *prefix));
        Self::On(all.filter(|(id, _)| placed.contains_key(id)).collect())
    }
}

/// What is wanted of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SourceNatWish {
    /// As it is: a Service without UDP takes nothing from others that share the load balancer.
    AsItIs,
    Off,
    /// With these prefixes, one for each subnet that the Service names, in the same order; `None` if AWS chooses. Empty if it chooses all.
    On(Vec<Option<Ipv6Net>>),
}

impl SourceNatWish {
    /// Whether a prefix is given, so that the IDs of the subnets must be known.
    pub(crate) fn has_prefixes(&self) -> bool {
        matches!(self, Self::On(prefixes) if prefixes.iter().any(Option::is_some))
    }

    /// The given prefixes, for subnets in the Service's order.
    pub(crate) fn prefixes(&self, subnets: &[String]) -> Prefixes {
        let Self::On(prefixes) = self else { return Prefixes::new() };
        let given = subnets.iter().zip(prefixes).filter_map(|(id, prefix)| Some((id.clone(), (*prefix)?)));
        given.collect()
    }

    /// Whether a load balancer has it on or off as wanted.
    pub(crate) fn is_met_by(&self, present: &SourceNat) -> bool {
        match self {
            Self::AsItIs => true,
            Self::Off => !present.is_on(),
            Self::On(_) => present.is_on(),
        }
    }

    /// What a load balancer with these subnets gets instead of what it has; `None` if it has what is wanted. `prefixes` are those that are
    /// given.
    pub(crate) fn change(
        &self,
        present: &SourceNat,
        placed: &Placed,
        prefixes: &Prefixes,
    ) -> Option<SourceNat> {
        let kept = match (self, present) {
            (Self::AsItIs, _) | (Self::Off, SourceNat::Off) => return None,
            (Self::Off, SourceNat::On(_)) => return Some(SourceNat::Off),
            (Self::On(_), SourceNat::Off) => Prefixes::new(),
            (Self::On(_), SourceNat::On(kept)) => kept.clone(),
        };
        let given = prefixes.iter().filter(|(id, _)| placed.contains_key(*id));
        let given: Prefixes = given.map(|(id, prefix)| (id.clone(), *prefix)).collect();
        let is_same = given.iter().all(|(id, prefix)| kept.get(id) == Some(prefix));
        if present.is_on() && is_same {
            return None;
        }
        Some(SourceNat::On(kept.into_iter().chain(given).filter(|(id, _)| placed.contains_key(id)).collect()))
    }
}

/// By the annotations, or else on if a port has UDP. `subnets` is the number of subnets that the Service names.
pub(crate) fn wish(
    lb: &LoadBalancer,
    of_clients: IpAddressType,
    has_udp: bool,
    subnets: Option<usize>,
) -> Result<SourceNatWish, Error> {
    let said = match lb.annotations.get(SOURCE_NAT).map(|text| text.trim()) {
        None => None,
        Some("on") => Some(true),
        Some("off") => Some(false),
        Some(text) => {
            let problem = format!("has the wrong value `{}`", shown(text));
            return Err(annotation::invalid(SOURCE_NAT, &problem, "Use on or off."));
        }
    };
    let prefixes = prefixes(lb)?;
    if of_clients == IpAddressType::Ipv4 {
        let wrong = match (said, &prefixes) {
            (Some(true), _) => SOURCE_NAT,
            (_, Some(_)) => SOURCE_NAT_PREFIXES,
            (_, None) => return Ok(SourceNatWish::Off),
        };
        return Err(annotation::conflict(
            &format!("Annotation {wrong} is for dualstack load balancers, but this one is ipv4."),
            &format!("Remove the annotation, or set {IP_ADDRESS_TYPE} to dualstack."),
        ));
    }
    if said == Some(false) {
        let needed_by = match &prefixes {
            _ if has_udp => "a port has UDP, which a dualstack load balancer takes only with it".to_owned(),
            Some(_) => format!("annotation {SOURCE_NAT_PREFIXES} requests prefixes"),
            None => return Ok(SourceNatWish::Off),
        };
        return Err(annotation::conflict(
            &format!("Annotation {SOURCE_NAT} is off, but {needed_by}."),
            &format!("Remove {SOURCE_NAT}, or what needs it."),
        ));
    }
    if !has_udp && said.is_none() && prefixes.is_none() {
        return Ok(SourceNatWish::Off);
    }
    let wish = SourceNatWish::On(prefixes.unwrap_or_default());
    let SourceNatWish::On(prefixes) = &wish else { return Ok(wish) };
    match subnets {
        Some(subnets) if !prefixes.is_empty() && prefixes.len() != subnets => Err(annotation::conflict(
            &format!("Annotation {SOURCE_NAT_PREFIXES} has {} values for {subnets} subnets.", prefixes.len()),
            "Write one for each subnet, in the same order.",
        )),
        // Which subnets there will be, and in which order, the Service cannot know.
        None if wish.has_prefixes() => Err(annotation::conflict(
            &format!("Annotation {SOURCE_NAT_PREFIXES} has a prefix, which is one of a certain subnet."),
            &format!("Name the subnets in annotation {SUBNETS}, or write {AUTO_ASSIGNED}."),
        )),
        _ => Ok(wish),
    }
}

/// The values of the annotation; `None` without it. `auto_assigned` may be there several times.
fn prefixes(lb: &LoadBalancer) -> Result<Option<Vec<Option<Ipv6Net>>>, Error> {
    let Some(text) = lb.annotations.get(SOURCE_NAT_PREFIXES) else { return Ok(None) };
    let parse = |item: &str| {
        if item == AUTO_ASSIGNED {
            return Ok(None);
        }
        let prefix = item
            .parse()
            .ok()
            .filter(|found: &Ipv6Net| found.prefix_len() == PREFIX_LENGTH && found.network() == found.addr());
        prefix.map(Some).ok_or_else(|| {
            let problem = format!("has the wrong value `{}`", shown(item));
            let advice = format!("Use prefixes such as 2001:db8:0:1:2::/80, or {AUTO_ASSIGNED}.");
            annotation::invalid(SOURCE_NAT_PREFIXES, &problem, &advice)
        })
    };
    let all: Vec<Option<Ipv6Net>> = annotation::items(text).map(parse).collect::<Result<_, Error>>()?;
    if all.is_empty() {
        let advice = "List the values, separated by commas, or remove it.";
        return Err(annotation::invalid(SOURCE_NAT_PREFIXES, "is empty", advice));
    }
    Ok(Some(all))
}

#[cfg(test)]
mod tests {
    use steerage_model::Protocol;

    use super::*;
    use crate::desired::tests::planned;

    const GIVEN: &str = "2001:db8:0:1:2::/80";

    fn read(
        annotations: &[(&str, &str)],
        of_clients: IpAddressType,
        has_udp: bool,
        subnets: Option<usize>,
    ) -> Result<SourceNatWish, (&'static str, String)> {
        let mut lb = planned(&[(Protocol::Tcp, 80, 30080)]);
        let pairs = annotations.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        lb.annotations.extend(pairs);
        wish(&lb, of_clients, has_udp, subnets).map_err(|error| (error.reason(), error.to_string()))
    }

    #[test]
    fn udp_needs_it_and_annotations_request_it() {
        use IpAddressType::{DualStack, Ipv4};
        use SourceNatWish::{Off, On};
        let prefix = Some(GIVEN.parse().unwrap());
        let mixed = format!("{GIVEN}, auto_assigned");
        for (annotations, of_clients, has_udp, subnets, expected) in [
            (&[][..], Ipv4, true, None, Off),
            (&[], DualStack, false, None, Off),
            (&[], DualStack, true, None, On(vec![])),
            (&[(SOURCE_NAT, " on ")], DualStack, false, None, On(vec![])),
            (&[(SOURCE_NAT, "off")], DualStack, false, None, Off),
            (&[(SOURCE_NAT, "off")], Ipv4, true, None, Off),
            (&[(SOURCE_NAT_PREFIXES, mixed.as_str())], DualStack, true, Some(2), On(vec![prefix, None])),
            (&[(SOURCE_NAT_PREFIXES, GIVEN)], DualStack, false, Some(1), On(vec![prefix])),
            // Nothing depends on the order.
            (&[(SOURCE_NAT_PREFIXES, "auto_assigned")], DualStack, true, None, On(vec![None])),
        ] {
            let found = read(annotations, of_clients, has_udp, subnets);
            assert_eq!(found, Ok(expected), "{annotations:?} {of_clients:?} {has_udp}");
        }
    }

    #[test]
    fn what_aws_would_refuse_is_refused() {
        use IpAddressType::{DualStack, Ipv4};
        let conflict = "ConflictingAnnotations";
        for (annotations, of_clients, has_udp, subnets, reason, part) in [
            (&[(SOURCE_NAT, "true")][..], DualStack, true, None, "InvalidAnnotation", "`true`"),
            (&[(SOURCE_NAT, "on")], Ipv4, true, None, conflict, "this one is ipv4"),
            (&[(SOURCE_NAT_PREFIXES, GIVEN)], Ipv4, true, Some(1), conflict, "this one is ipv4"),
            (&[(SOURCE_NAT, "off")], DualStack, true, None, conflict, "has UDP"),
            (
                &[(SOURCE_NAT, "off"), (SOURCE_NAT_PREFIXES, GIVEN)],
                DualStack,
                false,
                Some(1),
                conflict,
                "prefixes",
            ),
            (&[(SOURCE_NAT_PREFIXES, GIVEN)], DualStack, true, Some(2), conflict, "1 values for 2"),
            (&[(SOURCE_NAT_PREFIXES, GIVEN)], DualStack, true, None, conflict, SUBNETS),
            (&[(SOURCE_NAT_PREFIXES, " ,")], DualStack, true, None, "InvalidAnnotation", "empty"),
            (&[(SOURCE_NAT_PREFIXES, "2001:db8::/64")], DualStack, true, Some(1), "InvalidAnnotation", "/64"),
            (
                &[(SOURCE_NAT_PREFIXES, "2001:db8::1/80")],
                DualStack,
                true,
                Some(1),
                "InvalidAnnotation",
                "::1",
            ),
            (&[(SOURCE_NAT_PREFIXES, "10.0.0.0/80")], DualStack, true, Some(1), "InvalidAnnotation", "10.0"),
        ] {
            let (found, message) = read(annotations, of_clients, has_udp, subnets).unwrap_err();
            assert_eq!(found, reason, "{annotations:?}: {message}");
            assert!(message.contains(part), "{message}");
        }
    }

    fn prefixes(of: &[(&str, &str)]) -> Prefixes {
        of.iter().map(|(id, prefix)| ((*id).to_owned(), prefix.parse().unwrap())).collect()
    }

    fn placed(ids: &[&str]) -> Placed {
        ids.iter().map(|id| ((*id).to_owned(), None)).collect()
    }

    #[test]
    fn present_prefixes_stay_unless_another_is_given() {
        let other = "2001:db8:0:1:3::/80";
        let given = prefixes(&[("subnet-a", GIVEN), ("subnet-gone", GIVEN)]);
        let (on, none) = (SourceNatWish::On(Vec::new()), Prefixes::new());
        let here = placed(&["subnet-a", "subnet-b"]);
        let has = |of: &[(&str, &str)]| SourceNat::On(prefixes(of));
        assert_eq!(on.change(&SourceNat::Off, &here, &none), Some(has(&[])));
        assert_eq!(on.change(&SourceNat::Off, &here, &given), Some(has(&[("subnet-a", GIVEN)])));
        assert_eq!(on.change(&has(&[("subnet-a", other)]), &here, &none), None);
        assert_eq!(on.change(&has(&[("subnet-a", GIVEN)]), &here, &given), None);
        let present = has(&[("subnet-a", other), ("subnet-b", other)]);
        let changed = has(&[("subnet-a", GIVEN), ("subnet-b", other)]);
        assert_eq!(on.change(&present, &here, &given), Some(changed));
        assert_eq!(SourceNatWish::Off.change(&present, &here, &none), Some(SourceNat::Off));
        assert_eq!(SourceNatWish::Off.change(&SourceNat::Off, &here, &none), None);
        assert_eq!(SourceNatWish::AsItIs.change(&present, &here, &given), None);
        // A change of zones changes nothing else.
        let given = prefixes(&[("subnet-a", GIVEN), ("subnet-c", GIVEN)]);
        let moved = has(&[("subnet-a", other), ("subnet-c", GIVEN)]);
        assert_eq!(present.with_subnets(&placed(&["subnet-a", "subnet-c"]), &given), moved);
        assert_eq!(SourceNat::Off.with_subnets(&here, &given), SourceNat::Off);
    }
}
