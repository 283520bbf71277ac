// SPDX-License-Identifier: Apache-2.0
//! What other programs do to nftables: changes of the agent's own tables, and tables of theirs that harm Services. Pure;
//! [`crate::kernel`] reads it, the loop and `steerage-agent check` report it.

mod change;
mod tables;

pub use change::{ChangeKind, Damage, ForeignChange};
pub use tables::{ForeignChain, Interference, KUBE_SERVICES, Reason, interferences};
