// SPDX-License-Identifier: Apache-2.0
//! What a program costs: processor time, resident memory, memory of the kernel. A memory cgroup holds the program and whatever
//! it starts, so that helpers count too, and so do rules that outlive it.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context as _, Result};

/// Clock ticks in a second, as proc(5) counts: the same on every architecture of ours.
const TICKS: f64 = 100.0;
/// How often resident memory is looked at.
const LOOK: Duration = Duration::from_millis(25);

/// What names of cgroups begin with; the driver's process and a number follow.
const PREFIX: &str = "stbench-";

/// Removes the cgroups of runs whose process is gone.
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

/// A memory cgroup of its own.
#[derive(Debug)]
pub struct Group {
    folder: PathBuf,
    kernel: Kernel,
}

/// Where a cgroup says how much the kernel holds for it.
#[derive(Clone, Copy, Debug)]
enum Kernel {
    /// Version 1: a file of its own.
    Usage,
    /// Version 2: a line of memory.stat.
    Stat,
}

impl Group {
    /// Makes one below the caller's own; each has another number.
    pub fn new(number: usize) -> Result<Self> {
        let (parent, kernel) = parent().context("cgroups with a memory controller are needed")?;
        let folder = parent.join(format!("{PREFIX}{}-{number}", std::process::id()));
        fs::create_dir_all(&folder)
            .with_context(|| format!("cannot make the cgroup {}", folder.display()))?;
        Ok(Self { folder, kernel })
    }

    /// The file that a process writes itself into to join.
    pub fn door(&self) -> PathBuf {
        self.folder.join("cgroup.procs")
    }

    /// Its processes.
    pub fn processes(&self) -> Vec<i32> {
        let listed = fs::read_to_string(self.door()).unwrap_or_default();
        listed.lines().filter_map(|line| line.trim().parse().ok()).collect()
    }

    /// Bytes that the kernel holds for it: rules that its processes made, sockets, page tables.
    pub fn kernel_bytes(&self) -> Result<u64> {
        let (file, line) = match self.kernel {
            Kernel::Usage => ("memory.kmem.usage_in_bytes", None),
            Kernel::Stat => ("memory.stat", Some("kernel ")),
        };
        let text = fs::read_to_string(self.folder.join(file))?;
        let number = match line {
            None => text.trim(),
            Some(line) => text
                .lines()
                .find_map(|found| found.strip_prefix(line))
                .context("the kernel does not tell")?
                .trim(),
        };
        Ok(number.parse()?)
    }

    /// Bytes resident in its processes now.
    pub fn resident(&self) -> u64 {
        self.processes().into_iter().map(resident).sum()
    }

    /// Seconds of processor time that its processes and their ended children have used.
    pub fn processor(&self) -> f64 {
        self.processes().into_iter().filter_map(processor).sum()
    }

    /// Watches resident memory until the value goes.
    pub fn watch(self: &Arc<Self>) -> Peak {
        let (group, most, stop) =
            (Arc::clone(self), Arc::<AtomicU64>::default(), Arc::<AtomicBool>::default());
        let (shared, ended) = (Arc::clone(&most), Arc::clone(&stop));
        let thread = std::thread::spawn(move || {
            while !ended.load(Ordering::Relaxed) {
                shared.fetch_max(group.resident(), Ordering::Relaxed);
                std::thread::sleep(LOOK);
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

/// The most memory that was resident at once.
#[derive(Debug)]
pub struct Peak {
    most: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Peak {
    /// Bytes, until now.
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

fn resident(pid: i32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) * 1024
}

fn processor(pid: i32) -> Option<f64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    ticks(&stat).map(|ticks| ticks / TICKS)
}

/// utime, stime, cutime and cstime of a line of /proc/PID/stat.
fn ticks(stat: &str) -> Option<f64> {
    // The name in parentheses may hold anything.
    let (_, rest) = stat.rsplit_once(')')?;
    let fields: Vec<_> = rest.split_whitespace().collect();
    let times = fields.get(11..15)?.iter().map(|field| field.parse::<f64>());
    times.sum::<Result<f64, _>>().ok()
}

/// The cgroup below which ours are made.
fn parent() -> Option<(PathBuf, Kernel)> {
    let own = fs::read_to_string("/proc/self/cgroup").ok()?;
    let below = |mount: &str, own: &str| Path::new(mount).join(own.trim_start_matches('/'));
    for line in own.lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (controllers, path) = (parts.next()?, parts.next()?);
        if controllers.split(',').any(|controller| controller == "memory") {
            let folder = below("/sys/fs/cgroup/memory", path);
            return folder.exists().then_some((folder, Kernel::Usage));
        }
    }
    // In version 2 a cgroup with processes hands no controllers on, but the root does.
    let root = Path::new("/sys/fs/cgroup");
    let handed = fs::read_to_string(root.join("cgroup.subtree_control")).ok()?;
    handed
        .split_whitespace()
        .any(|controller| controller == "memory")
        .then(|| (root.to_owned(), Kernel::Stat))
}

#[cfg(test)]
mod tests {
    use steerage_requirements::requires;

    use super::*;

    #[test]
    fn times_are_found_behind_any_name() {
        let stat = "12 (a) b) S 1 2 3 4 5 6 7 8 9 10 100 20 3 4 20 0 1 0 5";
        assert_eq!(ticks(stat), Some(127.0));
        assert_eq!(ticks("12 (a"), None);
    }

    #[test]
    fn a_group_counts_what_runs_in_it() {
        requires!(Root);
        let group = Arc::new(Group::new(0).unwrap());
        let script = "echo $$ >\"$0\"; i=0; while [ $i -lt 30000 ]; do i=$((i+1)); done; sleep 60";
        let mut child =
            std::process::Command::new("sh").args(["-c", script]).arg(group.door()).spawn().unwrap();
        let deadline = std::time::Instant::now() + Duration::from_secs(30);
        let peak = group.watch();
        while (group.processor() == 0.0 || group.resident() == 0 || peak.bytes() == 0)
            && std::time::Instant::now() < deadline
        {
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(group.processor() > 0.0 && peak.bytes() > 100_000, "{} {}", group.processor(), peak.bytes());
        assert!(group.kernel_bytes().is_ok());
        for pid in group.processes() {
            nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL)
                .unwrap();
        }
        child.wait().unwrap();
    }
}
