// SPDX-License-Identifier: Apache-2.0
//! The network namespaces: one for the API server and the driver, and for each program under test a client, a node and its pods.
//!
//! The worlds of two programs have the same addresses inside. Nothing is put into the machine's own namespace. All goes with
//! the value; what a killed run left is removed by the next.

use std::net::Ipv4Addr;
use std::process::{self, Command};

use anyhow::{Context as _, Result};
use nix::sched::{CloneFlags, setns};
use nix::sys::signal::kill;
use nix::unistd::Pid;
use steerage_lab::command::{run, run_with};
use steerage_lab::netns;

use crate::subject::Who;
use crate::usage;

/// The API server's address.
pub const API: Ipv4Addr = Ipv4Addr::new(10, 200, 0, 1);
/// The node's address, where node ports and health checks are answered.
pub const NODE: Ipv4Addr = Ipv4Addr::new(10, 10, 0, 1);
/// The pods' network; every address of it answers.
pub const PODS: (Ipv4Addr, u8) = (Ipv4Addr::new(10, 128, 0, 0), 12);
/// The network that load balancers' addresses come from.
pub const VIPS: (Ipv4Addr, u8) = (Ipv4Addr::new(10, 64, 0, 0), 16);
/// The test server's network of cluster addresses.
const CLUSTER: &str = "10.96.0.0/16";
const PREFIX: &str = "stbench";

/// A namespace of a world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum At {
    /// Outside the cluster.
    Client,
    /// Where the program under test runs.
    Node,
    /// Where every pod is.
    Pods,
}

/// The driver's own namespace.
#[derive(Debug)]
pub struct Home(String);

impl Home {
    /// Makes it and moves the calling thread there, and with it whatever it starts. Call it before there are other threads.
    pub fn enter() -> Result<Self> {
        sweep();
        usage::sweep();
        let home = Self(format!("{PREFIX}{}-home", process::id()));
        netns::create(&home.0, true)?;
        let file = std::fs::File::open(netns::path(&home.0))?;
        setns(file, CloneFlags::CLONE_NEWNET).context("cannot enter the network namespace")?;
        shell(&home.0, &format!("ip link set lo up; ip addr add {API}/32 dev lo"))?;
        Ok(home)
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        let _ = netns::delete(&self.0);
    }
}

/// The three namespaces of one program.
#[derive(Debug)]
pub struct World {
    who: Who,
}

impl World {
    /// Makes them and joins them to `home`.
    pub fn new(home: &Home, who: Who) -> Result<Self> {
        let world = Self { who };
        for at in [At::Client, At::Node, At::Pods] {
            netns::create(&world.netns(at), at == At::Node)?;
        }
        world.join(home).context("cannot join the namespaces")?;
        Ok(world)
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

    /// Runs `work` on a thread of its own in a namespace.
    pub fn inside<T: Send>(&self, at: At, work: impl FnOnce() -> T + Send) -> Result<T> {
        Ok(netns::in_netns(&self.netns(at), work)?)
    }

    /// Runs a shell script in a namespace, and gives back what it printed.
    pub fn shell(&self, at: At, script: &str) -> Result<String> {
        shell(&self.netns(at), script)
    }

    fn join(&self, home: &Home) -> Result<()> {
        let (node, client, pods) = (self.netns(At::Node), self.netns(At::Client), self.netns(At::Pods));
        let number = match self.who {
            Who::Ours => 1,
            Who::Peer => 2,
        };
        let (range, bits) = PODS;
        let (vips, vip_bits) = VIPS;
        shell(
            &home.0,
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
        // Many short connections from few addresses: what is over must not fill the table.
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

impl Drop for World {
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

/// Removes the namespaces of runs whose process is gone.
fn sweep() {
    let Ok(listed) = run(Command::new("ls").arg("/run/netns")) else { return };
    for name in listed.lines() {
        let pid = name.strip_prefix(PREFIX).and_then(|rest| rest.split('-').next()?.parse().ok());
        if pid.is_some_and(|pid| kill(Pid::from_raw(pid), None).is_err()) {
            let _ = netns::delete(name);
        }
    }
}
