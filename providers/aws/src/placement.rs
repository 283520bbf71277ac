// SPDX-License-Identifier: Apache-2.0
//! The subnets and addresses of a load balancer, by annotations. Pure. They are decided when it is created: `check` says so if they
//! change.

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;

use steerage_provider_api::Error;

use crate::annotations::{EIP_ALLOCATIONS, PRIVATE_ADDRESSES, SUBNETS};
use crate::config::{Config, Scheme};
use crate::{list, reasons};

/// The address of a load balancer in one subnet, if it is not AWS's choice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Address {
    /// Allocation of an Elastic IP address.
    Elastic(String),
    Private(Ipv4Addr),
}

/// Where a load balancer is wanted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Placement {
    /// With the addresses that annotations request, in their order.
    pub(crate) subnets: Vec<(String, Option<Address>)>,
    /// Whether the Service names the subnets; otherwise the flag does, for new load balancers only.
    is_named: bool,
}

/// The subnets that a load balancer has, with the addresses that were requested.
pub(crate) type Placed = BTreeMap<String, Option<Address>>;

fn conflict(message: &str, advice: &str) -> Error {
    let message = format!("{message} No load balancer is created or changed. {advice}");
    Error::invalid(reasons::CONFLICTING_ANNOTATIONS, message)
}

/// The items of a list; `None` without the annotation. Each must be there once.
fn read(annotations: &BTreeMap<String, String>, name: &str) -> Result<Option<Vec<String>>, Error> {
    let Some(text) = annotations.get(name) else { return Ok(None) };
    let items: Vec<String> = list::items(text).map(str::to_owned).collect();
    if items.is_empty() {
        return Err(list::invalid(name, "is empty", "List the values, separated by commas, or remove it."));
    }
    if items.iter().collect::<BTreeSet<_>>().len() < items.len() {
        return Err(list::invalid(name, "names something twice", "Keep one."));
    }
    Ok(Some(items))
}

/// One address for each subnet, for load balancers of this scheme.
fn addresses(
    (name, items): (&str, Vec<String>),
    (scheme, needed): (Scheme, Scheme),
    subnets: usize,
    parse: impl Fn(&str) -> Option<Address>,
    form: &str,
) -> Result<Vec<Option<Address>>, Error> {
    if scheme != needed {
        return Err(conflict(
            &format!(
                "Annotation {name} is for the scheme {}, but the scheme is {}.",
                needed.as_str(),
                scheme.as_str()
            ),
            "Change the scheme of a new Service, or remove the annotation.",
        ));
    }
    if items.len() != subnets {
        let message = format!("Annotation {name} has {} values for {subnets} subnets.", items.len());
        return Err(conflict(&message, "Write one for each subnet, in the same order."));
    }
    let parsed = |item: &String| {
        let wrong = || list::invalid(name, &format!("has the wrong value `{item}`"), &format!("Use {form}."));
        parse(item).map(Some).ok_or_else(wrong)
    };
    items.iter().map(parsed).collect()
}

/// Reads the annotations.
pub(crate) fn placement(
    config: &Config,
    scheme: Scheme,
    annotations: &BTreeMap<String, String>,
) -> Result<Placement, Error> {
    let named = read(annotations, SUBNETS)?;
    if let Some(wrong) = named.iter().flatten().find(|item| !item.starts_with("subnet-")) {
        let problem =
            format!("names the subnet `{wrong}`, which is not an ID: Steerage does not look up names yet");
        return Err(list::invalid(SUBNETS, &problem, "Use the subnet's ID, subnet-…."));
    }
    let is_named = named.is_some();
    let subnets = named.unwrap_or_else(|| config.subnets.clone());
    let count = subnets.len();
    let elastic = read(annotations, EIP_ALLOCATIONS)?.map(|items| {
        let parse = |item: &str| item.starts_with("eipalloc-").then(|| Address::Elastic(item.to_owned()));
        addresses(
            (EIP_ALLOCATIONS, items),
            (scheme, Scheme::InternetFacing),
            count,
            parse,
            "an allocation ID, eipalloc-…",
        )
    });
    let private = read(annotations, PRIVATE_ADDRESSES)?.map(|items| {
        let parse = |item: &str| item.parse().ok().map(Address::Private);
        addresses((PRIVATE_ADDRESSES, items), (scheme, Scheme::Internal), count, parse, "IPv4 addresses")
    });
    let (elastic, private) = (elastic.transpose()?, private.transpose()?);
    let requested = elastic.or(private).unwrap_or_else(|| vec![None; count]);
    Ok(Placement { subnets: subnets.into_iter().zip(requested).collect(), is_named })
}

impl Placement {
    /// Refuses a change of what the load balancer has. What no annotation names may differ.
    pub(crate) fn check(&self, placed: &Placed) -> Result<(), Error> {
        let wanted: BTreeSet<&String> = self.subnets.iter().map(|(subnet, _)| subnet).collect();
        if self.is_named && !placed.keys().eq(wanted) {
            let present = placed.keys().cloned().collect::<Vec<_>>().join(",");
            let message = format!(
                "Steerage does not change the subnets of an existing load balancer. The present ones are kept. Re-create the Service, \
                 or set the annotation {SUBNETS} to {present}."
            );
            return Err(Error::invalid(reasons::SUBNETS_IMMUTABLE, message));
        }
        for (subnet, address) in self.subnets.iter().filter(|(_, address)| address.is_some()) {
            if placed.get(subnet) != Some(address) {
                let name = if matches!(address, Some(Address::Elastic(_))) {
                    EIP_ALLOCATIONS
                } else {
                    PRIVATE_ADDRESSES
                };
                let message = format!(
                    "The load balancer does not have the address that annotation {name} requests for {subnet}, and AWS cannot change \
                     it. The present address is kept. Re-create the Service, or restore or remove the annotation."
                );
                return Err(Error::invalid(reasons::ADDRESSES_IMMUTABLE, message));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::desired::tests::config;

    fn read(scheme: Scheme, pairs: &[(&str, &str)]) -> Result<Placement, (&'static str, String)> {
        let annotations =
            pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        placement(&config(), scheme, &annotations).map_err(|error| (error.reason(), error.to_string()))
    }

    fn eip(id: &str) -> Address {
        Address::Elastic(id.to_owned())
    }

    #[test]
    fn addresses_follow_the_order_of_the_subnets() {
        assert_eq!(read(Scheme::Internal, &[]).unwrap().subnets, [("subnet-a".to_owned(), None)]);
        let made = read(
            Scheme::InternetFacing,
            &[(SUBNETS, "subnet-z, subnet-b"), (EIP_ALLOCATIONS, "eipalloc-1,eipalloc-2")],
        );
        let expected = [
            ("subnet-z".to_owned(), Some(eip("eipalloc-1"))),
            ("subnet-b".to_owned(), Some(eip("eipalloc-2"))),
        ];
        assert_eq!(made.unwrap().subnets, expected);
        let made = read(Scheme::Internal, &[(PRIVATE_ADDRESSES, "10.0.0.9")]).unwrap();
        assert_eq!(made.subnets[0].1, Some(Address::Private(Ipv4Addr::new(10, 0, 0, 9))));
    }

    #[test]
    fn wrong_placements_are_refused() {
        let (internal, public) = (Scheme::Internal, Scheme::InternetFacing);
        for (scheme, name, value, reason, part) in [
            (internal, SUBNETS, "private-a", "InvalidAnnotation", "names"),
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
    fn only_named_things_may_not_change() {
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
        assert_eq!(check(&[(SUBNETS, "subnet-b,subnet-c")]), Err("SubnetsImmutable"));
        assert_eq!(check(&[(EIP_ALLOCATIONS, "eipalloc-1")]), Err("AddressesImmutable"), "of another subnet");
    }
}
