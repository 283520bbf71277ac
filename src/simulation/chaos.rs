// SPDX-License-Identifier: Apache-2.0
//! The scenario of a seed: a cluster, replicas, minutes of chaos, then peace until the world has converged.

use serde_json::{Map, Value, json};
use steerage_model::{Key, annotations};
use tokio::time::{Duration, Instant, sleep_until};

use super::cloud::{self, UNSUPPORTED};
use super::invariants::{self, Calls};
use super::objects::{self, Resource, ServiceSpec};
use super::process::{NAMESPACE, RESYNC, Running};
use super::vendor;
use super::world::{Faults, ProviderKind, Report, SharedWorld, World};
use crate::lease::clock;

const NODES: u16 = 8;
pub(super) const SERVICES: u16 = 4;
/// Addresses in the edge's pool: one fewer than Services.
pub(super) const POOL_SIZE: usize = 3;
/// A Service with this value of the annotation is refused by the controller itself.
pub(super) const UNKNOWN_STEERING: &str = "unknown";
/// Objects of the edge's kinds with this name are somebody else's.
pub(super) const FOREIGN: &str = "foreign";
/// Of which a Service has some, or none.
const SOURCE_RANGES: [&str; 3] = ["10.0.0.0/8", "10.1.0.0/16", "203.0.113.0/24"];
/// The end of a run, in which nothing happens.
pub(super) const QUIET: Duration = Duration::from_mins(4);

struct Scenario {
    world: SharedWorld,
    /// The process of each replica, while it runs.
    replicas: Vec<Option<Running>>,
    /// When a replica's next process starts.
    restarts: Vec<(Instant, usize)>,
    uids: u32,
    deletes_nodes: bool,
}

pub(super) async fn run(seed: u64, provider: ProviderKind) -> Result<Report, String> {
    clock::simulate();
    let world = SharedWorld::new(seed, provider);
    let deletes_nodes = world.lock().rng.bool();
    let (replicas, restarts) = (Vec::new(), Vec::new());
    let mut scenario = Scenario { world: world.clone(), replicas, restarts, uids: 0, deletes_nodes };
    scenario.begin();
    let minutes = world.lock().rng.u64(2..12);
    let end = Instant::now() + Duration::from_mins(minutes);
    while Instant::now() < end {
        let pause = world.lock().millis(50..15_000);
        scenario.supervise_until(Instant::now() + pause).await;
        scenario.act();
    }
    scenario.end();
    // The last comparison of each load balancer, and an orphan's grace period; and the minutes that a vendor's cloud takes.
    let periods = if matches!(provider, ProviderKind::Vendor(_)) { 6 } else { 3 };
    scenario.supervise_until(Instant::now() + RESYNC * periods).await;
    let before = Calls::of(&world.lock());
    scenario.supervise_until(Instant::now() + QUIET).await;
    let expected = vendor::expected(&world).await?;
    let mut wrong = invariants::at_end(&world, expected.as_ref());
    wrong.extend(invariants::within_budget(&world.lock(), before));
    for running in scenario.replicas.into_iter().flatten() {
        running.kill(&world);
    }
    if wrong.is_empty() { Ok(world.lock().report().clone()) } else { Err(wrong.join("\n  ")) }
}

impl Scenario {
    fn begin(&mut self) {
        let replicas = {
            let mut world = self.world.lock();
            let pool = objects::pool(NAMESPACE, "public", "198.51.100.4-198.51.100.6");
            world.api.put(Resource::AddressPools, &Key::new(NAMESPACE, "public"), pool);
            for resource in [Resource::EdgeLoadBalancers, Resource::EdgeNodeSets] {
                let key = Key::new(NAMESPACE, FOREIGN);
                world.api.put(resource, &key, objects::foreign(resource, &key));
            }
            for number in 0..NODES {
                if number == 0 || world.rng.bool() {
                    put_node(&mut world, number, false);
                }
            }
            world.rng.usize(1..=3)
        };
        for number in 0..SERVICES {
            if self.world.lock().rng.bool() {
                self.create_service(number);
            }
        }
        self.replicas.resize_with(replicas, || None);
        for replica in 0..replicas {
            self.replicas[replica] = Some(Running::start(&self.world, replica));
        }
        let mut world = self.world.lock();
        let level = [0.0, 0.3, 1.0, 3.0][world.rng.usize(0..4)];
        world.faults = Faults {
            refuse: 0.03 * level,
            lose_request: 0.02 * level,
            lose_answer: 0.03 * level,
            repeat: 0.02 * level,
            slow: 0.02 * level,
            crash: 0.01 * level,
            lag: 0.1 * level,
            old_list: 0.2 * level,
        };
    }

    /// Ends all faults. Every replica runs.
    fn end(&mut self) {
        let now = Instant::now();
        {
            let mut world = self.world.lock();
            world.record("peace", "");
            world.faults = Faults::default();
            for process in &mut world.processes {
                (process.api_cut, process.cloud_cut) = (now, now);
            }
            let keys: Vec<Key> = world.api.list(Resource::Services).map(|(key, _)| key.clone()).collect();
            for key in keys {
                change_service(&mut world, &key, |service| {
                    if let Some(annotations) = service["metadata"]["annotations"].as_object_mut() {
                        annotations.remove(annotations::PAUSED);
                    }
                });
            }
        }
        for restart in &mut self.restarts {
            restart.0 = now;
        }
    }

    /// Buries and restarts processes until then.
    async fn supervise_until(&mut self, deadline: Instant) {
        loop {
            self.bury();
            let now = Instant::now();
            let (due, later): (Vec<_>, Vec<_>) = self.restarts.drain(..).partition(|(at, _)| *at <= now);
            self.restarts = later;
            for (_, replica) in due {
                self.replicas[replica] = Some(Running::start(&self.world, replica));
            }
            if now >= deadline {
                return;
            }
            let next = self.restarts.iter().map(|(at, _)| *at).chain([deadline]).min().unwrap_or(deadline);
            let wake = std::sync::Arc::clone(&self.world.lock().wake);
            tokio::select! {
                biased;
                () = wake.notified() => {}
                () = sleep_until(next) => {}
            }
        }
    }

    /// Removes processes that crashed or ended, and plans the next ones.
    fn bury(&mut self) {
        let ended = std::mem::take(&mut self.world.lock().crashing);
        for replica in 0..self.replicas.len() {
            if let Some(running) = self.replicas[replica].take_if(|running| ended.contains(&running.id)) {
                running.kill(&self.world);
                let delay = self.world.lock().millis(10..20_000);
                self.restarts.push((Instant::now() + delay, replica));
            }
        }
    }

    fn act(&mut self) {
        let action = self.world.lock().rng.u32(0..100);
        let service = self.world.lock().rng.u16(0..SERVICES);
        let key = service_key(service);
        match action {
            0..=9 => self.create_service(service),
            10..=15 => self.delete_service(&key),
            16..=19 => {
                self.delete_service(&key);
                if self.world.lock().rng.bool() {
                    self.force_deletion(&key);
                }
                self.create_service(service);
            }
            20..=44 => put_slice(&mut self.world.lock(), &key),
            45..=54 => {
                let mut world = self.world.lock();
                let spec = service_spec(&mut world);
                let changed = objects::service(&key, "", service, &spec);
                change_service(&mut world, &key, |service| {
                    let kept = service["metadata"]["annotations"][annotations::PROVIDER].clone();
                    service["spec"] = changed["spec"].clone();
                    service["metadata"]["annotations"] = changed["metadata"]["annotations"].clone();
                    if !kept.is_null() {
                        service["metadata"]["annotations"][annotations::PROVIDER] = kept;
                    }
                    let generation = service["metadata"]["generation"].as_u64().unwrap_or(0);
                    service["metadata"]["generation"] = json!(generation + 1);
                });
                put_slice(&mut world, &key);
            }
            55..=64 => {
                let mut world = self.world.lock();
                let (number, is_excluded) = (world.rng.u16(1..NODES), world.rng.u8(0..4) == 0);
                // Where nodes are deleted, mass removals are right.
                if self.deletes_nodes && world.rng.u8(0..3) == 0 {
                    world.record("node gone", &number.to_string());
                    world.nodes.deleted(&node_name(number));
                    world.api.delete(Resource::Nodes, &Key::new("", node_name(number)));
                    if let Some(cloud) = &world.vendor {
                        cloud.set_machine(&node_name(number), false);
                    }
                } else {
                    put_node(&mut world, number, is_excluded);
                }
            }
            65..=69 => self.end_a_process(),
            70..=79 => self.part(),
            80..=84 => {
                let mut world = self.world.lock();
                let now = Instant::now();
                for process in &mut world.processes {
                    process.watches_cut = now + Duration::from_millis(1);
                }
                world.api.wake_watches();
                world.api.compacted = world.api.version();
            }
            85..=89 => self.change_by_hand(&key),
            90..=93 => change_many_nodes(&mut self.world.lock(), true),
            94..=96 => change_many_nodes(&mut self.world.lock(), false),
            _ => {}
        }
    }

    fn create_service(&mut self, number: u16) {
        let key = service_key(number);
        let mut world = self.world.lock();
        if world.api.get(Resource::Services, &key).is_some() {
            return;
        }
        self.uids += 1;
        // Clouds write UIDs as they have them: without hyphens, and with a length.
        let uid = match world.vendor {
            Some(_) => format!("5eed0000-0000-4000-8000-{:012}", self.uids),
            None => format!("uid-{}", self.uids),
        };
        let spec = service_spec(&mut world);
        world.record("Service created", &format!("{key} {uid}"));
        world.created.insert(uid.clone(), Instant::now());
        world.changed.insert(key.clone(), Instant::now());
        let of_vendor = world.vendor.as_ref().map(|cloud| cloud.load_balancers()).unwrap_or_default();
        if world.cloud.balancers.contains_key(&key) || of_vendor.keys().any(|owner| owner.service == key) {
            world.record("Service created again", &uid);
        }
        world.api.put(Resource::Services, &key, objects::service(&key, &uid, number, &spec));
        put_slice(&mut world, &key);
    }

    fn delete_service(&mut self, key: &Key) {
        let mut world = self.world.lock();
        world.record("Service deleted", &key.to_string());
        world.api.delete(Resource::Services, key);
    }

    /// Somebody changes or deletes what the provider has made.
    fn change_by_hand(&mut self, service: &Key) {
        let mut world = self.world.lock();
        if let Some(cloud) = world.vendor.clone() {
            let number = world.rng.u64(..);
            if let Some(what) = cloud.change_by_hand(number) {
                world.record("change by hand", &what);
                world.changed_by_hand = Some(Instant::now());
            }
            return;
        }
        cloud::drift(&mut world, service);
        let resource = if world.rng.bool() { Resource::EdgeNodeSets } else { Resource::EdgeLoadBalancers };
        let keys = world.api.list(resource).map(|(key, _)| key.clone());
        let keys: Vec<Key> = keys.filter(|key| key.name() != FOREIGN).collect();
        if keys.is_empty() {
            return;
        }
        let key = keys[world.rng.usize(0..keys.len())].clone();
        world.record("change by hand", &format!("{resource:?} {key}"));
        if world.rng.bool() {
            world.api.delete(resource, &key);
        } else if let Some(mut object) = world.api.get(resource, &key).cloned() {
            let targets = json!([{"node": "by-hand", "addresses": ["192.0.2.200"]}]);
            object["spec"]["targets"] = targets;
            world.api.put(resource, &key, object);
        }
    }

    /// Somebody removes the finalizers of a Service that is being deleted.
    fn force_deletion(&mut self, key: &Key) {
        let mut world = self.world.lock();
        let Some(mut service) = world.api.get(Resource::Services, key).cloned() else { return };
        world.record("finalizers removed by hand", &key.to_string());
        service["metadata"]["finalizers"] = json!([]);
        world.api.put(Resource::Services, key, service);
        world.api.delete(Resource::Services, key);
    }

    /// Kills a process, or ends it as SIGTERM does.
    fn end_a_process(&mut self) {
        let mut world = self.world.lock();
        let replica = world.rng.usize(0..self.replicas.len());
        let is_crash = world.rng.bool();
        let Some(running) = &self.replicas[replica] else { return };
        let identity = world.identity(running.id).to_owned();
        if is_crash {
            world.record("crash", &identity);
            world.crashing.push(running.id);
        } else {
            world.record("shutdown", &identity);
            running.terminate();
        }
    }

    /// Parts a replica, or all of them, from the API server or from the cloud.
    fn part(&mut self) {
        let mut world = self.world.lock();
        let until = Instant::now() + world.millis(1000..150_000);
        let (is_api, everyone) = (world.rng.bool(), world.rng.u8(0..3) == 0);
        let chosen = world.rng.usize(0..self.replicas.len());
        let what = if is_api { "part from the API server" } else { "part from the cloud" };
        for (replica, running) in self.replicas.iter().enumerate() {
            let Some(running) = running.as_ref().filter(|_| everyone || replica == chosen) else { continue };
            let identity = world.identity(running.id).to_owned();
            world.record(what, &identity);
            let state = &mut world.processes[running.id];
            if is_api { state.api_cut = until } else { state.cloud_cut = until }
        }
    }
}

fn service_key(number: u16) -> Key {
    Key::new("shop", format!("web-{number}"))
}

fn node_name(number: u16) -> String {
    format!("node-{number}")
}

/// Excludes most nodes at once, or takes that back.
fn change_many_nodes(world: &mut World, is_excluded: bool) {
    if is_excluded {
        world.record("nodes excluded at once", "");
    }
    for number in 1..NODES {
        let exists = world.api.get(Resource::Nodes, &Key::new("", node_name(number))).is_some();
        if exists && world.rng.u8(0..4) > 0 {
            put_node(world, number, is_excluded);
        }
    }
}

fn put_node(world: &mut World, number: u16, is_excluded: bool) {
    let name = node_name(number);
    let is_first = world.processes.is_empty();
    world.nodes.put(&name, is_excluded, is_first);
    world.record("node", &format!("{name} excluded: {is_excluded}"));
    let provider_id = world.vendor.as_ref().map(|cloud| cloud.provider_id(&name));
    if let Some(cloud) = &world.vendor {
        cloud.set_machine(&name, true);
    }
    let node = objects::node(&name, provider_id, number + 1, is_excluded);
    world.api.put(Resource::Nodes, &Key::new("", &name), node);
}

fn service_spec(world: &mut World) -> ServiceSpec {
    let mut annotations = Map::new();
    if world.rng.bool() {
        let steering = if world.rng.bool() { "api" } else { "health-check" };
        annotations.insert(annotations::STEERING.to_owned(), json!(steering));
    }
    if world.rng.u8(0..8) == 0 {
        annotations.insert(annotations::STEERING.to_owned(), json!(UNKNOWN_STEERING));
    }
    if world.rng.u8(0..8) == 0 {
        let (name, value) = world.vendor.as_ref().map_or((UNSUPPORTED, ""), |cloud| cloud.refused());
        annotations.insert(name.to_owned(), json!(value));
    }
    for (name, value) in world.vendor.as_ref().map_or(&[][..], |cloud| cloud.options()) {
        if world.rng.u8(0..4) == 0 && !annotations.contains_key(*name) {
            annotations.insert((*name).to_owned(), json!(value));
        }
    }
    if world.rng.u8(0..4) == 0 {
        annotations.insert(annotations::TARGET_NODE_LABELS.to_owned(), json!("tier=web"));
    }
    if world.rng.u8(0..8) == 0 {
        annotations.insert(annotations::PAUSED.to_owned(), json!("true"));
    }
    let ports = (0..world.rng.u16(1..4)).map(|port| 80 + port).collect();
    let is_local = world.rng.bool();
    let source_ranges = SOURCE_RANGES.into_iter().filter(|_| world.rng.u8(0..3) == 0).collect();
    ServiceSpec { ports, is_local, annotations, source_ranges }
}

/// Gives a Service endpoints on some nodes, known or not, and at least on one.
fn put_slice(world: &mut World, service: &Key) {
    let first = world.rng.u16(0..NODES);
    let mut nodes = vec![node_name(first)];
    for number in (0..NODES).filter(|number| *number != first) {
        if world.rng.u8(0..3) == 0 {
            nodes.push(node_name(number));
        }
    }
    world.record("endpoints", &format!("{service} {nodes:?}"));
    let key = Key::new(service.namespace(), format!("{}-a", service.name()));
    world.api.put(Resource::EndpointSlices, &key, objects::slice(service, &[80], &nodes));
}

fn change_service(world: &mut World, key: &Key, change: impl FnOnce(&mut Value)) {
    let Some(mut service) = world.api.get(Resource::Services, key).cloned() else { return };
    let before = service.clone();
    change(&mut service);
    if service != before {
        world.record("Service changed", &key.to_string());
        world.changed.insert(key.clone(), Instant::now());
        world.api.put(Resource::Services, key, service);
    }
}
