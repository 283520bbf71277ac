// SPDX-License-Identifier: Apache-2.0
//! The daemon's side of the edge's data plane in eBPF: it loads the program of `edge/ebpf`, writes
//! its maps, and reads flows and counters.
//!
//! The plan makes a [`State`], or a [`StateChange`] of it; [`Dataplane`] writes what differs from the maps. Maps and program are
//! pinned, so that packets pass while no daemon runs, and the next one adopts them. Nothing here
//! decides about targets or leases, and nothing else writes to the maps; counters are the program's, and so are flows but for those
//! that another host has told.

mod adopt;
mod attach;
mod change;
pub mod counters;
mod dataplane;
mod difference;
mod error;
mod exceptions;
mod flows;
mod leases;
pub mod maglev;
mod maps;
pub mod numbers;
mod object;
mod pins;
mod range_sets;
mod records;
mod regions;
mod shared;
mod state;
mod syscall;
mod writer;

pub use attach::Hook;
pub use change::StateChange;
pub use counters::Counts;
pub use dataplane::{Dataplane, Options, Sizes, remove};
pub use error::Error;
pub use exceptions::{Exception, FlowTable, Pinned, Refusal};
pub use leases::Leases;
pub use state::{Listener, MacAddress, Path, Sender, State, Table, TargetState};
pub use steerage_edge_packet as packet;
