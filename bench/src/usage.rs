// SPDX-License-Identifier: Apache-2.0
//! CPU time, resident memory and kernel memory of a program. A memory cgroup contains the program and its children, so it also
//! counts helpers, and rules that stay after the program ended.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context as _, Result};

/// Clock ticks per second in proc(5), the same on all supported architectures.
const TICKS: f64 = 100.0;
/// Time between two readings of resident memory.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(25);

/// Prefix of the cgroups. The driver's process ID and a number follow.
const PREFIX: &str = "stbench-";

/// Removes the cgroups of runs whose process no longer exists.
pub fn sweep() {
    let entries = parent().and_then(|(folder, _)| fs::read_dir(folder).ok()).into_iter().flatten().flatten();
    for entry in entries {
        let name = entry.file_name();
        let pid =
            name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.split('-').next()?.parse::<i32>().ok());
        if pid.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            let _ = fs::remove_dir(entry.path());
        }
    }
}

/// A memory cgroup.
#[derive(Debug)]
pub struct Group {
    folder: PathBuf,
    kernel: KernelMemory,
}

/// The file with the kernel memory of a cgroup.
#[derive(Clone, Copy, Debug)]
enum KernelMemory {
    /// Version 1: `memory.kmem.usage_in_bytes`.
    Usage,
    /// Version 2: a line of memory.stat.
    Stat,
}

impl Group {
    /// Creates a cgroup below the caller's. Each needs another number.
    pub fn new(number: usize) -> Result<Self> {
        let (parent, kernel) = parent().context("cgroups with a memory controller are needed")?;
        let folder = parent.join(format!("{PREFIX}{}-{number}", std::process::id()));
        fs::create_dir_all(&folder)
            .with_context(|| format!("cannot create the cgroup {}", folder.display()))?;
        Ok(Self { folder, kernel })
    }

    /// The file into which a process writes its ID to join.
    pub fn procs_file(&self) -> PathBuf {
        self.folder.join("cgroup.procs")
    }

    /// IDs of its processes.
    pub fn processes(&self) -> Vec<i32> {
        let listed = fs::read_to_string(self.procs_file()).unwrap_or_default();
        listed.lines().filter_map(|line| line.trim().parse().ok()).collect()
    }

    /// Bytes of kernel memory: rules of its processes, sockets, page tables.
    pub fn kernel_bytes(&self) -> Result<u64> {
        let (file, line) = match self.kernel {
            KernelMemory::Usage => ("memory.kmem.usage_in_bytes", None),
            KernelMemory::Stat => ("memory.stat", Some("kernel ")),
        };
        let text = fs::read_to_string(self.folder.join(file))?;
        let number = match line {
            None => text.trim(),
            Some(line) => text
                .lines()
                .find_map(|found| found.strip_prefix(line))
                .context("memory.stat has no line `kernel`")?
                .trim(),
        };
        Ok(number.parse()?)
    }

    /// Bytes of resident memory of its processes.
    pub fn resident_bytes(&self) -> u64 {
        self.processes().into_iter().map(resident_bytes).sum()
    }

    /// CPU seconds of its processes and their ended children.
    pub fn cpu_seconds(&self) -> f64 {
        self.processes().into_iter().filter_map(cpu_seconds).sum()
    }

    /// Records the peak of resident memory until the result is dropped.
    pub fn record_peak(self: &Arc<Self>) -> Peak {
        let (group, most, stop) =
            (Arc::clone(self), Arc::<AtomicU64>::default(), Arc::<AtomicBool>::default());
        let (shared, ended) = (Arc::clone(&most), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            while !ended.load(Ordering::Relaxed) {
                shared.fetch_max(group.resident_bytes(), Ordering::Relaxed);
                std::thread::sleep(SAMPLE_INTERVAL);
            }
        });
        Peak { most, stop, thread: Some(thread) }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.folder);
    }
}

/// A recorder of peak resident memory.
#[derive(Debug)]
pub struct Peak {
    most: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Peak {
    /// The peak so far, in bytes.
    pub fn bytes(&self) -> u64 {
        self.most.load(Ordering::Relaxed)
    }
}

impl Drop for Peak {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn resident_bytes(pid: i32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) * 1024
}

fn cpu_seconds(pid: i32) -> Option<f64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    ticks(&stat).map(|ticks| ticks / TICKS)
}

/// utime, stime, cutime and cstime of a line of /proc/PID/stat.
fn ticks(stat: &str) -> Option<f64> {
    // The name in parentheses may contain anything.
    let (_, rest) = stat.rsplit_once(')')?;
    let fields: Vec<_> = rest.split_whitespace().collect();
    let times = fields.get(11..15)?.iter().map(|field| field.parse::<f64>());
    times.sum::<Result<f64, _>>().ok()
}

/// The parent of the cgroups.
fn parent() -> Option<(PathBuf, KernelMemory)> {
    let own = fs::read_to_string("/proc/self/cgroup").ok()?;
    let below = |mount: &str, own: &str| Path::new(mount).join(own.trim_start_matches('/'));
    for line in own.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next()?, parts.next()?);
        if controllers.split(',').any(|controller| controller == "memory") {
            let folder = below("/sys/fs/cgroup/memory", path);
            return folder.exists().then_some((folder, KernelMemory::Usage));
        }
    }
    // In version 2 only the root delegates controllers while it contains processes.
    let root = Path::new("/sys/fs/cgroup");
    let delegated = fs::read_to_string(root.join("cgroup.subtree_control")).ok()?;
    delegated
        .split_whitespace()
        .any(|controller| controller == "memory")
        .then(|| (root.to_owned(), KernelMemory::Stat))
}

#[cfg(test)]
mod tests {
    use steerage_requirements::requires;

    use super::*;

    #[test]
    fn times_are_parsed_after_any_name() {
        let stat = "12 (a) b) S 1 2 3 4 5 6 7 8 9 10 100 20 3 4 20 0 1 0 5";
        assert_eq!(ticks(stat), Some(127.0));
        assert_eq!(ticks("12 (a"), None);
    }

    #[test]
    fn cgroup_counts_its_processes() {
        requires!(Root);
        let group = Arc::new(Group::new(0).unwrap());
        let script = "echo $$ >\"$0\"; i=0; while [ $i -lt 30000 ]; do i=$((i+1)); done; sleep 60";
        let mut child =
            std::process::Command::new("sh").args(["-c", script]).arg(group.procs_file()).spawn().unwrap();
        let deadline = std::time::Instant::now() + Duration::from_secs(30);
        let peak = group.record_peak();
        while (group.cpu_seconds() == 0.0 || group.resident_bytes() == 0 || peak.bytes() == 0)
            && std::time::Instant::now() < deadline
        {
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(
            group.cpu_seconds() > 0.0 && peak.bytes() > 100_000,
            "{} {}",
            group.cpu_seconds(),
            peak.bytes()
        );
        assert!(group.kernel_bytes().is_ok());
        for pid in group.processes() {
            nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL)
                .unwrap();
        }
        child.wait().unwrap();
    }
}
