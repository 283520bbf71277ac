// SPDX-License-Identifier: Apache-2.0
//! The daemon's side of the edge's data plane in eBPF: it loads the program of `edge/ebpf`, writes
//! its maps, and reads flows and counters.

pub mod maglev;
