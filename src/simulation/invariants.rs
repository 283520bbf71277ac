// SPDX-License-Identifier: Apache-2.0
//! What must hold in every world: checked at each change of the cloud or of a Service, and at the end.
//!
//! - At most one writer: only the holder of the Lease changes anything.
//! - No load balancer is deleted while its Service exists.
//! - A load balancer with targets never loses all of them while an endpoint is usable.
//! - Calls are bounded by what happened, and in a quiet world by the comparisons alone.
//! - At the end, every Service has what a fresh plan of the true cluster wants, nothing else is left at the cloud, no finalizer is
//!   stuck, and nothing is written any more.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde_json::Value;
use steerage_model::{Key, Service, names};
use steerage_provider_api::Owner;
use steerage_watch::{Backoff, EndpointSlices, Event, Kind as _, Nodes, Services};
use tokio::time::Duration;

use super::cloud::{Balancer, SimulatedProvider, UNSUPPORTED};
use super::objects::Resource;
use super::process::{self, LEASE, NAMESPACE};
use super::world::{ProcessId, SharedWorld, World};
use crate::cluster_index::{ClusterIndex, owner_of};
use crate::plan;
use crate::request_queue::RequestQueue;

/// The load balancers that have targets.
pub(super) fn with_targets(world: &World) -> BTreeSet<Owner> {
    let balancers = world.cloud.balancers.values();
    let some = balancers.filter(|balancer| !world.cloud.targets_of(balancer).is_empty());
    some.map(|balancer| balancer.owner.clone()).collect()
}

pub(super) fn on_service_patch(world: &mut World, process: ProcessId, key: &Key) {
    check_writer(world, process, &format!("patches {key}"));
}

pub(super) fn on_cloud_write(
    world: &mut World,
    process: ProcessId,
    before: &BTreeMap<Key, Balancer>,
    had_targets: &BTreeSet<Owner>,
) {
    check_writer(world, process, "changes the cloud");
    let identity = world.identity(process).to_owned();
    for (key, earlier) in before {
        let is_deleted = world.cloud.balancers.get(key).is_none_or(|now| now.owner != earlier.owner);
        if is_deleted && is_live(world, &earlier.owner) {
            world.violation(format!(
                "{identity} deletes the load balancer of {}, which exists",
                earlier.owner
            ));
        }
    }
    let emptied: Vec<Owner> = {
        let now = with_targets(world);
        let balancers = world.cloud.balancers.values().map(|balancer| &balancer.owner);
        balancers.filter(|owner| had_targets.contains(owner) && !now.contains(owner)).cloned().collect()
    };
    for owner in emptied {
        // Every Service always has an endpoint, and there is always an eligible node.
        if is_live(world, &owner) {
            world.violation(format!("{identity} removes all targets of {owner}"));
        }
    }
}

fn check_writer(world: &mut World, process: ProcessId, what: &str) {
    let lease = world.api.get(Resource::Leases, &Key::new(NAMESPACE, LEASE));
    let holder =
        lease.and_then(|lease| lease["spec"]["holderIdentity"].as_str()).unwrap_or_default().to_owned();
    let identity = world.identity(process).to_owned();
    if holder != identity {
        world.violation(format!("{identity} {what}, and the Lease is held by `{holder}`"));
    }
}

fn is_live(world: &World, owner: &Owner) -> bool {
    world.api.get(Resource::Services, &owner.service).is_some_and(|service| {
        service["metadata"]["uid"] == owner.uid.as_str()
            && service["metadata"].get("deletionTimestamp").is_none()
    })
}

/// The cluster as it is, in an index of its own.
fn index(world: &World, provider: &SimulatedProvider) -> ClusterIndex {
    let config = process::config(world.cloud.shared_sets, provider);
    let backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(1));
    let requests = Arc::new(RequestQueue::new(|owner| owner.uid.clone(), backoff));
    let index = ClusterIndex::new(config.classes, requests, Arc::default());
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

/// What is wrong at the end, when there have been no faults for a long time.
pub(super) fn at_end(shared: &SharedWorld, provider: &SimulatedProvider) -> Vec<String> {
    let world = shared.lock();
    let mut wrong = world.violations.clone();
    let config = process::config(world.cloud.shared_sets, provider);
    let index = index(&world, provider);
    let mut wanted = BTreeSet::new();
    for (key, json) in world.api.list(Resource::Services) {
        let service = service(json);
        let owner = owner_of(&service);
        if service.deleting {
            wrong.push(format!("{key} still has finalizers {:?}", service.finalizers));
            continue;
        }
        wanted.insert(owner.clone());
        let is_rejected = service.annotations.contains_key(UNSUPPORTED);
        let Some(balancer) = world.cloud.balancers.get(key).filter(|found| found.owner == owner) else {
            if !is_rejected {
                wrong.push(format!("{owner} has no load balancer"));
            }
            continue;
        };
        let snapshot = index.snapshot(&owner).expect("listed");
        let steering = plan::steering(&service, &config).expect("a valid annotation");
        let lb = plan::load_balancer(&service, steering, &config).expect("a valid Service");
        let targets = plan::targets(&service, &snapshot.endpoints, &snapshot.nodes, steering, &config);
        let targets: BTreeSet<String> =
            targets.set.targets.iter().map(|target| target.node.clone()).collect();
        let found = world.cloud.targets_of(balancer);
        // Those of a rejected Service depend on the steering that its load balancer has.
        if !is_rejected && found != targets {
            wrong.push(format!("{owner} has the targets {found:?}, wanted {targets:?}"));
        }
        if !is_rejected
            && (balancer.listeners != lb.listeners
                || balancer.health_check.as_ref() != Some(&lb.health_check))
        {
            wrong.push(format!(
                "{owner} has the listeners {:?}, wanted {:?}",
                balancer.listeners, lb.listeners
            ));
        }
        if found.contains("by-hand") {
            wrong.push(format!("{owner} keeps a target that was added by hand"));
        }
        if service.ingress.first().and_then(|ingress| ingress.ip) != Some(balancer.address) {
            wrong.push(format!("{owner} publishes {:?}, not {}", service.ingress, balancer.address));
        }
        let programmed = service.conditions.iter().find(|condition| condition.kind == names::PROGRAMMED);
        let expected = if is_rejected { "False" } else { "True" };
        if programmed.is_none_or(|condition| condition.status != expected) {
            wrong.push(format!("{owner} has the condition {programmed:?}, wanted {expected}"));
        }
        if !service.has_finalizer(names::FINALIZER) {
            wrong.push(format!("{owner} has no finalizer"));
        }
    }
    for balancer in world.cloud.balancers.values().filter(|balancer| !wanted.contains(&balancer.owner)) {
        wrong.push(format!("the load balancer of {} is left", balancer.owner));
    }
    wrong
}

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
            patches: count("Service patched"),
            service_reads: count("Service read"),
        }
    }
}

/// `quiet`: the calls when nothing happened any more.
pub(super) fn within_budget(world: &World, quiet: Calls) -> Vec<String> {
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
    if reads > periods + services * (2 * periods + minutes) {
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
        + count("call slow")
        + count("finalizers removed by hand");
    let of_all = count("node") + count("node gone") + count("process started") + count("part from the cloud");
    let causes = of_one + services * of_all;
    // Creation takes three writes and four patches: the finalizer, and a status for each stage.
    for (what, calls) in [("writes to the cloud", now.cloud_writes), ("patches of Services", now.patches)] {
        if calls > 3 * causes {
            wrong.push(format!("{calls} {what} for {causes} causes"));
        }
    }
    wrong
}
