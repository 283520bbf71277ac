// SPDX-License-Identifier: Apache-2.0
//! The maps of a loaded program. `writer`, `flows` and `counters` use them.

use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use aya::maps::{Map, MapData, MapType};
use aya::{Ebpf, Pod};
use steerage_edge_packet::maps::{Config, Service, Slots, Target};

use crate::error::Error;
use crate::shared::SharedArray;
use crate::syscall;

/// A map that is read and written by system calls.
#[derive(Debug)]
pub(crate) struct KernelMap {
    name: &'static str,
    data: MapData,
}

impl KernelMap {
    fn take(program: &mut Ebpf, name: &'static str) -> Result<Self, Error> {
        let map = program.take_map(name).ok_or(Error::Missing(name))?;
        let (Map::Array(data)
        | Map::HashMap(data)
        | Map::LruHashMap(data)
        | Map::LpmTrie(data)
        | Map::PerCpuArray(data)) = map
        else {
            return Err(Error::Missing(name));
        };
        Ok(Self { name, data })
    }

    fn fd(&self) -> BorrowedFd<'_> {
        self.data.fd().as_fd()
    }

    pub(crate) fn update<K: Pod, V: Pod>(&self, keys: &[K], values: &[V]) -> Result<(), Error> {
        syscall::update(self.fd(), keys, values).map_err(Error::io("write to", self.name))
    }

    pub(crate) fn delete<K: Pod>(&self, keys: &[K]) -> Result<(), Error> {
        syscall::delete(self.fd(), keys).map_err(Error::io("delete from", self.name))
    }

    /// Writes the element unless the map has one with this key. Returns whether it did.
    pub(crate) fn insert<K: Pod, V: Pod>(&self, key: &K, value: &V) -> Result<bool, Error> {
        syscall::insert(self.fd(), key, value).map_err(Error::io("write to", self.name))
    }

    pub(crate) fn read<K: Pod, V: Pod>(&self) -> Result<Vec<(K, V)>, Error> {
        let mut found = Vec::new();
        self.each(|key, value| found.push((key, value)))?;
        Ok(found)
    }

    /// Calls `each` with all elements, in no order.
    pub(crate) fn each<K: Pod, V: Pod>(&self, mut each: impl FnMut(K, V)) -> Result<(), Error> {
        let first = |key, values: &[V]| values.iter().take(1).for_each(|value| each(key, *value));
        syscall::read(self.fd(), 1, first).map_err(Error::io("read", self.name))
    }

    /// The value of an element, if there is one.
    pub(crate) fn get<K: Pod, V: Pod>(&self, key: &K) -> Result<Option<V>, Error> {
        match syscall::lookup(self.fd(), key, 1) {
            Ok(values) => Ok(values.first().copied()),
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(None),
            Err(error) => Err(Error::io("read", self.name)(error)),
        }
    }

    /// The values of each CPU.
    pub(crate) fn lookup<K: Pod, V: Pod>(&self, key: &K, cpus: usize) -> Result<Vec<V>, Error> {
        syscall::lookup(self.fd(), key, cpus).map_err(Error::io("read", self.name))
    }

    /// Writes this value for each CPU.
    pub(crate) fn reset<K: Pod, V: Pod>(&self, key: &K, value: V, cpus: usize) -> Result<(), Error> {
        syscall::replace(self.fd(), key, &vec![value; cpus]).map_err(Error::io("write to", self.name))
    }

    /// Elements that it has room for.
    pub(crate) fn size(&self) -> Result<u32, Error> {
        Ok(self.data.info()?.max_entries())
    }

    fn share<T: Pod>(self) -> Result<SharedArray<T>, Error> {
        let count = usize::try_from(self.size()?).unwrap_or(0);
        SharedArray::open(self.data, count).map_err(Error::io("map into memory", self.name))
    }
}

/// All maps.
#[derive(Debug)]
pub(crate) struct Maps {
    /// Counts the writes after which a flow may have another slot, target or lease than before.
    changes: AtomicU64,
    /// Values of each element of the counters.
    pub(crate) cpus: usize,
    pub(crate) config: SharedArray<Config>,
    pub(crate) gate: SharedArray<u64>,
    pub(crate) leases: SharedArray<u64>,
    pub(crate) services: SharedArray<Service>,
    pub(crate) slots: SharedArray<Slots>,
    pub(crate) targets: SharedArray<Target>,
    pub(crate) vips: KernelMap,
    pub(crate) listeners: KernelMap,
    pub(crate) members: KernelMap,
    pub(crate) senders: KernelMap,
    pub(crate) prefixes: KernelMap,
    pub(crate) flows4: KernelMap,
    pub(crate) flows6: KernelMap,
    pub(crate) recent4: KernelMap,
    pub(crate) recent6: KernelMap,
    pub(crate) service_counters: KernelMap,
    pub(crate) target_counters: KernelMap,
    pub(crate) events: KernelMap,
}

const LEASES: &str = "LEASES";

/// The pinned leases in a folder of maps. They are the same in all layouts.
pub(crate) fn open_leases(maps: &Path) -> Result<SharedArray<u64>, Error> {
    let data = MapData::from_pin(maps.join(LEASES))?;
    let info = data.info()?;
    if info.map_type()? != MapType::Array || info.value_size() != 8 {
        return Err(Error::Missing(LEASES));
    }
    KernelMap { name: LEASES, data }.share()
}

/// The names of all maps in the object file.
pub(crate) const NAMES: [&str; 19] = [
    "CONFIG",
    "GATE",
    LEASES,
    "SERVICES",
    "SLOTS",
    "TARGETS",
    "VIPS",
    "LISTENERS",
    "MEMBERS",
    "SENDERS",
    "PREFIXES",
    "FLOWS4",
    "FLOWS6",
    "RECENT4",
    "RECENT6",
    "FRAGMENTS",
    "SERVICE_COUNTERS",
    "TARGET_COUNTERS",
    "EVENTS",
];

impl Maps {
    pub(crate) fn take(program: &mut Ebpf) -> Result<Self, Error> {
        let cpus = aya::util::nr_cpus().map_err(|(path, error)| Error::io("read", path)(error))?;
        let mut take = |name| KernelMap::take(program, name);
        Ok(Self {
            changes: AtomicU64::new(0),
            cpus,
            config: take("CONFIG")?.share()?,
            gate: take("GATE")?.share()?,
            leases: take(LEASES)?.share()?,
            services: take("SERVICES")?.share()?,
            slots: take("SLOTS")?.share()?,
            targets: take("TARGETS")?.share()?,
            vips: take("VIPS")?,
            listeners: take("LISTENERS")?,
            members: take("MEMBERS")?,
            senders: take("SENDERS")?,
            prefixes: take("PREFIXES")?,
            flows4: take("FLOWS4")?,
            flows6: take("FLOWS6")?,
            recent4: take("RECENT4")?,
            recent6: take("RECENT6")?,
            service_counters: take("SERVICE_COUNTERS")?,
            target_counters: take("TARGET_COUNTERS")?,
            events: take("EVENTS")?,
        })
    }

    /// A flow may have another slot, target or lease now.
    pub(crate) fn count_change(&self) {
        self.changes.fetch_add(1, Ordering::Release);
    }

    pub(crate) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }
}
