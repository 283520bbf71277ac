// SPDX-License-Identifier: Apache-2.0
//! The maps. The loader sets the sizes that depend on the host; those here are for tests.

use aya_ebpf::macros::map;
use aya_ebpf::maps::lpm_trie::Key;
use aya_ebpf::maps::{Array, HashMap, LpmTrie, LruHashMap, PerCpuArray};
use steerage_edge_packet::hash::GATE_WORDS;
use steerage_edge_packet::maps::{
    Config, Counters, Event, FORWARDING, Flow, FlowKey, FragmentFlow, FragmentKey, ListenerKey, Mac, Member,
    Prefix, Service, Slots, Target, Vip,
};
use steerage_edge_packet::{Address, V4, V6};

use crate::{DROP, PASS};

/// The daemon writes these arrays through shared memory.
const MMAPABLE: u32 = 1 << 10;
/// Memory is taken as elements come.
const NO_PREALLOC: u32 = 1;

#[map]
pub static CONFIG: Array<Config> = Array::with_max_entries(1, MMAPABLE);
#[map]
pub static GATE: Array<u64> = Array::with_max_entries(GATE_WORDS, MMAPABLE);
/// Until when this host answers for the VIPs of each lease, by the clock that counts suspended time. [`FORWARDING`] is no lease.
#[map]
pub static LEASES: Array<u64> = Array::with_max_entries(1024, MMAPABLE);
#[map]
pub static SERVICES: Array<Service> = Array::with_max_entries(1024, MMAPABLE);
#[map]
pub static SLOTS: Array<Slots> = Array::with_max_entries(65_536, MMAPABLE);
#[map]
pub static TARGETS: Array<Target> = Array::with_max_entries(1024, MMAPABLE);

#[map]
pub static VIPS: HashMap<V6, Vip> = HashMap::with_max_entries(65_536, NO_PREALLOC);
#[map]
pub static LISTENERS: HashMap<ListenerKey, u32> = HashMap::with_max_entries(262_144, NO_PREALLOC);
#[map]
pub static MEMBERS: HashMap<Member, u32> = HashMap::with_max_entries(2_097_152, NO_PREALLOC);
/// The set of addresses of each known link-layer sender.
#[map]
pub static SENDERS: HashMap<Mac, u32> = HashMap::with_max_entries(65_536, NO_PREALLOC);
#[map]
pub static PREFIXES: LpmTrie<PrefixData, u32> = LpmTrie::with_max_entries(1_048_576, NO_PREALLOC);

#[map]
pub static FLOWS4: LruHashMap<FlowKey<V4>, Flow> = LruHashMap::with_max_entries(65_536, 0);
#[map]
pub static FLOWS6: LruHashMap<FlowKey<V6>, Flow> = LruHashMap::with_max_entries(65_536, 0);
/// Flows of which one packet was seen. A flood of first packets evicts only these.
#[map]
pub static RECENT4: LruHashMap<FlowKey<V4>, Flow> = LruHashMap::with_max_entries(16_384, 0);
#[map]
pub static RECENT6: LruHashMap<FlowKey<V6>, Flow> = LruHashMap::with_max_entries(16_384, 0);
#[map]
pub static FRAGMENTS: LruHashMap<FragmentKey, FragmentFlow> = LruHashMap::with_max_entries(16_384, 0);

#[map]
pub static SERVICE_COUNTERS: PerCpuArray<Counters> = PerCpuArray::with_max_entries(1024, 0);
#[map]
pub static TARGET_COUNTERS: PerCpuArray<Counters> = PerCpuArray::with_max_entries(1024, 0);
#[map]
pub static EVENTS: PerCpuArray<u64> = PerCpuArray::with_max_entries(Event::ALL.len() as u32, 0);

/// The key of [`PREFIXES`] behind its length.
pub type PrefixData = [u32; 5];

const _: () = assert!(size_of::<Key<PrefixData>>() == size_of::<Prefix>());

/// The maps that differ between the IP families.
pub trait Family: Address + 'static {
    fn flows() -> &'static LruHashMap<FlowKey<Self>, Flow>;
    fn recent() -> &'static LruHashMap<FlowKey<Self>, Flow>;
}

impl Family for V4 {
    #[inline(always)]
    fn flows() -> &'static LruHashMap<FlowKey<Self>, Flow> {
        &FLOWS4
    }

    #[inline(always)]
    fn recent() -> &'static LruHashMap<FlowKey<Self>, Flow> {
        &RECENT4
    }
}

impl Family for V6 {
    #[inline(always)]
    fn flows() -> &'static LruHashMap<FlowKey<Self>, Flow> {
        &FLOWS6
    }

    #[inline(always)]
    fn recent() -> &'static LruHashMap<FlowKey<Self>, Flow> {
        &RECENT6
    }
}

/// Whether the set of prefixes contains the address.
#[inline(always)]
pub fn contains(set: u32, address: V6) -> bool {
    let prefix = Prefix::of(set, address);
    // SAFETY: the same bytes, but aligned.
    let key = unsafe { &*core::ptr::from_ref(&prefix).cast::<Key<PrefixData>>() };
    PREFIXES.get(key).is_some()
}

#[inline(always)]
pub fn count(event: Event) {
    if let Some(counter) = EVENTS.get_ptr_mut(event as u32) {
        // SAFETY: the value is this CPU's own.
        unsafe { *counter += 1 };
    }
}

/// Whether packets to VIPs are left to the kernel, as if there were no program: the daemon is gone, and
/// other hosts have the VIPs. `clock`: [`crate::flow::clock`].
#[inline(always)]
pub fn is_over(clock: u64) -> bool {
    LEASES.get(FORWARDING).is_some_and(|until| *until != 0 && clock > *until)
}

/// Drops a packet that no listener takes, if it is for a VIP: several addresses share a bit of the
/// gate.
#[inline(never)]
pub fn drop_if_vip(vip: V6, event: Event) -> i32 {
    // SAFETY: only whether the element exists matters.
    if unsafe { VIPS.get(vip) }.is_none() {
        return PASS;
    }
    count(event);
    DROP
}
