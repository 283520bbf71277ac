// SPDX-License-Identifier: Apache-2.0
//! Reservation, rest and waiting, over an index of objects.

use kube::Client;
use kube::client::Body;
use serde_json::json;
use steerage_edge_api::AddressPoolSpec;
use steerage_model::Key;

mod limits;
mod sharing;

use super::*;
use crate::entry::Entry;
use crate::objects::LoadBalancerContent;

pub(crate) fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

pub(crate) fn owner(name: &str) -> Owner {
    Owner { service: Key::new("shop", name), uid: name.to_owned() }
}

pub(crate) fn load_balancer(name: &str, requested: &[&str]) -> LoadBalancer {
    LoadBalancer {
        owner: owner(name),
        families: vec![Family::V4],
        listeners: Vec::new(),
        groups: Vec::new(),
        requested_addresses: requested.iter().map(|text| ip(text)).collect(),
        pool: None,
        published: Vec::new(),
        published_hostnames: Vec::new(),
        labels: std::sync::Arc::default(),
        source_ranges: Vec::new(),
        annotations: BTreeMap::new(),
    }
}

/// A client of an API server that cannot be reached, for what makes no call.
pub(crate) fn unreachable_client() -> Client {
    let service = tower::service_fn(|_: http::Request<Body>| async {
        Err::<http::Response<Body>, _>(std::io::Error::other("no call is made"))
    });
    Client::new(service, "default")
}

fn held(addresses: &[IpAddr]) -> AssignedAddresses {
    AssignedAddresses { addresses: addresses.to_vec(), sharing: None }
}

fn pools(range: &str) -> [Pool; 1] {
    [Pool::new(
        "default",
        &AddressPoolSpec { addresses: vec![range.to_owned()], ..AddressPoolSpec::default() },
    )]
}

/// The object of a load balancer with these addresses; this version cannot read the rest.
fn object(name: &str, addresses: &[IpAddr]) -> Entry<LoadBalancerContent> {
    Entry {
        name: spec::object_name(&owner(name)),
        uid: String::new(),
        version: String::new(),
        owner: Some(owner(name)),
        managed: true,
        deleting: false,
        content: Err(json!({"spec": {"addresses": addresses}})),
    }
}

#[test]
fn reserved_address_is_taken_until_the_reservation_ends() {
    let (mut allocation, index, pools) =
        (Allocation::default(), Index::default(), pools("10.9.0.1-10.9.0.2"));
    let get = |allocation: &mut Allocation, name| {
        allocation.allocate(&load_balancer(name, &[]), AssignedAddresses::default(), &pools, None, &index)
    };
    assert_eq!(get(&mut allocation, "a").expect("free"), [ip("10.9.0.1")]);
    assert_eq!(get(&mut allocation, "a").expect("its own"), [ip("10.9.0.1")]);
    assert_eq!(get(&mut allocation, "b").expect("free"), [ip("10.9.0.2")]);
    assert_eq!(get(&mut allocation, "c").expect_err("none is left").reason(), crate::NO_FREE_ADDRESS);
    let name = spec::object_name(&owner("a"));
    assert_eq!(allocation.end_reservation(&name), Some(vec![held(&[ip("10.9.0.1")])]));
    assert_eq!(allocation.end_reservation(&name), None);
    assert_eq!(
        allocation.release(None, &held(&[ip("10.9.0.1")]), &AssignedAddresses::default(), &pools, &index),
        [owner("c")]
    );
    assert_eq!(get(&mut allocation, "c").expect("no other is free"), [ip("10.9.0.1")]);
}

/// The answer to the first creation was lost, and the second try gets a lower address.
#[test]
fn addresses_of_all_tries_stay_reserved() {
    let (mut allocation, mut index, pools) = (Allocation::default(), Index::default(), pools("10.9.0.0/24"));
    index.change(None, Some(&object("z", &[ip("10.9.0.1")])));
    let get = |allocation: &mut Allocation, index: &Index, name| {
        allocation
            .allocate(&load_balancer(name, &[]), AssignedAddresses::default(), &pools, None, index)
            .expect("free")
    };
    assert_eq!(get(&mut allocation, &index, "a"), [ip("10.9.0.2")]);
    index.change(Some(&object("z", &[ip("10.9.0.1")])), None);
    assert_eq!(get(&mut allocation, &index, "a"), [ip("10.9.0.1")]);
    assert_eq!(get(&mut allocation, &index, "b"), [ip("10.9.0.3")], "a may have 10.9.0.2");
    let name = spec::object_name(&owner("a"));
    assert_eq!(
        allocation.end_reservation(&name),
        Some(vec![held(&[ip("10.9.0.2")]), held(&[ip("10.9.0.1")])])
    );
}

#[test]
fn address_of_an_object_is_taken() {
    let (mut allocation, mut index, pools) = (Allocation::default(), Index::default(), pools("10.9.0.0/24"));
    index.change(None, Some(&object("a", &[ip("10.9.0.1")])));
    let mut get = |name, requested: &[&str], current: &[IpAddr]| {
        allocation.allocate(&load_balancer(name, requested), held(current), &pools, None, &index)
    };
    assert_eq!(get("b", &[], &[]).expect("free"), [ip("10.9.0.2")]);
    assert_eq!(get("b", &["10.9.0.1"], &[]).expect_err("taken").reason(), crate::ADDRESS_IN_USE);
    assert_eq!(get("a", &["10.9.0.1"], &[ip("10.9.0.1")]).expect("its own"), [ip("10.9.0.1")]);
}

/// A creation whose answer was lost may still have an effect for a while. The address then rests.
#[tokio::test(start_paused = true)]
async fn times_pass() {
    let (mut allocation, index, pools) = (Allocation::default(), Index::default(), pools("10.9.0.0/24"));
    allocation
        .allocate(&load_balancer("a", &[]), AssignedAddresses::default(), &pools, None, &index)
        .expect("free");
    let name = spec::object_name(&owner("a"));
    assert!(allocation.unsettled(&name).is_some() && allocation.unsettled("lb-b").is_none());
    tokio::time::advance(LATEST_EFFECT).await;
    assert_eq!(allocation.unsettled(&name), None);
    let released = allocation.end_reservation(&name).expect("it was reserved");
    allocation.release(
        Some(&owner("a").service),
        &released[0],
        &AssignedAddresses::default(),
        &pools,
        &index,
    );
    let mut get = |name| {
        allocation.allocate(&load_balancer(name, &[]), AssignedAddresses::default(), &pools, None, &index)
    };
    assert_eq!(get("b").expect("free"), [ip("10.9.0.2")], "the nodes may still forward the other");
    let again =
        LoadBalancer { owner: Owner { uid: "again".to_owned(), ..owner("a") }, ..load_balancer("a", &[]) };
    let given = allocation.allocate(&again, AssignedAddresses::default(), &pools, None, &index);
    assert_eq!(given.expect("free"), [ip("10.9.0.1")], "they forward it to pods of the same Service");
    allocation.end_reservation(&spec::object_name(&again.owner));
    let mut get = |name| {
        allocation.allocate(&load_balancer(name, &[]), AssignedAddresses::default(), &pools, None, &index)
    };
    tokio::time::advance(REUSE_AVOIDANCE).await;
    assert_eq!(get("c").expect("free"), [ip("10.9.0.1")]);
}

/// Hundreds of Services may wait for addresses that stay in use.
#[test]
fn released_address_wakes_only_those_who_may_use_it() {
    let waiting = |addresses: &[&str], pool: Option<&str>| WaitingRequest {
        namespace: "default".to_owned(),
        namespace_labels: None,
        labels: Arc::default(),
        families: vec![Family::V4],
        addresses: addresses.iter().map(|text| ip(text)).collect(),
        pool: pool.map(str::to_owned),
        current: Vec::new(),
        key: None,
    };
    let mut allocation = Allocation::default();
    for (name, request) in [
        ("any", waiting(&[], None)),
        ("its-pool", waiting(&[], Some("default"))),
        ("this", waiting(&["10.9.0.7"], None)),
        ("another", waiting(&["10.9.0.8"], None)),
        ("other-pool", waiting(&[], Some("other"))),
        ("ipv6", WaitingRequest { families: vec![Family::V6], ..waiting(&[], None) }),
    ] {
        allocation.waiting.insert(owner(name), request);
    }
    let woken = allocation.release(
        None,
        &held(&[ip("10.9.0.7")]),
        &AssignedAddresses::default(),
        &pools("10.9.0.0/24"),
        &Index::default(),
    );
    assert_eq!(woken, ["any", "its-pool", "this"].map(owner));
    assert_eq!(allocation.take_waiting(), ["another", "ipv6", "other-pool"].map(owner), "the others wait on");
    assert_eq!(allocation.take_waiting(), []);
}

/// Two Services publish the same address: that of the second object by name is not served.
#[tokio::test(start_paused = true)]
async fn duplicate_address_stays_with_the_load_balancer_that_is_served() {
    let (mut allocation, mut index, pools) = (Allocation::default(), Index::default(), pools("10.9.0.0/24"));
    let address = ip("10.9.0.1");
    for name in ["a", "b"] {
        index.change(None, Some(&object(name, &[address])));
    }
    let mut get = |name, requested: &[&str]| {
        let lb = LoadBalancer { published: vec![address], ..load_balancer(name, requested) };
        allocation.allocate(&lb, held(&[address]), &pools, None, &index)
    };
    assert_eq!(get("b", &[]).expect("its own"), [address], "another program may have edited the first");
    tokio::time::advance(DUPLICATE_GRACE).await;
    assert_eq!(get("b", &[]).expect("its own"), [address], "the other one may not publish it");
    assert_eq!(get("a", &[]).expect("its own"), [address]);
    assert_eq!(get("b", &["10.9.0.1"]).expect_err("of another").reason(), crate::ADDRESS_IN_USE);
    assert_eq!(get("b", &[]).expect("another"), [ip("10.9.0.2")]);
}

/// Creating Services anew for years must not fill the memory.
#[tokio::test(start_paused = true)]
async fn deleted_load_balancer_disputes_no_address() {
    let (mut allocation, mut index, pools) = (Allocation::default(), Index::default(), pools("10.9.0.0/24"));
    let address = ip("10.9.0.1");
    for name in ["a", "b"] {
        index.change(None, Some(&object(name, &[address])));
        let lb = LoadBalancer { published: vec![address], ..load_balancer(name, &[]) };
        allocation.allocate(&lb, held(&[address]), &pools, None, &index).expect("its own");
    }
    assert_eq!(allocation.duplicates.len(), 1);
    allocation.forget(&owner("b"));
    assert!(allocation.duplicates.is_empty());
}

/// The first one was edited, and cannot be written for a while. Its Service publishes its own address.
#[tokio::test(start_paused = true)]
async fn address_stays_if_the_other_service_does_not_publish_it() {
    let (mut allocation, mut index, pools) = (Allocation::default(), Index::default(), pools("10.9.0.0/24"));
    let (address, other) = (ip("10.9.0.1"), ip("10.9.0.7"));
    for name in ["a", "b"] {
        index.change(None, Some(&object(name, &[address])));
    }
    for _ in 0..2 {
        for (name, published) in [("a", other), ("b", address)] {
            let lb = LoadBalancer { published: vec![published], ..load_balancer(name, &[]) };
            let given = allocation.allocate(&lb, held(&[address]), &pools, None, &index);
            assert_eq!(given.expect("its own"), [published]);
            assert_eq!(allocation.disputed_for(&spec::object_name(&lb.owner)), None);
        }
        tokio::time::advance(DUPLICATE_GRACE).await;
    }
}

/// The first one was edited, and has its own address again.
#[tokio::test(start_paused = true)]
async fn address_that_was_duplicate_for_a_moment_stays() {
    let (mut allocation, mut index, pools) = (Allocation::default(), Index::default(), pools("10.9.0.0/24"));
    let address = ip("10.9.0.1");
    index.change(None, Some(&object("b", &[address])));
    let edited = object("a", &[address]);
    let mut get = |index: &Index| {
        let lb = LoadBalancer { published: vec![address], ..load_balancer("b", &[]) };
        allocation.allocate(&lb, held(&[address]), &pools, None, index).expect("its own")
    };
    for _ in 0..2 {
        index.change(None, Some(&edited));
        assert_eq!(get(&index), [address]);
        index.change(Some(&edited), None);
        tokio::time::advance(DUPLICATE_GRACE).await;
        assert_eq!(get(&index), [address]);
    }
}
