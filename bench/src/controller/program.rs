// SPDX-License-Identifier: Apache-2.0
//! The controller and its peer as processes: their start, their counters, their CPU time and memory, their end.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::usage::{Group, Peak};
use crate::who::Who;

/// Time between two looks at the counters.
const LOOK: Duration = Duration::from_millis(50);
/// Time without work after which a program counts as quiet.
const QUIET: Duration = Duration::from_secs(2);
/// Longest wait until everything is planned.
const LIMIT: Duration = Duration::from_hours(1);
/// What the peer needs so that neither its limit of requests nor its single worker is what is measured.
const RAISED: [&str; 3] = ["--concurrent-service-syncs=64", "--kube-api-qps=10000", "--kube-api-burst=10000"];
/// The peer's counters.
const ENSURED: &str = "provider_calls_total{call=\"EnsureLoadBalancer\"}";
const UPDATED: &str = "provider_calls_total{call=\"UpdateLoadBalancer\"}";

/// The files of the programs, and how they are started.
#[derive(Clone, Debug)]
pub(super) struct Programs {
    pub(super) controller: PathBuf,
    /// `None`: the controller is measured alone.
    pub(super) peer: Option<PathBuf>,
    /// Directory for configuration and logs.
    pub(super) folder: PathBuf,
    /// Whether the peer keeps the defaults of its flags.
    pub(super) peer_defaults: bool,
    /// The API server answers in JSON only.
    pub(super) json_only: bool,
    /// Longest wait for a program to come to rest.
    pub(super) limit: Duration,
}

/// A running program.
pub(super) struct Program {
    who: Who,
    child: Child,
    /// Where its counters are.
    port: u16,
    group: Arc<Group>,
    peak: Peak,
    begun: Instant,
    limit: Duration,
}

/// When a program came to rest.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rest {
    /// Since its start.
    pub(super) after: Duration,
    /// CPU seconds since its start.
    pub(super) cpu: f64,
    /// It did not: the others are lower bounds.
    pub(super) is_bound: bool,
}

impl Programs {
    /// Starts a program. What is not named here has its default.
    pub(super) fn start(&self, who: Who, kubeconfig: &Path, number: usize) -> Result<Program> {
        let group = Arc::new(Group::new(number)?);
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
        let log = File::create(self.folder.join(format!("controller-{number}.log")))?;
        let mut command = Command::new("setpriv");
        command
            // The program ends with the driver, even if that is killed.
            .args(["--pdeathsig", "KILL", "sh", "-c", "echo $$ >\"$0\"; exec \"$@\" 2>&1"])
            .arg(group.procs_file());
        match who {
            Who::Ours => self.add_controller(&mut command, port, number),
            Who::Peer => self.add_peer(&mut command, port)?,
        }
        let begun = Instant::now();
        let child = command
            .arg("--kubeconfig")
            .arg(kubeconfig)
            .stdin(Stdio::null())
            .stdout(log)
            .spawn()
            .with_context(|| format!("cannot start {}", who.name()))?;
        let peak = group.record_peak();
        Ok(Program { who, child, port, group, peak, begun, limit: self.limit })
    }

    /// With an identity that lets it take the Lease of a predecessor that has ended.
    fn add_controller(&self, command: &mut Command, port: u16, number: usize) {
        command
            .arg(&self.controller)
            .args(["--provider", "edge", "--namespace", "default", "--leader-elect-identity"])
            .arg(format!("bench-{number}"))
            .arg(format!("--admin-address=127.0.0.1:{port}"));
    }

    /// With a provider that answers at once, without its other controllers, which do not concern Services, and without a Lease, which
    /// it does not give back when it ends.
    fn add_peer(&self, command: &mut Command, port: u16) -> Result<()> {
        let config = self.folder.join("peer.conf");
        fs::write(&config, format!("127.0.0.1:{port}"))?;
        command
            .arg(self.peer.as_ref().context("no peer")?)
            .args(["--cloud-provider=memory", "--controllers=service-lb-controller", "--leader-elect=false"])
            .args(["--secure-port=0", &format!("--cloud-config={}", config.display())]);
        if self.json_only {
            command.arg("--kube-api-content-type=application/json");
        }
        if !self.peer_defaults {
            command.args(RAISED);
        }
        Ok(())
    }
}

impl Program {
    /// Waits until this many load balancers were reconciled and nothing waits. The time since the start.
    pub(super) fn wait_done(&self, load_balancers: u32) -> Result<Duration> {
        let (counter, queue) = match self.who {
            Who::Ours => (
                "steerage_controller_reconciles_total{result=\"done\"}",
                Some("steerage_controller_workqueue_depth"),
            ),
            // It calls the provider once for each Service.
            Who::Peer => (ENSURED, None),
        };
        loop {
            // The server is not there in the first moment.
            let metrics = self.metrics().unwrap_or_default();
            let done = value(&metrics, counter);
            let is_empty = queue.is_none_or(|queue| value(&metrics, queue) == Some(0.0));
            if done >= Some(f64::from(load_balancers)) && is_empty {
                return Ok(self.begun.elapsed());
            }
            ensure!(self.begun.elapsed() < LIMIT, "{done:?} of {load_balancers} load balancers are done");
            sleep(LOOK);
        }
    }

    /// Waits until the peer has told its provider of this many more load balancers' nodes. False after the limit.
    pub(super) fn wait_updated(&self, before: f64, load_balancers: u32) -> Result<bool> {
        let begun = Instant::now();
        while self.updated()? < before + f64::from(load_balancers) {
            if begun.elapsed() > self.limit {
                return Ok(false);
            }
            sleep(LOOK);
        }
        Ok(true)
    }

    /// How often the peer's provider was told of a load balancer's nodes.
    pub(super) fn updated(&self) -> Result<f64> {
        Ok(value(&self.metrics()?, UPDATED).unwrap_or_default())
    }

    /// Leaves the peer's provider calls for this Service without an answer.
    pub(super) fn hang(&self, service: &str) -> Result<()> {
        self.request(&format!("POST /hang/{service}")).map(drop)
    }

    /// Waits until the program has used almost no CPU time for a while, or until the limit.
    pub(super) fn rest(&self) -> Rest {
        let begun = Instant::now();
        loop {
            let (after, cpu) = (self.begun.elapsed(), self.cpu_seconds());
            sleep(QUIET);
            if self.cpu_seconds() - cpu < 0.05 * QUIET.as_secs_f64() {
                return Rest { after, cpu, is_bound: false };
            }
            if begun.elapsed() > self.limit {
                return Rest { after, cpu, is_bound: true };
            }
        }
    }

    /// CPU seconds per second while nothing happens.
    pub(super) fn idle_rate(&self) -> f64 {
        self.rest();
        let (before, begun) = (self.cpu_seconds(), Instant::now());
        sleep(QUIET * 2);
        (self.cpu_seconds() - before) / begun.elapsed().as_secs_f64()
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

    /// Ends it as a rolling update does. The controller gives its Lease back.
    pub(super) fn end(mut self) -> Result<()> {
        if let Some(status) = self.child.try_wait()? {
            bail!("{} ended with {status}", self.who.name());
        }
        for pid in self.group.processes() {
            kill(Pid::from_raw(pid), Signal::SIGTERM)?;
        }
        let status = self.child.wait()?;
        // The peer ends by the signal.
        ensure!(self.who == Who::Peer || status.success(), "the controller ended with {status}");
        Ok(())
    }

    fn metrics(&self) -> Result<String> {
        self.request("GET /metrics")
    }

    fn request(&self, what: &str) -> Result<String> {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port))?;
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        write!(stream, "{what} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        if !text.starts_with("HTTP/1.1 200") {
            bail!("{} answers {:?}", self.who.name(), text.lines().next());
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
