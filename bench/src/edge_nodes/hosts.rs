// SPDX-License-Identifier: Apache-2.0
//! The edge hosts: real processes in their namespaces, what they cost, and the limit of their memory. It decides nothing.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::tables::Tables;
use super::world::{LINK, World, host_netns};
use crate::edge_bed::admin::{self, ADMIN, HostMetrics};
use crate::edge_bed::{self, cpu};

/// Time between two looks at the processes' memory.
const MEMORY_INTERVAL: Duration = Duration::from_millis(50);

/// All edge hosts.
pub(crate) struct Hosts {
    program: PathBuf,
    kubeconfig: PathBuf,
    children: Vec<Option<Child>>,
    guard: MemoryGuard,
}

impl Hosts {
    /// No process runs yet.
    pub(crate) fn new(world: &World, program: PathBuf, kubeconfig: &Path, memory_limit: u64) -> Result<Self> {
        fs::write(world.folder.join("key"), "a key of at least thirty-two bytes")?;
        let count = usize::from(world.hosts);
        Ok(Self {
            program,
            kubeconfig: kubeconfig.to_owned(),
            children: (0..count).map(|_| None).collect(),
            guard: MemoryGuard::start(count, memory_limit),
        })
    }

    /// Starts the process of a host.
    pub(crate) fn start(&mut self, world: &World, host: usize) -> Result<()> {
        let name = host_netns(host);
        let path = world.folder.join(format!("{name}.log"));
        let log = fs::File::options().create(true).append(true).open(path)?;
        let mut command = edge_bed::command(&name);
        command.arg(&self.program);
        command.args(["--host-name", &name, "--group", "bench", "--interface", LINK]);
        command.args(["--admin-address", &ADMIN.to_string()]);
        command.arg("--bpf-dir").arg(bpf_folder(world, host));
        command.arg("--kubeconfig").arg(&self.kubeconfig);
        command.arg("--peers-key-file").arg(world.folder.join("key"));
        let child = command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).spawn();
        let child = child.context("cannot start steerage-edge")?;
        self.guard.watch(host, Some(i32::try_from(child.id())?));
        if let Some(place) = self.children.get_mut(host) {
            *place = Some(child);
        }
        Ok(())
    }

    /// SIGKILL; what is in the kernel stays.
    pub(crate) fn kill(&mut self, host: usize) -> Result<()> {
        self.guard.watch(host, None);
        if let Some(mut child) = self.children.get_mut(host).and_then(Option::take) {
            child.kill()?;
            child.wait()?;
        }
        Ok(())
    }

    /// Fails if a process has ended.
    pub(crate) fn check(&mut self) -> Result<()> {
        if let Some(reason) = self.guard.exceeded() {
            bail!(reason);
        }
        for (host, child) in self.children.iter_mut().enumerate() {
            if let Some(status) = child.as_mut().map(Child::try_wait).transpose()?.flatten() {
                // Before the guard has said why.
                thread::sleep(MEMORY_INTERVAL);
                match self.guard.exceeded() {
                    Some(reason) => bail!(reason),
                    None => bail!("the edge of host {} ended with {status}: see its log", host + 1),
                }
            }
        }
        Ok(())
    }

    /// Why the processes were stopped, if they needed more memory than they may.
    pub(crate) fn exceeded(&self) -> Option<String> {
        self.guard.exceeded()
    }

    /// CPU time and memory of a host's process.
    pub(crate) fn usage(&self, host: usize) -> Result<Usage> {
        let child = self.children.get(host).and_then(Option::as_ref).context("the edge does not run")?;
        let pid = i32::try_from(child.id())?;
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        let memory = |name| kib(&status, name).map(|kib| kib * 1024).with_context(|| format!("no {name}"));
        Ok(Usage { cpu: cpu::cpu_time(pid)?, resident: memory("VmRSS")?, peak: memory("VmHWM")? })
    }

    /// Whether a host says that it is ready.
    pub(crate) fn is_ready(host: usize) -> Result<bool> {
        admin::is_ready(&host_netns(host))
    }

    /// A host's own metrics.
    pub(crate) fn metrics(host: usize) -> Result<HostMetrics> {
        admin::metrics(&host_netns(host))
    }

    /// What a host's kernel forwards by, once there is something.
    pub(crate) fn tables(world: &World, host: usize) -> Result<Tables> {
        Tables::open(&bpf_folder(world, host), LINK)
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for host in 0..self.children.len() {
            let _ = self.kill(host);
        }
    }
}

fn bpf_folder(world: &World, host: usize) -> PathBuf {
    world.folder.join("bpf").join(host_netns(host))
}

/// What a process has used.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Usage {
    pub(crate) cpu: Duration,
    /// Bytes of resident memory.
    pub(crate) resident: u64,
    /// The most of it so far.
    pub(crate) peak: u64,
}

/// Kills all watched processes once their memory together exceeds a limit, before the machine has none left.
struct MemoryGuard {
    shared: Arc<Guarded>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Guarded {
    ended: AtomicBool,
    pids: Mutex<Vec<Option<i32>>>,
    exceeded: Mutex<Option<String>>,
}

impl MemoryGuard {
    fn start(count: usize, limit: u64) -> Self {
        let shared = Arc::new(Guarded { pids: Mutex::new(vec![None; count]), ..Guarded::default() });
        let guarded = Arc::clone(&shared);
        let thread = thread::spawn(move || {
            while !guarded.ended.load(Ordering::Relaxed) {
                guarded.look(limit);
                thread::sleep(MEMORY_INTERVAL);
            }
        });
        Self { shared, thread: Some(thread) }
    }

    fn watch(&self, host: usize, pid: Option<i32>) {
        if let Some(place) = lock(&self.shared.pids).get_mut(host) {
            *place = pid;
        }
    }

    fn exceeded(&self) -> Option<String> {
        lock(&self.shared.exceeded).clone()
    }
}

impl Drop for MemoryGuard {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Guarded {
    fn look(&self, limit: u64) {
        let pids = lock(&self.pids);
        let resident = |pid: &i32| {
            let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
            kib(&status, "VmRSS").unwrap_or(0) * 1024
        };
        let each: Vec<_> = pids.iter().flatten().map(|pid| (*pid, resident(pid))).collect();
        let sum: u64 = each.iter().map(|(_, bytes)| bytes).sum();
        if sum <= limit {
            return;
        }
        let mib = |bytes: u64| bytes >> 20;
        let most = each.iter().map(|(_, bytes)| *bytes).max().unwrap_or(0);
        lock(&self.exceeded).get_or_insert_with(|| {
            format!(
                "stopped: {} edge hosts together had {} MiB of memory, the largest {} MiB, and --memory-limit is {} MiB",
                each.len(),
                mib(sum),
                mib(most),
                mib(limit)
            )
        });
        for (pid, _) in each {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }
}

fn kib(status: &str, name: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    line.split_whitespace().next()?.parse().ok()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn metrics_are_found_by_series_and_by_family() {
        let text = "a_total{kind=\"x\"} 3\na_total{kind=\"y\"} 4\na_total_more{kind=\"x\"} 9\nb 7\n";
        let metrics = HostMetrics(text.to_owned());
        assert_eq!((metrics.value("b"), metrics.value("a_total{kind=\"y\"}")), (Some(7.0), Some(4.0)));
        assert!((metrics.sum("a_total") - 7.0).abs() < 1e-9);
    }

    #[test]
    fn process_beyond_the_limit_is_stopped() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let guard = MemoryGuard::start(1, 1 << 30);
        guard.watch(0, Some(pid));
        thread::sleep(4 * MEMORY_INTERVAL);
        assert!(guard.exceeded().is_none() && child.try_wait().unwrap().is_none());
        drop(guard);
        let guard = MemoryGuard::start(1, 1);
        guard.watch(0, Some(pid));
        assert!(!child.wait().unwrap().success());
        assert!(guard.exceeded().unwrap().contains("--memory-limit"));
    }
}
