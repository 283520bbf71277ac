// SPDX-License-Identifier: Apache-2.0
//! Tables for the rules one by one, and a property over long runs of requests.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;
use steerage_edge_api::{AddressPoolSpec, Labels};

use super::*;

fn pool(name: &str, auto_assign: bool, entries: &[&str]) -> Pool {
    let addresses = entries.iter().map(ToString::to_string).collect();
    let pool = Pool::new(name, &AddressPoolSpec { addresses, auto_assign, ..AddressPoolSpec::default() });
    assert!(pool.problems.is_empty());
    pool
}

fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

fn ips(list: &[&str]) -> Vec<IpAddr> {
    list.iter().map(|text| ip(text)).collect()
}

const V4: &[Family] = &[Family::V4];
static NO_LABELS: Labels = Labels::new();
static NOT_HELD: BTreeMap<IpAddr, Duration> = BTreeMap::new();
static NONE: BTreeSet<IpAddr> = BTreeSet::new();
const ANY: Request<'_> = Request {
    requester: Requester { namespace: "shop", namespace_labels: None, labels: &NO_LABELS },
    families: V4,
    addresses: &[],
    pool: None,
    current: &[],
    published: &[],
    resting: &NONE,
    held: &NOT_HELD,
};

#[test]
fn pools_are_for_their_namespaces_and_the_highest_priority_comes_first() {
    let of = |name: &str, entry: &str, namespaces: &[&str], priority| {
        let spec = AddressPoolSpec {
            addresses: vec![entry.to_owned()],
            namespaces: namespaces.iter().map(ToString::to_string).collect(),
            priority,
            ..AddressPoolSpec::default()
        };
        Pool::new(name, &spec)
    };
    let pools = [
        of("a", "10.0.1.1", &[], -1),
        of("b", "10.0.2.1", &[], 0),
        of("c", "10.0.3.1", &["shop", "bank"], 7),
        of("d", "10.0.4.1", &["bank"], 9),
    ];
    let mut given = Vec::new();
    while let Ok(addresses) = allocate(&pools, &given.iter().copied().collect::<AddressSet>(), ANY) {
        given.extend(addresses);
    }
    assert_eq!(given, ips(&["10.0.3.1", "10.0.2.1", "10.0.1.1"]), "and none of another namespace's");
    let taken = AddressSet::default();
    let named = Request { pool: Some("d"), ..ANY };
    let error = allocate(&pools, &taken, named).expect_err("not for this namespace").to_string();
    assert!(error.contains("is not for this Service of namespace shop"), "{error}");
    assert!(error.contains("Name one of: a, b, c;"), "{error}");
    let asked = Request { addresses: &ips(&["10.0.4.1"]), ..ANY };
    assert_eq!(reason(allocate(&pools, &taken, asked)), ADDRESS_OUTSIDE_POOLS);
    // An address that is assigned stays, whatever becomes of the pool.
    let current = ips(&["10.0.4.1"]);
    assert!(is_unchanged(&pools, &taken, Request { current: &current, published: &current, ..ANY }));
    assert!(is_unchanged(
        &pools,
        &taken,
        Request { pool: Some("d"), current: &current, published: &current, ..ANY }
    ));
    assert!(
        allocate(
            &pools,
            &taken,
            Request { requester: Requester { namespace: "bank", ..named.requester }, ..named }
        )
        .is_ok()
    );
}

fn reason(result: Result<Vec<IpAddr>, Error>) -> &'static str {
    result.expect_err("refused").reason()
}

#[test]
fn the_lowest_free_address_of_the_first_pool_by_name_is_given() {
    let pools = [pool("b", true, &["10.0.2.1"]), pool("a", true, &["10.0.1.5-10.0.1.6"])];
    let mut taken = AddressSet::default();
    for expected in ["10.0.1.5", "10.0.1.6", "10.0.2.1"] {
        let given = allocate(&pools, &taken, ANY).expect("free");
        assert_eq!(given, ips(&[expected]));
        taken.insert(given[0]);
    }
    assert_eq!(reason(allocate(&pools, &taken, ANY)), NO_FREE_ADDRESS);
}

#[test]
fn a_resting_address_is_given_last_or_on_request() {
    let pools = [pool("a", true, &["10.0.1.5-10.0.1.6"]), pool("b", true, &["10.0.2.1"])];
    let resting = BTreeSet::from([ip("10.0.1.5"), ip("10.0.2.1")]);
    let mut taken = AddressSet::default();
    for expected in ["10.0.1.6", "10.0.1.5", "10.0.2.1"] {
        let given = allocate(&pools, &taken, Request { resting: &resting, ..ANY }).expect("free");
        assert_eq!(given, ips(&[expected]));
        taken.insert(given[0]);
    }
    for list in ["addresses", "current", "published"] {
        let own = ips(&["10.0.1.5"]);
        let pick = |name| if list == name { own.as_slice() } else { &[] };
        let request = Request {
            addresses: pick("addresses"),
            current: pick("current"),
            published: pick("published"),
            resting: &resting,
            ..ANY
        };
        assert_eq!(allocate(&pools, &AddressSet::default(), request).expect("free"), own, "{list}");
    }
}

#[test]
fn families_keep_their_order_and_all_are_required() {
    let pools = [pool("a", true, &["10.0.1.5", "fd00::5"])];
    let both = Request { families: &[Family::V6, Family::V4], ..ANY };
    assert_eq!(allocate(&pools, &AddressSet::default(), both).expect("free"), ips(&["fd00::5", "10.0.1.5"]));
    let only_v4 = [pool("a", true, &["10.0.1.5"])];
    assert_eq!(reason(allocate(&only_v4, &AddressSet::default(), both)), NO_FREE_ADDRESS);
}

#[test]
fn a_requested_address_is_given_or_refused_with_its_reason() {
    let pools = [pool("hidden", false, &["10.0.9.0/24"]), pool("open", true, &["10.0.1.0/24"])];
    let taken = AddressSet::from_iter([ip("10.0.1.7")]);
    let ask = |address: &str, pool: Option<&str>| {
        let addresses = ips(&[address]);
        allocate(&pools, &taken, Request { addresses: &addresses, pool, ..ANY })
    };
    assert_eq!(ask("10.0.1.9", None).expect("free"), ips(&["10.0.1.9"]));
    assert_eq!(ask("10.0.9.9", None).expect("a pool without autoAssign serves requests"), ips(&["10.0.9.9"]));
    assert_eq!(reason(ask("10.0.1.7", None)), ADDRESS_IN_USE);
    assert_eq!(reason(ask("10.7.0.1", None)), ADDRESS_OUTSIDE_POOLS);
    assert_eq!(reason(ask("10.0.1.9", Some("hidden"))), ADDRESS_OUTSIDE_POOLS);
    assert_eq!(reason(ask("10.0.1.9", Some("none"))), UNKNOWN_POOL);
    assert_eq!(reason(ask("fd00::1", None)), INVALID_ADDRESS);
    let two = ips(&["10.0.1.1", "10.0.1.2"]);
    assert_eq!(reason(allocate(&pools, &taken, Request { addresses: &two, ..ANY })), INVALID_ADDRESS);
    assert_eq!(reason(allocate(&[], &AddressSet::default(), ANY)), NO_ADDRESS_POOL);
}

#[test]
fn pool_without_auto_assign_requires_its_name() {
    let pools = [pool("hidden", false, &["10.0.9.1"])];
    assert_eq!(reason(allocate(&pools, &AddressSet::default(), ANY)), NO_FREE_ADDRESS);
    let named = Request { pool: Some("hidden"), ..ANY };
    assert_eq!(allocate(&pools, &AddressSet::default(), named).expect("free"), ips(&["10.0.9.1"]));
}

#[test]
fn existing_addresses_are_kept() {
    let pools = [pool("a", true, &["10.0.1.0/24"]), pool("b", false, &["10.0.2.0/24"])];
    let none = AddressSet::default();
    let (current, published) = (ips(&["10.0.7.7"]), ips(&["10.0.1.9"]));
    let both = Request { current: &current, published: &published, ..ANY };
    assert_eq!(allocate(&pools, &none, both).expect("kept"), current, "though its pool is gone");
    let lost = Request { published: &published, ..ANY };
    assert_eq!(
        allocate(&pools, &none, lost).expect("kept"),
        published,
        "the object is lost, the status is not"
    );
    let stale = ips(&["10.0.7.8"]);
    let outside = Request { published: &stale, ..ANY };
    assert_eq!(allocate(&pools, &none, outside).expect("new"), ips(&["10.0.1.1"]));
    let moved = Request { pool: Some("b"), current: &published, ..both };
    assert!(!is_unchanged(&pools, &none, moved));
    assert_eq!(allocate(&pools, &none, moved).expect("moved"), ips(&["10.0.2.1"]));
    let wanted = ips(&["10.0.1.44"]);
    let asked = Request { addresses: &wanted, ..both };
    assert_eq!(allocate(&pools, &none, asked).expect("moved"), wanted);
}

/// A restart of the controller compares everything: the address must be the same before and after.
#[test]
fn address_stays_when_the_named_pool_has_shrunk() {
    let pools = [pool("a", true, &["10.0.1.0/24"]), pool("b", true, &["10.0.2.0/24"])];
    let current = ips(&["10.0.7.7"]);
    let named = Request { pool: Some("a"), current: &current, published: &current, ..ANY };
    assert!(is_unchanged(&pools, &AddressSet::default(), named));
    assert_eq!(allocate(&pools, &AddressSet::default(), named).expect("kept"), current);
    let asked = Request { addresses: &current, ..named };
    assert_eq!(allocate(&pools, &AddressSet::default(), asked).expect("kept"), current);
    let with_v6 = Request { families: &[Family::V4, Family::V6], ..named };
    let v6 = [pool("a", true, &["10.0.1.0/24", "fd00::5"])];
    assert_eq!(allocate(&v6, &AddressSet::default(), with_v6).expect("kept"), ips(&["10.0.7.7", "fd00::5"]));
}

#[test]
fn address_of_another_load_balancer_in_an_edited_object_is_not_adopted() {
    let pools = [pool("a", true, &["10.0.1.0/24"])];
    let (edited, theirs) = (ips(&["10.0.1.2"]), AddressSet::from_iter([ip("10.0.1.2")]));
    // Also one that a shrunk pool no longer has.
    for published in [ips(&["10.0.1.9"]), ips(&["10.0.7.7"])] {
        for pool in [None, Some("a")] {
            let request = Request { current: &edited, published: &published, pool, ..ANY };
            assert!(!is_unchanged(&pools, &theirs, request));
            assert_eq!(allocate(&pools, &theirs, request).expect("restored"), published);
            let asked = Request { addresses: &published, ..request };
            assert_eq!(allocate(&pools, &theirs, asked).expect("restored"), published);
        }
    }
    // The other Service publishes the address, and keeps it.
    let owner = Request { current: &edited, published: &edited, ..ANY };
    assert!(is_unchanged(&pools, &theirs, owner));
    assert_eq!(allocate(&pools, &theirs, owner).expect("kept"), edited);
    // An address that is not published yet is no edit.
    let new = Request { current: &edited, ..ANY };
    assert!(is_unchanged(&pools, &AddressSet::default(), new));
}

#[test]
fn refusal_says_whether_an_address_is_kept() {
    let pools = [pool("a", true, &["10.0.1.7"])];
    let (taken, wanted, current) =
        (AddressSet::from_iter([ip("10.0.1.7")]), ips(&["10.0.1.7"]), ips(&["10.0.1.9"]));
    let refusals = [
        Request { addresses: &wanted, ..ANY },
        Request { pool: Some("none"), ..ANY },
        Request { families: &[Family::V4, Family::V6], ..ANY },
    ];
    for request in refusals {
        let text = |current| {
            let refused = allocate(&pools, &taken, Request { current, ..request });
            refused.expect_err("refused").to_string()
        };
        assert!(text(&[]).contains("No address is assigned."), "{}", text(&[]));
        assert!(text(&current).contains("The load balancer keeps 10.0.1.9."), "{}", text(&current));
    }
}

/// A step in the life of a few load balancers.
#[derive(Clone, Debug)]
enum Step {
    Ensure { who: u8, v6: bool, ask: Option<u8>, named: bool },
    Delete { who: u8 },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0u8..6, any::<bool>(), proptest::option::of(0u8..8), any::<bool>())
            .prop_map(|(who, v6, ask, named)| Step::Ensure { who, v6, ask, named }),
        1 => (0u8..6).prop_map(|who| Step::Delete { who }),
    ]
}

proptest! {
    #[test]
    fn addresses_are_unique_and_stable(steps in proptest::collection::vec(step(), 1..60)) {
        let pools = [
            pool("a", true, &["10.0.1.1-10.0.1.3", "fd00::1-fd00::3"]),
            pool("b", false, &["10.0.2.1-10.0.2.2", "fd01::1"]),
        ];
        let mut holders: BTreeMap<u8, Vec<IpAddr>> = BTreeMap::new();
        for step in steps {
            let (who, v6, ask, named) = match step {
                Step::Ensure { who, v6, ask, named } => (who, v6, ask, named),
                Step::Delete { who } => { holders.remove(&who); continue }
            };
            let families: &[Family] = if v6 { &[Family::V4, Family::V6] } else { V4 };
            let addresses: Vec<IpAddr> = ask.map(|n| ip(&format!("10.0.1.{n}"))).into_iter().collect();
            let current = holders.get(&who).cloned().unwrap_or_default();
            let taken: AddressSet =
                holders.iter().filter(|(holder, _)| **holder != who).flat_map(|(_, list)| list.clone()).collect();
            let pool = named.then_some("b");
            let request = Request { families, addresses: &addresses, pool, current: &current, ..ANY };
            let given = allocate(&pools, &taken, request);
            let repeated = allocate(&pools, &taken, request);
            prop_assert_eq!(given.as_ref().ok(), repeated.as_ref().ok(), "deterministic");
            if is_unchanged(&pools, &taken, request) {
                prop_assert_eq!(given.as_ref().ok(), Some(&current), "the short cut gives what the long way does");
            }
            if let Ok(given) = given {
                prop_assert_eq!(given.iter().map(|a| Family::of(*a)).collect::<Vec<_>>(), families);
                for address in &given {
                    prop_assert!(!taken.contains(*address));
                    prop_assert!(pools.iter().any(|pool| pool.contains(*address)));
                }
                if addresses.is_empty() && pool.is_none() {
                    for old in current.iter().filter(|a| families.contains(&Family::of(**a))) {
                        prop_assert!(given.contains(old), "{old} moved without need");
                    }
                }
                holders.insert(who, given);
                let all: Vec<IpAddr> = holders.values().flatten().copied().collect();
                prop_assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), all.len());
            }
        }
    }
}
