// SPDX-License-Identifier: Apache-2.0
//! The cluster beyond its API: its hosts, their network namespaces, and faults. Blocking.

pub mod kind;
pub mod lab;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use steerage_model::Family;

use crate::aws::Aws;
use crate::off_link::OffLink;
use crate::openstack::OpenStack;
use crate::passthrough::Passthrough;

/// A machine: a node, an edge host or a client.
#[derive(Clone, Debug)]
pub struct Host {
    /// Its name; for a node also its name in Kubernetes.
    pub name: String,
    /// The name of its network namespace under /run/netns.
    pub netns: String,
    /// Its IPv4 address.
    pub ipv4: Ipv4Addr,
    /// Its IPv6 address.
    pub ipv6: Ipv6Addr,
}

impl Host {
    /// The address of one family.
    pub fn address(&self, family: Family) -> IpAddr {
        match family {
            Family::V4 => self.ipv4.into(),
            Family::V6 => self.ipv6.into(),
        }
    }
}

/// A running cluster with Steerage installed.
pub trait Cluster: Send + Sync {
    /// The simulated AWS that the nodes are in, if they are in one.
    fn aws(&self) -> Option<Aws> {
        None
    }
    /// The OpenStack that the nodes are in, if they are in one.
    fn openstack(&self) -> Option<OpenStack> {
        None
    }
    /// The GCE or Azure that the nodes are in, if they are in one.
    fn passthrough(&self) -> Option<Passthrough> {
        None
    }
    /// How a node gets off the link of the edge hosts, where that is possible.
    fn off_link(&self) -> Option<OffLink> {
        None
    }
    /// The administrator's kubeconfig, which works inside the clients' namespaces.
    fn kubeconfig(&self) -> PathBuf;
    /// Two machines outside of the cluster.
    fn clients(&self) -> [Host; 2];
    /// The nodes, in order.
    fn nodes(&self) -> Vec<Host>;
    /// The edge hosts, in order; the first is the active one.
    fn edges(&self) -> Vec<Host>;
    /// Runs a command on a node or an edge host and returns its output.
    fn exec(&self, host: &str, command: &[&str]) -> Result<String>;
    /// Switches a node off, as a power cut does.
    fn kill_node(&self, node: &str) -> Result<()>;
    /// Switches a killed node on and waits until it is ready.
    fn start_node(&self, node: &str) -> Result<()>;
    /// Ends the API server with SIGKILL and keeps it down.
    fn stop_api_server(&self) -> Result<()>;
    /// Starts the API server and waits until it is ready.
    fn start_api_server(&self) -> Result<()>;
    /// Ends the edge process of a host with SIGKILL.
    fn kill_edge(&self, edge: &str) -> Result<()>;
    /// Starts the edge process of a host.
    fn start_edge(&self, edge: &str) -> Result<()>;
    /// Asks the edge process of a host to end, and waits for that.
    fn stop_edge(&self, edge: &str) -> Result<()>;
    /// Removes the edge's program from a node on which it runs no more.
    fn clean_edge(&self, node: &str) -> Result<()>;
    /// Whether [`Cluster::install`] can change the chart's values.
    fn is_changeable(&self) -> bool;
    /// Upgrades Steerage to these chart values beside those of the cluster, and waits until all is ready.
    fn install(&self, values: &[&str]) -> Result<()>;
    /// Log files of processes that do not run in pods.
    fn logs(&self) -> Vec<PathBuf>;
}

/// Runs a command and returns its standard output; an error has all its output.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("running {command:?}"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    ensure!(
        output.status.success(),
        "{command:?} failed ({}): {}{}",
        output.status,
        text(&output.stdout),
        text(&output.stderr)
    );
    Ok(text(&output.stdout))
}
