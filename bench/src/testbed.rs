// SPDX-License-Identifier: Apache-2.0
//! The network namespaces: one for the API server and the driver, and a client, a node and pods for each program under test.
//!
//! The testbeds of both programs have the same addresses. The machine's own namespace is not changed. Namespaces are removed
//! on drop, and those of a killed run at the next start.

use std::net::Ipv4Addr;
use std::process::{self, Command};

use anyhow::{Context as _, Result};
use nix::sched::{CloneFlags, setns};
use nix::sys::signal::kill;
use nix::unistd::Pid;
use steerage_lab::command::{run, run_with};
use steerage_lab::netns;

use crate::usage;
use crate::who::Who;

/// Address of the API server.
pub const API: Ipv4Addr = Ipv4Addr::new(10, 200, 0, 1);
/// Address of the node, with node ports and health-check ports.
pub const NODE: Ipv4Addr = Ipv4Addr::new(10, 10, 0, 1);
/// Pod network. Every address in it responds.
pub const PODS: (Ipv4Addr, u8) = (Ipv4Addr::new(10, 128, 0, 0), 12);
/// Network of the VIPs.
pub const VIPS: (Ipv4Addr, u8) = (Ipv4Addr::new(10, 64, 0, 0), 16);
/// Network of the cluster IPs.
const CLUSTER: &str = "10.96.0.0/16";
const PREFIX: &str = "stbench";

/// A network namespace of a testbed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum At {
    /// Outside the cluster.
    Client,
    /// The node with the program under test.
    Node,
    /// All pods.
    Pods,
}

/// The network namespace of the driver and the API server.
#[derive(Debug)]
pub struct DriverNetns(String);

impl DriverNetns {
    /// Creates the namespace and moves the calling thread into it. Call this before starting other threads, which inherit it.
    pub fn enter() -> Result<Self> {
        sweep();
        usage::sweep();
        let driver = Self(format!("{PREFIX}{}-driver", process::id()));
        netns::create(&driver.0, true)?;
        let file = std::fs::File::open(netns::path(&driver.0))?;
        setns(file, CloneFlags::CLONE_NEWNET).context("cannot enter the network namespace")?;
        shell(&driver.0, &format!("ip link set lo up; ip addr add {API}/32 dev lo"))?;
        Ok(driver)
    }
}

impl Drop for DriverNetns {
    fn drop(&mut self) {
        let _ = netns::delete(&self.0);
    }
}

/// The three namespaces of one program.
#[derive(Debug)]
pub struct Testbed {
    who: Who,
}

impl Testbed {
    /// Creates the namespaces and connects them to the driver's.
    pub fn new(driver: &DriverNetns, who: Who) -> Result<Self> {
        let testbed = Self { who };
        for at in [At::Client, At::Node, At::Pods] {
            netns::create(&testbed.netns(at), at == At::Node)?;
        }
        testbed.join(driver).context("cannot join the namespaces")?;
        Ok(testbed)
    }

    /// The name of a namespace.
    pub fn netns(&self, at: At) -> String {
        let at = match at {
            At::Client => "client",
            At::Node => "node",
            At::Pods => "pods",
        };
        format!("{PREFIX}{}-{}-{at}", process::id(), self.who.name())
    }

    /// Runs `work` on a new thread in a namespace.
    pub fn inside<T: Send>(&self, at: At, work: impl FnOnce() -> T + Send) -> Result<T> {
        Ok(netns::in_netns(&self.netns(at), work)?)
    }

    /// Runs a shell script in a namespace and returns its output.
    pub fn shell(&self, at: At, script: &str) -> Result<String> {
        shell(&self.netns(at), script)
    }

    fn join(&self, driver: &DriverNetns) -> Result<()> {
        let (node, client, pods) = (self.netns(At::Node), self.netns(At::Client), self.netns(At::Pods));
        let number = match self.who {
            Who::Ours => 1,
            Who::Peer => 2,
        };
        let (range, bits) = PODS;
        let (vips, vip_bits) = VIPS;
        shell(
            &driver.0,
            &format!(
                "ip link add n{number} type veth peer name api netns {node}
                 ip addr add 10.201.{number}.1/30 dev n{number}; ip link set n{number} up"
            ),
        )?;
        self.shell(
            At::Node,
            &format!(
                "ip link set lo up
                 ip link add client type veth peer name eth0 netns {client}
                 ip link add pods type veth peer name eth0 netns {pods}
                 ip addr add 10.201.{number}.2/30 dev api; ip link set api up
                 ip addr add {NODE}/24 dev client; ip link set client up
                 ip addr add 10.11.0.1/30 dev pods; ip link set pods up
                 ip route add {API}/32 via 10.201.{number}.1
                 ip route add {range}/{bits} via 10.11.0.2
                 ip route add blackhole {CLUSTER}; ip route add blackhole {vips}/{vip_bits}"
            ),
        )?;
        // Many short connections come from few addresses: closed ones must not fill the conntrack table.
        self.shell(
            At::Node,
            "cd /proc/sys/net/netfilter 2>/dev/null || exit 0
             for name in udp_timeout tcp_timeout_close tcp_timeout_time_wait tcp_timeout_last_ack; do
               [ ! -w nf_conntrack_$name ] || echo 1 >nf_conntrack_$name
             done",
        )?;
        self.shell(
            At::Client,
            &format!(
                "ip link set lo up; ip addr add 10.10.0.2/24 dev eth0; ip link set eth0 up
                 ip route add default via {NODE}
                 echo '1024 65535' >/proc/sys/net/ipv4/ip_local_port_range"
            ),
        )?;
        self.shell(
            At::Pods,
            &format!(
                "ip link set lo up; ip addr add 10.11.0.2/30 dev eth0; ip link set eth0 up
                 ip route add default via 10.11.0.1; ip route add local {range}/{bits} dev lo"
            ),
        )?;
        Ok(())
    }
}

impl Drop for Testbed {
    fn drop(&mut self) {
        for at in [At::Client, At::Node, At::Pods] {
            let _ = netns::delete(&self.netns(at));
        }
    }
}

fn shell(netns: &str, script: &str) -> Result<String> {
    let path = format!("--net={}", netns::path(netns).display());
    Ok(run_with(Command::new("nsenter").args([&path, "sh", "-e"]), script)?)
}

/// Removes the namespaces of runs whose process no longer exists.
fn sweep() {
    let Ok(listed) = run(Command::new("ls").arg("/run/netns")) else { return };
    for name in listed.lines() {
        let pid = name.strip_prefix(PREFIX).and_then(|rest| rest.split('-').next()?.parse().ok());
        if pid.is_some_and(|pid| kill(Pid::from_raw(pid), None).is_err()) {
            let _ = netns::delete(name);
        }
    }
}
