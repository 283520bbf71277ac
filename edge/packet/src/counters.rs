// SPDX-License-Identifier: Apache-2.0
//! What the program counts.

/// What is counted of a Service and of a target.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Forwarded packets; those that the device has merged count each.
    pub packets: u64,
    /// Their bytes, with link-layer headers.
    pub bytes: u64,
    /// Connections, and exchanges of datagrams, that began.
    pub flows: u64,
    /// Packets that the edge dropped although the Service is known.
    pub drops: u64,
}

/// What the program counts apart from [`Counters`].
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Event {
    /// Dropped: a malformed or cut-off header, or headers longer than [`crate::MAX_HEADERS`].
    Malformed,
    /// Dropped: the VIP has no such listener.
    NoListener,
    /// Dropped: the client is outside the source ranges.
    OutsideSourceRanges,
    /// Dropped: no target has the slot.
    NoTarget,
    /// Dropped: a node or an edge host has sent the frame with another's source address.
    ForeignSource,
    /// Dropped: a later fragment whose first one was not seen.
    UnknownFragment,
    /// Dropped: the hop limit is exhausted.
    HopLimit,
    /// Dropped: too long for the tunnel. The client was told, if it can be.
    TooBig,
    /// Dropped: an ICMP message that is neither an echo request nor about a flow to the VIP.
    UnknownIcmp,
    /// Answered: an ARP request.
    Arp,
    /// Answered: a neighbour solicitation.
    Neighbour,
    /// Answered: an echo request.
    Echo,
    /// Left to the kernel: a request for a VIP whose lease has ended.
    LeaseEnded,
}

impl Event {
    /// All, in the order of their numbers.
    pub const ALL: [Self; 13] = [
        Self::Malformed,
        Self::NoListener,
        Self::OutsideSourceRanges,
        Self::NoTarget,
        Self::ForeignSource,
        Self::UnknownFragment,
        Self::HopLimit,
        Self::TooBig,
        Self::UnknownIcmp,
        Self::Arp,
        Self::Neighbour,
        Self::Echo,
        Self::LeaseEnded,
    ];

    /// Whether the program drops the packet.
    pub fn is_drop(self) -> bool {
        self < Self::Arp
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_in_the_order_of_their_numbers() {
        for (number, event) in Event::ALL.into_iter().enumerate() {
            assert_eq!(event as usize, number);
        }
    }
}
