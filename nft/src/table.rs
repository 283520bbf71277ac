// SPDX-License-Identifier: Apache-2.0
//! Tables and chains: where rules live and when the kernel runs them. Plain values, given to a `Batch`.

/// The packets that a table sees (NFPROTO_*).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Family {
    /// IPv4 and IPv6 in one table.
    Inet = 1,
    /// IPv4.
    Ip = 2,
    /// Whatever arrives on a device, before any protocol.
    Netdev = 5,
    /// IPv6.
    Ip6 = 10,
}

impl Family {
    /// As `nft` writes it.
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

/// Names a table.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Table {
    /// Its family; two tables of different families may share a name.
    pub family: Family,
    /// Its name.
    pub name: String,
}

impl Table {
    /// Names the table `name` of `family`.
    pub fn new(family: Family, name: impl Into<String>) -> Self {
        Self { family, name: name.into() }
    }
}

impl std::fmt::Display for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.family.name(), self.name)
    }
}

/// Where in a packet's way a base chain runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Hook {
    /// Before routing, for all that arrives.
    Prerouting,
    /// For this host.
    Input,
    /// Through this host.
    Forward,
    /// From this host.
    Output,
    /// After routing, for all that leaves.
    Postrouting,
    /// Netdev family: on arrival at one of these devices, by name. The devices must exist; when one goes, the kernel
    /// takes it out of the chain.
    Ingress(Vec<String>),
}

impl Hook {
    /// `NF_INET`_* or, for netdev, `NF_NETDEV_INGRESS`.
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

/// What a base chain may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChainType {
    /// Decide on every packet.
    Filter,
    /// Translate addresses: sees only the first packet of a connection.
    Nat,
}

/// What happens to a packet that reaches the end of a base chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// It is dropped.
    Drop,
    /// It goes on.
    Accept,
}

/// The part of a base chain that a regular one does not have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Base {
    pub(crate) kind: ChainType,
    pub(crate) hook: Hook,
    pub(crate) priority: i32,
    pub(crate) policy: Policy,
}

/// A chain to create.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chain {
    pub(crate) name: String,
    pub(crate) base: Option<Base>,
}

impl Chain {
    /// A chain that rules jump to.
    pub fn regular(name: impl Into<String>) -> Self {
        Self { name: name.into(), base: None }
    }

    /// A chain that the kernel runs at `hook`, lower `priority` first; the policy is accept. Priorities with names:
    /// dstnat −100, filter 0, srcnat 100.
    pub fn base(name: impl Into<String>, kind: ChainType, hook: Hook, priority: i32) -> Self {
        Self { name: name.into(), base: Some(Base { kind, hook, priority, policy: Policy::Accept }) }
    }

    /// Whether packets enter by it.
    pub fn is_base(&self) -> bool {
        self.base.is_some()
    }

    /// Replaces the policy of a base chain.
    #[must_use]
    pub fn policy(mut self, policy: Policy) -> Self {
        if let Some(base) = &mut self.base {
            base.policy = policy;
        }
        self
    }
}
