// SPDX-License-Identifier: Apache-2.0
//! Flows that stay on another target than that of their slot. Another host, whose tables are the
//! same, would send the packets of all other flows to the same targets, but not of these.
//!
//! The exchange of the daemon finds them here, and inserts those that another host has told. What is
//! exchanged has no numbers, because those of Services and targets differ between hosts. Nothing here
//! decides which host may end a flow.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

use steerage_edge_packet::maps::{
    CLOSING, Flow, FlowKey, ListenerKey, Member, SLOTS_PER_ELEMENT, Service, TCP_CLOSING, Vip,
};
use steerage_edge_packet::{Address, V4, V6, hash, protocol};

use crate::error::Error;
use crate::maps::{KernelMap, Maps};
use crate::records;

/// A flow with the target that it stays on, as hosts tell each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exception {
    /// The flow; addresses of IPv4 are mapped.
    pub key: FlowKey<V6>,
    /// The target's address.
    pub target: IpAddr,
    /// How long no packet was seen, in the units of [`steerage_edge_packet::maps::seconds`].
    pub idle: u32,
    /// Whether either side has closed the connection.
    pub is_closing: bool,
}

/// What the kernel remembers of an exception.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pinned {
    /// Number of the target.
    pub target: u32,
    /// As in [`Flow::seen`].
    pub seen: u32,
    /// Whether more than one packet was seen.
    pub is_established: bool,
}

impl Pinned {
    /// How long no packet was seen.
    pub fn idle(&self, now: u32) -> u32 {
        Flow { seen: self.seen, ..Flow::default() }.idle(now)
    }

    /// Whether either side has closed the connection.
    pub fn is_closing(&self) -> bool {
        self.seen & CLOSING != 0
    }

    /// Whether a flow of this protocol still has its target.
    pub fn is_alive(&self, protocol: u32, now: u32) -> bool {
        Flow { seen: self.seen, ..Flow::default() }.is_alive(protocol, now)
    }
}

/// Why an exception of another host was not inserted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Refusal {
    /// This host has no such listener.
    UnknownListener,
    /// This host has no such target.
    UnknownTarget,
    /// The kernel would not keep the flow on its target any more.
    Expired,
    /// This host knows the flow itself: it answers for the VIP, or sees the flow's packets.
    Known,
}

/// Ended flows that one scan collects. A map that was never scanned may be full of them; later scans find the others.
const MOST_ENDED: usize = 1 << 18;
/// Ended flows that are looked at again, and then deleted: so few that hardly one begins anew in between.
const ENDED_AT_ONCE: usize = 64;

/// What a scan has found beside the exceptions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scanned {
    /// Established flows that have not ended.
    pub flows: usize,
    /// Established flows that have ended, not all of them if they are many.
    pub ended: Vec<FlowKey<V6>>,
}

impl Scanned {
    /// Notes an established flow. Returns whether it has not ended.
    fn counts(&mut self, key: FlowKey<V6>, flow: &Flow, now: u32) -> bool {
        let is_alive = flow.is_alive(key.protocol, now);
        if is_alive {
            self.flows += 1;
        } else if self.ended.len() < MOST_ENDED {
            self.ended.push(key);
        }
        is_alive
    }
}

/// The flows of a data plane. Clones are the same, and need nothing of the data plane's owner.
#[derive(Clone, Debug)]
pub struct FlowTable {
    maps: Arc<Maps>,
    targets: Arc<Mutex<TargetIndex>>,
}

/// The numbers of targets, as of the last write.
#[derive(Debug, Default)]
struct TargetIndex {
    changes: Option<u64>,
    numbers: HashMap<IpAddr, u32>,
}

/// Whether the program would keep the flow on another target than that of its slot, `slot`, if it may
/// use the target.
fn is_exception<A: Address>(
    key: &FlowKey<A>,
    flow: &Flow,
    service: &Service,
    slot: u32,
    is_established: bool,
    now: u32,
) -> bool {
    let is_alive =
        if is_established { flow.is_alive(key.protocol, now) } else { flow.idle(now) <= TCP_CLOSING };
    is_alive && slot != flow.target && service.listener == key.listener()
}

/// The key of a flow of IPv4, whose addresses are mapped.
fn v4(key: &FlowKey<V6>) -> Option<FlowKey<V4>> {
    let unmapped = |address: V6| {
        let V6([_, _, _, last]) = address;
        (V4(last).mapped() == address).then_some(V4(last))
    };
    let FlowKey { client, vip, ports, protocol } = *key;
    Some(FlowKey { client: unmapped(client)?, vip: unmapped(vip)?, ports, protocol })
}

impl FlowTable {
    pub(crate) fn new(maps: Arc<Maps>) -> Self {
        Self { maps, targets: Arc::default() }
    }

    /// How many established flows of one family the kernel remembers at most.
    ///
    /// # Errors
    /// If the kernel refuses to describe the map.
    pub fn size(&self) -> Result<u32, Error> {
        self.maps.flows4.size()
    }

    /// Calls `each` with all exceptions, in no order.
    ///
    /// # Errors
    /// If the kernel refuses to list them.
    pub fn scan(&self, now: u32, mut each: impl FnMut(FlowKey<V6>, Pinned)) -> Result<Scanned, Error> {
        let maps = &*self.maps;
        let mut members = HashMap::new();
        let mut scanned = Scanned::default();
        maps.flows4.each(|key: FlowKey<V4>, flow: Flow| {
            if scanned.counts(key.mapped(), &flow, now)
                && let Some(pinned) = self.pinned(&key, &flow, true, now, &mut members)
            {
                each(key.mapped(), pinned);
            }
        })?;
        maps.flows6.each(|key: FlowKey<V6>, flow: Flow| {
            if scanned.counts(key, &flow, now)
                && let Some(pinned) = self.pinned(&key, &flow, true, now, &mut members)
            {
                each(key, pinned);
            }
        })?;
        // A flow leaves its element among the recent ones once it is established.
        maps.recent4.each(|key: FlowKey<V4>, flow| {
            if let Some(pinned) = self.pinned(&key, &flow, false, now, &mut members)
                && maps.flows4.get::<_, Flow>(&key).is_ok_and(|flow| flow.is_none())
            {
                each(key.mapped(), pinned);
            }
        })?;
        maps.recent6.each(|key: FlowKey<V6>, flow| {
            if let Some(pinned) = self.pinned(&key, &flow, false, now, &mut members)
                && maps.flows6.get::<_, Flow>(&key).is_ok_and(|flow| flow.is_none())
            {
                each(key, pinned);
            }
        })?;
        Ok(scanned)
    }

    /// Deletes established flows that a scan has found to have ended, and that have not begun anew since: the program takes no packet
    /// for one of theirs, and each would take its part of every later scan.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn delete_ended(&self, keys: &[FlowKey<V6>], now: impl Fn() -> u32) -> Result<(), Error> {
        for keys in keys.chunks(ENDED_AT_ONCE) {
            let now = now();
            let (mut of_v4, mut of_v6) = (Vec::new(), Vec::new());
            for key in keys {
                match v4(key) {
                    Some(key) if has_ended(&self.maps.flows4, &key, now)? => of_v4.push(key),
                    None if has_ended(&self.maps.flows6, key, now)? => of_v6.push(*key),
                    _ => {}
                }
            }
            self.maps.flows4.delete(&of_v4)?;
            self.maps.flows6.delete(&of_v6)?;
        }
        Ok(())
    }

    /// The established flow with this key, if it is an exception.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn get(&self, key: &FlowKey<V6>, now: u32) -> Result<Option<Pinned>, Error> {
        let mut members = HashMap::new();
        Ok(if let Some(key) = v4(key) {
            let flow: Option<Flow> = self.maps.flows4.get(&key)?;
            flow.and_then(|flow| self.pinned(&key, &flow, true, now, &mut members))
        } else {
            let flow: Option<Flow> = self.maps.flows6.get(key)?;
            flow.and_then(|flow| self.pinned(key, &flow, true, now, &mut members))
        })
    }

    /// What the kernel remembers of a flow, whether it is an exception or not, and also where one packet
    /// was seen.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn known(&self, key: &FlowKey<V6>) -> Result<Option<Pinned>, Error> {
        let maps = &*self.maps;
        let flow = match v4(key) {
            Some(key) => known(&maps.recent4, &maps.flows4, &key),
            None => known(&maps.recent6, &maps.flows6, key),
        };
        Ok(flow?.map(|(Flow { target, seen, .. }, is_established)| Pinned { target, seen, is_established }))
    }

    /// Deletes flows, also those of which one packet was seen.
    ///
    /// # Errors
    /// If the kernel refuses.
    pub fn delete(&self, keys: &[FlowKey<V6>]) -> Result<(), Error> {
        let of_v4: Vec<_> = keys.iter().filter_map(v4).collect();
        let of_v6: Vec<_> = keys.iter().filter(|key| v4(key).is_none()).copied().collect();
        self.maps.flows4.delete(&of_v4)?;
        self.maps.recent4.delete(&of_v4)?;
        self.maps.flows6.delete(&of_v6)?;
        self.maps.recent6.delete(&of_v6)
    }

    /// The address of a target.
    pub fn target(&self, number: u32) -> Option<IpAddr> {
        let target = self.maps.targets.get(number)?;
        records::target_state(&target).map(|state| state.address)
    }

    /// Whether this host has a listener.
    pub fn has_listener(&self, listener: &ListenerKey) -> bool {
        self.service(listener).is_ok_and(|found| found.is_some())
    }

    /// Whether this host has a target with this address.
    pub fn has_target(&self, address: IpAddr) -> bool {
        self.target_number(address).is_some()
    }

    /// The number of the target with this address.
    pub fn target_number(&self, address: IpAddr) -> Option<u32> {
        self.number_of(address).map(|(number, _)| number)
    }

    /// Rises with each write after which a flow may have another slot, target or lease than before.
    pub fn changes(&self) -> u64 {
        self.maps.changes()
    }

    /// The VIPs that the program knows, and the lease of each.
    ///
    /// # Errors
    /// If the kernel refuses to list them.
    pub fn vips(&self) -> Result<HashMap<V6, u32>, Error> {
        let vips = self.maps.vips.read::<V6, Vip>()?;
        Ok(vips.into_iter().map(|(vip, value)| (vip, value.lease)).collect())
    }

    /// Lets the program keep these flows on their targets, if this host has listener and target. The
    /// next packet of each is checked as one of a flow that something has changed for. `is_new`: whether
    /// the flow is written only if the program remembers nothing of it. `is_used`: whether this host
    /// knows better of another flow, by the key and [`Flow::seen`].
    ///
    /// # Errors
    /// If the kernel refuses a write.
    pub fn insert(
        &self,
        exceptions: &[Exception],
        now: u32,
        is_new: impl Fn(&FlowKey<V6>) -> bool,
        is_used: impl Fn(&FlowKey<V6>, u32) -> bool,
    ) -> Result<Vec<Result<(), Refusal>>, Error> {
        let mut services = HashMap::new();
        let mut results = Vec::with_capacity(exceptions.len());
        let (mut keys4, mut flows4, mut keys6, mut flows6) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for exception in exceptions {
            let key = &exception.key;
            let flow = match self.flow(exception, now, &mut services)? {
                Ok(flow) => flow,
                Err(refusal) => {
                    results.push(Err(refusal));
                    continue;
                }
            };
            let maps = &*self.maps;
            let is_inserted = match (is_new(key), v4(key)) {
                (true, Some(key)) => insert_new(&maps.recent4, &maps.flows4, &key, &flow, now)?,
                (true, None) => insert_new(&maps.recent6, &maps.flows6, key, &flow, now)?,
                (false, of_v4) => {
                    let known = match &of_v4 {
                        Some(key) => known(&maps.recent4, &maps.flows4, key)?,
                        None => known(&maps.recent6, &maps.flows6, key)?,
                    };
                    let known = known.filter(|(known, _)| known.is_alive(key.protocol, now));
                    let is_better = known.is_some_and(|(known, _)| is_used(key, known.seen));
                    // What is told again must not make a flow older.
                    let has_it = known.is_some_and(|(known, is_established)| {
                        let is_same = (known.service, known.target) == (flow.service, flow.target);
                        is_established && is_same && known.idle(now) < flow.idle(now)
                    });
                    if !is_better && !has_it {
                        if let Some(key) = of_v4 {
                            keys4.push(key);
                            flows4.push(flow);
                        } else {
                            keys6.push(*key);
                            flows6.push(flow);
                        }
                    }
                    !is_better
                }
            };
            results.push(if is_inserted { Ok(()) } else { Err(Refusal::Known) });
        }
        self.maps.flows4.update(&keys4, &flows4)?;
        self.maps.flows6.update(&keys6, &flows6)?;
        Ok(results)
    }

    /// The flow by this host's numbers, or why it has none.
    fn flow(
        &self,
        exception: &Exception,
        now: u32,
        services: &mut HashMap<ListenerKey, Option<(u32, Service)>>,
    ) -> Result<Result<Flow, Refusal>, Error> {
        let listener = exception.key.listener();
        let found = match services.get(&listener) {
            Some(found) => *found,
            None => *services.entry(listener).or_insert(self.service(&listener)?),
        };
        let Some((number, service)) = found else { return Ok(Err(Refusal::UnknownListener)) };
        let Some((target, version)) = self.number_of(exception.target) else {
            return Ok(Err(Refusal::UnknownTarget));
        };
        let flow = Flow {
            target,
            service: number,
            // One that was before: the program checks the flow as after a change.
            version: Flow::version(service.version, version).wrapping_sub(1),
            sender: 0,
            seen: now.wrapping_sub(exception.idle) & !CLOSING
                | if exception.is_closing { CLOSING } else { 0 },
        };
        let is_alive = exception.idle < CLOSING && flow.is_alive(exception.key.protocol, now);
        Ok(if is_alive { Ok(flow) } else { Err(Refusal::Expired) })
    }

    fn service(&self, listener: &ListenerKey) -> Result<Option<(u32, Service)>, Error> {
        let number: Option<u32> = self.maps.listeners.get(listener)?;
        Ok(number.and_then(|number| {
            let service = self.maps.services.get(number)?;
            (service.listener == *listener).then_some((number, service))
        }))
    }

    /// The number and the version of the target with this address.
    fn number_of(&self, address: IpAddr) -> Option<(u32, u32)> {
        let mut index = self.targets.lock().unwrap_or_else(PoisonError::into_inner);
        let changes = self.maps.changes();
        if index.changes != Some(changes) {
            let all = 1..self.maps.targets.len();
            index.numbers = all.filter_map(|number| Some((self.target(number)?, number))).collect();
            index.changes = Some(changes);
        }
        let number = *index.numbers.get(&address)?;
        // A write may be under way.
        let target = self.maps.targets.get(number)?;
        (records::target_state(&target)?.address == address).then_some((number, target.version))
    }

    fn pinned<A: Address>(
        &self,
        key: &FlowKey<A>,
        flow: &Flow,
        is_established: bool,
        now: u32,
        members: &mut HashMap<Member, bool>,
    ) -> Option<Pinned> {
        let service = self.maps.services.get(flow.service)?;
        let slot = self.slot(key.hash(service.flags), &service);
        if !is_exception(key, flow, &service, slot, is_established, now) {
            return None;
        }
        let is_kept = if key.protocol == u32::from(protocol::TCP) {
            self.maps.targets.get(flow.target).is_some_and(|target| target.family != 0)
        } else {
            let member = Member { table: service.table, target: flow.target };
            *members.entry(member).or_insert_with(|| self.is_member(member))
        };
        is_kept.then_some(Pinned { target: flow.target, seen: flow.seen, is_established })
    }

    fn is_member(&self, member: Member) -> bool {
        self.maps.members.get::<Member, u32>(&member).is_ok_and(|found| found.is_some())
    }

    /// The target of the slot of a hash; zero if there is none.
    fn slot(&self, hash: u32, service: &Service) -> u32 {
        let half = |number: u64| u32::try_from(number & u64::from(u32::MAX)).unwrap_or(0);
        let (base, size) = (half(service.slots >> 32), half(service.slots));
        if size == 0 {
            return 0;
        }
        let slot = base.wrapping_add(hash::slot(hash, size));
        let element = self.maps.slots.get(slot / SLOTS_PER_ELEMENT);
        let place = usize::try_from(slot % SLOTS_PER_ELEMENT).unwrap_or(0);
        element.and_then(|element| element.get(place).copied()).unwrap_or(0)
    }
}

/// Whether the map still has the flow, and it has ended.
fn has_ended<A>(flows: &KernelMap, key: &FlowKey<A>, now: u32) -> Result<bool, Error>
where
    FlowKey<A>: aya::Pod,
{
    let flow: Option<Flow> = flows.get(key)?;
    Ok(flow.is_some_and(|flow| !flow.is_alive(key.protocol, now)))
}

/// What the program remembers of a flow, and whether more than one packet was seen.
fn known<A>(recent: &KernelMap, flows: &KernelMap, key: &FlowKey<A>) -> Result<Option<(Flow, bool)>, Error>
where
    FlowKey<A>: aya::Pod,
{
    // An element among the established flows hides one among the recent ones.
    Ok(match flows.get(key)? {
        Some(flow) => Some((flow, true)),
        None => recent.get(key)?.map(|flow| (flow, false)),
    })
}

/// Inserts a flow that the program does not know.
fn insert_new<A>(
    recent: &KernelMap,
    flows: &KernelMap,
    key: &FlowKey<A>,
    flow: &Flow,
    now: u32,
) -> Result<bool, Error>
where
    FlowKey<A>: aya::Pod,
{
    // An element among the established flows would hide one among the recent ones.
    let is_recent = recent.get::<_, Flow>(key)?.is_some_and(|flow| flow.idle(now) <= TCP_CLOSING);
    Ok(!is_recent && flows.insert(key, flow)?)
}
