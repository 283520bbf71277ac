// SPDX-License-Identifier: Apache-2.0
//! The network namespaces: client, router, switch, two load-balancer hosts and the nodes. All of it is inside a mount namespace of
//! this process, so that nothing is left behind when the process ends in any way.
//!
//! What arrives at a load-balancer host, and what its own switch port takes from it, is received by kernel threads of the interfaces
//! (threaded NAPI) when [`Bed::set_threaded`] says so. The work of the host's network stack is then that of one thread, whose time
//! the kernel counts. Otherwise it is done wherever the frame comes from, as usual, and nobody can say whose it was.

use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::{self, Command};

use anyhow::{Context as _, Result};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use steerage_lab::command::run_with;
use steerage_lab::netns;

/// Nodes behind the load balancer.
pub const NODES: u8 = 4;
/// Addresses of the client. More than one, because each has only so many ports.
pub const CLIENTS: u8 = 8;
/// First of the VIPs; there is one for each Service.
const FIRST_VIP: u32 = 0x0a40_0001;
/// A Service's port, and that of the node's server.
pub const PORT: u16 = 80;
/// Port of the nodes' health checks.
pub const CHECK: u16 = 10256;

/// A load-balancer host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Host(pub u8);

impl Host {
    /// All of them.
    pub const BOTH: [Self; 2] = [Self(1), Self(2)];

    /// Its address on the link.
    pub fn address(self) -> Ipv4Addr {
        Ipv4Addr::new(10, 0, 0, 10 + self.0)
    }

    /// Its interface, whose name no other interface of the machine has: kernel threads are found by it.
    pub fn interface(self) -> String {
        format!("lb{}n{}", self.0, process::id())
    }

    /// Its namespace.
    pub fn netns(self) -> String {
        format!("lb{}", self.0)
    }
}

/// The address of a node, counted from 0.
pub fn node_address(node: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 0, 0, 21 + node)
}

/// The address of a Service, counted from 0.
pub fn vip(service: u32) -> Ipv4Addr {
    Ipv4Addr::from(FIRST_VIP + service)
}

/// The namespaces, and a folder for files.
#[derive(Debug)]
pub struct Bed {
    /// For configurations, objects and logs, with a BPF file system below it.
    pub folder: PathBuf,
}

impl Bed {
    /// Moves this process into its own mount namespace and makes everything. Call this before other threads start.
    pub fn new(folder: &Path) -> Result<Self> {
        private_mounts(folder)?;
        let bed = Self { folder: folder.to_owned() };
        bed.connect().context("cannot make the namespaces")?;
        Ok(bed)
    }

    fn connect(&self) -> Result<()> {
        for (name, forwards) in [("client", false), ("router", true), ("switch", false)] {
            netns::create(name, forwards)?;
            self.shell(name, "ip link set lo up")?;
        }
        self.shell("switch", "ip link add br0 type bridge mcast_snooping 0; ip link set br0 up")?;
        self.plug("router", "eth0", Ipv4Addr::new(10, 0, 0, 1))?;
        let addresses: Vec<_> =
            (2..2 + CLIENTS).map(|last| format!("ip addr add 10.1.0.{last}/16 dev eth0")).collect();
        let addresses = addresses.join("; ");
        self.shell(
            "client",
            &format!(
                "ip link add eth0 type veth peer name client netns {router}
                 {addresses}
                 ethtool -K eth0 tso off; ip link set eth0 up
                 echo '1024 65535' >/proc/sys/net/ipv4/ip_local_port_range",
                router = netns::path("router").display()
            ),
        )?;
        self.shell(
            "router",
            "ip addr add 10.1.0.1/16 dev client; ethtool -K client tso off; ip link set client up
             ip route add 10.64.0.0/16 dev eth0",
        )?;
        self.shell("client", "ip route add default via 10.1.0.1")?;
        for host in Host::BOTH {
            netns::create(&host.netns(), true)?;
            self.plug(&host.netns(), &host.interface(), host.address())?;
            self.shell(
                &host.netns(),
                "ip link set lo up; ip route add default via 10.0.0.1
                 echo 1 >/proc/sys/net/ipv4/ip_nonlocal_bind
                 echo 1 >/proc/sys/net/ipv4/tcp_tw_reuse
                 echo '1024 65535' >/proc/sys/net/ipv4/ip_local_port_range
                 cd /proc/sys/net/netfilter 2>/dev/null || exit 0
                 for name in udp_timeout tcp_timeout_close tcp_timeout_time_wait tcp_timeout_last_ack; do
                   [ ! -w nf_conntrack_$name ] || echo 1 >nf_conntrack_$name
                 done",
            )?;
        }
        for node in 0..NODES {
            let name = node_netns(node);
            netns::create(&name, true)?;
            self.plug(&name, "eth0", node_address(node))?;
            // A node has the VIPs, as with kube-proxy, and answers no ARP request for them.
            self.shell(
                &name,
                "echo 1 >/proc/sys/net/ipv4/conf/all/arp_ignore; echo 2 >/proc/sys/net/ipv4/conf/all/arp_announce
                 ip link set lo up; ip route add default via 10.0.0.1; ip route add local 10.64.0.0/16 dev lo",
            )?;
        }
        Ok(())
    }

    /// Connects a namespace to the switch.
    fn plug(&self, name: &str, interface: &str, address: Ipv4Addr) -> Result<()> {
        let port = format!("p-{name}");
        self.shell(
            name,
            &format!(
                "ip link add {interface} type veth peer name {port} netns {switch}
                 ethtool -K {interface} tso off gro on >/dev/null
                 ip addr add {address}/24 dev {interface}; ip link set {interface} up",
                switch = netns::path("switch").display()
            ),
        )?;
        self.shell(
            "switch",
            &format!("ethtool -K {port} tso off gro on >/dev/null; ip link set {port} master br0 up"),
        )?;
        Ok(())
    }

    /// Whether kernel threads receive for the load-balancer hosts and for the ports that they are connected to.
    pub fn set_threaded(&self, threaded: bool) -> Result<()> {
        let set = |netns: &str, interface: &str| {
            let script = format!(
                "mount -t sysfs sysfs /sys; echo {} >/sys/class/net/{interface}/threaded",
                u8::from(threaded)
            );
            self.shell(netns, &format!("unshare -m sh -ec '{script}'")).map(drop)
        };
        for host in Host::BOTH {
            set(&host.netns(), &host.interface())?;
            set("switch", &format!("p-{}", host.netns()))?;
        }
        Ok(())
    }

    /// Connects or cuts off a load-balancer host, as a power failure of it does.
    pub fn set_connected(&self, host: Host, connected: bool) -> Result<()> {
        let state = if connected { "up" } else { "down" };
        self.shell("switch", &format!("ip link set p-{} {state}", host.netns())).map(drop)
    }

    /// Forgets which host has a VIP, so that the next contender is asked.
    pub fn forget_neighbours(&self) -> Result<()> {
        self.shell("router", "ip neigh flush dev eth0").map(drop)
    }

    /// Runs a shell script in a namespace.
    pub fn shell(&self, netns: &str, script: &str) -> Result<String> {
        let path = format!("--net={}", netns::path(netns).display());
        Ok(run_with(Command::new("nsenter").args([&path, "sh", "-e"]), script)?)
    }

    /// Runs `work` on a new thread in a namespace.
    pub fn inside<T: Send>(&self, netns: &str, work: impl FnOnce() -> T + Send) -> Result<T> {
        Ok(netns::in_netns(netns, work)?)
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        let hosts = Host::BOTH.map(Host::netns);
        let nodes = (0..NODES).map(node_netns);
        for name in ["client", "router", "switch"].map(str::to_owned).into_iter().chain(hosts).chain(nodes) {
            let _ = netns::delete(&name);
        }
        let _ = nix::mount::umount2(&self.folder.join("bpf"), nix::mount::MntFlags::MNT_DETACH);
    }
}

/// Moves this process into its own mount namespace, with names of network namespaces that are its own, and mounts a BPF file system
/// below `folder`. Call this before other threads start.
pub(crate) fn private_mounts(folder: &Path) -> Result<()> {
    unshare(CloneFlags::CLONE_NEWNS).context("cannot make a mount namespace; run this as root")?;
    mount(None::<&str>, "/", None::<&str>, MsFlags::MS_PRIVATE | MsFlags::MS_REC, None::<&str>)?;
    fs::create_dir_all("/run/netns")?;
    mount(Some("tmpfs"), "/run/netns", Some("tmpfs"), MsFlags::empty(), None::<&str>)?;
    let bpf = folder.join("bpf");
    fs::create_dir_all(&bpf)?;
    mount(Some("bpf"), &bpf, Some("bpf"), MsFlags::empty(), None::<&str>)?;
    Ok(())
}

/// The namespace of a node.
pub fn node_netns(node: u8) -> String {
    format!("node{node}")
}
