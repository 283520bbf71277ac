// SPDX-License-Identifier: Apache-2.0
//! The steerage-edge processes, one for each host: starts, signals and ends them for `world` and `events`. It decides nothing.

use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::edge_bed::admin::{self, ADMIN};
use crate::edge_bed::{Bed, Host, command};

/// Until a process is ready, or has ended.
const LIMIT: Duration = Duration::from_mins(1);
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// All edge hosts. Processes that run end with this value.
pub(super) struct Hosts {
    folder: PathBuf,
    /// By the number of the host, less one.
    children: Vec<Option<Child>>,
}

impl Hosts {
    /// No process runs yet.
    pub(super) fn new(bed: &Bed) -> Result<Self> {
        for folder in ["objects", "status"] {
            fs::create_dir_all(bed.folder.join(folder))?;
        }
        fs::write(bed.folder.join("key"), "a key of at least thirty-two bytes")?;
        Ok(Self { folder: bed.folder.clone(), children: bed.size.hosts().map(|_| None).collect() })
    }

    fn child(&mut self, host: Host) -> Result<&mut Option<Child>> {
        self.children.get_mut(usize::from(host.0) - 1).context("there is no such host")
    }

    pub(super) fn is_running(&mut self, host: Host) -> Result<bool> {
        Ok(self.child(host)?.is_some())
    }

    /// The hosts whose process runs. Fails if one has ended by itself.
    pub(super) fn running(&mut self) -> Result<Vec<Host>> {
        let mut running = Vec::new();
        for (number, child) in (1..).zip(&mut self.children) {
            let Some(child) = child else { continue };
            if let Some(status) = child.try_wait()? {
                bail!("the edge of {} ended with {status}: see its log", Host(number).netns());
            }
            running.push(Host(number));
        }
        Ok(running)
    }

    /// Starts this program, and waits until it is ready.
    pub(super) fn start(&mut self, host: Host, program: &PathBuf) -> Result<()> {
        let name = host.netns();
        let log =
            fs::File::options().create(true).append(true).open(self.folder.join(format!("{name}.log")))?;
        let path = |name: &str| self.folder.join(name);
        let mut command = command(&name);
        command.arg(program).args(["--host-name", &name, "--group", "bench", "--statements-port", "0"]);
        command.args(["--interface", &host.interface(), "--admin-address", &ADMIN.to_string()]);
        command.arg("--bpf-dir").arg(path("bpf").join(&name));
        command.arg("--objects-dir").arg(path("objects")).arg("--status-dir").arg(path("status"));
        command.arg("--peers-key-file").arg(path("key"));
        let child = command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).spawn();
        *self.child(host)? = Some(child.context("cannot start steerage-edge")?);
        let begun = Instant::now();
        while !admin::is_ready(&name)? {
            if let Some(status) = self.child(host)?.as_mut().map(Child::try_wait).transpose()?.flatten() {
                bail!("the edge of {name} ended with {status}: see its log");
            }
            ensure!(begun.elapsed() < LIMIT, "the edge of {name} is not ready: see its log");
            thread::sleep(LOOK_EVERY);
        }
        Ok(())
    }

    /// Sends a signal to the process.
    pub(super) fn signal(&mut self, host: Host, signal: Signal) -> Result<()> {
        let child = self.child(host)?.as_ref().context("the edge does not run")?;
        Ok(kill(Pid::from_raw(i32::try_from(child.id())?), signal)?)
    }

    /// Ends the process by this signal, SIGTERM or SIGKILL, and waits for its end.
    pub(super) fn end(&mut self, host: Host, signal: Signal) -> Result<()> {
        self.running()?;
        self.signal(host, signal)?;
        let mut child = self.child(host)?.take().context("the edge does not run")?;
        let begun = Instant::now();
        loop {
            if let Some(status) = child.try_wait()? {
                let is_as_told = status.success() || status.signal() == Some(Signal::SIGKILL as i32);
                ensure!(is_as_told, "the edge of {} ended with {status}: see its log", host.netns());
                return Ok(());
            }
            if begun.elapsed() > LIMIT {
                child.kill()?;
                bail!("the edge of {} did not end", host.netns());
            }
            thread::sleep(LOOK_EVERY);
        }
    }

    /// Removes what an ended process has left in the kernel.
    pub(super) fn clean_up(&self, host: Host, program: &PathBuf) -> Result<()> {
        let name = host.netns();
        let mut command: Command = command(&name);
        command.arg(program).args(["--interface", &host.interface(), "--bpf-dir"]);
        let output = command.arg(self.folder.join("bpf").join(&name)).arg("cleanup").output()?;
        ensure!(output.status.success(), "cleanup: {}", String::from_utf8_lossy(&output.stderr));
        Ok(())
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for child in self.children.iter_mut().flatten() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
