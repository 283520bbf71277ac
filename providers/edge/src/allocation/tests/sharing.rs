// SPDX-License-Identifier: Apache-2.0
//! Addresses of several load balancers, over a world of objects.

use proptest::prelude::*;
use steerage_edge_api::AddressSharing;
use steerage_model::Protocol;
use steerage_model::annotations::ADDRESS_SHARING_KEY;
use steerage_provider_api::{GroupKey, Listener};
use steerage_provider_cloud::reasons::PORT_IN_USE;

use super::*;
use crate::ADDRESS_IN_USE;

/// Its namespace and name, and what it asks for.
#[derive(Clone, Debug)]
struct Asked {
    namespace: &'static str,
    name: &'static str,
    key: Option<&'static str>,
    ports: Vec<u16>,
    addresses: Vec<IpAddr>,
}

fn asked(name: &'static str, key: Option<&'static str>, ports: &[u16]) -> Asked {
    Asked { namespace: "shop", name, key, ports: ports.to_vec(), addresses: Vec::new() }
}

impl Asked {
    fn owner(&self) -> Owner {
        Owner {
            service: Key::new(self.namespace, self.name),
            uid: format!("{}-{}", self.namespace, self.name),
        }
    }

    fn load_balancer(&self) -> LoadBalancer {
        let listener = |port: &u16| Listener {
            name: String::new(),
            protocol: Protocol::Tcp,
            port: *port,
            group: GroupKey::Vip,
        };
        let key = self.key.map(|key| (ADDRESS_SHARING_KEY.to_owned(), key.to_owned()));
        LoadBalancer {
            owner: self.owner(),
            listeners: self.ports.iter().map(listener).collect(),
            requested_addresses: self.addresses.clone(),
            annotations: key.into_iter().collect(),
            ..load_balancer(self.name, &[])
        }
    }
}

/// All that was written, and what the provider remembers.
struct World {
    allocation: Allocation,
    index: Index,
    objects: BTreeMap<String, Entry<LoadBalancerContent>>,
    pools: [Pool; 1],
}

impl World {
    fn new(sharing: AddressSharing) -> Self {
        let addresses = vec!["10.9.0.1-10.9.0.9".to_owned()];
        let spec = AddressPoolSpec { addresses, sharing, ..AddressPoolSpec::default() };
        let pools = [Pool::new("default", &spec)];
        let (allocation, index) = (Allocation::default(), Index::default());
        Self { allocation, index, objects: BTreeMap::new(), pools }
    }

    /// Allocates, and writes nothing yet.
    fn begin(&mut self, asked: &Asked) -> Result<Vec<IpAddr>, Error> {
        let mut lb = asked.load_balancer();
        let current =
            self.objects.get(&spec::object_name(&lb.owner)).map(AssignedAddresses::of).unwrap_or_default();
        lb.published.clone_from(&current.addresses);
        self.allocation.allocate(&lb, current, &self.pools, None, &self.index)
    }

    /// Allocates and writes; returns the address, or the reason of a refusal.
    fn apply(&mut self, asked: &Asked) -> Result<IpAddr, &'static str> {
        let addresses = self.begin(asked).map_err(|error| error.reason())?;
        let listeners: Vec<_> =
            asked.ports.iter().map(|port| json!({"protocol": "TCP", "port": port})).collect();
        let service = json!({"namespace": asked.namespace});
        let spec = json!({"service": service, "addresses": addresses, "sharingKey": asked.key, "listeners": listeners});
        let owner = asked.owner();
        let name = spec::object_name(&owner);
        let new = Entry {
            name: name.clone(),
            owner: Some(owner),
            content: Err(json!({"spec": spec})),
            ..object("", &[])
        };
        self.write(&name, Some(new));
        self.allocation.end_reservation(&name);
        Ok(addresses[0])
    }

    /// Returns who is woken.
    fn write(&mut self, name: &str, new: Option<Entry<LoadBalancerContent>>) -> Vec<Owner> {
        let old = self.objects.remove(name);
        self.index.change(old.as_ref(), new.as_ref());
        let held = |entry: Option<&Entry<_>>| entry.map(AssignedAddresses::of).unwrap_or_default();
        let (before, now) = (held(old.as_ref()), held(new.as_ref()));
        let service = old.as_ref().and_then(|old| old.owner.as_ref()).map(|owner| owner.service.clone());
        if let Some(new) = new {
            self.objects.insert(name.to_owned(), new);
        }
        self.allocation.release(service.as_ref(), &before, &now, &self.pools, &self.index)
    }

    fn delete(&mut self, asked: &Asked) -> Vec<Owner> {
        let owner = asked.owner();
        self.allocation.forget(&owner);
        self.write(&spec::object_name(&owner), None)
    }

    fn message(&mut self, asked: &Asked) -> String {
        self.begin(asked).expect_err("refused").to_string()
    }
}

const FIRST: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 9, 0, 1));
const SECOND: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 9, 0, 2));

#[test]
fn services_with_one_key_and_different_ports_get_one_address() {
    let mut world = World::new(AddressSharing::Namespace);
    assert_eq!(world.apply(&asked("web", Some("k"), &[80])), Ok(FIRST));
    assert_eq!(world.apply(&asked("alone", None, &[25])), Ok(SECOND));
    assert_eq!(world.apply(&asked("mail", Some("k"), &[25, 587])), Ok(FIRST));
    assert_eq!(world.apply(&asked("other", Some("l"), &[53])), Ok(ip("10.9.0.3")));
    let named = Asked { addresses: vec![FIRST], ..asked("dns", Some("k"), &[53]) };
    assert_eq!(world.apply(&named), Ok(FIRST));
    let named = Asked { addresses: vec![SECOND], ..asked("ftp", Some("k"), &[21]) };
    assert_eq!(world.apply(&named), Err(ADDRESS_IN_USE), "the other one has no key");
    // A restart changes nothing.
    world.allocation = Allocation::default();
    assert_eq!(world.apply(&asked("mail", Some("k"), &[25, 587])), Ok(FIRST));
    assert_eq!(world.apply(&asked("web", Some("k"), &[80])), Ok(FIRST));
}

#[test]
fn port_of_another_service_is_refused_until_it_is_free() {
    let mut world = World::new(AddressSharing::Namespace);
    let (web, late) = (asked("web", Some("k"), &[80, 443]), asked("late", Some("k"), &[443]));
    assert_eq!(world.apply(&web), Ok(FIRST));
    assert_eq!(world.apply(&late), Err(PORT_IN_USE));
    let message = world.message(&late);
    assert!(message.contains("Port TCP 443 of address 10.9.0.1 belongs to another Service"), "{message}");
    assert!(message.contains("No address is assigned.") && !message.contains("web"), "{message}");
    let named = Asked { addresses: vec![FIRST], ..late.clone() };
    assert_eq!(world.apply(&named), Err(PORT_IN_USE));
    // The port is free, and the address stays.
    let addresses =
        json!({"addresses": [FIRST], "sharingKey": "k", "listeners": [{"protocol": "TCP", "port": 80}]});
    let fewer = Entry {
        name: spec::object_name(&web.owner()),
        owner: Some(web.owner()),
        content: Err(json!({"spec": addresses})),
        ..object("", &[])
    };
    assert_eq!(world.write(&spec::object_name(&web.owner()), Some(fewer)), [late.owner()]);
    assert_eq!(world.apply(&late), Ok(FIRST));
    let third = asked("third", Some("k"), &[80]);
    assert_eq!(world.apply(&third), Err(PORT_IN_USE));
    assert_eq!(world.delete(&web), [third.owner()]);
    assert_eq!(world.apply(&third), Ok(FIRST));
}

/// The key is no secret.
#[test]
fn services_of_other_namespaces_share_only_where_the_pool_says_so() {
    let elsewhere = Asked { namespace: "bank", ..asked("web", Some("k"), &[443]) };
    let mut world = World::new(AddressSharing::Namespace);
    assert_eq!(world.apply(&asked("web", Some("k"), &[80])), Ok(FIRST));
    assert_eq!(world.apply(&elsewhere), Ok(SECOND));
    let named = Asked { addresses: vec![FIRST], namespace: "evil", ..asked("x", Some("k"), &[22]) };
    assert_eq!(world.apply(&named), Err(ADDRESS_IN_USE));
    assert!(!world.message(&named).contains("shop"));

    let mut world = World::new(AddressSharing::Cluster);
    assert_eq!(world.apply(&asked("web", Some("k"), &[80])), Ok(FIRST));
    assert_eq!(world.apply(&elsewhere), Ok(FIRST));
    // The operator thinks again: those that share keep what they have, and others do not join.
    world.pools = World::new(AddressSharing::Namespace).pools;
    world.allocation = Allocation::default();
    assert_eq!(world.apply(&elsewhere), Ok(FIRST));
    assert_eq!(world.apply(&asked("web", Some("k"), &[80, 81])), Ok(FIRST));
    assert_eq!(world.apply(&Asked { namespace: "late", ..asked("web", Some("k"), &[22]) }), Ok(SECOND));
}

#[test]
fn change_that_no_longer_fits_is_refused_and_costs_nobody_the_address() {
    let mut world = World::new(AddressSharing::Namespace);
    let (web, mail) = (asked("web", Some("k"), &[80]), asked("mail", Some("k"), &[25]));
    assert_eq!(world.apply(&web), Ok(FIRST));
    assert_eq!(world.apply(&Asked { key: Some("alone"), ..web.clone() }), Ok(FIRST), "nobody shares it");
    assert_eq!(world.apply(&web), Ok(FIRST));
    assert_eq!(world.apply(&mail), Ok(FIRST));
    for (changed, reason, text) in [
        (Asked { key: None, ..mail.clone() }, ADDRESS_IN_USE, "Other Services share address 10.9.0.1"),
        (Asked { key: Some("l"), ..mail.clone() }, ADDRESS_IN_USE, "Restore the annotation"),
        (Asked { ports: vec![25, 80], ..mail.clone() }, PORT_IN_USE, "The load balancer keeps 10.9.0.1."),
        (Asked { key: None, addresses: vec![FIRST], ..mail.clone() }, ADDRESS_IN_USE, "keeps 10.9.0.1."),
    ] {
        assert_eq!(world.apply(&changed), Err(reason), "{changed:?}");
        let message = world.message(&changed);
        assert!(message.contains(text), "{message}");
        assert_eq!(world.apply(&web), Ok(FIRST));
    }
    assert_eq!(world.apply(&mail), Ok(FIRST));
    let moved = Asked { key: None, addresses: vec![SECOND], ..mail };
    assert_eq!(world.apply(&moved), Ok(SECOND));
    assert_eq!(world.apply(&Asked { key: None, ..web }), Ok(FIRST));
}

/// The objects of both are not written yet.
#[test]
fn what_is_about_to_be_written_counts() {
    let mut world = World::new(AddressSharing::Namespace);
    assert_eq!(world.begin(&asked("web", Some("k"), &[80])).expect("free"), [FIRST]);
    assert_eq!(world.begin(&asked("mail", Some("k"), &[25])).expect("shared"), [FIRST]);
    assert_eq!(world.begin(&asked("late", Some("k"), &[25])).expect_err("in use").reason(), PORT_IN_USE);
    assert_eq!(world.begin(&asked("alone", None, &[25])).expect("free"), [SECOND]);
    // Both write; then one adds a port, and its answer is not there yet.
    let mut world = World::new(AddressSharing::Namespace);
    let (web, mail) = (asked("web", Some("k"), &[80]), asked("mail", Some("k"), &[25]));
    assert_eq!((world.apply(&web), world.apply(&mail)), (Ok(FIRST), Ok(FIRST)));
    let more = |of: &Asked, port| Asked { ports: vec![of.ports[0], port], ..of.clone() };
    assert_eq!(world.begin(&more(&web, 443)).expect("free"), [FIRST]);
    assert_eq!(world.apply(&more(&mail, 443)), Err(PORT_IN_USE));
    assert_eq!(world.apply(&asked("late", Some("k"), &[443])), Err(PORT_IN_USE));
    // It drops its key while another one comes.
    let mut world = World::new(AddressSharing::Namespace);
    assert_eq!(world.apply(&web), Ok(FIRST));
    assert_eq!(world.begin(&Asked { key: None, ..web.clone() }).expect("its own"), [FIRST]);
    assert_eq!(world.apply(&mail), Ok(SECOND));
}

#[tokio::test(start_paused = true)]
async fn shared_address_rests_when_nobody_has_it_any_more() {
    let mut world = World::new(AddressSharing::Namespace);
    let (web, mail) = (asked("web", Some("k"), &[80]), asked("mail", Some("k"), &[25]));
    assert_eq!((world.apply(&web), world.apply(&mail)), (Ok(FIRST), Ok(FIRST)));
    world.delete(&web);
    assert_eq!(world.apply(&mail), Ok(FIRST));
    assert_eq!(world.apply(&asked("new", Some("k"), &[80])), Ok(FIRST), "it does not rest");
    world.delete(&mail);
    world.delete(&asked("new", Some("k"), &[80]));
    assert_eq!(world.apply(&asked("alone", None, &[80])), Ok(SECOND));
}

/// Both publish the address, as intended.
#[tokio::test(start_paused = true)]
async fn shared_address_is_no_duplicate() {
    let mut world = World::new(AddressSharing::Namespace);
    let all = [asked("a", Some("k"), &[80]), asked("b", Some("k"), &[25]), asked("c", Some("k"), &[53])];
    for _ in 0..3 {
        for one in &all {
            assert_eq!(world.apply(one), Ok(FIRST));
            assert_eq!(world.allocation.disputed_for(&spec::object_name(&one.owner())), None);
        }
        tokio::time::advance(DUPLICATE_GRACE).await;
    }
    // Another program writes it into the object of one without the key, the last by name.
    let foreign = asked("z", None, &[99]);
    assert_eq!(world.apply(&foreign), Ok(SECOND));
    let name = spec::object_name(&foreign.owner());
    let mut edited = world.objects[&name].clone();
    edited.content = Err(json!({"spec": {"addresses": [FIRST]}}));
    world.write(&name, Some(edited));
    assert_eq!(world.apply(&foreign), Ok(FIRST), "its Service publishes it now");
    tokio::time::advance(DUPLICATE_GRACE).await;
    assert_eq!(world.apply(&foreign), Ok(SECOND));
    for one in &all {
        assert_eq!(world.apply(one), Ok(FIRST));
    }
}

#[derive(Clone, Debug)]
enum Step {
    Apply(Asked),
    Begin(Asked),
    Delete(Asked),
}

fn step() -> impl Strategy<Value = Step> {
    let asked = (
        prop::sample::select(vec!["shop", "bank"]),
        prop::sample::select(vec!["a", "b", "c", "d"]),
        prop::sample::select(vec![None, Some("k"), Some("l")]),
        prop::collection::btree_set(1..5_u16, 1..3),
        prop::option::weighted(0.3, 1..5_u8),
    )
        .prop_map(|(namespace, name, key, ports, address)| Asked {
            namespace,
            name,
            key,
            ports: ports.into_iter().collect(),
            addresses: address.map(|n| IpAddr::from([10, 9, 0, n])).into_iter().collect(),
        });
    prop_oneof![
        6 => asked.clone().prop_map(Step::Apply),
        1 => asked.clone().prop_map(Step::Begin),
        1 => asked.prop_map(Step::Delete),
    ]
}

proptest! {
    /// Whatever is written, no two load balancers have an address that they may not share, and nobody loses one without asking.
    #[test]
    fn nobody_gets_an_address_that_another_one_does_not_share(
        steps in prop::collection::vec(step(), 1..40),
        is_for_all in any::<bool>(),
    ) {
        let (sharing, scope) = if is_for_all {
            (AddressSharing::Cluster, Scope::Cluster)
        } else {
            (AddressSharing::Namespace, Scope::Namespace)
        };
        let mut world = World::new(sharing);
        for step in steps {
            match step {
                Step::Apply(asked) => {
                    let name = spec::object_name(&asked.owner());
                    let before = world.objects.get(&name).map(AssignedAddresses::of).unwrap_or_default().addresses;
                    if let Ok(address) = world.apply(&asked) && !before.is_empty() {
                        prop_assert!(before.contains(&address) || asked.addresses.contains(&address));
                    }
                }
                Step::Begin(asked) => drop(world.begin(&asked)),
                Step::Delete(asked) => drop(world.delete(&asked)),
            }
            let held: Vec<AssignedAddresses> = world.objects.values().map(AssignedAddresses::of).collect();
            for (i, one) in held.iter().enumerate() {
                for other in held.iter().skip(i + 1).filter(|other| other.addresses == one.addresses) {
                    let found = conflict(one.sharing.as_ref(), other.sharing.as_ref(), scope);
                    prop_assert_eq!(found, None, "{:?} {:?}", one, other);
                }
            }
        }
    }
}
