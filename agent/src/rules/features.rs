// SPDX-License-Identifier: Apache-2.0
//! What of the kernel the rules use, and what the agent does on a kernel that lacks it. Pure; [`crate::kernel`] tries each feature.
//!
//! [`super::chains`] and [`super::affinity`] make the rules for the features that there are.

use std::collections::BTreeSet;
use std::fmt;

/// Something that a kernel may lack, because it is older or was built without it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Feature {
    /// Base chains that translate addresses; masquerading with random ports.
    Nat,
    /// Rejecting packets before they are routed.
    Reject,
    /// Hashes of flows, with a seed and an offset.
    Hashes,
    /// The kind of an address in the routing tables.
    AddressTypes,
    /// The addresses and ports of a connection's first packet and of its answers.
    ConnectionTuples,
    /// Maps that packets fill, with elements that expire.
    DynamicMaps,
    /// Tables that belong to one process, and go with it.
    OwnedTables,
    /// Counters that rules share.
    Counters,
    /// The expression `dup`, which sends a packet to another host.
    Duplicates,
    /// Elements with limits of their own.
    Limits,
    /// Rules that delete elements, and a kernel that frees them.
    Deletion,
}

/// What the agent does without a feature.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Without {
    /// Other rules, or less: in words.
    Instead(&'static str),
    /// Nothing: Services are not served.
    Fails(&'static str),
}

impl fmt::Display for Without {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Instead(text) | Self::Fails(text)) = self;
        f.write_str(text)
    }
}

impl Feature {
    /// All features.
    pub const ALL: [Self; 11] = [
        Self::Nat,
        Self::Reject,
        Self::Hashes,
        Self::AddressTypes,
        Self::ConnectionTuples,
        Self::DynamicMaps,
        Self::OwnedTables,
        Self::Counters,
        Self::Duplicates,
        Self::Limits,
        Self::Deletion,
    ];

    /// Its name in logs and in the metric's label.
    pub fn name(self) -> &'static str {
        match self {
            Self::Nat => "nat",
            Self::Reject => "reject",
            Self::Hashes => "hashes",
            Self::AddressTypes => "address-types",
            Self::ConnectionTuples => "connection-tuples",
            Self::DynamicMaps => "dynamic-maps",
            Self::OwnedTables => "owned-tables",
            Self::Counters => "counters",
            Self::Duplicates => "duplicates",
            Self::Limits => "limits",
            Self::Deletion => "deletion",
        }
    }

    /// The first Linux that has it, if it was built in.
    pub fn since(self) -> (u32, u32) {
        match self {
            Self::Nat => (4, 18),
            Self::Reject => (5, 9),
            Self::Hashes => (4, 12),
            Self::ConnectionTuples => (4, 17),
            Self::DynamicMaps => (4, 1),
            Self::OwnedTables => (5, 12),
            Self::AddressTypes | Self::Counters => (4, 10),
            Self::Limits | Self::Duplicates => (4, 3),
            // And the 5.15 and 6.1 with the same change: see `crate::kernel_release`.
            Self::Deletion => (6, 5),
        }
    }

    /// What the agent does without it.
    pub fn without(self) -> Without {
        match self {
            Self::Nat => {
                Without::Fails("no Service is served (CONFIG_NF_TABLES, CONFIG_NFT_NAT, CONFIG_NFT_MASQ)")
            }
            Self::Reject => Without::Fails("no Service is served (CONFIG_NFT_REJECT)"),
            Self::Hashes => Without::Fails("no Service is served (CONFIG_NFT_HASH)"),
            Self::AddressTypes => {
                Without::Fails("no Service is served (CONFIG_NFT_FIB_IPV4, CONFIG_NFT_FIB_IPV6)")
            }
            Self::ConnectionTuples => Without::Fails("no Service is served (CONFIG_NFT_CT)"),
            Self::DynamicMaps => Without::Fails("no Service is served"),
            Self::OwnedTables => Without::Instead(
                "the name of the socket for explain and dump is the lock, and another process that has it can prevent the agent from starting",
            ),
            Self::Counters => Without::Instead("dropped packets are not counted"),
            Self::Duplicates => Without::Instead(
                "--forward-without-local-endpoints does nothing (CONFIG_NFT_DUP_IPV4, CONFIG_NFT_DUP_IPV6)",
            ),
            Self::Limits => Without::Instead("one namespace's clients may fill the map of session affinity"),
            Self::Deletion => Without::Instead(
                "after an endpoint is removed, the agent searches the map of session affinity for its clients",
            ),
        }
    }
}

/// The features of a kernel. By default all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Features {
    missing: BTreeSet<Feature>,
}

impl Features {
    /// All but one.
    #[must_use]
    pub fn without(mut self, feature: Feature) -> Self {
        self.missing.insert(feature);
        self
    }

    /// Whether the kernel has it.
    pub fn has(&self, feature: Feature) -> bool {
        !self.missing.contains(&feature)
    }

    /// What the kernel lacks.
    pub fn missing(&self) -> impl Iterator<Item = Feature> {
        self.missing.iter().copied()
    }
}

impl fmt::Display for Features {
    /// What is missing, and what the agent does instead: a part of one line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.missing.is_empty() {
            return f.write_str("none");
        }
        for (n, feature) in self.missing().enumerate() {
            let separator = if n == 0 { "" } else { "; " };
            write!(f, "{separator}{}: {}", feature.name(), feature.without())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_features_are_named_with_what_is_done_instead() {
        assert_eq!(Features::default().to_string(), "none");
        let features = Features::default().without(Feature::Deletion).without(Feature::Counters);
        assert!(Feature::ALL.into_iter().all(|feature| Features::default().has(feature)));
        assert!(!features.has(Feature::Counters) && features.has(Feature::Limits));
        let text = features.to_string();
        assert!(text.starts_with("counters: dropped packets are not counted; deletion: after an"), "{text}");
    }
}
