// SPDX-License-Identifier: Apache-2.0
//! A frame in the kernel: reads and writes that the verifier can follow.

use core::arch::asm;

use aya_ebpf::bindings::__sk_buff;
use aya_ebpf::helpers::bpf_skb_pull_data;
use steerage_edge_packet::{MAX_HEADERS, Packet};

/// The readable part of a frame.
#[derive(Clone, Copy)]
pub struct Frame {
    pub skb: *mut __sk_buff,
    start: usize,
    end: usize,
}

impl Frame {
    /// Makes the headers readable. `None` if the kernel lacks the memory.
    #[inline(always)]
    pub fn open(skb: *mut __sk_buff) -> Option<Self> {
        let frame = Self::again(skb);
        let length = frame.length();
        let wanted = if length < MAX_HEADERS { length } else { MAX_HEADERS };
        if frame.start + wanted <= frame.end {
            return Some(frame);
        }
        // SAFETY: the program's own context. All pointers into the packet are read again.
        let pulled = unsafe { bpf_skb_pull_data(skb, wanted as u32) };
        if pulled == 0 { Some(Self::again(skb)) } else { None }
    }

    /// The same frame, after a call that may have moved it, or in another function.
    #[inline(always)]
    pub fn again(skb: *mut __sk_buff) -> Self {
        // SAFETY: the program's own context.
        unsafe { Self { skb, start: (*skb).data as usize, end: (*skb).data_end as usize } }
    }

    /// The VLAN tag, which the kernel keeps beside the frame; zero for none.
    #[inline(always)]
    pub fn vlan(&self) -> u32 {
        // SAFETY: the program's own context.
        unsafe { if (*self.skb).vlan_present == 0 { 0 } else { (*self.skb).vlan_tci } }
    }

    /// To whom the frame is addressed.
    #[inline(always)]
    pub fn kind(&self) -> u32 {
        // SAFETY: the program's own context.
        unsafe { (*self.skb).pkt_type }
    }

    /// The interface that received the frame.
    #[inline(always)]
    pub fn interface(&self) -> u32 {
        // SAFETY: the program's own context.
        unsafe { (*self.skb).ifindex }
    }

    /// Packets that were merged into this one, at least one.
    #[inline(always)]
    pub fn segments(&self) -> u64 {
        // SAFETY: the program's own context.
        let merged = unsafe { (*self.skb).gso_segs };
        if merged == 0 { 1 } else { merged as u64 }
    }

    /// Payload of each packet that was merged into this one; zero for none.
    #[inline(always)]
    pub fn segment_size(&self) -> u32 {
        // SAFETY: the program's own context.
        unsafe { (*self.skb).gso_size }
    }

    /// `N` bytes at `offset`, to write.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)]
    pub fn at_mut<const N: usize>(&self, offset: usize) -> Option<&mut [u8; N]> {
        // SAFETY: the bytes are within the packet, and nothing else refers to them.
        self.find::<N>(offset).map(|found| unsafe { &mut *(found as *mut [u8; N]) })
    }

    /// `N` bytes at an offset that was found long before. The verifier of Ubuntu's 5.15.0-25 forgets the limit of an offset that the
    /// compiler keeps on the stack in four bytes, and the compiler would not check it again: it knows the limit.
    #[inline(always)]
    pub fn at_found<const N: usize>(&self, mut offset: usize) -> Option<&[u8; N]> {
        // SAFETY: no instruction at all.
        unsafe { asm!("/* {0} */", inout(reg) offset, options(nomem, nostack, preserves_flags)) };
        self.at(offset)
    }

    #[inline(always)]
    fn find<const N: usize>(&self, offset: usize) -> Option<usize> {
        if offset > MAX_HEADERS - N {
            return None;
        }
        let mut found = self.start + offset;
        // The verifier only accepts the very register that was compared with the end. Without this the compiler adds `offset` anew
        // for each access.
        // SAFETY: no instruction at all.
        unsafe { asm!("/* {0} */", inout(reg) found, options(nomem, nostack, preserves_flags)) };
        if found + N > self.end { None } else { Some(found) }
    }
}

impl Packet for Frame {
    #[inline(always)]
    fn at<const N: usize>(&self, offset: usize) -> Option<&[u8; N]> {
        // SAFETY: the bytes are within the packet.
        self.find::<N>(offset).map(|found| unsafe { &*(found as *const [u8; N]) })
    }

    #[inline(always)]
    fn length(&self) -> usize {
        // SAFETY: the program's own context.
        unsafe { (*self.skb).len as usize }
    }
}
