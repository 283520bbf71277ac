// SPDX-License-Identifier: Apache-2.0
//! The machine, and its load, which are printed with the results.

use std::fs;

/// One line with processor, cores, memory and kernel.
pub fn describe() -> String {
    let cpus = text("/proc/cpuinfo");
    let model = cpus.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    let model = model.map_or("unknown processor", |(_, model)| model.trim());
    let cores = cpus.lines().filter(|line| line.starts_with("processor")).count();
    let memory = text("/proc/meminfo");
    let kib = memory
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:")?.split_whitespace().next()?.parse().ok());
    let gib = kib.unwrap_or(0_u64) / (1024 * 1024);
    format!("{model}, {cores} cores, {gib} GiB, Linux {}", text("/proc/sys/kernel/osrelease").trim())
}

/// The load average of the last minute.
pub fn load() -> f64 {
    text("/proc/loadavg").split(' ').next().and_then(|word| word.parse().ok()).unwrap_or_default()
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
