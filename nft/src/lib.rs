// SPDX-License-Identifier: Apache-2.0
//! nftables and connection tracking over netlink. Knows nothing of Kubernetes.
//!
//! This crate exists because, of the crates on crates.io, nftables runs the `nft` command for every change and rustables is
//! GPL.
//!
//! - [`Batch`] collects operations on [`Table`], [`Chain`], [`Set`], [`Element`] and [`Rule`]. [`Nft::commit`] applies all of
//!   them or none.
//! - [`Rule`] is built from [`Expression`]s: packet fields, marks, conntrack fields, hashes, map lookups.
//! - [`Nft`] also lists objects. [`Monitor`] reports changes and their authors, [`Tracer`] the ways of packets. [`CommitLog`] tells
//!   own commits from others whose notifications were lost. [`Conntrack`] lists and deletes conntrack entries.
//! - [`Rows`] holds many elements of one set in one allocation.
//!
//! Keys and data of elements have the layout of the kernel's registers. [`concat()`] creates it from values. A list of
//! expressions, as in [`Rule::in_set`] and [`Rule::map`], creates it from a packet.
//!
//! ```no_run
//! use steerage_nft::*;
//!
//! fn main() -> Result<(), Error> {
//!     let table = Table::new(Family::Ip, "example");
//!     let ends = [DataType::Ipv4Addr, DataType::InetService];
//!     let mut batch = Batch::new();
//!     batch
//!         .destroy_table(&table)
//!         .add_table(&table, Some("balances port 80 over two servers"))
//!         .add_set(&table, &Set::new("servers", &[DataType::Mark]).maps_to(&ends))
//!         .add_chain(&table, &Chain::base("prerouting", ChainType::Nat, Hook::Prerouting, -100))
//!         .add_rule(&table, "prerouting", &Rule::new()
//!             .equals(&Expression::l4proto(), Field::Proto(6))
//!             .equals(&Expression::dport(), Field::Port(80))
//!             .map("servers", &[Expression::Random { modulus: 2, offset: 0 }])
//!             .dnat(Family::Ip));
//!     let server = |n: u8| Element::entry(
//!         concat(&[Field::Number(n.into())]),
//!         concat(&[Field::V4([10, 0, 0, n].into()), Field::Port(8080)]),
//!     );
//!     batch.add_elements(&table, "servers", &[server(0), server(1)]);
//!     Nft::open()?.commit(batch)
//! }
//! ```
//!
//! Forwarding of received packets that changes only their link-layer addresses:
//!
//! ```no_run
//! # use steerage_nft::*;
//! # fn rules(batch: &mut Batch, index: u32) {
//! let table = Table::new(Family::Netdev, "example");
//! batch
//!     .add_table(&table, None)
//!     .add_set(&table, &Set::new("slots", &[DataType::Ipv4Addr, DataType::Mark]).maps_to(&[DataType::Ipv4Addr]))
//!     .add_chain(&table, &Chain::base("in", ChainType::Filter, Hook::Ingress(vec!["eth0".into()]), 0))
//!     .add_rule(&table, "in", &Rule::new()
//!         .equals_bytes(&Expression::Meta(Meta::Protocol), &0x0800_u16.to_be_bytes())
//!         .map("slots", &[
//!             Expression::daddr(Family::Ip),
//!             Expression::Jhash { of: vec![Expression::saddr(Family::Ip), Expression::sport()], modulus: 64, seed: 1, offset: 0 },
//!         ])
//!         .forward(Family::Ip, index));
//! # }
//! ```
//!
//! Properties of the kernel that callers must know:
//!
//! - Lookups are not atomic for a packet. A packet may meet one set before a commit and the next set after it.
//! - Every commit by anyone in the network namespace increments the generation.
//! - A change of rules makes the kernel walk all elements of verdict maps, but not those of maps to values.

mod batch;
mod commit_log;
mod connection;
mod conntrack;
#[cfg(test)]
mod corruption_tests;
mod decode;
mod error;
mod expression;
mod field;
mod info;
mod kernel_expression;
mod keys;
mod listing;
mod load;
mod monitor;
mod registers;
mod rows;
mod rule;
mod set;
mod socket;
mod table;
mod trace;
mod verdict;
mod wire;

pub use batch::Batch;
pub use commit_log::{CommitLog, is_later_generation, next_generation};
pub use connection::Nft;
pub use conntrack::{Conntrack, ConntrackEntry, Tuple};
pub use error::{Error, KernelError};
pub use expression::Expression;
pub use field::{DataType, Field, concat};
pub use info::{BaseChainInfo, ChainInfo, RuleInfo, SetInfo, TableInfo};
pub use kernel_expression::KernelExpression;
pub use keys::{Ct, Direction, FibAddress, Meta, PayloadBase};
pub use monitor::{Change, Commit, Monitor, Notification, ObjectKind, Process};
/// The error numbers in [`KernelError`].
pub use nix::errno::Errno;
pub use rows::{Row, RowShape, Rows};
pub use rule::{DynamicOp, Limit, Reject, Rule};
pub use set::{Data, Element, Set};
pub use table::{Chain, ChainPolicy, ChainType, Family, Hook, Table};
pub use trace::{TraceEvent, TraceStep, Tracer};
pub use verdict::Verdict;
