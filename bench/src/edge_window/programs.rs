// SPDX-License-Identifier: Apache-2.0
//! The controller's process, beside the API server.

use std::fs::File;
use std::path::Path;
use std::process::{Child, Stdio};

use anyhow::{Context as _, Result, bail};

use crate::edge_bed;
use crate::edge_nodes::world::SWITCH;

/// The running controller. It is killed when this value is dropped.
pub(super) struct Controller(Child);

impl Controller {
    pub(super) fn start(program: &Path, kubeconfig: &Path, folder: &Path) -> Result<Self> {
        let log = File::create(folder.join("controller.log"))?;
        let child = edge_bed::command(SWITCH)
            .arg(program)
            .args(["--provider", "edge", "--namespace", "default", "--leader-elect-identity", "bench"])
            .args(["--admin-address", "127.0.0.1:0"])
            .arg("--kubeconfig")
            .arg(kubeconfig)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("cannot start the controller")?;
        Ok(Self(child))
    }

    /// Fails if it has ended.
    pub(super) fn check(&mut self) -> Result<()> {
        match self.0.try_wait()? {
            Some(status) => bail!("the controller ended with {status}: see its log"),
            None => Ok(()),
        }
    }
}

impl Drop for Controller {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
