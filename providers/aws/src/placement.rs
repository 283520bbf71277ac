// SPDX-License-Identifier: Apache-2.0
//! The subnets and addresses of a load balancer, by annotations. Pure. Where no IDs are given, `subnets` finds them. Of an existing load
//! balancer, `check` refuses other addresses, and `zones` says which subnets it gets or loses.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;

use steerage_model::shown;
use steerage_provider_api::Error;
use steerage_provider_cloud::annotation;

use crate::annotations::{EIP_ALLOCATIONS, PRIVATE_ADDRESSES, SUBNETS};
use crate::config::{Config, Scheme};
use crate::ip_address_type::IpAddressType;
use crate::reasons;
use crate::subnets::{self, Subnet};

/// The address of a load balancer in one subnet, if it is not AWS's choice.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Address {
    /// Allocation of an Elastic IP address.
    Elastic(String),
    Private(Ipv4Addr),
}

/// The subnets of a new load balancer.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Subnets {
    /// Their IDs.
    Ids(Vec<String>),
    /// Names, and perhaps IDs.
    Names(Vec<String>),
    /// Those that tags offer.
    Offered,
}

/// Where a load balancer is wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Placement {
    subnets: Subnets,
    scheme: Scheme,
    /// Whether the load balancer has IPv6, so that each subnet needs it.
    has_ipv6: bool,
    /// Whether the Service names the subnets; otherwise flag or tags do, which never take one from an existing load balancer.
    is_named: bool,
    /// The addresses that an annotation requests, one for each subnet; empty if none does.
    addresses: Vec<Address>,
    /// The annotation that requests them.
    requested_by: &'static str,
}

/// The subnets that a load balancer has, with the addresses that were requested.
pub(crate) type Placed = BTreeMap<String, Option<Address>>;

/// The addresses that an annotation requests, for load balancers of this scheme.
fn addresses(
    (name, items): (&str, Vec<String>),
    (scheme, needed): (Scheme, Scheme),
    parse: impl Fn(&str) -> Option<Address>,
    form: &str,
) -> Result<Vec<Address>, Error> {
    if scheme != needed {
        return Err(annotation::conflict(
            &format!(
                "Annotation {name} is for the scheme {}, but the scheme is {}.",
                needed.as_str(),
                scheme.as_str()
            ),
            "Change the scheme of a new Service, or remove the annotation.",
        ));
    }
    let parsed = |item: &String| {
        let wrong = || {
            let problem = format!("has the wrong value `{}`", shown(item));
            annotation::invalid(name, &problem, &format!("Use {form}."))
        };
        parse(item).ok_or_else(wrong)
    };
    items.iter().map(parsed).collect()
}

/// Reads the annotations.
pub(crate) fn placement(
    config: &Config,
    (scheme, of_clients): (Scheme, IpAddressType),
    annotations: &BTreeMap<String, String>,
) -> Result<Placement, Error> {
    let named = annotation::distinct(annotations, SUBNETS)?;
    let is_named = named.is_some();
    let subnets = match named {
        Some(items) if items.iter().all(|item| item.starts_with("subnet-")) => Subnets::Ids(items),
        Some(items) => Subnets::Names(items),
        None if config.subnets.is_empty() => Subnets::Offered,
        None => Subnets::Ids(config.subnets.clone()),
    };
    let elastic = annotation::distinct(annotations, EIP_ALLOCATIONS)?.map(|items| {
        let parse = |item: &str| item.starts_with("eipalloc-").then(|| Address::Elastic(item.to_owned()));
        let needed = (scheme, Scheme::InternetFacing);
        addresses((EIP_ALLOCATIONS, items), needed, parse, "an allocation ID, eipalloc-…")
    });
    let private = annotation::distinct(annotations, PRIVATE_ADDRESSES)?.map(|items| {
        let parse = |item: &str| item.parse().ok().map(Address::Private);
        addresses((PRIVATE_ADDRESSES, items), (scheme, Scheme::Internal), parse, "IPv4 addresses")
    });
    let (elastic, private) = (elastic.transpose()?, private.transpose()?);
    let requested_by = if elastic.is_some() { EIP_ALLOCATIONS } else { PRIVATE_ADDRESSES };
    let addresses = elastic.or(private).unwrap_or_default();
    let has_ipv6 = of_clients == IpAddressType::DualStack;
    let placement = Placement { subnets, scheme, has_ipv6, is_named, addresses, requested_by };
    // The number of the flag's subnets is that of new load balancers only.
    if let Subnets::Ids(ids) | Subnets::Names(ids) = &placement.subnets
        && is_named
    {
        placement.check_number(ids.len())?;
    }
    Ok(placement)
}

impl Placement {
    /// Whether the Service names the subnets.
    pub(crate) fn is_named(&self) -> bool {
        self.is_named
    }

    /// Whether the load balancer has IPv6.
    pub(crate) fn has_ipv6(&self) -> bool {
        self.has_ipv6
    }

    /// The number of subnets that the Service names.
    pub(crate) fn named(&self) -> Option<usize> {
        match &self.subnets {
            Subnets::Ids(items) | Subnets::Names(items) if self.is_named => Some(items.len()),
            _ => None,
        }
    }

    /// The IDs of the subnets, in the Service's order. Empty as long as they are not resolved.
    pub(crate) fn ids(&self) -> &[String] {
        match &self.subnets {
            Subnets::Ids(ids) => ids,
            Subnets::Names(_) | Subnets::Offered => &[],
        }
    }

    /// Whether the subnets of the VPC must be read to know the IDs.
    pub(crate) fn needs_lookup(&self) -> bool {
        !matches!(self.subnets, Subnets::Ids(_))
    }

    /// Whether the subnets of the VPC must be read to know what a load balancer with these subnets lacks or has too many of.
    pub(crate) fn may_differ(&self, placed: &Placed) -> bool {
        match &self.subnets {
            _ if !self.is_named && self.has_addresses(placed) => false,
            Subnets::Ids(ids) if self.is_named => !placed.keys().eq(ids.iter().collect::<BTreeSet<_>>()),
            Subnets::Ids(ids) => ids.iter().any(|id| !placed.contains_key(id)),
            Subnets::Names(_) | Subnets::Offered => true,
        }
    }

    /// Whether addresses are requested, or were. AWS would choose that of one more subnet, which clients with a list of addresses do not
    /// expect.
    fn has_addresses(&self, placed: &Placed) -> bool {
        !self.addresses.is_empty() || placed.values().any(Option::is_some)
    }

    /// The same with IDs, from the subnets of the VPC.
    pub(crate) fn resolved(&self, config: &Config, all: &[Subnet]) -> Result<Self, Error> {
        let ids = match &self.subnets {
            Subnets::Ids(ids) => ids.clone(),
            Subnets::Names(names) => subnets::named(all, &config.vpc, names)?,
            Subnets::Offered => {
                subnets::offered(all, &config.vpc, (self.scheme, self.has_ipv6), &config.cluster.name)?
            }
        };
        Ok(Self { subnets: Subnets::Ids(ids), ..self.clone() })
    }

    /// Refuses addresses that are not one for each of so many subnets.
    fn check_number(&self, subnets: usize) -> Result<(), Error> {
        let Self { addresses, requested_by, .. } = self;
        if addresses.is_empty() || addresses.len() == subnets {
            return Ok(());
        }
        let message =
            format!("Annotation {requested_by} has {} values for {subnets} subnets.", addresses.len());
        Err(annotation::conflict(&message, "Write one for each subnet, in the same order."))
    }

    /// The subnets of a new load balancer, each with its address. Empty as long as the subnets are not resolved.
    pub(crate) fn mappings(&self) -> Result<Vec<(String, Option<Address>)>, Error> {
        let Subnets::Ids(ids) = &self.subnets else { return Ok(Vec::new()) };
        self.check_number(ids.len())?;
        let addresses = self.addresses.iter().cloned().map(Some).chain(std::iter::repeat(None));
        Ok(ids.iter().cloned().zip(addresses).collect())
    }

    /// Refuses another address in a subnet that the load balancer keeps. Names that are not resolved are not compared.
    pub(crate) fn check(&self, placed: &Placed) -> Result<(), Error> {
        if self.addresses.is_empty() || matches!(self.subnets, Subnets::Names(_)) {
            return Ok(());
        }
        // Without named subnets, their order at the creation is not known any more.
        let is_same = if self.is_named {
            let is_kept = |(subnet, wanted): &(String, Option<Address>)| {
                placed.get(subnet).is_none_or(|present| present == wanted)
            };
            self.mappings()?.iter().all(is_kept)
        } else {
            let present: BTreeSet<&Address> = placed.values().flatten().collect();
            self.addresses.iter().collect::<BTreeSet<_>>() == present
        };
        if is_same {
            return Ok(());
        }
        let message = format!(
            "Annotation {} requests other addresses than the load balancer has, and AWS cannot change them. The load balancer keeps \
             its addresses. Restore or remove the annotation, or create the Service again, which changes its hostname.",
            self.requested_by
        );
        Err(Error::invalid(reasons::ADDRESSES_IMMUTABLE, message))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::desired::tests::config;

    fn read(scheme: Scheme, pairs: &[(&str, &str)]) -> Result<Placement, (&'static str, String)> {
        let annotations =
            pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let placement = placement(&config(), (scheme, IpAddressType::Ipv4), &annotations);
        placement
            .and_then(|made| made.mappings().map(|_| made))
            .map_err(|error| (error.reason(), error.to_string()))
    }

    fn eip(id: &str) -> Address {
        Address::Elastic(id.to_owned())
    }

    #[test]
    fn addresses_follow_the_order_of_the_subnets() {
        assert_eq!(read(Scheme::Internal, &[]).unwrap().mappings().unwrap(), [("subnet-a".to_owned(), None)]);
        let made = read(
            Scheme::InternetFacing,
            &[(SUBNETS, "subnet-z, subnet-b"), (EIP_ALLOCATIONS, "eipalloc-1,eipalloc-2")],
        );
        let expected = [
            ("subnet-z".to_owned(), Some(eip("eipalloc-1"))),
            ("subnet-b".to_owned(), Some(eip("eipalloc-2"))),
        ];
        assert_eq!(made.unwrap().mappings().unwrap(), expected);
        let made = read(Scheme::Internal, &[(PRIVATE_ADDRESSES, "10.0.0.9")]).unwrap();
        assert_eq!(made.mappings().unwrap()[0].1, Some(Address::Private(Ipv4Addr::new(10, 0, 0, 9))));
    }

    #[test]
    fn wrong_placements_are_refused() {
        let (internal, public) = (Scheme::Internal, Scheme::InternetFacing);
        for (scheme, name, value, reason, part) in [
            (internal, SUBNETS, "subnet-a,subnet-a", "InvalidAnnotation", "twice"),
            (internal, SUBNETS, " , ", "InvalidAnnotation", "empty"),
            (internal, EIP_ALLOCATIONS, "eipalloc-1", "ConflictingAnnotations", "scheme"),
            (public, PRIVATE_ADDRESSES, "10.0.0.1", "ConflictingAnnotations", "scheme"),
            (public, EIP_ALLOCATIONS, "eipalloc-1,eipalloc-2", "ConflictingAnnotations", "2 values for 1"),
            (public, EIP_ALLOCATIONS, "192.0.2.1", "InvalidAnnotation", "eipalloc-"),
            (internal, PRIVATE_ADDRESSES, "10.0.0.300", "InvalidAnnotation", "10.0.0.300"),
            (internal, PRIVATE_ADDRESSES, "fd00::1", "InvalidAnnotation", "IPv4"),
        ] {
            let (found, message) = read(scheme, &[(name, value)]).unwrap_err();
            assert_eq!(found, reason, "{message}");
            assert!(message.contains(part) && message.contains(name), "{message}");
        }
    }

    #[test]
    fn only_requested_addresses_of_present_subnets_may_not_change() {
        let placed = Placed::from([("subnet-b".to_owned(), Some(eip("eipalloc-1")))]);
        let check = |pairs: &[(&str, &str)]| {
            read(Scheme::InternetFacing, pairs).unwrap().check(&placed).map_err(|error| error.reason())
        };
        assert_eq!(check(&[]), Ok(()), "the flag is for new load balancers");
        assert_eq!(check(&[(SUBNETS, "subnet-b")]), Ok(()));
        assert_eq!(check(&[(SUBNETS, "subnet-b"), (EIP_ALLOCATIONS, "eipalloc-1")]), Ok(()));
        assert_eq!(
            check(&[(SUBNETS, "subnet-b"), (EIP_ALLOCATIONS, "eipalloc-2")]),
            Err("AddressesImmutable")
        );
        assert_eq!(check(&[(SUBNETS, "subnet-b,subnet-c")]), Ok(()));
        assert_eq!(check(&[(SUBNETS, "subnet-c"), (EIP_ALLOCATIONS, "eipalloc-2")]), Ok(()));
        assert_eq!(check(&[(EIP_ALLOCATIONS, "eipalloc-1")]), Ok(()), "the flag named another subnet then");
        assert_eq!(check(&[(EIP_ALLOCATIONS, "eipalloc-2")]), Err("AddressesImmutable"));
        assert_eq!(check(&[(SUBNETS, "private-b")]), Ok(()), "not before its ID is known");
        let mut grown = config();
        grown.subnets.push("subnet-b".to_owned());
        let annotations = BTreeMap::from([(EIP_ALLOCATIONS.to_owned(), "eipalloc-1".to_owned())]);
        let kind = (Scheme::InternetFacing, IpAddressType::Ipv4);
        let wanted = placement(&grown, kind, &annotations).unwrap();
        assert!(wanted.check(&placed).is_ok(), "a zone is added to the flag");
        assert_eq!(wanted.mappings().unwrap_err().reason(), "ConflictingAnnotations", "of a new one");
    }

    #[test]
    fn names_and_tags_are_resolved_for_new_load_balancers() {
        let tags = |key: &str, value: &str| BTreeMap::from([(key.to_owned(), value.to_owned())]);
        let subnet = |id: &str, tags| Subnet {
            id: id.to_owned(),
            zone: id.to_owned(),
            tags,
            free: 9,
            has_ipv6: false,
            is_on_outpost: false,
        };
        let all = [
            subnet("subnet-1", tags("Name", "private-a")),
            subnet("subnet-2", tags("kubernetes.io/role/internal-elb", "1")),
        ];
        let by_tags = Config { subnets: Vec::new(), ..config() };
        let of = |pairs: &[(&str, &str)]| {
            let annotations =
                pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
            let kind = (Scheme::Internal, IpAddressType::Ipv4);
            placement(&by_tags, kind, &annotations).map_err(|error| error.reason())
        };
        let offered = of(&[]).unwrap();
        assert!(offered.needs_lookup());
        let made = offered.resolved(&by_tags, &all).unwrap().mappings().unwrap();
        assert_eq!(made, [("subnet-2".to_owned(), None)]);
        let named = of(&[(SUBNETS, "private-a"), (PRIVATE_ADDRESSES, "10.0.0.9")]).unwrap();
        assert!(named.needs_lookup() && named.mappings().unwrap().is_empty());
        let resolved = named.resolved(&by_tags, &all).unwrap();
        assert_eq!(resolved.mappings().unwrap()[0].0, "subnet-1");
        let other_address = Placed::from([("subnet-1".to_owned(), None)]);
        assert!(named.check(&other_address).is_ok(), "not before its ID is known");
        assert_eq!(resolved.check(&other_address).unwrap_err().reason(), "AddressesImmutable");
        let two = of(&[(SUBNETS, "private-a"), (PRIVATE_ADDRESSES, "10.0.0.9,10.0.0.8")]);
        assert_eq!(two.unwrap_err(), "ConflictingAnnotations");
        let addresses = of(&[(PRIVATE_ADDRESSES, "10.0.0.9,10.0.0.8")]).unwrap();
        let error = addresses.resolved(&by_tags, &all).unwrap().mappings().unwrap_err();
        assert_eq!(error.reason(), "ConflictingAnnotations");
    }
}
