// SPDX-License-Identifier: Apache-2.0
//! The two programs: their command lines, their start and their end.

use std::fs::File;
use std::net::{Ipv4Addr, TcpListener};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::cloud::{Start, Vendor};
use super::objects::CLUSTER;
use super::world::World;
use crate::who::Who;

/// The files of the programs, and a directory for configuration and logs.
pub(super) struct Programs {
    pub(super) vendor: Vendor,
    pub(super) controller: PathBuf,
    pub(super) peer: PathBuf,
    pub(super) folder: PathBuf,
    /// More flags of Steerage's.
    pub(super) flags: &'static [&'static str],
}

/// A running program.
pub(super) struct Program {
    child: Child,
    log: PathBuf,
}

impl Programs {
    /// Starts a program. The peer manages Services without a class, and everything that is not named here or by the cloud has its default.
    pub(super) fn start(&self, who: Who, world: &World, number: usize) -> Result<Program> {
        let mut command = Command::new("setpriv");
        // The program ends with the driver, even if that is killed.
        command.args(["--pdeathsig", "KILL"]);
        let start = Start { kubeconfig: world.kubeconfig(), folder: &self.folder };
        match who {
            Who::Ours => {
                command.arg(&self.controller).args(["--namespace", "default"]);
                command.args(self.flags).args(["--admin-address", "127.0.0.1:0"]);
                command.args(["--leader-elect-identity", &format!("bench-{number}")]);
                command.arg("--kubeconfig").arg(start.kubeconfig);
                world.cloud.add_to_controller(&mut command, &start)?;
            }
            Who::Peer => {
                self.add_peer(&mut command, &start)?;
                world.cloud.add_to_peer(&mut command, &start)?;
            }
        }
        let title = self.vendor.title(who);
        let log = self.folder.join(format!("{title}-{number}.log"));
        let file = File::create(&log)?;
        let child = command
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file)
            .spawn()
            .with_context(|| format!("cannot start {title}"))?;
        Ok(Program { child, log })
    }

    /// Without its other controllers, which do not concern Services, and without a Lease, which it does not give back when it ends.
    fn add_peer(&self, command: &mut Command, start: &Start<'_>) -> Result<()> {
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
        command.arg(&self.peer);
        if self.vendor == Vendor::Gce {
            command
                .args(["--running-in-cluster=false", "--leader-elect=false"])
                .arg(format!("--healthz-port={port}"))
                .arg(format!("--kubeconfig={}", start.kubeconfig.display()));
            return Ok(());
        }
        command
            .args(["--controllers=service-lb-controller", "--leader-elect=false"])
            .arg(format!("--cluster-name={CLUSTER}"))
            .args(["--bind-address=127.0.0.1", &format!("--secure-port={port}")])
            .arg(format!("--cert-dir={}", start.folder.display()))
            .arg(format!("--kubeconfig={}", start.kubeconfig.display()));
        Ok(())
    }
}

impl Program {
    /// Fails if the program has ended by itself.
    pub(super) fn ensure_runs(&mut self) -> Result<()> {
        if let Some(status) = self.child.try_wait()? {
            bail!("a program ended with {status}: see {}", self.log.display());
        }
        Ok(())
    }

    /// Ends it as a rolling update does.
    pub(super) fn end(mut self) -> Result<()> {
        self.ensure_runs()?;
        kill(Pid::from_raw(self.child.id().try_into()?), Signal::SIGTERM)?;
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
