// SPDX-License-Identifier: Apache-2.0
//! The machine and its load, which are printed with the results, the programs that `hack/prepare` built on it, and the limit of open
//! files.

use std::path::PathBuf;
use std::{env, fs};

use anyhow::{Context as _, Result};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

/// One line with processor, cores, memory and kernel.
pub fn describe() -> String {
    let cpus = text("/proc/cpuinfo");
    let model = cpus.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    let model = model.map_or("unknown processor", |(_, model)| model.trim());
    let cores = cpus.lines().filter(|line| line.starts_with("processor")).count();
    let gib = memory() >> 30;
    format!("{model}, {cores} cores, {gib} GiB, Linux {}", text("/proc/sys/kernel/osrelease").trim())
}

/// Bytes of memory.
pub fn memory() -> u64 {
    let memory = text("/proc/meminfo");
    let kib = memory
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:")?.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

/// The load average of the last minute.
pub fn load() -> f64 {
    text("/proc/loadavg").split(' ').next().and_then(|word| word.parse().ok()).unwrap_or_default()
}

/// The program that a flag gave, or the one of this name in the directory of this program.
pub fn given_or_beside(given: Option<PathBuf>, name: &str) -> Result<PathBuf> {
    given.map_or_else(|| Ok(env::current_exe()?.with_file_name(name)), Ok)
}

/// A program from `hack/prepare`, in the project's cache, as `hack/env` says where that is.
pub fn prepared(name: &str) -> Result<PathBuf> {
    let var = |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = var("STEERAGE_CACHE")
        .or_else(|| var("XDG_CACHE_HOME").map(|base| base.join("steerage")))
        .or_else(|| var("HOME").map(|home| home.join(".cache/steerage")));
    Ok(cache.context("neither STEERAGE_CACHE nor HOME is set")?.join("bin").join(name))
}

/// Open files that suffice for all measurements with some ten thousand connections.
pub const MOST_DESCRIPTORS: u64 = 16_000;

/// Lets this process, and those that it starts, have so many files open.
pub fn allow_descriptors(needed: u64) -> Result<()> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    if soft >= needed {
        return Ok(());
    }
    setrlimit(Resource::RLIMIT_NOFILE, needed, hard.max(needed))
        .with_context(|| format!("{needed} open files are needed, and {hard} are allowed"))
}

fn text(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    #[test]
    fn description_names_kernel() {
        assert!(super::describe().contains("Linux "), "{}", super::describe());
        assert!(super::load() >= 0.0);
    }
}
