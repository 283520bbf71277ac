// SPDX-License-Identifier: Apache-2.0
//! Arrays of the kernel in this process's memory: elements are read and written without system
//! calls. Used by `maps` alone.

#![allow(unsafe_code, reason = "memory that the kernel shares has no safe form")]

use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use aya::Pod;
use aya::maps::MapData;

/// An array of elements that are a number of 64-bit words each. Words are read and written whole, so
/// that the program sees either the old or the new one.
#[derive(Debug)]
pub(crate) struct SharedArray<T> {
    words: NonNull<AtomicU64>,
    count: usize,
    elements: PhantomData<T>,
    /// Open, because the kernel loads a program by the descriptors of its maps.
    _map: MapData,
}

// SAFETY: all access to the memory is atomic.
unsafe impl<T: Send> Send for SharedArray<T> {}
// SAFETY: all access to the memory is atomic.
unsafe impl<T: Sync> Sync for SharedArray<T> {}

impl<T: Pod> SharedArray<T> {
    const WORDS: usize = size_of::<T>() / 8;
    const WHOLE: () = assert!(size_of::<T>().is_multiple_of(8) && size_of::<T>() > 0);

    /// `map`: an array with the flag `BPF_F_MMAPABLE`, of `count` elements.
    pub(crate) fn open(map: MapData, count: usize) -> io::Result<Self> {
        let () = Self::WHOLE;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping; the kernel chooses the place.
        let found = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                count * size_of::<T>(),
                access,
                libc::MAP_SHARED,
                map.fd().as_fd().as_raw_fd(),
                0,
            )
        };
        if found == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let words = NonNull::new(found.cast()).ok_or(io::ErrorKind::Other)?;
        Ok(Self { words, count, elements: PhantomData, _map: map })
    }

    /// The number of elements: the kernel counts them in 32 bits.
    pub(crate) fn len(&self) -> u32 {
        u32::try_from(self.count).unwrap_or(u32::MAX)
    }

    /// The element, or `None` behind the end.
    pub(crate) fn get(&self, index: u32) -> Option<T> {
        let words = self.element(index)?;
        // SAFETY: all bytes zero are a value of plain old data.
        let mut value: T = unsafe { std::mem::zeroed() };
        let to = std::ptr::from_mut(&mut value).cast::<u64>();
        for (at, word) in words.iter().enumerate() {
            // SAFETY: within the value, as `WHOLE` asserts; it may be aligned less.
            unsafe { to.add(at).write_unaligned(word.load(Ordering::Acquire)) };
        }
        Some(value)
    }

    /// Writes the element, where it differs. Returns whether the array has it.
    pub(crate) fn set(&self, index: u32, value: &T) -> bool {
        let Some(words) = self.element(index) else { return false };
        let from = std::ptr::from_ref(value).cast::<u64>();
        for (at, word) in words.iter().enumerate() {
            // SAFETY: within the value, as `WHOLE` asserts; it may be aligned less.
            let new = unsafe { from.add(at).read_unaligned() };
            if word.load(Ordering::Relaxed) != new {
                word.store(new, Ordering::Release);
            }
        }
        true
    }

    fn element(&self, index: u32) -> Option<&[AtomicU64]> {
        let index = usize::try_from(index).ok().filter(|index| *index < self.count)?;
        // SAFETY: within the mapping, which lives as long as this value; the kernel and other processes access it atomically.
        Some(unsafe { std::slice::from_raw_parts(self.words.as_ptr().add(index * Self::WORDS), Self::WORDS) })
    }
}

impl<T> Drop for SharedArray<T> {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own.
        unsafe { libc::munmap(self.words.as_ptr().cast(), self.count * size_of::<T>()) };
    }
}
