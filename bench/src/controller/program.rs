// SPDX-License-Identifier: Apache-2.0
//! The controller as a process: its start, its counters, its CPU time and memory, its end.

use std::fs::File;
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::usage::{Group, Peak};

/// Time between two looks at the counters.
const LOOK: Duration = Duration::from_millis(50);
/// Time without work after which the controller counts as quiet.
const QUIET: Duration = Duration::from_secs(2);
/// Longest wait for anything.
const LIMIT: Duration = Duration::from_mins(15);

/// A running controller.
pub(super) struct Program {
    child: Child,
    admin: u16,
    group: Arc<Group>,
    peak: Peak,
    begun: Instant,
}

impl Program {
    /// Starts a controller with the flags' defaults, except that it takes the Lease of a predecessor that has ended.
    pub(super) fn start(file: &Path, kubeconfig: &Path, folder: &Path, number: usize) -> Result<Self> {
        let group = Arc::new(Group::new(number)?);
        let admin = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
        let log = File::create(folder.join(format!("controller-{number}.log")))?;
        let begun = Instant::now();
        let child = Command::new("setpriv")
            // The program ends with the driver, even if that is killed.
            .args(["--pdeathsig", "KILL", "sh", "-c", "echo $$ >\"$0\"; exec \"$@\" 2>&1"])
            .arg(group.procs_file())
            .arg(file)
            .args(["--provider", "edge", "--namespace", "default", "--leader-elect-identity"])
            .arg(format!("bench-{number}"))
            .arg(format!("--admin-address=127.0.0.1:{admin}"))
            .arg("--kubeconfig")
            .arg(kubeconfig)
            .stdin(Stdio::null())
            .stdout(log)
            .spawn()
            .context("cannot start the controller")?;
        let peak = group.record_peak();
        Ok(Self { child, admin, group, peak, begun })
    }

    /// Waits until this many load balancers were reconciled and nothing waits. The time since the start.
    pub(super) fn wait_done(&self, load_balancers: u32) -> Result<Duration> {
        loop {
            // The server is not there in the first moment.
            let metrics = self.metrics().unwrap_or_default();
            let done = value(&metrics, "steerage_controller_reconciles_total{result=\"done\"}");
            let waiting = value(&metrics, "steerage_controller_workqueue_depth");
            if done >= Some(f64::from(load_balancers)) && waiting == Some(0.0) {
                return Ok(self.begun.elapsed());
            }
            ensure!(self.begun.elapsed() < LIMIT, "{done:?} of {load_balancers} load balancers are done");
            sleep(LOOK);
        }
    }

    /// Waits until the controller has used almost no CPU time for a while.
    pub(super) fn wait_quiet(&self) -> Result<()> {
        let begun = Instant::now();
        loop {
            let before = self.cpu_seconds();
            sleep(QUIET);
            if self.cpu_seconds() - before < 0.05 * QUIET.as_secs_f64() {
                return Ok(());
            }
            ensure!(begun.elapsed() < LIMIT, "the controller does not come to rest");
        }
    }

    /// CPU seconds per second while nothing happens.
    pub(super) fn idle_rate(&self) -> Result<f64> {
        self.wait_quiet()?;
        let (before, begun) = (self.cpu_seconds(), Instant::now());
        sleep(QUIET * 2);
        Ok((self.cpu_seconds() - before) / begun.elapsed().as_secs_f64())
    }

    /// CPU seconds since the start.
    pub(super) fn cpu_seconds(&self) -> f64 {
        self.group.cpu_seconds()
    }

    /// The peak of resident memory since the start.
    pub(super) fn peak_mebibytes(&self) -> f64 {
        #[allow(clippy::cast_precision_loss, reason = "far below 2^52")]
        let bytes = self.peak.bytes() as f64;
        bytes / 1024.0 / 1024.0
    }

    /// Ends it as a rolling update does, so that it gives its Lease back.
    pub(super) fn end(mut self) -> Result<()> {
        for pid in self.group.processes() {
            kill(Pid::from_raw(pid), Signal::SIGTERM)?;
        }
        let status = self.child.wait()?;
        ensure!(status.success(), "the controller ended with {status}");
        Ok(())
    }

    fn metrics(&self) -> Result<String> {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, self.admin))?;
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        write!(stream, "GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        if !text.starts_with("HTTP/1.1 200") {
            bail!("the controller answers {:?}", text.lines().next());
        }
        Ok(text)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The value of a line of metrics.
fn value(metrics: &str, name: &str) -> Option<f64> {
    metrics.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_found_by_name() {
        let metrics = "# HELP a_b x\na_b 3\na_total{result=\"done\"} 12\n";
        assert_eq!(value(metrics, "a_b"), Some(3.0));
        assert_eq!(value(metrics, "a_total{result=\"done\"}"), Some(12.0));
        assert_eq!(value(metrics, "a_total{result=\"failed\"}"), None);
    }
}
