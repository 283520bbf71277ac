// SPDX-License-Identifier: Apache-2.0
//! The commands of bpf(2) for many elements at once, which aya does not have, and a query without its needs. Used by `maps` and
//! `attach`.
//!
//! Kernels without a batch for a type of map get one element after the other.

#![allow(
    unsafe_code,
    reason = "bpf(2) has no safe wrapper for batches; pointers go no further than the call"
)]

use std::ffi::CString;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::time::Duration;

use aya::Pod;

/// `BPF_TCX_INGRESS`.
const TCX_INGRESS: u32 = 46;
/// Programs on one link.
const PROGRAMS: usize = 64;

/// `BPF_LINK_TYPE_TCX`.
const TCX_LINK: u32 = 11;

/// `MEMBARRIER_CMD_GLOBAL`: a grace period of RCU.
const MEMBARRIER_GLOBAL: i64 = 1;

const OBJECT_GET: i64 = 7;
const OBJECT_INFO: i64 = 15;
const PROGRAM_QUERY: i64 = 16;
const LOOKUP: i64 = 1;
const UPDATE: i64 = 2;
const DELETE: i64 = 3;
const LOOKUP_BATCH: i64 = 24;
const UPDATE_BATCH: i64 = 26;
const DELETE_BATCH: i64 = 27;
/// The kernel's own code for a command that a type of map lacks.
const ENOTSUPP: i32 = 524;
/// `BPF_NOEXIST`: writes no element that exists.
const NO_EXIST: u64 = 1;
/// Elements in one batch: the kernel copies them to and from memory of its own.
const BATCH: usize = 4096;
/// Bytes of a cursor: the longest key.
const CURSOR: usize = 64;

/// `union bpf_attr` of batches.
#[repr(C)]
struct BatchAttr {
    in_batch: u64,
    out_batch: u64,
    keys: u64,
    values: u64,
    count: u32,
    map_fd: u32,
    elem_flags: u64,
    flags: u64,
}

/// `union bpf_attr` of single elements.
#[repr(C)]
struct ElementAttr {
    map_fd: u32,
    padding: u32,
    key: u64,
    value: u64,
    flags: u64,
}

/// `union bpf_attr` of queries.
#[repr(C)]
struct QueryAttr {
    target_ifindex: u32,
    attach_type: u32,
    query_flags: u32,
    attach_flags: u32,
    prog_ids: u64,
    prog_cnt: u32,
    padding: u32,
    prog_attach_flags: u64,
    link_ids: u64,
    link_attach_flags: u64,
    revision: u64,
}

/// `union bpf_attr` of pinned objects.
#[repr(C)]
struct PinAttr {
    path: u64,
    fd: u32,
    flags: u32,
}

/// `union bpf_attr` of descriptions.
#[repr(C)]
struct InfoAttr {
    fd: u32,
    length: u32,
    info: u64,
}

/// `struct bpf_link_info` of tcx, and room for other types.
#[repr(C, align(8))]
#[derive(Default)]
struct LinkInfo {
    link_type: u32,
    id: u32,
    program: u32,
    padding: u32,
    ifindex: u32,
    attach_type: u32,
    rest: [u64; 16],
}

/// What is at tcx ingress of an interface.
#[derive(Debug)]
pub(crate) struct Tcx {
    /// Ids of the programs.
    pub(crate) programs: Vec<u32>,
    /// Ids of their links; zero for a program that has none.
    pub(crate) links: Vec<u32>,
}

/// A tcx link.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TcxLink {
    /// Its id.
    pub(crate) id: u32,
    /// Index of the interface, in its own network namespace; zero if that is gone.
    pub(crate) ifindex: u32,
}

/// What is at tcx ingress of an interface. aya's own function also opens the programs, for which the
/// kernel wants `CAP_SYS_ADMIN`.
pub(crate) fn tcx(interface: &str) -> io::Result<Tcx> {
    let name = CString::new(interface)?;
    // SAFETY: the name is a C string that lives during the call.
    let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
    if index == 0 {
        return Err(io::Error::last_os_error());
    }
    let (mut programs, mut links) = (vec![0_u32; PROGRAMS], vec![0_u32; PROGRAMS]);
    let mut attr = QueryAttr {
        target_ifindex: index,
        attach_type: TCX_INGRESS,
        query_flags: 0,
        attach_flags: 0,
        prog_ids: programs.as_mut_ptr().expose_provenance() as u64,
        prog_cnt: u32::try_from(PROGRAMS).unwrap_or(0),
        padding: 0,
        prog_attach_flags: 0,
        link_ids: links.as_mut_ptr().expose_provenance() as u64,
        link_attach_flags: 0,
        revision: 0,
    };
    bpf(PROGRAM_QUERY, &mut attr)?;
    let count = usize::try_from(attr.prog_cnt).unwrap_or(0);
    programs.truncate(count);
    links.truncate(count);
    Ok(Tcx { programs, links })
}

/// The pinned tcx link of ingress. aya does not tell its interface.
pub(crate) fn pinned_link(pin: &Path) -> io::Result<TcxLink> {
    let path = CString::new(pin.as_os_str().as_bytes())?;
    let mut attr = PinAttr { path: path.as_ptr().expose_provenance() as u64, fd: 0, flags: 0 };
    let opened = bpf(OBJECT_GET, &mut attr)?;
    // SAFETY: the kernel has made the descriptor for this call alone.
    let object = unsafe { OwnedFd::from_raw_fd(opened) };
    let mut info = LinkInfo::default();
    let length = u32::try_from(size_of::<LinkInfo>()).unwrap_or(0);
    let pointer = std::ptr::from_mut(&mut info).expose_provenance() as u64;
    bpf(OBJECT_INFO, &mut InfoAttr { fd: fd(object.as_fd()), length, info: pointer })?;
    // Maps and programs have other numbers at these places: no map has such flags.
    if info.link_type != TCX_LINK || info.attach_type != TCX_INGRESS {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "no tcx link of ingress"));
    }
    Ok(TcxLink { id: info.id, ifindex: info.ifindex })
}

/// Returns once no packet is in the program any more that was so before: what such packets may have
/// looked at can be written with another meaning. The kernel's programs are read sides of RCU.
pub(crate) fn wait_for_packets() {
    // SAFETY: reads and writes no memory.
    let result = unsafe { libc::syscall(libc::SYS_membarrier, MEMBARRIER_GLOBAL, 0, 0) };
    if result != 0 {
        // Some kernels have no such call. No packet takes a millionth of this.
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Returns the new descriptor of a command that makes one.
fn bpf<T>(command: i64, attr: &mut T) -> io::Result<RawFd> {
    let size = size_of::<T>();
    // SAFETY: the attribute lives during the call, and each pointer in it is to memory of the size that the map has, as the callers
    // below ensure.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_mut(attr), size) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(RawFd::try_from(result).unwrap_or(-1)) }
}

fn fd(map: BorrowedFd<'_>) -> u32 {
    u32::try_from(map.as_raw_fd()).unwrap_or(u32::MAX)
}

fn address<T>(slice: &[T]) -> u64 {
    slice.as_ptr().expose_provenance() as u64
}

fn lacks_batches(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP | ENOTSUPP))
}

/// Writes all elements. `K` and `V` have the sizes of the map's keys and values.
pub(crate) fn update<K: Pod, V: Pod>(map: BorrowedFd<'_>, keys: &[K], values: &[V]) -> io::Result<()> {
    for (keys, values) in keys.chunks(BATCH).zip(values.chunks(BATCH)) {
        let mut attr = BatchAttr::new(map, keys, address(values));
        match bpf(UPDATE_BATCH, &mut attr) {
            Err(error) if lacks_batches(&error) => {
                for (key, value) in keys.iter().zip(values) {
                    element(UPDATE, map, key, address(std::slice::from_ref(value)))?;
                }
            }
            result => drop(result?),
        }
    }
    Ok(())
}

/// Deletes all elements; those that do not exist are skipped.
pub(crate) fn delete<K: Pod>(map: BorrowedFd<'_>, keys: &[K]) -> io::Result<()> {
    let mut rest = keys;
    while !rest.is_empty() {
        let chunk = &rest[..rest.len().min(BATCH)];
        let mut attr = BatchAttr::new(map, chunk, 0);
        match bpf(DELETE_BATCH, &mut attr) {
            Ok(_) => rest = &rest[chunk.len()..],
            // The element after those that were deleted does not exist.
            Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {
                let done = usize::try_from(attr.count).unwrap_or(0).min(chunk.len() - 1);
                rest = &rest[done + 1..];
            }
            Err(error) if lacks_batches(&error) => {
                for key in chunk {
                    match element(DELETE, map, key, 0) {
                        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
                        result => result?,
                    }
                }
                rest = &rest[chunk.len()..];
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Calls `each` with all elements, in no order. Elements that come or go meanwhile may be missed.
/// `width`: values of one element, one for each CPU in maps that are per CPU.
pub(crate) fn read<K: Pod, V: Pod>(
    map: BorrowedFd<'_>,
    width: usize,
    mut each: impl FnMut(K, &[V]),
) -> io::Result<()> {
    let (mut keys, mut values) = (zeroed::<K>(BATCH), zeroed::<V>(BATCH * width));
    let mut cursor: Option<[u8; CURSOR]> = None;
    let mut count = BATCH;
    loop {
        let mut next = [0_u8; CURSOR];
        let mut attr = BatchAttr::new(map, &keys, address(&values));
        attr.in_batch = cursor.as_ref().map_or(0, |cursor| address(cursor));
        attr.out_batch = next.as_mut_ptr().expose_provenance() as u64;
        attr.count = u32::try_from(count).unwrap_or(u32::MAX);
        attr.keys = keys.as_mut_ptr().expose_provenance() as u64;
        attr.values = values.as_mut_ptr().expose_provenance() as u64;
        let result = bpf(LOOKUP_BATCH, &mut attr);
        match &result {
            // A bucket of the hash table has more elements.
            Err(error) if error.raw_os_error() == Some(libc::ENOSPC) => {
                count *= 2;
                (keys, values) = (zeroed(count), zeroed(count * width));
                continue;
            }
            Err(error) if error.raw_os_error() != Some(libc::ENOENT) => return result.map(drop),
            _ => {}
        }
        let found = usize::try_from(attr.count).unwrap_or(0);
        for (key, value) in keys.iter().zip(values.chunks(width)).take(found) {
            each(*key, value);
        }
        if result.is_err() {
            return Ok(());
        }
        cursor = Some(next);
    }
}

/// The values of one element, one for each CPU in maps that are per CPU.
pub(crate) fn lookup<K: Pod, V: Pod>(map: BorrowedFd<'_>, key: &K, width: usize) -> io::Result<Vec<V>> {
    let mut values = zeroed::<V>(width);
    element(LOOKUP, map, key, values.as_mut_ptr().expose_provenance() as u64)?;
    Ok(values)
}

/// Writes the values of one element, one for each CPU in maps that are per CPU.
pub(crate) fn replace<K: Pod, V: Pod>(map: BorrowedFd<'_>, key: &K, values: &[V]) -> io::Result<()> {
    element(UPDATE, map, key, address(values))
}

/// Writes the element unless the map has one with this key. Returns whether it did.
pub(crate) fn insert<K: Pod, V: Pod>(map: BorrowedFd<'_>, key: &K, value: &V) -> io::Result<bool> {
    let (key, value) = (address(std::slice::from_ref(key)), address(std::slice::from_ref(value)));
    match bpf(UPDATE, &mut ElementAttr { map_fd: fd(map), padding: 0, key, value, flags: NO_EXIST }) {
        Ok(_) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::EEXIST) => Ok(false),
        Err(error) => Err(error),
    }
}

fn element<K: Pod>(command: i64, map: BorrowedFd<'_>, key: &K, value: u64) -> io::Result<()> {
    let key = address(std::slice::from_ref(key));
    bpf(command, &mut ElementAttr { map_fd: fd(map), padding: 0, key, value, flags: 0 }).map(drop)
}

fn zeroed<T: Pod>(count: usize) -> Vec<T> {
    // SAFETY: all bytes zero are a value of plain old data.
    vec![unsafe { std::mem::zeroed() }; count]
}

impl BatchAttr {
    fn new<K>(map: BorrowedFd<'_>, keys: &[K], values: u64) -> Self {
        Self {
            in_batch: 0,
            out_batch: 0,
            keys: address(keys),
            values,
            count: u32::try_from(keys.len()).unwrap_or(u32::MAX),
            map_fd: fd(map),
            elem_flags: 0,
            flags: 0,
        }
    }
}
