// SPDX-License-Identifier: Apache-2.0
//! Shards of the VIPs: each VIP is in one of them, by a hash of its address, and edge hosts share out the shards. Pure.
//!
//! So hosts agree on who answers for a VIP before they know of it, and a heartbeat has room for all of them. The controller computes
//! the shard of an address to know whose report of its targets counts. The number of shards and the hash must never change: hosts of
//! two versions would not agree.

use std::fmt;
use std::net::IpAddr;
use std::ops::{BitAnd, BitOr, Sub};
use std::str::FromStr;

use crate::hash::{self, mix64};

/// The lease of the first shard; those of the others follow.
const FIRST_LEASE: u32 = 2;

/// One shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Shard(u8);

impl Shard {
    /// How many there are: one for each bit of [`Shards`].
    pub const COUNT: usize = 128;

    /// The shard that a VIP is in.
    pub fn of(vip: IpAddr) -> Self {
        let hash = match vip {
            IpAddr::V4(vip) => hash::bytes(&vip.octets()),
            IpAddr::V6(vip) => hash::bytes(&vip.octets()),
        };
        Self(hash.to_be_bytes()[0] >> 1)
    }

    /// All of them.
    pub fn all() -> impl Iterator<Item = Self> {
        (0..=u8::MAX >> 1).map(Self)
    }

    /// Its number, from 0 to 127.
    pub fn index(self) -> usize {
        self.0.into()
    }

    /// The number of the lease of its VIPs.
    pub fn lease(self) -> u32 {
        FIRST_LEASE + u32::from(self.0)
    }

    /// How much a host is preferred for the shard: rendezvous hashing. The host with the highest preference comes first.
    pub fn preference(self, host: &str) -> u64 {
        mix64(hash::bytes(host.as_bytes()) ^ mix64(self.0.into()))
    }
}

/// A set of shards.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Shards(u128);

impl Shards {
    /// No shard.
    pub const NONE: Self = Self(0);
    /// All shards.
    pub const ALL: Self = Self(u128::MAX);

    /// Whether the shard is one of them.
    pub fn contains(self, shard: Shard) -> bool {
        self.0 >> shard.0 & 1 == 1
    }

    /// Whether there are none.
    pub fn is_empty(self) -> bool {
        self == Self::NONE
    }

    /// How many there are.
    pub fn len(self) -> u32 {
        self.0.count_ones()
    }

    /// In order.
    pub fn iter(self) -> impl Iterator<Item = Shard> {
        Shard::all().filter(move |shard| self.contains(*shard))
    }

    /// As heartbeats have them.
    pub fn to_bytes(self) -> [u8; 16] {
        self.0.to_be_bytes()
    }

    /// The reverse of [`Self::to_bytes`].
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(u128::from_be_bytes(bytes))
    }
}

impl FromIterator<Shard> for Shards {
    fn from_iter<I: IntoIterator<Item = Shard>>(shards: I) -> Self {
        Self(shards.into_iter().fold(0, |bits, shard| bits | 1 << shard.0))
    }
}

impl BitOr for Shards {
    type Output = Self;
    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl BitAnd for Shards {
    type Output = Self;
    fn bitand(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}

/// Those of the first that are not of the second.
impl Sub for Shards {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
}

/// In hexadecimal, the last shard first.
impl fmt::Debug for Shards {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// As the kernel writes lists of CPUs: numbers and ranges, such as `0-2,5`. Empty for none.
impl fmt::Display for Shards {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        let mut shards = self.iter().map(|shard| shard.0).peekable();
        while let Some(first) = shards.next() {
            let mut last = first;
            while let Some(next) = shards.next_if_eq(&(last + 1)) {
                last = next;
            }
            write!(f, "{separator}{first}")?;
            if last > first {
                write!(f, "-{last}")?;
            }
            separator = ",";
        }
        Ok(())
    }
}

/// A text is no list of shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParseShardsError;

impl FromStr for Shards {
    type Err = ParseShardsError;

    fn from_str(text: &str) -> Result<Self, ParseShardsError> {
        let number = |text: &str| {
            let number: u8 = text.parse().map_err(|_| ParseShardsError)?;
            if usize::from(number) < Shard::COUNT { Ok(number) } else { Err(ParseShardsError) }
        };
        let mut shards = Self::NONE;
        for part in text.split(',').filter(|_| !text.is_empty()) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = (number(first)?, number(last)?);
            if first > last {
                return Err(ParseShardsError);
            }
            shards = shards | (first..=last).map(Shard).collect();
        }
        Ok(shards)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Hosts of other versions have these values.
    #[test]
    fn shards_of_vips_and_preferences_are_stable() {
        let shards =
            ["10.0.200.1", "10.0.200.2", "fd00:200::1"].map(|vip| Shard::of(vip.parse().expect("vip")).0);
        assert_eq!(shards, [48, 122, 68]);
        let first = |shard| {
            let preference = |host: &&str| Shard(shard).preference(host);
            ["edge-0", "edge-1", "edge-2"].into_iter().max_by_key(preference).expect("hosts")
        };
        assert_eq!([0, 1, 2, 3].map(first), ["edge-0", "edge-1", "edge-2", "edge-2"]);
    }

    #[test]
    fn vips_are_spread_over_all_shards_and_shards_over_hosts() {
        let mut of = [0_u32; Shard::COUNT];
        for number in 0..12_800_u32 {
            of[Shard::of(IpAddr::from((0x0a00_0000 + number).to_be_bytes())).index()] += 1;
        }
        // The standard deviation is 10.
        assert!(of.iter().all(|vips| (50..150).contains(vips)), "{of:?}");
        for hosts in 2..5_usize {
            let names: Vec<String> = (0..hosts).map(|host| format!("edge-{host}")).collect();
            let mut has = vec![0_usize; hosts];
            for shard in Shard::all() {
                let host = (0..hosts).max_by_key(|host| shard.preference(&names[*host])).expect("hosts");
                has[host] += 1;
            }
            let share = Shard::COUNT / hosts;
            assert!(has.iter().all(|shards| (share * 2 / 3..share * 4 / 3).contains(shards)), "{has:?}");
        }
    }

    #[test]
    fn sets_are_written_as_ranges() {
        for (numbers, text) in
            [(&[][..], ""), (&[7], "7"), (&[0, 1, 2, 5, 126, 127], "0-2,5,126-127"), (&[0, 2, 4], "0,2,4")]
        {
            let shards: Shards = numbers.iter().copied().map(Shard).collect();
            assert_eq!((shards.to_string().as_str(), text.parse()), (text, Ok(shards)));
        }
        assert_eq!((Shards::ALL.to_string().as_str(), "0-127".parse()), ("0-127", Ok(Shards::ALL)));
        for text in ["128", "-", "3-1", "1,", ",", "a", "1-2-3", "[1]"] {
            assert_eq!(text.parse::<Shards>(), Err(ParseShardsError), "{text}");
        }
    }

    #[test]
    fn sets_are_what_they_say() {
        let some: Shards = [Shard(0), Shard(64), Shard(127)].into_iter().collect();
        assert_eq!(some.iter().map(Shard::index).collect::<Vec<_>>(), [0, 64, 127]);
        assert_eq!(Shards::from_bytes(some.to_bytes()), some);
        assert_eq!((some.len(), (Shards::ALL - some).len()), (3, 125));
        assert_eq!((some | Shards::NONE, some & Shards::ALL), (some, some));
        assert_eq!(Shards::ALL.iter().count(), Shard::COUNT);
        assert!(Shard::all().all(|shard| shard.lease() < 1024), "the map of leases has so many");
    }
}
