// SPDX-License-Identifier: Apache-2.0
//! nftables and connection tracking over netlink. Knows nothing of Kubernetes.
//!
//! - [`Batch`] collects operations ([`Table`], [`Chain`], [`Set`], [`Element`], [`Rule`]); [`Nft::commit`] applies all of
//!   them or none.
//! - [`Rule`] is built from [`Source`]s, what a rule can load: parts of the packet, marks, hashes, map lookups.
//! - [`Nft`] also lists what is there; [`Monitor`] tells who changes it; [`Conntrack`] lists and deletes flows.
//! - [`Rows`] are many elements of one set in one piece of memory.
//!
//! Keys and data of elements are bytes as they lie in the kernel's registers: [`concat()`] makes them, and a list of sources
//! given to [`Rule::in_set`] or [`Rule::map`] makes the same layout from a packet.
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
//!         .add_table(&table, Some("spreads port 80 over two servers"))
//!         .add_set(&table, &Set::new("servers", &[DataType::Mark]).maps_to(&ends))
//!         .add_chain(&table, &Chain::base("prerouting", ChainType::Nat, Hook::Prerouting, -100))
//!         .add_rule(&table, "prerouting", &Rule::new()
//!             .equals(&Source::l4proto(), Field::Proto(6))
//!             .equals(&Source::dport(), Field::Port(80))
//!             .map("servers", &[Source::Random { modulus: 2, offset: 0 }])
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
//! Forwarding on arrival at a device, without changing the packet above its link layer:
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
//!         .equals_bytes(&Source::Meta(Meta::Protocol), &0x0800_u16.to_be_bytes())
//!         .map("slots", &[
//!             Source::daddr(Family::Ip),
//!             Source::Jhash { of: vec![Source::saddr(Family::Ip), Source::sport()], modulus: 64, seed: 1 },
//!         ])
//!         .forward(Family::Ip, index));
//! # }
//! ```
//!
//! What the kernel does that surprises: its lookups are not atomic to a packet (a walk may pass one set before a commit and
//! the next one after it); any commit of anybody in the namespace raises the generation; rules that change make the kernel
//! walk all elements of verdict maps, but never those of maps of values.

mod batch;
mod conntrack;
mod decode;
mod error;
mod handle;
mod monitor;
#[cfg(test)]
mod mutations;
mod rows;
mod rule;
mod set;
mod socket;
mod source;
mod table;
mod wire;

pub use batch::Batch;
pub use conntrack::{Conntrack, Flow, Tuple};
pub use error::{Error, Refusal};
pub use handle::{Nft, RuleInfo, TableInfo};
pub use monitor::{Change, Monitor, Object};
/// The error numbers in [`Refusal`].
pub use nix::errno::Errno;
pub use rows::{Row, RowShape, Rows};
pub use rule::{DynamicOp, Reject, Rule, Verdict};
pub use set::{Data, DataType, Element, Field, Set, concat};
pub use source::{Base, Ct, Direction, FibAddress, Meta, Source};
pub use table::{Chain, ChainType, Family, Hook, Policy, Table};
