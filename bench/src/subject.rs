// SPDX-License-Identifier: Apache-2.0
//! The programs under test: their start, the log line that ends the initial list, and their end.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;
use steerage_lab::netns;

use crate::objects::NODE_NAME;
use crate::testbed::{At, Testbed};
use crate::usage::Group;
use crate::who::Who;

/// Kill a program that has not ended this long after SIGTERM.
const END: Duration = Duration::from_secs(5);

/// The files of the programs.
#[derive(Clone, Debug)]
pub struct Programs {
    /// Steerage's agent.
    pub agent: PathBuf,
    /// kube-proxy.
    pub kube_proxy: PathBuf,
    /// Directory for configuration and logs.
    pub folder: PathBuf,
}

impl Programs {
    /// The program and its arguments. Both log at their usual level, serve all Services, and detect local traffic by the node's
    /// pod CIDR. Everything else has its default.
    fn command(&self, who: Who, kubeconfig: &Path) -> Result<Vec<String>> {
        let kubeconfig = kubeconfig.display().to_string();
        let line: Vec<String> = match who {
            Who::Ours => [
                &self.agent.display().to_string(),
                "--kube-proxy-replacement",
                "--node-name",
                NODE_NAME,
                "--kubeconfig",
                &kubeconfig,
            ]
            .map(str::to_owned)
            .to_vec(),
            Who::Peer => {
                let file = self.folder.join("kube-proxy.json");
                fs::write(&file, kube_proxy(&kubeconfig).to_string())?;
                // At level 2 kube-proxy logs when its caches are filled.
                vec![
                    self.kube_proxy.display().to_string(),
                    format!("--config={}", file.display()),
                    "--v=2".to_owned(),
                ]
            }
        };
        Ok(line)
    }
}

fn kube_proxy(kubeconfig: &str) -> serde_json::Value {
    json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "hostnameOverride": NODE_NAME,
        "clientConnection": { "kubeconfig": kubeconfig },
        "detectLocalMode": "NodeCIDR",
        "oomScoreAdj": 0,
        // These settings are the machine's, read-only in a network namespace.
        "conntrack": {
            "maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s",
            "udpTimeout": "0s", "udpStreamTimeout": "0s",
        },
    })
}

/// A line of a program's log, and the time when it was read.
type Line = (Instant, String);

/// A running program.
#[derive(Debug)]
pub struct Running {
    who: Who,
    child: Child,
    lines: Receiver<Line>,
    log: PathBuf,
    /// Time of the start.
    pub begun: Instant,
    /// The cgroup that measures its CPU time and memory.
    pub group: Arc<Group>,
}

impl Running {
    /// Starts a program in the node of its testbed.
    pub fn start(
        programs: &Programs,
        who: Who,
        testbed: &Testbed,
        kubeconfig: &Path,
        number: usize,
    ) -> Result<Self> {
        let group = Arc::new(Group::new(number)?);
        let command = programs.command(who, kubeconfig)?;
        let begun = Instant::now();
        let mut child = Command::new("setpriv")
            // The program ends with the driver, even if that is killed.
            .args(["--pdeathsig", "KILL", "nsenter"])
            .arg(format!("--net={}", netns::path(&testbed.netns(At::Node)).display()))
            .args(["sh", "-c", "echo $$ >\"$0\"; exec \"$@\" 2>&1"])
            .arg(group.procs_file())
            .args(command)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {}", who.title()))?;
        let output = child.stdout.take().context("no output")?;
        let log = programs.folder.join(format!("{}-{number}.log", who.title()));
        let mut file = File::create(&log)?;
        let (sends, lines) = channel();
        thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                let now = Instant::now();
                let _ = writeln!(file, "{line}");
                // Fails after the initial list, when nobody receives lines any more.
                let _ = sends.send((now, line));
            }
        });
        Ok(Self { who, child, lines, log, begun, group })
    }

    /// Waits for the log lines about the initial lists of Services and EndpointSlices. Returns the time of the last one.
    pub fn listed(&self, within: Duration) -> Result<Instant> {
        self.logged(
            match self.who {
                Who::Ours => vec!["Services, slices and the node are listed"],
                Who::Peer => vec!["controller=\"service config\"", "controller=\"endpoint slice config\""],
            },
            "Caches are synced",
            "the end of its initial list",
            within,
        )
    }

    /// Waits for the log line about the first write. Returns its time. Call it after [`Running::listed`].
    pub fn written(&self, within: Duration) -> Result<Instant> {
        let line = match self.who {
            Who::Ours => "rules written for the first time",
            // It is capitalised differently from mode to mode.
            Who::Peer => "yncProxyRules complete",
        };
        self.logged(vec![line], line, "its first write", within)
    }

    /// Waits for lines of the log that contain these words, and of kube-proxy also `mark`.
    fn logged(&self, mut missing: Vec<&str>, mark: &str, what: &str, within: Duration) -> Result<Instant> {
        let deadline = self.begun + within;
        loop {
            match self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok((when, line)) => {
                    let counts = self.who == Who::Ours || line.contains(mark);
                    missing.retain(|words| !(counts && line.contains(words)));
                    if missing.is_empty() {
                        return Ok(when);
                    }
                }
                Err(RecvTimeoutError::Timeout) => {
                    bail!("{} did not log {what}; see {}", self.who.title(), self.log.display())
                }
                Err(RecvTimeoutError::Disconnected) => {
                    bail!("{} ended:\n{}", self.who.title(), self.log_tail())
                }
            }
        }
    }

    /// The last lines of its log.
    pub fn log_tail(&self) -> String {
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<_> = text.lines().collect();
        lines[lines.len().saturating_sub(15)..].join("\n")
    }

    /// Ends the program and its children. Its rules stay.
    pub fn end(mut self) -> Result<Arc<Group>> {
        let signal = |signal| {
            for pid in self.group.processes() {
                let _ = kill(Pid::from_raw(pid), signal);
            }
        };
        signal(Signal::SIGTERM);
        let begun = Instant::now();
        while !self.group.processes().is_empty() {
            // The kernel completes a running transaction before the process ends.
            if begun.elapsed() > END {
                signal(Signal::SIGKILL);
            }
            let _ = self.child.try_wait();
            thread::sleep(Duration::from_millis(20));
        }
        self.child.wait()?;
        Ok(Arc::clone(&self.group))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
