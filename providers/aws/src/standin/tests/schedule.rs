// SPDX-License-Identifier: Apache-2.0
//! Random schedules: what is wanted changes, calls fail, the provider restarts or a call is abandoned at any moment.
//!
//! A failure names its seed, and `STEERAGE_SEED` runs only that one. `STEERAGE_SEEDS` runs so many.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use clap::ValueEnum as _;
use steerage_model::{Affinity, Family, Key, Protocol};
use steerage_provider_api::{Compare, GroupKey, LoadBalancer, Owner, Provider as _};
use steerage_provider_cloud::marks;

use super::driver::{apply, delete, set, standin};
use super::peers::adopting;
use super::pods::with_pods;
use crate::annotations;
use crate::client::{NewBalancer, Tags};
use crate::config::{Peer, Scheme};
use crate::desired::tests::{config, planned, planned_with_pods};
use crate::ip_address_type::IpAddressType;
use crate::names;
use crate::source_nat::SourceNat;
use crate::standin::cloud::{Forward, Group, NetworkLb};
use crate::standin::faults::Faults;
use crate::standin::harness::pod_address;
use crate::standin::snapshot::snapshot;
use crate::standin::{Cloud, StandIn};

const SEEDS: u64 = 150;
const STEPS: usize = 8;
/// Time in which a state that a read may see has become the newest one.
const SETTLED: Duration = Duration::from_mins(1);

/// What is wanted of each Service; without a load balancer, it is deleted.
type Wishes = BTreeMap<Owner, Option<LoadBalancer>>;

fn owner(index: usize) -> Owner {
    Owner { service: Key::new("shop", format!("web-{}", index % 2)), uid: format!("uid-{index}") }
}

/// Annotations that a Service may have. Those of one name replace each other.
const OPTIONS: &[(&str, &str)] = &[
    (annotations::CROSS_ZONE, "true"),
    (annotations::ATTRIBUTES, "zonal_shift.config.enabled=true"),
    (annotations::ATTRIBUTES, "dns_record.client_routing_policy=availability_zone_affinity"),
    (
        annotations::GROUP_ATTRIBUTES,
        "load_balancing.cross_zone.enabled=true,deregistration_delay.timeout_seconds=60",
    ),
    (annotations::GROUP_ATTRIBUTES, "deregistration_delay.connection_termination.enabled=true"),
    (annotations::PROXY_PROTOCOL, "*"),
    (annotations::TAGS, "team=shop,stage=test"),
    (annotations::TAGS, "team=web"),
    (annotations::SSL_CERT, "arn:aws:acm:::a"),
    (annotations::SSL_CERT, "arn:aws:acm:::b,arn:aws:acm:::a,arn:aws:acm:::c"),
];

/// Security groups that a Service may name.
const GROUPS: [&str; 3] = ["sg-front", "name-office", "sg-office,name-front"];
/// Subnets that a Service names. No change of them replaces one in a zone.
const SUBNETS: [&str; 4] = ["subnet-a", "name-b", "subnet-b,subnet-a", "subnet-c,name-a"];

/// Source ranges that a Service may have.
const RANGES: [&str; 3] = ["10.0.0.0/8", "192.0.2.0/24", "198.51.100.0/24"];

/// Random ports, targets, source ranges and check of a Service.
fn wish(random: &mut fastrand::Rng, owner: &Owner) -> LoadBalancer {
    let port = |random: &mut fastrand::Rng| {
        let protocol = if random.bool() { Protocol::Tcp } else { Protocol::Udp };
        (protocol, random.u16(80..83), random.u16(30000..30003))
    };
    let mut ports: Vec<_> = (0..random.usize(1..4)).map(|_| port(random)).collect();
    ports.sort_by_key(|port| port.1);
    ports.dedup_by_key(|port| port.1);
    let targets: Vec<usize> = (0..6).filter(|_| random.u8(0..3) == 0).collect();
    let mut lb = if random.u8(0..3) == 0 {
        // Without a pod, a change from nodes would never be complete.
        let pods = if targets.is_empty() { vec![0] } else { targets };
        let mut lb = with_pods(&planned_with_pods(&ports), &pods);
        // Pods of a UDP port need another port for their check.
        lb.annotations.insert(annotations::CHECK_PORT.to_owned(), "9000".to_owned());
        lb
    } else {
        planned(&ports).with_nodes(set(&targets))
    };
    lb.owner = owner.clone();
    if lb.groups.iter().all(|group| !matches!(group.key, GroupKey::Pods(_))) {
        lb.families = families(random, &lb);
    }
    let port = random.u16(32000..32002);
    let affinity = random.bool().then_some(Affinity { timeout: Duration::from_mins(1) });
    for group in &mut lb.groups {
        group.health_check.port = group.health_check.port.map(|_| port);
        group.affinity = affinity;
    }
    if random.u8(0..3) == 0 {
        let (first, count) = (random.usize(0..RANGES.len()), random.usize(1..3));
        let chosen = RANGES.iter().cycle().skip(first).take(count);
        lb.source_ranges = chosen.map(|range| range.parse().unwrap()).collect();
    }
    if lb.source_ranges.is_empty() && random.u8(0..3) == 0 {
        let named = GROUPS[random.usize(0..GROUPS.len())];
        lb.annotations.insert(annotations::SECURITY_GROUPS.to_owned(), named.to_owned());
    }
    // Without the annotation, a load balancer keeps zones that a new one would not have.
    let subnets = SUBNETS[random.usize(0..SUBNETS.len())];
    lb.annotations.insert(annotations::SUBNETS.to_owned(), subnets.to_owned());
    for (name, value) in OPTIONS {
        if random.u8(0..4) == 0 {
            lb.annotations.insert((*name).to_owned(), (*value).to_owned());
        }
    }
    lb
}

/// IP families that a Service may have. With UDP and both, IPv6 is first. That the first one changes takes a detour over another type of
/// Service.
fn families(random: &mut fastrand::Rng, lb: &LoadBalancer) -> Vec<Family> {
    use Family::{V4, V6};
    match random.u8(0..6) {
        0 => vec![V6],
        1 => vec![V6, V4],
        2 if lb.listeners.iter().all(|listener| listener.protocol == Protocol::Tcp) => vec![V4, V6],
        _ => vec![V4],
    }
}

/// A load balancer of others with a listener, under the prefix of this cluster's names; and what annotations name.
fn plant_foreign(cloud: &StandIn) {
    super::named_groups::plant(cloud, 80..=82);
    super::zones::plant(cloud);
    cloud.change(|cloud| {
        let name = format!("{}other", names::prefix(&config().cluster));
        let arn = cloud.arn("loadbalancer/net", &name);
        let created = tokio::time::Instant::now();
        let tags = Tags::from([("team".to_owned(), "other".to_owned())]);
        let (subnets, security_groups) = (Vec::new(), BTreeSet::new());
        let made = NewBalancer {
            name,
            ip_address_type: IpAddressType::Ipv4,
            source_nat: SourceNat::Off,
            scheme: Scheme::Internal,
            subnets,
            security_groups,
        };
        let other = NetworkLb::new(made, tags.clone(), created);
        cloud.balancers.insert(arn.clone(), other);
        let forward = Forward {
            balancer: arn,
            port: 80,
            protocol: "TCP".to_owned(),
            group: String::new(),
            tags,
            tls: None,
        };
        let arn = cloud.arn("listener/net", "other");
        cloud.listeners.insert(arn, forward);
    });
}

/// Whether a group had only pods that are no targets of any group any more. Their addresses may be other pods' by now.
fn had_only_ended(wishes: &Wishes, forward: &Forward, before: &Cloud) -> bool {
    let wish = wishes.iter().find(|(owner, _)| Some(&owner.uid) == forward.tags.get(marks::UID));
    let pods = wish.and_then(|(_, lb)| lb.as_ref()).map(|lb| lb.targets().pods).unwrap_or_default();
    let addresses: BTreeSet<String> =
        pods.values().flat_map(|pods| pods.iter().map(|pod| pod.address.ip().to_string())).collect();
    let group = before.groups.get(&forward.group).filter(|group| group.has_pods);
    group.is_some_and(|group| !addresses.is_empty() && group.registered().all(|id| !addresses.contains(id)))
}

/// A listener never comes to an empty group while targets are wanted, except where a change of the group waits and its pods ended.
fn never_empties(wishes: &Wishes, before: &Cloud, after: &Cloud) -> Option<String> {
    let wants_targets = |tags: &Tags| {
        let wish = wishes.iter().find(|(owner, _)| Some(&owner.uid) == tags.get(marks::UID));
        wish.and_then(|(_, lb)| lb.as_ref()).is_some_and(|lb| lb.targets().count() > 0)
    };
    let is_empty = |cloud: &Cloud, forward: &Forward| {
        cloud.groups.get(&forward.group).is_none_or(|group: &Group| group.registered().next().is_none())
    };
    let emptied = after.listeners.iter().find(|(arn, forward)| {
        wants_targets(&forward.tags)
            && is_empty(after, forward)
            && before.listeners.get(*arn).is_none_or(|was| {
                let was_ended = was.group == forward.group && had_only_ended(wishes, was, before);
                !is_empty(before, was) && !was_ended
            })
    });
    emptied.map(|(_, forward)| format!("port {} forwards to an empty group", forward.port))
}

/// Whether a rule lets somebody connect to the port of a load balancer.
fn admits(cloud: &Cloud, balancer: &str, protocol: &str, port: u16) -> bool {
    let ids = cloud.balancers.get(balancer).into_iter().flat_map(|found| &found.security_groups);
    let groups = ids.filter_map(|id| cloud.security_groups.get(id));
    let mut rules = groups.flat_map(|group| group.own.union(&group.others));
    rules.any(|rule| (rule.protocol, rule.port) == (protocol, port))
}

/// A listener never loses its last rule while its port is wanted.
fn closes_port(wishes: &Wishes, before: &Cloud, after: &Cloud) -> Option<String> {
    let is_wanted = |tags: &Tags, protocol: Protocol, port: u16| {
        let wish = wishes.iter().find(|(owner, _)| Some(&owner.uid) == tags.get(marks::UID));
        let listeners = wish.and_then(|(_, lb)| lb.as_ref()).map(|lb| &lb.listeners);
        listeners.into_iter().flatten().any(|wanted| (wanted.protocol, wanted.port) == (protocol, port))
    };
    let closed = |forward: &Forward| {
        let protocols: &[(Protocol, &str)] = match forward.protocol.as_str() {
            "UDP" => &[(Protocol::Udp, "udp")],
            "TCP_UDP" => &[(Protocol::Tcp, "tcp"), (Protocol::Udp, "udp")],
            _ => &[(Protocol::Tcp, "tcp")],
        };
        let (balancer, port) = (forward.balancer.as_str(), forward.port);
        let lost = protocols.iter().find(|(protocol, name)| {
            is_wanted(&forward.tags, *protocol, port)
                && admits(before, balancer, name, port)
                && !admits(after, balancer, name, port)
        });
        lost.map(|(_, name)| format!("port {port} has no rule for {name} any more"))
    };
    after.listeners.values().find_map(closed)
}

async fn run(seed: u64) -> anyhow::Result<()> {
    let mut random = fastrand::Rng::with_seed(seed);
    let cloud = standin(seed);
    plant_foreign(&cloud);
    tokio::time::sleep(SETTLED).await;
    let wishes = Arc::new(Mutex::new(Wishes::new()));
    let seen = Arc::clone(&wishes);
    cloud.set_invariant(Box::new(move |before, after| {
        let wishes = seen.lock().unwrap();
        never_empties(&wishes, before, after).or_else(|| closes_port(&wishes, before, after))
    }));
    cloud.set_faults(Faults::Random(0.07));
    // Whoever may adopt reads more at the start, and adopts nothing here.
    let peers: &[Peer] = if seed.is_multiple_of(2) { &[] } else { Peer::value_variants() };
    let provider = |cloud: &Arc<StandIn>| adopting(cloud, peers);
    let mut aws = provider(&cloud);
    for _ in 0..STEPS {
        let (sick, passes) = (random.usize(0..6), random.bool());
        let sick = if random.bool() { format!("i-{sick}") } else { pod_address(sick).to_string() };
        cloud.change(|cloud| {
            if let Some(instance) = cloud.instances.get_mut(&sick).filter(|found| found.passes.0 != passes) {
                instance.passes = (passes, tokio::time::Instant::now());
            }
        });
        let index = random.usize(0..3);
        let owner = owner(index);
        let next = (random.u8(0..5) > 0).then(|| wish(&mut random, &owner));
        {
            let mut wishes = wishes.lock().unwrap();
            // A Service exists once by its name: a re-created one replaces that with another UID.
            if next.is_some() {
                let same = wishes.iter_mut().filter(|(other, _)| other.service == owner.service);
                same.for_each(|(_, wish)| *wish = None);
            }
            wishes.insert(owner.clone(), next);
        }
        let limit = Duration::from_millis(random.u64(10..300_000));
        let now = wishes.lock().unwrap().clone();
        let compare = if random.bool() { Compare::Remembered } else { Compare::InPlace };
        let work = async {
            for (owner, wish) in &now {
                // The result does not matter: the schedule goes on.
                let _ = match wish {
                    Some(lb) => apply(&aws, lb, compare).await.map(drop),
                    None => delete(&aws, owner).await,
                };
            }
        };
        let is_cut = tokio::time::timeout(limit, work).await.is_err();
        if is_cut && random.bool() || random.u8(0..6) == 0 {
            // A process needs longer to start, and to get the lease, than AWS to show what the last one did.
            tokio::time::sleep(Duration::from_secs(5)).await;
            aws = provider(&cloud);
        }
    }
    cloud.set_faults(Faults::None);
    let wishes = wishes.lock().unwrap().clone();
    for compare in [Compare::Remembered, Compare::InPlace, Compare::InPlace] {
        for (owner, wish) in &wishes {
            match wish {
                Some(lb) => drop(apply(&aws, lb, compare).await.context("apply")?),
                None => delete(&aws, owner).await.context("delete")?,
            }
        }
        tokio::time::sleep(SETTLED).await;
    }
    let violations = cloud.violations();
    ensure!(violations.is_empty(), "{violations:?}");
    let clean = standin(seed);
    plant_foreign(&clean);
    tokio::time::sleep(SETTLED).await;
    let direct = provider(&clean);
    for lb in wishes.values().flatten() {
        apply(&direct, lb, Compare::InPlace).await.context("apply to an empty account")?;
    }
    let expected = snapshot(&clean.cloud());
    let result = snapshot(&cloud.cloud());
    let surplus: Vec<_> = result.iter().filter(|(name, is)| expected.get(*name) != Some(*is)).collect();
    let missing: Vec<_> = expected.iter().filter(|(name, is)| result.get(*name) != Some(*is)).collect();
    ensure!(surplus.is_empty() && missing.is_empty(), "{surplus:#?} instead of {missing:#?}");
    let owned: BTreeSet<Owner> = aws.owned().await.context("owned")?.into_iter().collect();
    let exist: BTreeSet<Owner> =
        wishes.into_iter().filter(|(_, wish)| wish.is_some()).map(|(owner, _)| owner).collect();
    ensure!(owned == exist, "owned() is {owned:?}, not {exist:?}");
    Ok(())
}

#[tokio::test(start_paused = true)]
async fn every_schedule_converges_and_empties_no_group() {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<u64>().unwrap());
    let all = 0..number("STEERAGE_SEEDS").unwrap_or(SEEDS);
    for seed in number("STEERAGE_SEED").map_or(all, |seed| seed..seed + 1) {
        run(seed).await.with_context(|| format!("replay with STEERAGE_SEED={seed}")).unwrap();
    }
}
