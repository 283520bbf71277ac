// SPDX-License-Identifier: Apache-2.0
//! The CPU time of a load-balancer host: that of its programs and of the kernel threads that receive its frames.
//!
//! The kernel counts both in nanoseconds, as the thread's run time, so another program on the same cores adds nothing to it. Not
//! counted is what the kernel does elsewhere for a host: timers of TCP, and the removal of old conntrack entries.

use std::fs;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::Signal;
use nix::time::ClockId;
use nix::unistd::Pid;

use super::Host;

/// Reads the CPU time of one host.
#[derive(Clone, Debug)]
pub struct CpuMeter {
    processes: Vec<i32>,
    receivers: Vec<i32>,
}

/// CPU time so far, or of a period.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CpuTime {
    /// Of the programs, with what the kernel does in their system calls.
    pub programs: Duration,
    /// Of the kernel threads that receive.
    pub receive: Duration,
}

impl CpuTime {
    /// Without what a host that does nothing uses in a period of this length, of which it used `at_rest` in another.
    #[must_use]
    pub fn beyond(self, period: Duration, at_rest: (Self, Duration)) -> Self {
        let (rest, length) = at_rest;
        let part = period.as_secs_f64() / length.as_secs_f64().max(1e-9);
        let beyond = |time: Duration, rest: Duration| time.saturating_sub(rest.mul_f64(part));
        Self { programs: beyond(self.programs, rest.programs), receive: beyond(self.receive, rest.receive) }
    }

    /// Both.
    pub fn total(self) -> Duration {
        self.programs + self.receive
    }
}

impl CpuMeter {
    /// Of these processes and this host's interface, which threads receive for.
    pub fn new(host: Host, processes: Vec<i32>) -> Result<Self> {
        let receivers = threads_of(&host.interface());
        ensure!(!receivers.is_empty(), "no kernel thread receives for {}", host.interface());
        Ok(Self { processes, receivers })
    }

    /// The time of all so far.
    pub fn read(&self) -> Result<CpuTime> {
        let sum = |pids: &[i32]| pids.iter().map(|pid| cpu_time(*pid)).sum::<Result<Duration>>();
        Ok(CpuTime { programs: sum(&self.processes)?, receive: sum(&self.receivers)? })
    }

    /// What `work` costs.
    pub fn during<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<(T, CpuTime)> {
        let before = self.read()?;
        let value = work()?;
        let after = self.read()?;
        let spent = CpuTime {
            programs: after.programs.saturating_sub(before.programs),
            receive: after.receive.saturating_sub(before.receive),
        };
        Ok((value, spent))
    }
}

/// The CPU time of all threads of a process, also of a kernel thread.
pub(crate) fn cpu_time(pid: i32) -> Result<Duration> {
    let time = ClockId::pid_cpu_clock_id(Pid::from_raw(pid)).and_then(ClockId::now);
    Ok(time.with_context(|| format!("process {pid} has ended"))?.into())
}

/// The kernel's threads `napi/INTERFACE-ID`.
fn threads_of(interface: &str) -> Vec<i32> {
    let prefix = format!("napi/{interface}-");
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    pids.filter(|pid| {
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        // Before Linux 5.17 the name was cut off.
        name.starts_with(&prefix) || (name.trim_end().len() == 15 && prefix.starts_with(name.trim_end()))
    })
    .collect()
}

/// Lets a process use a known CPU time, and returns that time by its own clock and by [`cpu_time`]: the meter has to see it.
pub fn known_load() -> Result<(Duration, Duration)> {
    let script = "i=0; while [ $i -lt 150000 ]; do i=$((i+1)); done; times; exec sleep 60";
    let mut child = std::process::Command::new("sh")
        .args(["-c", script])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .context("cannot start sh")?;
    let pid = i32::try_from(child.id())?;
    let told = child.stdout.take().map(|output| {
        let mut line = String::new();
        let _ = std::io::BufRead::read_line(&mut std::io::BufReader::new(output), &mut line);
        line
    });
    let seen = cpu_time(pid);
    let _ = nix::sys::signal::kill(Pid::from_raw(pid), Signal::SIGKILL);
    child.wait()?;
    let told = parse_times(&told.unwrap_or_default()).context("sh printed no times")?;
    Ok((told, seen?))
}

/// `0m0.310000s 0m0.020000s`, user and system, as `times` prints it.
fn parse_times(line: &str) -> Option<Duration> {
    let seconds = |word: &str| {
        let (minutes, seconds) = word.strip_suffix('s')?.split_once('m')?;
        Some(minutes.parse::<f64>().ok()? * 60.0 + seconds.parse::<f64>().ok()?)
    };
    let words: Option<Vec<f64>> = line.split_whitespace().map(seconds).collect();
    words.filter(|words| words.len() == 2).map(|words| Duration::from_secs_f64(words.iter().sum()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_at_rest_is_taken_away_in_proportion() {
        let time = |programs, receive| CpuTime {
            programs: Duration::from_millis(programs),
            receive: Duration::from_millis(receive),
        };
        let rest = (time(10, 2), Duration::from_secs(1));
        assert_eq!(time(100, 5).beyond(Duration::from_secs(3), rest), time(70, 0));
    }

    #[test]
    fn shell_times_are_parsed() {
        assert_eq!(parse_times("0m0.310000s 1m0.020000s\n"), Some(Duration::from_millis(60_330)));
        assert_eq!(parse_times("0m0.31s"), None);
    }

    #[test]
    fn cpu_time_is_what_the_process_used_itself() {
        let (told, seen) = known_load().unwrap();
        // The shell's clock has ticks of 10 ms, two of them.
        assert!(seen + Duration::from_millis(25) >= told && !told.is_zero(), "{told:?} {seen:?}");
        assert!(seen <= told + Duration::from_millis(60), "{told:?} {seen:?}");
    }
}
