// SPDX-License-Identifier: Apache-2.0
//! How many addresses a namespace may have, and when a released one is given to another Service.

use super::*;
use crate::{ADDRESS_HELD, ADDRESS_IN_USE, ADDRESS_LIMIT_REACHED, NO_FREE_ADDRESS};

fn pools(change: impl FnOnce(&mut AddressPoolSpec)) -> Vec<Pool> {
    let addresses = vec!["10.9.0.1-10.9.0.4".to_owned(), "fd00::1-fd00::4".to_owned()];
    let mut spec = AddressPoolSpec { addresses, ..AddressPoolSpec::default() };
    change(&mut spec);
    vec![Pool::new("default", &spec)]
}

fn of_namespace(namespace: &str, name: &str) -> LoadBalancer {
    let of = Owner { service: Key::new(namespace, name), uid: format!("{namespace}-{name}") };
    LoadBalancer { owner: of, ..load_balancer(name, &[]) }
}

/// An allocation that reserves, so that nothing has to be written.
fn get(allocation: &mut Allocation, lb: &LoadBalancer, pools: &[Pool]) -> Result<Vec<IpAddr>, &'static str> {
    let (index, current) = (Index::default(), AssignedAddresses::default());
    allocation.allocate(lb, current, pools, None, &index).map_err(|error| error.reason())
}

#[test]
fn a_namespace_gets_no_more_addresses_than_the_pool_permits() {
    let limited = |most| pools(|spec| spec.max_addresses_per_namespace = Some(most));
    let (mut allocation, two) = (Allocation::default(), limited(2));
    for (name, address) in [("a", "10.9.0.1"), ("b", "10.9.0.2")] {
        assert_eq!(get(&mut allocation, &of_namespace("shop", name), &two), Ok(vec![ip(address)]));
    }
    let third = of_namespace("shop", "c");
    assert_eq!(get(&mut allocation, &third, &two), Err(ADDRESS_LIMIT_REACHED));
    let named = LoadBalancer { requested_addresses: vec![ip("10.9.0.4")], ..third.clone() };
    assert_eq!(get(&mut allocation, &named, &two), Err(ADDRESS_LIMIT_REACHED));
    let v6 = LoadBalancer { families: vec![Family::V6], ..of_namespace("shop", "d") };
    assert_eq!(get(&mut allocation, &v6, &two), Ok(vec![ip("fd00::1")]), "each family has its own");
    assert_eq!(get(&mut allocation, &of_namespace("bank", "a"), &two), Ok(vec![ip("10.9.0.3")]));
    // Another pool has none.
    let open = AddressPoolSpec { addresses: vec!["10.8.0.1".to_owned()], ..AddressPoolSpec::default() };
    let both = [two.clone(), vec![Pool::new("open", &open)]].concat();
    assert_eq!(get(&mut allocation, &third, &both), Ok(vec![ip("10.8.0.1")]));
    // One that is there stays when the limit is lowered, and may request another one in its place.
    let one = limited(1);
    let mut index = Index::default();
    for (name, n) in [("a", 1), ("b", 2)] {
        index.change(None, Some(&object(name, &[[10, 9, 0, n].into()])));
    }
    let again = |name: &str, requested: &[&str], pools: &[Pool]| {
        let own = [IpAddr::from([10, 9, 0, if name == "a" { 1 } else { 2 }])];
        let lb = LoadBalancer { published: own.to_vec(), ..load_balancer(name, requested) };
        Allocation::default().allocate(&lb, held(&own), pools, None, &index).map_err(|error| error.reason())
    };
    assert_eq!(again("a", &[], &one), Ok(vec![ip("10.9.0.1")]));
    assert_eq!(again("b", &[], &one), Ok(vec![ip("10.9.0.2")]));
    assert_eq!(again("b", &["10.9.0.4"], &one), Err(ADDRESS_LIMIT_REACHED));
    assert_eq!(again("b", &["10.9.0.4"], &two), Ok(vec![ip("10.9.0.4")]), "it leaves the other one");
}

#[test]
fn refusal_says_what_to_do_and_ends_when_an_address_of_the_namespace_is_free() {
    let one = pools(|spec| spec.max_addresses_per_namespace = Some(1));
    let (mut allocation, index) = (Allocation::default(), Index::default());
    let (first, second) = (of_namespace("shop", "a"), of_namespace("shop", "b"));
    assert!(get(&mut allocation, &first, &one).is_ok());
    let refused =
        allocation.allocate(&second, AssignedAddresses::default(), &one, None, &index).expect_err("refused");
    let text = refused.to_string();
    assert!(
        text.contains("Services of namespace shop have 1 IPv4 addresses of AddressPool `default`"),
        "{text}"
    );
    assert!(text.contains("No address is assigned. Delete Services"), "{text}");
    let tries = allocation.end_reservation(&spec::object_name(&first.owner)).expect("reserved");
    let woken = allocation.release(
        Some(&first.owner.service),
        &tries[0],
        &AssignedAddresses::default(),
        &one,
        &index,
    );
    assert_eq!(woken.as_slice(), std::slice::from_ref(&second.owner));
    assert!(get(&mut allocation, &second, &one).is_ok());
}

/// As on a name server or in a client's memory, the address is still that of the last Service.
#[tokio::test(start_paused = true)]
async fn released_address_is_kept_for_the_service_that_had_it() {
    let delayed = pools(|spec| {
        spec.addresses = vec!["10.9.0.1-10.9.0.2".to_owned()];
        spec.reuse_delay_seconds = Some(300);
    });
    let (mut allocation, index) = (Allocation::default(), Index::default());
    let first = of_namespace("shop", "a");
    assert_eq!(get(&mut allocation, &first, &delayed), Ok(vec![ip("10.9.0.1")]));
    let release = |allocation: &mut Allocation, lb: &LoadBalancer| {
        let tries = allocation.end_reservation(&spec::object_name(&lb.owner)).expect("reserved");
        allocation.release(
            Some(&lb.owner.service),
            &tries[0],
            &AssignedAddresses::default(),
            &delayed,
            &index,
        )
    };
    release(&mut allocation, &first);
    assert_eq!(allocation.held_by(&delayed[0], &index).len(), 1);
    assert_eq!(get(&mut allocation, &of_namespace("shop", "b"), &delayed), Ok(vec![ip("10.9.0.2")]));
    let late = of_namespace("shop", "c");
    assert_eq!(get(&mut allocation, &late, &delayed), Err(NO_FREE_ADDRESS), "though it is free");
    let named = LoadBalancer { requested_addresses: vec![ip("10.9.0.1")], ..late.clone() };
    assert_eq!(get(&mut allocation, &named, &delayed), Err(ADDRESS_HELD));
    let in_use = LoadBalancer { requested_addresses: vec![ip("10.9.0.2")], ..late.clone() };
    assert_eq!(get(&mut allocation, &in_use, &delayed), Err(ADDRESS_IN_USE));
    let published = LoadBalancer { published: vec![ip("10.9.0.1")], ..late.clone() };
    assert_eq!(get(&mut allocation, &published, &delayed), Err(NO_FREE_ADDRESS), "a status proves nothing");
    // The Service is created again.
    let again = LoadBalancer { owner: Owner { uid: "again".to_owned(), ..first.owner.clone() }, ..first };
    assert_eq!(get(&mut allocation, &again, &delayed), Ok(vec![ip("10.9.0.1")]));
    assert_eq!((allocation.held_by(&delayed[0], &index).len(), allocation.next_free(&delayed)), (0, None));
    release(&mut allocation, &again);
    assert_eq!(get(&mut allocation, &late, &delayed), Err(NO_FREE_ADDRESS));
    tokio::time::advance(Duration::from_secs(299)).await;
    assert_eq!(allocation.end_delays(&delayed), []);
    assert_eq!(allocation.next_free(&delayed), Some(Duration::from_secs(1)));
    tokio::time::advance(Duration::from_secs(1)).await;
    // A look at addresses in between must not keep it from being told.
    assert_eq!(get(&mut allocation, &in_use, &delayed), Err(ADDRESS_IN_USE));
    let waiting = of_namespace("shop", "d");
    allocation.waiting.clear();
    assert!(get(&mut allocation, &waiting, &delayed).is_ok(), "it is free");
    allocation.end_reservation(&spec::object_name(&waiting.owner));
}

#[tokio::test(start_paused = true)]
async fn who_waits_for_a_kept_address_is_woken_when_it_is_free() {
    let delayed = |seconds| {
        pools(|spec| {
            spec.addresses = vec!["10.9.0.1".to_owned()];
            spec.reuse_delay_seconds = Some(seconds);
        })
    };
    let (mut allocation, index, short) = (Allocation::default(), Index::default(), delayed(90));
    let record = ReleasedAddress {
        address: ip("10.9.0.1"),
        released_at_seconds: i64::MAX,
        namespace: "shop".to_owned(),
        name: "gone".to_owned(),
    };
    allocation.restore([record.clone()], &index);
    let late = of_namespace("shop", "late");
    assert_eq!(get(&mut allocation, &late, &short), Err(NO_FREE_ADDRESS), "a clock that was wrong");
    tokio::time::advance(Duration::from_secs(90)).await;
    assert_eq!(
        get(&mut allocation, &load_balancer("x", &["10.7.0.1"]), &short),
        Err(crate::ADDRESS_OUTSIDE_POOLS)
    );
    assert_eq!(allocation.end_delays(&short).as_slice(), std::slice::from_ref(&late.owner));
    assert_eq!(allocation.end_delays(&short), []);
    assert_eq!(get(&mut allocation, &late, &short), Ok(vec![ip("10.9.0.1")]));
    // Without a delay nothing is kept, and the address is given because no other is free.
    let mut none = Allocation::default();
    none.restore([record], &index);
    assert_eq!(get(&mut none, &late, &delayed(0)), Ok(vec![ip("10.9.0.1")]));
}
