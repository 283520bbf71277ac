// SPDX-License-Identifier: Apache-2.0
//! What must hold in every world: checked at each change of the cloud or of a Service, and at the end.
//!
//! - At most one writer: only the holder of the Lease changes anything.
//! - No load balancer is deleted while its Service exists.
//! - Nothing of somebody else is changed or deleted.
//! - A load balancer with targets never loses all of them while an endpoint is usable.
//! - The same for each listener of a vendor's cloud; and no listener is deleted whose port its Service has had for some time.
//! - Mass removals from a shared set are held: see [`super::removals`].
//! - Calls are bounded by what happened, and in a quiet world by the comparisons alone.
//! - At the end, no source may connect that its Service does not admit, also if that is refused.
//! - At the end, every Service has what a fresh plan of the true cluster wants, nothing else is left at the cloud, no finalizer is
//!   stuck, and nothing is written any more.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use ipnet::IpNet;
use serde_json::Value;
use steerage_edge_api::EdgeLoadBalancerSpec;
use steerage_model::{Key, Service, annotations, names};
use steerage_provider_api::{LoadBalancer, Owner};
use steerage_provider_conformance::Snapshot as CloudSnapshot;
use steerage_provider_edge::spec;
use steerage_watch::{Backoff, EndpointSlices, Event, Kind as _, Nodes, Services};
use tokio::time::Duration;

use super::chaos::{FOREIGN, POOL_SIZE};
use super::cloud::{self, UNSUPPORTED};
use super::objects::{self, Resource};
use super::process::{self, LEASE, NAMESPACE};
use super::removals::{self, SharedSets};
use super::watch_stream::MAX_LAG;
use super::world::{ProcessId, ProviderKind, SharedWorld, World};
use crate::cluster_index::{ClusterIndex, Snapshot, owner_of};
use crate::plan::{self, ManagedClasses};
use crate::request_queue::RequestQueue;

/// The targets of a load balancer, as far as the invariants are concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Targets {
    None,
    Some,
    /// Somebody changed them by hand.
    Changed,
}

/// The load balancers at one moment, by owner.
pub(super) struct LoadBalancers(BTreeMap<Owner, Targets>, SharedSets, OfVendor);

/// What is in a vendor's cloud: the targets of each listener, and what others made.
#[derive(Default)]
struct OfVendor {
    listeners: BTreeMap<(Owner, u16), Targets>,
    foreign: CloudSnapshot,
}

impl OfVendor {
    fn of(world: &World) -> Self {
        let Some(cloud) = &world.vendor else { return Self::default() };
        let mut listeners = BTreeMap::new();
        for (owner, found) in cloud.load_balancers() {
            for (port, nodes) in found.listeners {
                listeners.insert((owner.clone(), port), Targets::of(nodes.iter().map(String::as_str)));
            }
        }
        Self { listeners, foreign: cloud.foreign() }
    }
}

impl LoadBalancers {
    pub(super) fn of(world: &World) -> Self {
        let simulated = world.cloud.balancers.values();
        let simulated = simulated.map(|balancer| {
            let targets = world.cloud.targets_of(balancer);
            (balancer.owner.clone(), Targets::of(targets.iter().map(String::as_str)))
        });
        let edge = world.api.list(Resource::EdgeLoadBalancers).filter_map(|(_, json)| {
            let labels = serde_json::from_value(json["metadata"]["labels"].clone()).ok()?;
            let targets = match json["spec"]["nodeSet"].as_str() {
                Some(set) => world.api.get(Resource::EdgeNodeSets, &Key::new(NAMESPACE, set)),
                None => Some(json),
            };
            // Nobody but the provider deletes a set that is in use, except by hand.
            let targets = targets.map_or(Targets::Changed, |json| {
                let nodes = json["spec"]["targets"].as_array().into_iter().flatten();
                Targets::of(nodes.filter_map(|target| target["node"].as_str()))
            });
            Some((spec::owner(Some(&labels))?, targets))
        });
        let of_vendor = world.vendor.iter().flat_map(|cloud| cloud.load_balancers()).map(|(owner, found)| {
            let nodes = found.listeners.values().flatten();
            (owner, Targets::of(nodes.map(String::as_str)))
        });
        Self(simulated.chain(edge).chain(of_vendor).collect(), SharedSets::of(world), OfVendor::of(world))
    }
}

impl Targets {
    fn of<'a>(mut nodes: impl Iterator<Item = &'a str>) -> Self {
        match nodes.next() {
            None => Self::None,
            Some("by-hand") => Self::Changed,
            Some(_) if nodes.any(|node| node == "by-hand") => Self::Changed,
            Some(_) => Self::Some,
        }
    }
}

/// Checks a write of a replica: `before` is what there was.
pub(super) fn on_write(world: &mut World, process: ProcessId, what: &str, before: &LoadBalancers) {
    check_writer(world, process, what);
    let identity = world.identity(process).to_owned();
    removals::check(world, process, &before.1);
    let now = LoadBalancers::of(world);
    for (owner, targets) in &before.0 {
        // Where a change of ports replaces listeners, `check_listeners` decides whether that was needed.
        let has_no_listeners =
            replaces_listeners(world) && !now.2.listeners.keys().any(|(found, _)| found == owner);
        match now.0.get(owner) {
            _ if !is_live(world, owner) => {}
            None => {
                world.violation(&format!("{identity} deletes the load balancer of {owner}, which exists"));
            }
            // Every Service always has an endpoint, and there is always an eligible node; but while a watch lags, the endpoints of a
            // new Service are not seen.
            Some(Targets::None)
                if *targets == Targets::Some
                    && world.age(owner) > MAX_LAG
                    && !has_no_listeners
                    && shows_changes_by_hand(world) =>
            {
                world.violation(&format!("{identity} removes all targets of {owner}"));
            }
            Some(_) => {}
        }
    }
    check_listeners(world, &identity, &before.2, &now.2);
}

fn check_listeners(world: &mut World, identity: &str, before: &OfVendor, now: &OfVendor) {
    for ((owner, port), targets) in &before.listeners {
        if !is_live(world, owner) || world.age(owner) <= MAX_LAG {
            continue;
        }
        match now.listeners.get(&(owner.clone(), *port)) {
            Some(Targets::None) if *targets == Targets::Some && shows_changes_by_hand(world) => {
                world.violation(&format!("{identity} removes all targets of port {port} of {owner}"));
            }
            None if has_had_port(world, owner, *port) && !are_replaced(world, owner, before) => {
                world.violation(&format!("{identity} deletes the listener of port {port} of {owner}"));
            }
            _ => {}
        }
    }
    if before.foreign != now.foreign {
        world.violation(&format!("{identity} changes what is of others: {:?}", now.foreign));
    }
}

/// Whether every read shows what was changed by hand. Where that took away a target that is to stay, the provider takes the others away
/// as long as the cloud shows it.
fn shows_changes_by_hand(world: &World) -> bool {
    world.changed_by_hand.is_none_or(|at| at.elapsed() > SHOWN_AFTER)
}

fn replaces_listeners(world: &World) -> bool {
    world.vendor.as_ref().is_some_and(|cloud| cloud.replaces_listeners())
}

/// Whether the Service's listeners have to be replaced, since its ports are others.
fn are_replaced(world: &World, owner: &Owner, before: &OfVendor) -> bool {
    let service = world.api.get(Resource::Services, &owner.service);
    let ports = service.into_iter().filter_map(|json| json["spec"]["ports"].as_array()).flatten();
    let wanted: BTreeSet<u64> = ports.filter_map(|port| port["port"].as_u64()).collect();
    let present = before.listeners.keys().filter(|(of, _)| of == owner).map(|(_, port)| u64::from(*port));
    replaces_listeners(world) && present.collect::<BTreeSet<_>>() != wanted
}

/// Whether the Service has the port, and no watch can show an older one.
fn has_had_port(world: &World, owner: &Owner, port: u16) -> bool {
    let service = world.api.get(Resource::Services, &owner.service);
    let mut ports = service.into_iter().filter_map(|json| json["spec"]["ports"].as_array()).flatten();
    world.changed.get(&owner.service).is_none_or(|at| at.elapsed() > MAX_LAG)
        && ports.any(|found| found["port"] == port)
}

fn check_writer(world: &mut World, process: ProcessId, what: &str) {
    let lease = world.api.get(Resource::Leases, &Key::new(NAMESPACE, LEASE));
    let holder =
        lease.and_then(|lease| lease["spec"]["holderIdentity"].as_str()).unwrap_or_default().to_owned();
    let identity = world.identity(process).to_owned();
    if holder != identity {
        world.violation(&format!("{identity} {what}, and the Lease is held by `{holder}`"));
    }
}

fn is_live(world: &World, owner: &Owner) -> bool {
    world.api.get(Resource::Services, &owner.service).is_some_and(|service| {
        service["metadata"]["uid"] == owner.uid.as_str()
            && service["metadata"].get("deletionTimestamp").is_none()
    })
}

/// The cluster as it is, in an index of its own.
fn index(world: &World, classes: ManagedClasses) -> ClusterIndex {
    let backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(1));
    let requests = Arc::new(RequestQueue::new(|owner| owner.uid.clone(), backoff));
    let index = ClusterIndex::new(classes, requests, Arc::default());
    let json = |resource| world.api.list(resource).map(|(_, object)| object.to_string()).collect::<Vec<_>>();
    index.on_service(Event::Init);
    for text in json(Resource::Services) {
        index.on_service(Event::InitApply(
            Services::project(&text, &mut Vec::new()).expect("valid").expect("used"),
        ));
    }
    index.on_service(Event::InitDone);
    index.on_slice(Event::Init);
    for text in json(Resource::EndpointSlices) {
        let slice = EndpointSlices::project(&text, &mut Vec::new()).expect("valid").expect("used");
        index.on_slice(Event::InitApply(slice));
    }
    index.on_slice(Event::InitDone);
    index.on_node(Event::Init);
    for text in json(Resource::Nodes) {
        index
            .on_node(Event::InitApply(Nodes::project(&text, &mut Vec::new()).expect("valid").expect("used")));
    }
    index.on_node(Event::InitDone);
    index
}

fn service(json: &Value) -> Service {
    Services::project(&json.to_string(), &mut Vec::new()).expect("valid").expect("used")
}

/// A Service at the end, and what a fresh plan of the true cluster wants for it.
pub(super) struct Wanted {
    service: Service,
    pub(super) lb: LoadBalancer,
    /// Whether controller or provider refuses the Service, which keeps what it has.
    pub(super) is_rejected: bool,
}

/// What is wanted of each Service that is not being deleted.
pub(super) fn wanted(world: &World) -> Vec<Wanted> {
    let config = process::config(world);
    let index = index(world, config.classes.clone());
    let is_refused_by_provider =
        |annotations: &BTreeMap<String, String>| match (&world.vendor, world.provider) {
            (Some(cloud), _) => cloud.is_refused(annotations),
            (None, ProviderKind::Edge) => false,
            (None, _) => annotations.contains_key(UNSUPPORTED),
        };
    let mut all = Vec::new();
    for (_, json) in world.api.list(Resource::Services) {
        let mut service = service(json);
        if service.deleting {
            continue;
        }
        let is_refused = plan::steering(&service, &config).is_err();
        if is_refused {
            service.annotations.remove(annotations::STEERING);
        }
        let is_rejected = is_refused || is_refused_by_provider(&service.annotations);
        let snapshot = index.snapshot(&owner_of(&service), &config).expect("listed");
        let steering = plan::steering(&service, &config).expect("a valid annotation");
        let lb = plan::load_balancer(&service, steering, &config).expect("a valid Service");
        let labels = plan::node_labels(&service, &config).expect("a valid annotation");
        let Snapshot { endpoints, nodes, .. } = &snapshot;
        let targets = plan::targets(&service, endpoints, nodes, steering, labels.as_ref(), &config);
        let lb = plan::with_last_resort(lb.with_nodes(targets.set.clone()), &targets, &config);
        all.push(Wanted { service, lb, is_rejected });
    }
    all
}

/// What is wrong at the end, when there have been no faults for a long time. `expected` is what a vendor's cloud should have.
pub(super) fn at_end(shared: &SharedWorld, expected: Option<&CloudSnapshot>) -> Vec<String> {
    let world = shared.lock();
    let mut wrong = world.violations.clone();
    for (key, json) in world.api.list(Resource::Services) {
        let service = service(json);
        if service.deleting {
            wrong.push(format!("{key} still has finalizers {:?}", service.finalizers));
        }
    }
    let all = wanted(&world);
    for Wanted { service, lb, is_rejected } in &all {
        let (owner, is_rejected) = (&lb.owner, *is_rejected);
        let found = match world.provider {
            ProviderKind::Edge if is_rejected => refused_edge_balancer(&world, lb),
            ProviderKind::Edge => edge_balancer(&world, lb),
            ProviderKind::Own | ProviderKind::Shared => simulated_balancer(&world, lb, is_rejected),
            ProviderKind::Vendor(_) => vendors_balancer(&world, lb, is_rejected),
        };
        let address = match found {
            Ok(address) => address,
            Err(why) => {
                wrong.push(format!("{owner}: {why}"));
                continue;
            }
        };
        // A Service that lost its object by hand, and its address to another, publishes it still: docs/known-limits.md.
        let ingress = service.ingress.first();
        let published = ingress.and_then(|it| it.ip.map(|ip| ip.to_string()).or_else(|| it.hostname.clone()));
        if address.is_some() && published != address {
            wrong.push(format!("{owner} publishes {:?}, not {address:?}", service.ingress));
        }
        let programmed = service.conditions.iter().find(|condition| condition.kind == names::PROGRAMMED);
        let expected = if is_rejected || address.is_none() { "False" } else { "True" };
        if programmed.is_none_or(|condition| condition.status != expected) {
            wrong.push(format!("{owner} has the condition {programmed:?}, wanted {expected}"));
        }
        if !service.has_finalizer(names::FINALIZER) {
            wrong.push(format!("{owner} has no finalizer"));
        }
    }
    if let (Some(cloud), Some(expected)) = (&world.vendor, expected) {
        let rejected: Vec<&str> =
            all.iter().filter(|one| one.is_rejected).map(|one| one.lb.owner.uid.as_str()).collect();
        wrong.extend(differences(&cloud.snapshot(), expected, &rejected));
    }
    for resource in [Resource::EdgeLoadBalancers, Resource::EdgeNodeSets] {
        let key = Key::new(NAMESPACE, FOREIGN);
        let (made, found) = (objects::foreign(resource, &key), world.api.get(resource, &key));
        let is_same = |found: &Value| {
            found["spec"] == made["spec"] && found["metadata"]["labels"] == made["metadata"]["labels"]
        };
        if !found.is_some_and(is_same) {
            wrong.push(format!("an object of somebody else is {found:?}"));
        }
    }
    let exists = |owner: &Owner| all.iter().any(|one| one.lb.owner == *owner);
    for owner in LoadBalancers::of(&world).0.keys().filter(|owner| !exists(owner)) {
        wrong.push(format!("the load balancer of {owner} is left"));
    }
    wrong
}

/// How a cloud differs from what is expected, apart from what Services with these UIDs have.
fn differences(found: &CloudSnapshot, expected: &CloudSnapshot, rejected: &[&str]) -> Vec<String> {
    let of = |all: &CloudSnapshot, others: &CloudSnapshot| -> Vec<String> {
        let differs = |name: &String, content: &String| {
            let other = others.get(name);
            let is_of = |content: &String, uid: &str| content.contains(&format!("\"{uid}\""));
            let is_rejected =
                |uid: &&str| is_of(content, uid) || other.is_some_and(|content| is_of(content, uid));
            other != Some(content) && !rejected.iter().any(is_rejected)
        };
        let lines = all.iter().filter(|(name, content)| differs(name, content));
        lines.map(|(name, content)| format!("{name}: {content}")).collect()
    };
    let (surplus, missing) = (of(found, expected), of(expected, found));
    let list = |what: &str, lines: Vec<String>| {
        lines.into_iter().map(|line| format!("{what} {line}")).collect::<Vec<_>>()
    };
    [list("the cloud has", surplus), list("wanted is", missing)].concat()
}

/// What a Service's load balancer at a vendor's cloud publishes, or what is wrong with it, beside what the comparison of accounts shows.
fn vendors_balancer(world: &World, lb: &LoadBalancer, is_rejected: bool) -> Result<Option<String>, String> {
    let found = world.vendor.as_ref().and_then(|cloud| cloud.load_balancers().remove(&lb.owner));
    let Some(found) = found else {
        return if is_rejected { Ok(None) } else { Err("no load balancer".to_owned()) };
    };
    if is_rejected && !admits(lb, found.sources.iter()) {
        return Err(format!("sources {:?}, wanted {:?}", found.sources, lb.source_ranges));
    }
    // It was refused before it had a port: there is nothing to publish.
    if is_rejected && found.listeners.is_empty() {
        return Ok(None);
    }
    if found.address.is_empty() { Err("no address".to_owned()) } else { Ok(Some(found.address)) }
}

/// The address of a load balancer in the simulated cloud, or what is wrong with it.
fn simulated_balancer(world: &World, lb: &LoadBalancer, is_rejected: bool) -> Result<Option<String>, String> {
    let found = world.cloud.balancers.get(&lb.owner.service).filter(|found| found.owner == lb.owner);
    let Some(found) = found else {
        return if is_rejected { Ok(None) } else { Err("no load balancer".to_owned()) };
    };
    let targets = world.cloud.targets_of(found);
    let wanted: BTreeSet<String> = lb.nodes().targets.iter().map(|target| target.node.clone()).collect();
    if targets.contains("by-hand") {
        return Err("a target that was added by hand is left".to_owned());
    }
    // Those of a rejected Service depend on the steering that its load balancer has.
    if !is_rejected && targets != wanted {
        return Err(format!("targets {targets:?}, wanted {wanted:?}"));
    }
    if !is_rejected
        && (found.listeners != lb.listeners
            || found.health_check.as_ref() != lb.groups.first().map(|group| &group.health_check))
    {
        return Err(format!("listeners {:?}, wanted {:?}", found.listeners, lb.listeners));
    }
    if found.sources != cloud::sources(&lb.source_ranges)
        && !(is_rejected && admits(lb, found.sources.iter()))
    {
        return Err(format!("sources {:?}, wanted {:?}", found.sources, lb.source_ranges));
    }
    Ok(Some(found.address.to_string()))
}

/// Whether the Service admits all of these sources.
fn admits<'a>(lb: &LoadBalancer, mut sources: impl Iterator<Item = &'a IpNet>) -> bool {
    let wanted = cloud::sources(&lb.source_ranges);
    let nobody = IpNet::from(IpAddr::from([0, 0, 0, 0]));
    sources.all(|source| *source == nobody || wanted.iter().any(|range| range.contains(source)))
}

/// The address in the object of the edge for a refused Service, if it has one, or what is wrong with the object.
fn refused_edge_balancer(world: &World, lb: &LoadBalancer) -> Result<Option<String>, String> {
    let key = Key::new(NAMESPACE, spec::object_name(&lb.owner));
    let Some(json) = world.api.get(Resource::EdgeLoadBalancers, &key) else { return Ok(None) };
    let found: EdgeLoadBalancerSpec =
        serde_json::from_value(json["spec"].clone()).map_err(|error| error.to_string())?;
    let sources: Vec<IpNet> = found.source_ranges.iter().filter_map(|range| range.parse().ok()).collect();
    let is_open = sources.is_empty() && !lb.source_ranges.is_empty();
    if is_open || !admits(lb, sources.iter().filter(|range| matches!(range, IpNet::V4(_)))) {
        return Err(format!("sources {sources:?}, wanted {:?}", lb.source_ranges));
    }
    Ok(found.addresses.first().map(ToString::to_string))
}

/// The address in the object of the edge, or what is wrong with the object.
fn edge_balancer(world: &World, lb: &LoadBalancer) -> Result<Option<String>, String> {
    let key = Key::new(NAMESPACE, spec::object_name(&lb.owner));
    let all: Vec<EdgeLoadBalancerSpec> = world
        .api
        .list(Resource::EdgeLoadBalancers)
        .filter(|(key, _)| key.name() != FOREIGN)
        .filter_map(|(_, json)| serde_json::from_value(json["spec"].clone()).ok())
        .collect();
    let in_use: Vec<IpAddr> = all.iter().flat_map(|spec| spec.addresses.clone()).collect();
    let Some(json) = world.api.get(Resource::EdgeLoadBalancers, &key) else {
        let is_full = in_use.len() >= POOL_SIZE;
        return if is_full { Ok(None) } else { Err(format!("no load balancer, and {in_use:?} are in use")) };
    };
    let found: EdgeLoadBalancerSpec =
        serde_json::from_value(json["spec"].clone()).map_err(|error| error.to_string())?;
    let structure = spec::structure(lb, found.addresses.clone()).map_err(|error| error.to_string())?;
    let structure = EdgeLoadBalancerSpec { endpoint_nodes: spec::endpoint_nodes(&lb.nodes()), ..structure };
    let wanted = match lb.nodes().shared {
        Some(set) => EdgeLoadBalancerSpec { node_set: Some(set.as_str().to_owned()), ..structure },
        None => EdgeLoadBalancerSpec { targets: spec::targets(&lb.families, &lb.nodes()), ..structure },
    };
    if found != wanted {
        return Err(format!("object {found:?}, wanted {wanted:?}"));
    }
    if let Some(set) = lb.nodes().shared {
        let found = world.api.get(Resource::EdgeNodeSets, &Key::new(NAMESPACE, set.as_str()));
        let wanted = serde_json::json!(spec::shared_set(&lb.nodes()));
        if found.is_none_or(|found| found["spec"] != wanted) {
            return Err(format!("EdgeNodeSet {found:?}, wanted {wanted}"));
        }
    }
    let [address] = found.addresses[..] else { return Err(format!("addresses {:?}", found.addresses)) };
    if in_use.iter().filter(|other| **other == address).count() > 1 {
        return Err(format!("{address} belongs to several"));
    }
    Ok(Some(address.to_string()))
}

/// Reads of a vendor's cloud show a change after this time.
const SHOWN_AFTER: Duration = Duration::from_secs(15);

/// Calls so far.
#[derive(Clone, Copy, Debug)]
pub(super) struct Calls {
    cloud_writes: u64,
    cloud_reads: u64,
    patches: u64,
    service_reads: u64,
}

impl Calls {
    pub(super) fn of(world: &World) -> Self {
        let count = |what| world.report().count(what);
        Self {
            cloud_writes: world.cloud.writes,
            cloud_reads: world.cloud.reads,
            patches: count("Service patched") + count("edge object written"),
            service_reads: count("Service read"),
        }
    }
}

/// Reads of a vendor's cloud: for a list of everything, for the comparison of a Service with three ports, and for its health.
const VENDORS_READS: (u64, u64, u64) = (20, 30, 6);
/// Changes of a vendor's cloud for one cause: what the creation of a Service with three ports takes.
const VENDORS_WRITES: u64 = 20;

/// `quiet`: the calls when nothing happened any more.
pub(super) fn within_budget(world: &World, quiet: Calls) -> Vec<String> {
    let of_vendor = world.vendor.is_some();
    let now = Calls::of(world);
    let services = u64::from(super::chaos::SERVICES);
    let mut wrong = Vec::new();
    if (now.cloud_writes, now.patches, now.service_reads)
        != (quiet.cloud_writes, quiet.patches, quiet.service_reads)
    {
        wrong.push(format!("something is written or read in a quiet world: {quiet:?}, then {now:?}"));
    }
    // A comparison at four fifths of the period is the earliest; it reads twice. Health is read every minute, a tenth earlier.
    let periods = super::chaos::QUIET.as_secs() * 5 / (process::RESYNC.as_secs() * 4) + 1;
    let minutes = super::chaos::QUIET.as_secs() * 10 / (9 * 60) + 1;
    let reads = now.cloud_reads - quiet.cloud_reads;
    let (for_list, for_one, for_health) = if of_vendor { VENDORS_READS } else { (1, 2, 1) };
    if reads > for_list * periods + services * (for_one * periods + for_health * minutes) {
        wrong.push(format!("{reads} reads of the cloud in a quiet world"));
    }
    let count = |what| world.report().count(what);
    let of_one = count("Service created")
        + count("Service changed")
        + count("Service deleted")
        + count("endpoints")
        + count("change by hand")
        + count("call refused")
        + count("request lost")
        + count("answer lost")
        + count("request repeated")
        + count("call slow")
        + count("finalizers removed by hand");
    let of_all = count("node") + count("node gone") + count("process started") + count("part from the cloud");
    let causes = of_one + services * of_all;
    // Creation takes three writes and four patches: the finalizer, and a status for each stage.
    let writes = if of_vendor { VENDORS_WRITES } else { 3 };
    let calls = [("writes to the cloud", now.cloud_writes, writes), ("patches of Services", now.patches, 3)];
    for (what, calls, for_one) in calls {
        if calls > for_one * causes {
            wrong.push(format!("{calls} {what} for {causes} causes"));
        }
    }
    wrong
}
