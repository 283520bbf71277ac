// SPDX-License-Identifier: Apache-2.0
//! Which subnets an existing load balancer gets or loses next. Pure.
//!
//! A zone comes before another one leaves. Only an annotation of the Service takes a zone away: AWS then ends the zone's connections and
//! releases its address. Flag and tags, which concern many load balancers, only add a subnet in a zone that has none.

use std::collections::BTreeSet;

use steerage_provider_api::Error;

use crate::annotations::SUBNETS;
use crate::config::Config;
use crate::placement::{Placed, Placement};
use crate::reasons;
use crate::subnets::{Subnet, without_ipv6};

/// The next change: all subnets that the load balancer has afterwards.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ZoneChange {
    Add(Placed),
    Remove(Placed),
}

/// The next change of a load balancer with these subnets; `None` if it has those that are wanted.
pub(crate) fn next(
    config: &Config,
    wanted: &Placement,
    placed: &Placed,
    all: &[Subnet],
) -> Result<Option<ZoneChange>, Error> {
    if !wanted.may_differ(placed) {
        return Ok(None);
    }
    if wanted.is_named() {
        let wanted = wanted.resolved(config, all)?;
        wanted.check(placed)?;
        return named(&wanted.mappings()?.into_iter().collect(), placed, all);
    }
    // Without any offer, it keeps what it has.
    let offered = wanted.resolved(config, all).and_then(|offered| offered.mappings()).unwrap_or_default();
    let mut offered: Vec<String> = offered.into_iter().map(|(id, _)| id).collect();
    if wanted.has_ipv6() {
        // AWS takes no zone without IPv6: the others come all the same.
        let lacking: Vec<String> = without_ipv6(all, offered.iter()).into_iter().cloned().collect();
        offered.retain(|id| !lacking.contains(id));
    }
    Ok(offers(offered.into_iter(), placed, all))
}

fn zone_of<'a>(id: &str, all: &'a [Subnet]) -> Option<&'a str> {
    all.iter().find(|subnet| subnet.id == id).map(|subnet| subnet.zone.as_str())
}

/// The subnets that the Service names. Those that stay keep their addresses.
fn named(wanted: &Placed, placed: &Placed, all: &[Subnet]) -> Result<Option<ZoneChange>, Error> {
    let mut more = placed.clone();
    for (id, address) in wanted.iter().filter(|(id, _)| !placed.contains_key(*id)) {
        let zone = zone_of(id, all);
        let same = placed.keys().find(|present| zone.is_some() && zone_of(present, all) == zone);
        if let (Some(present), Some(zone)) = (same, zone) {
            return Err(taken(id, present, zone));
        }
        more.insert(id.clone(), address.clone());
    }
    if more.len() > placed.len() {
        return Ok(Some(ZoneChange::Add(more)));
    }
    let mut fewer = placed.clone();
    fewer.retain(|id, _| wanted.contains_key(id));
    Ok((fewer.len() < placed.len()).then_some(ZoneChange::Remove(fewer)))
}

/// AWS refuses a subnet in a zone that has one. Between the two calls that it takes, the zone would have no address.
fn taken(id: &str, present: &str, zone: &str) -> Error {
    let message = format!(
        "Annotation {SUBNETS} names {id} in the zone {zone}, where the load balancer has {present}. AWS takes another subnet of a zone \
         only after the present one is removed, which ends the connections of that zone. The load balancer keeps its subnets. Name \
         {present} again. To replace it all the same, name neither of the two but one of another zone, wait until the condition \
         steerage.dev/Programmed is True, and then add {id}."
    );
    Error::invalid(reasons::SUBNETS_IMMUTABLE, message)
}

/// Those of the offered subnets whose zone has none.
fn offers(offered: impl Iterator<Item = String>, placed: &Placed, all: &[Subnet]) -> Option<ZoneChange> {
    // With a subnet of an unknown zone, every zone might have one.
    let mut zones = placed.keys().map(|id| zone_of(id, all)).collect::<Option<BTreeSet<&str>>>()?;
    let mut more = placed.clone();
    more.extend(
        offered.filter(|id| zone_of(id, all).is_some_and(|zone| zones.insert(zone))).map(|id| (id, None)),
    );
    (more.len() > placed.len()).then_some(ZoneChange::Add(more))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::annotations::{EIP_ALLOCATIONS, PRIVATE_ADDRESSES};
    use crate::client::Tags;
    use crate::config::Scheme;
    use crate::desired::tests::config;
    use crate::ip_address_type::IpAddressType;
    use crate::placement::{Address, placement};

    /// `subnet-a1` and `subnet-a2` are in the zone `a`.
    fn subnets() -> Vec<Subnet> {
        let subnet = |id: &str| Subnet {
            id: id.to_owned(),
            zone: id["subnet-".len()..][..1].to_owned(),
            tags: Tags::from([("kubernetes.io/role/internal-elb".to_owned(), "1".to_owned())]),
            free: 100,
            has_ipv6: !id.starts_with("subnet-b"),
            is_on_outpost: false,
        };
        ["subnet-a1", "subnet-a2", "subnet-b1", "subnet-b2", "subnet-c1"].map(subnet).into()
    }

    fn placed(ids: &[&str]) -> Placed {
        ids.iter().map(|id| ((*id).to_owned(), None)).collect()
    }

    fn with_flag(flag: &[&str]) -> Config {
        Config { subnets: flag.iter().map(|id| (*id).to_owned()).collect(), ..config() }
    }

    fn next_of(
        flag: &[&str],
        annotations: &[(&str, &str)],
        placed: &Placed,
    ) -> Result<Option<ZoneChange>, (&'static str, String)> {
        let annotations: BTreeMap<String, String> =
            annotations.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let is_public = annotations.contains_key(EIP_ALLOCATIONS);
        let scheme = if is_public { Scheme::InternetFacing } else { Scheme::Internal };
        let config = with_flag(flag);
        let wanted = placement(&config, (scheme, IpAddressType::Ipv4), &annotations).unwrap();
        next(&config, &wanted, placed, &subnets()).map_err(|error| (error.reason(), error.to_string()))
    }

    fn added(ids: &[&str]) -> ZoneChange {
        ZoneChange::Add(placed(ids))
    }

    #[test]
    fn named_zone_comes_before_another_leaves() {
        let named = |ids: &str, present: &[&str]| next_of(&[], &[(SUBNETS, ids)], &placed(present));
        assert_eq!(named("subnet-a1", &["subnet-a1"]), Ok(None));
        assert_eq!(
            named("subnet-b1,subnet-a1", &["subnet-a1"]),
            Ok(Some(added(&["subnet-a1", "subnet-b1"])))
        );
        assert_eq!(
            named("subnet-b1,subnet-c1", &["subnet-a1", "subnet-b1"]),
            Ok(Some(added(&["subnet-a1", "subnet-b1", "subnet-c1"])))
        );
        let left = ZoneChange::Remove(placed(&["subnet-b1"]));
        assert_eq!(named("subnet-b1", &["subnet-a1", "subnet-b1"]), Ok(Some(left)));
        assert_eq!(
            named("subnet-unknown", &["subnet-a1"]),
            Ok(Some(added(&["subnet-a1", "subnet-unknown"]))),
            "AWS answers"
        );
    }

    #[test]
    fn another_subnet_of_a_zone_is_refused() {
        let (reason, text) =
            next_of(&[], &[(SUBNETS, "subnet-a2,subnet-b1")], &placed(&["subnet-a1"])).unwrap_err();
        assert_eq!(reason, "SubnetsImmutable");
        assert!(
            text.contains("subnet-a1") && text.contains("subnet-a2") && text.contains("zone a"),
            "{text}"
        );
        let by_name = next_of(&[], &[(SUBNETS, "public")], &placed(&["subnet-a1"]));
        assert_eq!(by_name.unwrap_err().0, "SubnetsNotFound");
    }

    #[test]
    fn addresses_of_zones_that_stay_are_kept() {
        let eip = |id: &str| Some(Address::Elastic(id.to_owned()));
        let present = Placed::from([("subnet-a1".to_owned(), eip("eipalloc-1"))]);
        let both = [(SUBNETS, "subnet-b1,subnet-a1"), (EIP_ALLOCATIONS, "eipalloc-2,eipalloc-1")];
        let more = Placed::from([
            ("subnet-a1".to_owned(), eip("eipalloc-1")),
            ("subnet-b1".to_owned(), eip("eipalloc-2")),
        ]);
        assert_eq!(next_of(&[], &both, &present), Ok(Some(ZoneChange::Add(more))));
        let other = [(SUBNETS, "subnet-b1,subnet-a1"), (EIP_ALLOCATIONS, "eipalloc-1,eipalloc-2")];
        assert_eq!(next_of(&[], &other, &present).unwrap_err().0, "AddressesImmutable");
        // The annotation about addresses was removed.
        let more =
            Placed::from([("subnet-a1".to_owned(), eip("eipalloc-1")), ("subnet-b1".to_owned(), None)]);
        let without = next_of(&[], &[(SUBNETS, "subnet-b1,subnet-a1")], &present);
        assert_eq!(without, Ok(Some(ZoneChange::Add(more))));
    }

    #[test]
    fn flag_and_tags_add_zones_and_take_none() {
        for flag in [&[][..], &["subnet-a2", "subnet-b2", "subnet-b1", "subnet-c1"]] {
            let b = if flag.is_empty() { "subnet-b1" } else { "subnet-b2" };
            assert_eq!(
                next_of(flag, &[], &placed(&["subnet-a1"])),
                Ok(Some(added(&["subnet-a1", b, "subnet-c1"])))
            );
            assert_eq!(next_of(flag, &[], &placed(&["subnet-a1", "subnet-b2", "subnet-c1"])), Ok(None));
            assert_eq!(next_of(flag, &[], &placed(&["subnet-of-unknown-zone"])), Ok(None));
        }
        assert_eq!(next_of(&["subnet-a1"], &[], &placed(&["subnet-a1", "subnet-b1"])), Ok(None));
        assert_eq!(next_of(&["subnet-unknown"], &[], &placed(&["subnet-a1"])), Ok(None));
    }

    /// AWS would choose the address of one more subnet.
    #[test]
    fn flag_and_tags_add_nothing_beside_requested_addresses() {
        let private = Some(Address::Private([10, 0, 0, 9].into()));
        let present = Placed::from([("subnet-a1".to_owned(), private)]);
        assert_eq!(next_of(&[], &[], &present), Ok(None));
        assert_eq!(next_of(&[], &[(PRIVATE_ADDRESSES, "10.0.0.9")], &present), Ok(None));
        assert_eq!(next_of(&["subnet-b1"], &[], &present), Ok(None));
    }

    #[test]
    fn zones_without_ipv6_are_not_added_to_load_balancers_that_have_it() {
        for flag in [&[][..], &["subnet-a1", "subnet-b1", "subnet-c1"]] {
            let kind = (Scheme::Internal, IpAddressType::DualStack);
            let wanted = placement(&with_flag(flag), kind, &BTreeMap::new()).unwrap();
            let change =
                |present: &[&str]| next(&with_flag(flag), &wanted, &placed(present), &subnets()).unwrap();
            assert_eq!(change(&["subnet-a1"]), Some(added(&["subnet-a1", "subnet-c1"])));
            assert_eq!(change(&["subnet-a1", "subnet-c1"]), None);
        }
    }

    #[test]
    fn nothing_offered_changes_nothing() {
        let kind = (Scheme::InternetFacing, IpAddressType::Ipv4);
        let wanted = placement(&with_flag(&[]), kind, &BTreeMap::new()).unwrap();
        assert_eq!(next(&with_flag(&[]), &wanted, &placed(&["subnet-a1"]), &subnets()).unwrap(), None);
    }

    fn some_subnets() -> impl Strategy<Value = Vec<String>> {
        let of_zone = |zone: char| prop_oneof![Just(None), Just(Some(format!("subnet-{zone}1")))];
        (of_zone('a'), of_zone('b'), of_zone('c'))
            .prop_map(|(a, b, c)| [a, b, c].into_iter().flatten().collect())
            .prop_filter("one subnet at least", |some: &Vec<String>| !some.is_empty())
    }

    proptest! {
        /// Whatever is named, the changes end with it, and none leaves out a zone that was there and is wanted.
        #[test]
        fn changes_end_with_the_named_subnets(from in some_subnets(), to in some_subnets()) {
            let mut present: Placed = from.iter().map(|id| (id.clone(), None)).collect();
            let wanted: Placed = to.iter().map(|id| (id.clone(), None)).collect();
            for _ in 0..2 {
                let change = next_of(&[], &[(SUBNETS, &to.join(","))], &present).unwrap();
                let Some(ZoneChange::Add(after) | ZoneChange::Remove(after)) = change else { break };
                prop_assert!(present.keys().filter(|id| wanted.contains_key(*id)).all(|id| after.contains_key(id)));
                prop_assert!(!after.is_empty());
                present = after;
            }
            prop_assert_eq!(present, wanted);
        }
    }
}
