// SPDX-License-Identifier: Apache-2.0
//! Tables and chains. Plain values, given to a `Batch`.

use crate::info::ChainInfo;

/// The protocol family of a table (NFPROTO_*): which packets its chains see.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Family {
    /// IPv4 and IPv6 in one table.
    Inet = 1,
    /// IPv4.
    Ip = 2,
    /// All packets that a device receives, before any protocol handles them.
    Netdev = 5,
    /// IPv6.
    Ip6 = 10,
}

impl Family {
    /// Name in the `nft` command.
    pub fn name(self) -> &'static str {
        match self {
            Self::Inet => "inet",
            Self::Ip => "ip",
            Self::Netdev => "netdev",
            Self::Ip6 => "ip6",
        }
    }

    pub(crate) fn from_wire(number: u8) -> Option<Self> {
        [Self::Inet, Self::Ip, Self::Netdev, Self::Ip6].into_iter().find(|family| *family as u8 == number)
    }
}

/// The identity of a table.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Table {
    /// Family. Tables of different families may have the same name.
    pub family: Family,
    /// Name within the family.
    pub name: String,
}

impl Table {
    /// The table `name` of `family`.
    pub fn new(family: Family, name: impl Into<String>) -> Self {
        Self { family, name: name.into() }
    }
}

impl std::fmt::Display for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.family.name(), self.name)
    }
}

/// The hook at which a base chain runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Hook {
    /// All received packets, before routing.
    Prerouting,
    /// Packets to this host.
    Input,
    /// Packets through this host.
    Forward,
    /// Packets from this host.
    Output,
    /// All packets that leave, after routing.
    Postrouting,
    /// Netdev family: packets received on these devices. The devices must exist. When a device goes, the kernel removes it
    /// from the chain.
    Ingress(Vec<String>),
}

impl Hook {
    /// Name in the `nft` command, but for `ingress`, which is no hook of these families.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::Prerouting | Self::Ingress(_) => "prerouting",
            Self::Input => "input",
            Self::Forward => "forward",
            Self::Output => "output",
            Self::Postrouting => "postrouting",
        }
    }

    /// `NF_INET`_*, or `NF_NETDEV_INGRESS` for netdev.
    pub(crate) fn number(&self) -> u32 {
        match self {
            Self::Prerouting | Self::Ingress(_) => 0,
            Self::Input => 1,
            Self::Forward => 2,
            Self::Output => 3,
            Self::Postrouting => 4,
        }
    }
}

/// The type of a base chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChainType {
    /// Sees every packet.
    Filter,
    /// Translates addresses. Sees only the first packet of a connection.
    Nat,
}

/// The policy of a base chain, for packets that reach its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChainPolicy {
    /// Drops the packet.
    Drop,
    /// Accepts the packet.
    Accept,
}

/// What only base chains have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BaseChain {
    pub(crate) kind: ChainType,
    pub(crate) hook: Hook,
    pub(crate) priority: i32,
    pub(crate) policy: ChainPolicy,
}

/// A chain to create.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chain {
    pub(crate) name: String,
    pub(crate) base: Option<BaseChain>,
}

impl Chain {
    /// A chain that runs when a rule jumps to it.
    pub fn regular(name: impl Into<String>) -> Self {
        Self { name: name.into(), base: None }
    }

    /// A chain that the kernel runs at `hook`, in the order of `priority`, with policy accept. Named priorities: dstnat −100,
    /// filter 0, srcnat 100.
    pub fn base(name: impl Into<String>, kind: ChainType, hook: Hook, priority: i32) -> Self {
        Self {
            name: name.into(),
            base: Some(BaseChain { kind, hook, priority, policy: ChainPolicy::Accept }),
        }
    }

    /// The same base chain under another name, which the kernel runs later than this one, and later than others of its priority. A
    /// regular chain only changes its name.
    #[must_use]
    pub fn later(&self, name: impl Into<String>) -> Self {
        let mut later = Self { name: name.into(), ..self.clone() };
        if let Some(base) = &mut later.base {
            base.priority = base.priority.saturating_add(1);
        }
        later
    }

    /// Whether this is a base chain.
    pub fn is_base(&self) -> bool {
        self.base.is_some()
    }

    /// Whether a chain of the kernel runs where this one is to run, with whatever policy. A base chain can be moved only by making
    /// another.
    pub fn runs_as(&self, info: &ChainInfo) -> bool {
        match (&self.base, &info.base) {
            (None, None) => true,
            (Some(base), Some(found)) => {
                (base.hook.name(), base.priority, Some(base.kind)) == (found.hook, found.priority, found.kind)
            }
            _ => false,
        }
    }

    /// Whether a chain of the kernel has this policy. [`Batch::add_chain`](crate::Batch::add_chain) sets it.
    pub fn has_policy_of(&self, info: &ChainInfo) -> bool {
        let drops = self.base.as_ref().is_some_and(|base| base.policy == ChainPolicy::Drop);
        drops == info.base.is_some_and(|base| base.drops)
    }

    /// Sets the policy of a base chain. Does nothing to a regular one.
    #[must_use]
    pub fn policy(mut self, policy: ChainPolicy) -> Self {
        if let Some(base) = &mut self.base {
            base.policy = policy;
        }
        self
    }
}
