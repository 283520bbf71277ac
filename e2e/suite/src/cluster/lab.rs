// SPDX-License-Identifier: Apache-2.0
//! A lab of `hack/lab` as a [`Cluster`]: hosts from its plan, faults by the lab's own commands.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;
use steerage_lab::{Cloud, addresses};

use super::{Cluster, Host, output};
use crate::aws::Aws;
use crate::off_link::OffLink;
use crate::openstack::OpenStack;
use crate::passthrough::Passthrough;

/// A running lab.
pub struct Lab(steerage_lab::Lab);

impl Lab {
    /// Opens a lab that `hack/lab up` and `hack/lab install` made.
    pub fn open(name: &str) -> Result<Self> {
        Ok(Self(steerage_lab::Lab::open(name)?))
    }

    fn verb(&self, verb: &str, arguments: &[&str]) -> Result<String> {
        let mut command = Command::new(self.0.executable());
        command.args([verb, "--name", &self.0.plan.name]).args(arguments.iter().map(OsStr::new));
        output(&mut command)
    }
}

impl From<addresses::Host> for Host {
    fn from(host: addresses::Host) -> Self {
        let addresses::Host { name, netns, ipv4, ipv6, .. } = host;
        Self { name, netns, ipv4, ipv6 }
    }
}

impl Cluster for Lab {
    fn aws(&self) -> Option<Aws> {
        (self.0.plan.cloud == Some(Cloud::Aws)).then(|| Aws::new(self.0.clone()))
    }

    fn openstack(&self) -> Option<OpenStack> {
        OpenStack::new(&self.0.plan)
    }

    fn passthrough(&self) -> Option<Passthrough> {
        Passthrough::new(&self.0)
    }

    fn off_link(&self) -> Option<OffLink> {
        Some(OffLink::new(&self.0))
    }

    fn kubeconfig(&self) -> PathBuf {
        self.0.kubeconfig("admin")
    }

    fn clients(&self) -> [Host; 2] {
        self.0.plan.clients().map(Host::from)
    }

    fn nodes(&self) -> Vec<Host> {
        self.0.plan.nodes().into_iter().map(Host::from).collect()
    }

    fn edges(&self) -> Vec<Host> {
        self.0.plan.edges().into_iter().map(Host::from).collect()
    }

    fn exec(&self, host: &str, command: &[&str]) -> Result<String> {
        let mut arguments = vec![host, "--"];
        arguments.extend(command);
        self.verb("exec", &arguments)
    }

    fn kill_node(&self, node: &str) -> Result<()> {
        self.verb("kill-node", &[node]).map(drop)
    }

    fn start_node(&self, node: &str) -> Result<()> {
        self.verb("start-node", &[node]).map(drop)
    }

    fn stop_api_server(&self) -> Result<()> {
        self.verb("stop-apiserver", &[]).map(drop)
    }

    fn start_api_server(&self) -> Result<()> {
        self.verb("start-apiserver", &[]).map(drop)
    }

    fn kill_edge(&self, edge: &str) -> Result<()> {
        self.verb("kill-edge", &[edge]).map(drop)
    }

    fn start_edge(&self, edge: &str) -> Result<()> {
        self.verb("start-edge", &[edge]).map(drop)
    }

    fn stop_edge(&self, edge: &str) -> Result<()> {
        self.verb("kill-edge", &[edge, "--signal", "SIGTERM"]).map(drop)
    }

    fn clean_edge(&self, node: &str) -> Result<()> {
        let program = steerage_lab::edge::program(&self.0)?;
        self.exec(node, &[&program, "cleanup"]).map(drop)
    }

    fn is_changeable(&self) -> bool {
        true
    }

    fn install(&self, values: &[&str]) -> Result<()> {
        let set = values.iter().flat_map(|value| ["--set", value]);
        self.verb("install", &["--no-build"].into_iter().chain(set).collect::<Vec<_>>()).map(drop)
    }

    fn logs(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.0.folder().join("logs")).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).collect()
    }
}
