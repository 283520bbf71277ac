// SPDX-License-Identifier: Apache-2.0
//! The process's resource usage, with the metric names of Prometheus' client libraries. Read from `/proc` at each scrape;
//! unreadable values are left out.

use std::fmt;
use std::fs;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;

/// Reads `/proc/self` at each scrape.
#[derive(Debug)]
pub(super) struct Usage;

/// Linux fixes this for user space whatever the kernel's own tick is (`USER_HZ`, asm-generic/param.h).
const TICKS_PER_SECOND: f64 = 100.0;

impl Collector for Usage {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        if let Some(bytes) = fs::read_to_string("/proc/self/status").ok().as_deref().and_then(resident_bytes)
        {
            let metric = ConstGauge::new(bytes);
            let help = "Resident memory size in bytes";
            let row = encoder.encode_descriptor(
                "process_resident_memory_bytes",
                help,
                None,
                metric.metric_type(),
            )?;
            metric.encode(row)?;
        }
        if let Some(seconds) = fs::read_to_string("/proc/self/stat").ok().as_deref().and_then(cpu_seconds) {
            let metric = ConstCounter::new(seconds);
            let help = "User and system CPU time spent in seconds";
            let row = encoder.encode_descriptor("process_cpu_seconds", help, None, metric.metric_type())?;
            metric.encode(row)?;
        }
        if let Ok(open) = fs::read_dir("/proc/self/fd") {
            let metric = ConstGauge::new(i64::try_from(open.count()).unwrap_or(i64::MAX));
            let help = "Number of open file descriptors";
            let row = encoder.encode_descriptor("process_open_fds", help, None, metric.metric_type())?;
            metric.encode(row)?;
        }
        Ok(())
    }
}

fn resident_bytes(status: &str) -> Option<i64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: i64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

fn cpu_seconds(stat: &str) -> Option<f64> {
    // The program's name stands in parentheses and may itself hold spaces and parentheses (proc_pid_stat(5)); `utime` and
    // `stime` are the twelfth and thirteenth fields after it.
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_ascii_whitespace().skip(11);
    let user: u32 = fields.next()?.parse().ok()?;
    let system: u32 = fields.next()?.parse().ok()?;
    Some((f64::from(user) + f64::from(system)) / TICKS_PER_SECOND)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proc_files_are_parsed_as_documented() {
        assert_eq!(resident_bytes("VmHWM:\t  9 kB\nVmRSS:\t   12 kB\n"), Some(12 * 1024));
        assert_eq!(resident_bytes("Name:\tx\n"), None);
        let stat = "7 (odd) name) S 1 7 7 0 -1 4194560 100 0 0 0 250 50 0 0 20 0 1 0 5 0 0";
        assert_eq!(cpu_seconds(stat), Some(3.0));
        assert_eq!(cpu_seconds("7 (x) S 1"), None);
    }
}
