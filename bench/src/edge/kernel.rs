// SPDX-License-Identifier: Apache-2.0
//! What the kernel says of the edge's program and maps, read from `/proc/PID/fdinfo` of the edge's process.

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::OwnedFd;

use anyhow::{Context as _, Result, ensure};
use aya::sys::{Stats, enable_stats};

/// `BPF_MAP_TYPE_LRU_HASH`, the type of the maps of flows.
const LRU_HASH: u64 = 9;

/// Memory of maps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Maps {
    /// Bytes of the maps of flows.
    pub flow_bytes: u64,
    /// Flows that they have room for.
    pub flows: u64,
    /// Bytes of all others.
    pub others: u64,
}

/// The maps of these processes, each counted once.
pub fn maps(processes: &[i32]) -> Maps {
    let mut maps = Maps::default();
    let all: BTreeMap<_, _> =
        files(processes).into_iter().filter_map(|text| Some((field(&text, "map_id")?, text))).collect();
    for text in all.values() {
        let bytes = field(text, "memlock").unwrap_or(0);
        if field(text, "map_type") == Some(LRU_HASH) {
            maps.flow_bytes += bytes;
            maps.flows += field(text, "max_entries").unwrap_or(0);
        } else {
            maps.others += bytes;
        }
    }
    maps
}

/// Runs of the program in a period, counted by the kernel while this exists.
#[derive(Debug)]
pub struct Statistics {
    _enabled: OwnedFd,
    before: ProgramTime,
}

/// Runs, and how long they took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProgramTime {
    /// Number of runs.
    pub runs: u64,
    /// Time of all.
    pub nanoseconds: u64,
}

impl ProgramTime {
    /// Time of one run.
    #[allow(clippy::cast_precision_loss, reason = "far below 2^52")]
    pub fn nanoseconds_each(self) -> f64 {
        self.nanoseconds as f64 / self.runs.max(1) as f64
    }
}

impl Statistics {
    /// Begins a period.
    pub fn begin(processes: &[i32]) -> Result<Self> {
        let enabled = enable_stats(Stats::RunTime).context("the kernel cannot count runs of programs")?;
        Ok(Self { _enabled: enabled, before: program(processes)? })
    }

    /// Ends it.
    pub fn end(self, processes: &[i32]) -> Result<ProgramTime> {
        let after = program(processes)?;
        Ok(ProgramTime {
            runs: after.runs.saturating_sub(self.before.runs),
            nanoseconds: after.nanoseconds.saturating_sub(self.before.nanoseconds),
        })
    }
}

/// Of all programs of these processes, each counted once.
fn program(processes: &[i32]) -> Result<ProgramTime> {
    let all: BTreeMap<_, _> = files(processes)
        .into_iter()
        .filter_map(|text| {
            Some((field(&text, "prog_id")?, (field(&text, "run_cnt")?, field(&text, "run_time_ns")?)))
        })
        .collect();
    ensure!(!all.is_empty(), "the process has no BPF program open");
    let sum = |of: fn(&(u64, u64)) -> u64| all.values().map(of).sum();
    Ok(ProgramTime { runs: sum(|(runs, _)| *runs), nanoseconds: sum(|(_, time)| *time) })
}

fn files(processes: &[i32]) -> Vec<String> {
    let folders = processes.iter().map(|pid| format!("/proc/{pid}/fdinfo"));
    let entries = folders.filter_map(|folder| fs::read_dir(folder).ok()).flatten().flatten();
    entries.filter_map(|entry| fs::read_to_string(entry.path()).ok()).collect()
}

fn field(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_by_their_whole_name() {
        let text = "map_type:\t9\nmap_extra:\t0x0\nmemlock:\t123\nmap_id:\t7\n";
        assert_eq!(
            (field(text, "memlock"), field(text, "map_id"), field(text, "map")),
            (Some(123), Some(7), None)
        );
    }
}
