// SPDX-License-Identifier: Apache-2.0
//! The network namespaces: client, router, switch, load-balancer hosts and nodes, as many as [`Size`] says; `edge` and `edge_loss` make
//! them. All of it is inside a mount namespace of this process, so that nothing is left behind when the process ends in any way.
//!
//! What arrives at a load-balancer host, and what its own switch port takes from it, is received by kernel threads of the interfaces
//! (threaded NAPI) when [`Bed::set_threaded`] says so. The work of the host's network stack is then that of one thread, whose time
//! the kernel counts. Otherwise it is done wherever the frame comes from, as usual, and nobody can say whose it was.

pub mod addresses;
pub(crate) mod admin;
pub mod cpu;

use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::{self, Command};

use anyhow::{Context as _, Result};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use steerage_lab::command::run_with;
use steerage_lab::netns;
use steerage_model::Family;

use addresses::{client_prefix, prefix, vips};

/// Nodes behind the load balancers that are compared.
pub const NODES: u8 = 4;
/// A Service's port, and that of the node's server.
pub const PORT: u16 = 80;
/// Port of the nodes' health checks.
pub const CHECK: u16 = 10256;
/// All links and VIPs have both families.
pub const FAMILIES: [Family; 2] = [Family::V4, Family::V6];
/// IPv6 addresses are used at once.
const NO_DETECTION: &str =
    "echo 0 >/proc/sys/net/ipv6/conf/all/accept_dad; echo 0 >/proc/sys/net/ipv6/conf/default/accept_dad";

/// A load-balancer host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Host(pub u8);

impl Host {
    /// Those that are compared.
    pub const BOTH: [Self; 2] = [Self(1), Self(2)];

    /// Its address on the link.
    pub fn address(self, family: Family) -> IpAddr {
        addresses::on_link(family, 10 + self.0)
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

/// How much there is of all.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Load-balancer hosts.
    pub hosts: u8,
    /// Nodes behind them.
    pub nodes: u8,
    /// Addresses of the client in each family. Each has only so many ports.
    pub clients: u16,
}

impl Size {
    /// For load balancers that are compared.
    pub const OF_COMPARISON: Self = Self { hosts: 2, nodes: NODES, clients: 8 };

    /// The load-balancer hosts.
    pub fn hosts(self) -> impl Iterator<Item = Host> {
        (1..=self.hosts).map(Host)
    }
}

/// The namespaces, and a folder for files.
#[derive(Debug)]
pub struct Bed {
    /// For configurations, objects and logs, with a BPF file system below it.
    pub folder: PathBuf,
    /// What there is.
    pub size: Size,
}

impl Bed {
    /// Moves this process into its own mount namespace and makes everything. Call this before other threads start.
    pub fn new(folder: &Path, size: Size) -> Result<Self> {
        private_mounts(folder)?;
        let bed = Self { folder: folder.to_owned(), size };
        bed.connect().context("cannot make the namespaces")?;
        Ok(bed)
    }

    fn connect(&self) -> Result<()> {
        for (name, forwards) in [("client", false), ("router", true), ("switch", false)] {
            netns::create(name, forwards)?;
            self.shell(name, &format!("ip link set lo up; {NO_DETECTION}"))?;
        }
        self.shell("switch", "ip link add br0 type bridge mcast_snooping 0; ip link set br0 up")?;
        self.plug("router", "eth0", addresses::router)?;
        let addresses: Vec<_> = FAMILIES
            .into_iter()
            .flat_map(|family| {
                (0..self.size.clients).map(move |number| (family, addresses::client(family, number)))
            })
            .map(|(family, address)| format!("ip addr add {address}/{} dev eth0", client_prefix(family)))
            .collect();
        let addresses = addresses.join("\n");
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
        self.shell("router", "ethtool -K client tso off; ip link set client up")?;
        for family in FAMILIES {
            let address = addresses::of_client_link(family, 1);
            self.shell("router", &format!("ip addr add {address}/{} dev client", client_prefix(family)))?;
            self.shell("client", &format!("ip route add default via {address}"))?;
            self.route_vips(family, None)?;
        }
        for host in self.size.hosts() {
            netns::create(&host.netns(), true)?;
            self.shell(&host.netns(), NO_DETECTION)?;
            self.plug(&host.netns(), &host.interface(), |family| host.address(family))?;
            self.shell(
                &host.netns(),
                "ip link set lo up
                 echo 1 >/proc/sys/net/ipv4/ip_nonlocal_bind; echo 1 >/proc/sys/net/ipv6/ip_nonlocal_bind
                 echo 1 >/proc/sys/net/ipv4/tcp_tw_reuse
                 echo '1024 65535' >/proc/sys/net/ipv4/ip_local_port_range
                 cd /proc/sys/net/netfilter 2>/dev/null || exit 0
                 for name in udp_timeout tcp_timeout_close tcp_timeout_time_wait tcp_timeout_last_ack; do
                   [ ! -w nf_conntrack_$name ] || echo 1 >nf_conntrack_$name
                 done",
            )?;
            self.default_routes(&host.netns())?;
        }
        for node in 0..self.size.nodes {
            let name = node_netns(node);
            netns::create(&name, true)?;
            self.shell(&name, NO_DETECTION)?;
            self.plug(&name, "eth0", |family| addresses::node_address(family, node))?;
            // A node has the VIPs, as with kube-proxy, and answers no ARP request for them.
            self.shell(
                &name,
                "echo 1 >/proc/sys/net/ipv4/conf/all/arp_ignore; echo 2 >/proc/sys/net/ipv4/conf/all/arp_announce
                 ip link set lo up",
            )?;
            self.default_routes(&name)?;
            for family in FAMILIES {
                self.shell(&name, &format!("ip route add local {} dev lo", vips(family)))?;
            }
        }
        Ok(())
    }

    fn default_routes(&self, name: &str) -> Result<()> {
        for family in FAMILIES {
            self.shell(name, &format!("ip route add default via {}", addresses::router(family)))?;
        }
        Ok(())
    }

    /// The router sends packets to VIPs to this host, or to the one that answers for them on the link.
    pub fn route_vips(&self, family: Family, to: Option<Host>) -> Result<()> {
        let via = to.map_or_else(String::new, |host| format!("via {}", host.address(family)));
        self.shell("router", &format!("ip route replace {} {via} dev eth0", vips(family))).map(drop)
    }

    /// Connects a namespace to the switch.
    fn plug(&self, name: &str, interface: &str, address: impl Fn(Family) -> IpAddr) -> Result<()> {
        let port = format!("p-{name}");
        let addresses = FAMILIES
            .map(|family| format!("ip addr add {}/{} dev {interface}", address(family), prefix(family)))
            .join("; ");
        self.shell(
            name,
            &format!(
                "ip link add {interface} type veth peer name {port} netns {switch}
                 ethtool -K {interface} tso off gro on >/dev/null
                 {addresses}; ip link set {interface} up",
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
        for host in self.size.hosts() {
            set(&host.netns(), &host.interface())?;
            set("switch", &format!("p-{}", host.netns()))?;
        }
        Ok(())
    }

    /// Connects or cuts off a load-balancer host or a node, as a power failure of it does.
    pub fn set_connected(&self, netns: &str, connected: bool) -> Result<()> {
        let state = if connected { "up" } else { "down" };
        self.shell("switch", &format!("ip link set p-{netns} {state}")).map(drop)
    }

    /// The load-balancer host to which the router sends the packets for a VIP.
    pub fn host_of(&self, vip: IpAddr) -> Result<Host> {
        let entry = self.shell("router", &format!("ip neigh show {vip} dev eth0"))?;
        let mac = entry.split_whitespace().skip_while(|word| *word != "lladdr").nth(1);
        let mac = mac.with_context(|| format!("the router does not know who has {vip}"))?;
        for host in self.size.hosts() {
            if self.shell(&host.netns(), &format!("ip link show {}", host.interface()))?.contains(mac) {
                return Ok(host);
            }
        }
        anyhow::bail!("no load-balancer host has {vip}: {entry}")
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
        let hosts = self.size.hosts().map(Host::netns);
        let nodes = (0..self.size.nodes).map(node_netns);
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

/// A command in a namespace, which ends with this program even if that is killed.
pub(crate) fn command(netns: &str) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "nsenter"]);
    command.arg(format!("--net={}", netns::path(netns).display()));
    command
}

/// The namespace of a node.
pub fn node_netns(node: u8) -> String {
    format!("node{node}")
}
