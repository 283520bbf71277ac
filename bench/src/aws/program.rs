// SPDX-License-Identifier: Apache-2.0
//! The two programs: their command lines, their start and their end.

use std::fs::{self, File};
use std::net::{Ipv4Addr, TcpListener};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use anyhow::{Context as _, Result, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use steerage_testmoto::peer;

use super::objects::{CLUSTER, REGION};
use super::world::World;
use crate::who::Who;

/// The files of the programs, and a directory for configuration and logs.
pub(super) struct Programs {
    pub(super) controller: PathBuf,
    pub(super) peer: PathBuf,
    pub(super) folder: PathBuf,
}

/// Name of a program in tables.
pub(super) fn title(who: Who) -> &'static str {
    match who {
        Who::Ours => "Steerage",
        Who::Peer => "cloud-provider-aws",
    }
}

/// A running program.
pub(super) struct Program {
    child: Child,
    log: PathBuf,
}

impl Programs {
    /// Starts a program. Both manage Services without a class, and everything that is not named here has its default.
    pub(super) fn start(&self, who: Who, world: &World, number: usize) -> Result<Program> {
        let mut command = Command::new("setpriv");
        // The program ends with the driver, even if that is killed.
        command.args(["--pdeathsig", "KILL"]);
        match who {
            Who::Ours => self.add_controller(&mut command, world, number),
            Who::Peer => self.add_peer(&mut command, world)?,
        }
        let log = self.folder.join(format!("{}-{number}.log", title(who)));
        let file = File::create(&log)?;
        let child = command
            // moto does not check them. Nothing here runs on an instance.
            .envs([("AWS_ACCESS_KEY_ID", "test"), ("AWS_SECRET_ACCESS_KEY", "test")])
            .env("AWS_EC2_METADATA_DISABLED", "true")
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file)
            .spawn()
            .with_context(|| format!("cannot start {}", title(who)))?;
        Ok(Program { child, log })
    }

    fn add_controller(&self, command: &mut Command, world: &World, number: usize) {
        let endpoint = format!("http://{}", world.recorder.addr());
        command
            .arg(&self.controller)
            .args(["--provider", "aws", "--serve-unset-class", "--namespace", "default"])
            .args(["--admin-address", "127.0.0.1:0", "--leader-elect-identity", &format!("bench-{number}")])
            .args(["--aws-cluster-name", CLUSTER, "--aws-region", REGION, "--aws-vpc-id", &world.vpc])
            .args(["--aws-subnets", &world.subnets.join(",")])
            .args(["--aws-elbv2-endpoint", &endpoint, "--aws-ec2-endpoint", &endpoint])
            .arg("--kubeconfig")
            .arg(world.kubeconfig());
    }

    /// Without its other controllers, which do not concern Services, and without a Lease, which it does not give back when it ends.
    fn add_peer(&self, command: &mut Command, world: &World) -> Result<()> {
        let config = self.folder.join("cloud.conf");
        fs::write(&config, peer::cloud_config(CLUSTER, "us-east-1a", &world.vpc, world.recorder.addr()))?;
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
        command
            .arg(&self.peer)
            .args(["--cloud-provider=aws", "--controllers=service-lb-controller", "--leader-elect=false"])
            .arg(format!("--cluster-name={CLUSTER}"))
            .args(["--bind-address=127.0.0.1", &format!("--secure-port={port}")])
            .arg(format!("--cloud-config={}", config.display()))
            .arg(format!("--cert-dir={}", self.folder.display()))
            .arg(format!("--kubeconfig={}", world.kubeconfig().display()));
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
