// SPDX-License-Identifier: Apache-2.0
//! The network namespaces: one for all nodes, one for each edge host, and a switch that connects them. The API server in memory is
//! in the switch's namespace, on a network of its own, so that its traffic is counted apart.
//!
//! All nodes share one interface. Each has an address of its own (a local route for the whole network) and an Ethernet address of its
//! own: the switch sends the frames for all of them to that interface, which takes frames for any address. The edge hosts' neighbours
//! are entered and permanent: their discovery is not measured, and the machine's limit of neighbours, which holds for all namespaces
//! together, does not matter.

use std::fs;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use steerage_lab::command::run_with;
use steerage_lab::netns;

use super::cluster::{NODE_NETWORK, mac, node_address};
use super::nodes::STATEMENTS;
use crate::edge_bed;

/// The namespace of all nodes.
pub(crate) const NODES: &str = "nodes";
/// The namespace of the switch and the API server.
pub(crate) const SWITCH: &str = "switch";
/// The edge hosts' interface on the link with the nodes.
pub(crate) const LINK: &str = "eth0";
/// Their interface to the API server.
pub(crate) const API_LINK: &str = "api0";
/// The address of the API server.
pub(crate) const API_SERVER: Ipv4Addr = Ipv4Addr::new(172, 31, 0, 1);
/// The most edge hosts.
pub(crate) const MOST_HOSTS: u8 = 16;
/// The last byte of the address before the first edge host's.
const BEFORE_HOSTS: u8 = 10;

/// The namespaces, and a folder for files.
#[derive(Debug)]
pub(crate) struct World {
    /// For logs and a BPF file system.
    pub(crate) folder: PathBuf,
    pub(crate) hosts: u8,
}

impl World {
    /// Moves this process into its own mount namespace and makes everything. Call this before other threads start.
    pub(crate) fn new(folder: &Path, hosts: u8, nodes: u32) -> Result<Self> {
        edge_bed::private_mounts(folder)?;
        let world = Self { folder: folder.to_owned(), hosts };
        world.connect(nodes).context("cannot make the namespaces")?;
        Ok(world)
    }

    fn connect(&self, nodes: u32) -> Result<()> {
        netns::create(SWITCH, false)?;
        shell(
            SWITCH,
            &format!(
                "ip link set lo up
                 ip link add br0 type bridge mcast_snooping 0; ip link set br0 up
                 ip link add br1 type bridge mcast_snooping 0; ip link set br1 up
                 ip addr add {API_SERVER}/24 dev br1"
            ),
        )?;
        netns::create(NODES, false)?;
        plug(NODES, LINK, "br0", "p-nodes", "10.32.0.2/15")?;
        shell(
            NODES,
            &format!(
                "ip link set lo up; ip route add local {NODE_NETWORK} dev lo
                 echo 65535 >/proc/sys/net/core/somaxconn
                 echo 65535 >/proc/sys/net/ipv4/tcp_max_syn_backlog
                 echo 5000 >/proc/sys/net/ipv4/tcp_max_tw_buckets
                 ip link set {LINK} promisc on
                 nft 'add table netdev nodes; add chain netdev nodes received {{ type filter hook ingress device {LINK} priority 0; }}; \
                      add rule netdev nodes received meta pkttype set host'"
            ),
        )?;
        let entry = |node| format!("fdb add {} dev p-nodes master static\n", mac(node));
        feed(SWITCH, &["bridge", "-batch", "-"], &(0..nodes).map(entry).collect::<String>())?;
        for host in 0..usize::from(self.hosts) {
            let name = host_netns(host);
            netns::create(&name, true)?;
            plug(&name, LINK, "br0", &format!("p-{name}"), &format!("{}/15", host_address(host)))?;
            let api = Ipv4Addr::from(u32::from(API_SERVER) + 10 + u32::try_from(host)?);
            plug(&name, API_LINK, "br1", &format!("a-{name}"), &format!("{api}/24"))?;
            shell(&name, "ip link set lo up; echo '1024 65535' >/proc/sys/net/ipv4/ip_local_port_range")?;
            let entry = |node| {
                format!(
                    "neigh replace {} lladdr {} dev {LINK} nud permanent\n",
                    node_address(node),
                    mac(node)
                )
            };
            feed(&name, &["ip", "-batch", "-"], &(0..nodes).map(entry).collect::<String>())?;
        }
        Ok(())
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let hosts = (0..usize::from(self.hosts)).map(host_netns);
        for name in [NODES, SWITCH].map(str::to_owned).into_iter().chain(hosts) {
            let _ = netns::delete(&name);
        }
        let _ = nix::mount::umount2(&self.folder.join("bpf"), nix::mount::MntFlags::MNT_DETACH);
    }
}

/// Connects a namespace to one of the switch's bridges.
fn plug(name: &str, interface: &str, bridge: &str, port: &str, address: &str) -> Result<()> {
    shell(
        name,
        &format!(
            "ip link add {interface} type veth peer name {port} netns {switch}
             ip addr add {address} dev {interface}; ip link set {interface} up",
            switch = netns::path(SWITCH).display()
        ),
    )?;
    shell(SWITCH, &format!("ip link set {port} master {bridge} up")).map(drop)
}

/// Drops packets to a node, or no longer. The route is more specific than the local one of all nodes.
pub(crate) fn set_unreachable(node: u32, unreachable: bool) -> Result<()> {
    let change = if unreachable { "add" } else { "del" };
    let script = format!("ip route {change} blackhole {}/32 table local", node_address(node));
    shell(NODES, &script).map(drop)
}

/// Bytes and packets that an interface of a host has received and sent.
pub(crate) fn traffic(host: usize, interface: &str) -> Result<Traffic> {
    // Of the thread's own namespace.
    let text = inside(&host_netns(host), || fs::read_to_string("/proc/thread-self/net/dev"))??;
    Traffic::parse(&text, interface).with_context(|| format!("host {} has no {interface}", host + 1))
}

/// Adds a client on the nodes' link, whose packets to this network ask the link for its addresses.
pub(crate) fn add_client(name: &str, vips: &str) -> Result<()> {
    netns::create(name, false)?;
    plug(name, LINK, "br0", &format!("p-{name}"), "10.32.1.1/15")?;
    shell(name, &format!("ip link set lo up; ip route add {vips} dev {LINK}")).map(drop)
}

/// Refuses requests for statements at all nodes but the first ones, as on nodes without an agent.
pub(crate) fn refuse_statements(stating: u32) -> Result<()> {
    let rules = format!(
        "nft 'add table ip agents; add chain ip agents received {{ type filter hook input priority 0; }}; \
              add rule ip agents received ip daddr >= {} tcp dport {STATEMENTS} reject with tcp reset'",
        node_address(stating)
    );
    shell(NODES, &rules).map(drop)
}

/// Runs a shell script in a namespace.
fn shell(netns: &str, script: &str) -> Result<String> {
    feed(netns, &["sh", "-e"], script)
}

/// Runs a command with this input in a namespace.
fn feed(netns: &str, command: &[&str], input: &str) -> Result<String> {
    let path = format!("--net={}", netns::path(netns).display());
    Ok(run_with(Command::new("nsenter").arg(path).args(command), input)?)
}

/// Runs `work` on a new thread in a namespace.
pub(crate) fn inside<T: Send>(netns: &str, work: impl FnOnce() -> T + Send) -> Result<T> {
    Ok(netns::in_netns(netns, work)?)
}

/// The namespace of an edge host, counted from 0.
pub(crate) fn host_netns(host: usize) -> String {
    format!("edge{}", host + 1)
}

/// Its address on the link.
fn host_address(host: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 32, 0, BEFORE_HOSTS + 1 + u8::try_from(host).unwrap_or(0))
}

/// The edge host with this address on the link.
pub(crate) fn host_at(address: IpAddr) -> Option<usize> {
    let IpAddr::V4(address) = address else { return None };
    address.octets()[3].checked_sub(BEFORE_HOSTS + 1).map(usize::from)
}

/// What an interface has counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Traffic {
    pub(crate) received: u64,
    pub(crate) received_packets: u64,
    pub(crate) sent: u64,
    pub(crate) sent_packets: u64,
}

impl Traffic {
    /// Reads a line of /proc/net/dev.
    fn parse(text: &str, interface: &str) -> Option<Self> {
        let line = text.lines().find_map(|line| line.trim().strip_prefix(interface)?.strip_prefix(':'))?;
        let numbers: Vec<u64> = line.split_whitespace().map_while(|word| word.parse().ok()).collect();
        let &[received, received_packets, _, _, _, _, _, _, sent, sent_packets, ..] = &numbers[..] else {
            return None;
        };
        Some(Self { received, received_packets, sent, sent_packets })
    }

    pub(crate) fn since(self, before: Self) -> Self {
        Self {
            received: self.received - before.received,
            received_packets: self.received_packets - before.received_packets,
            sent: self.sent - before.sent,
            sent_packets: self.sent_packets - before.sent_packets,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_of_an_interface_are_parsed() {
        let text = "Inter-|   Receive\n face |bytes\n    lo: 1 2 0 0 0 0 0 0 3 4 0 0 0 0 0 0\n  eth0: 5 6 0 0 0 0 0 0 7 8 0 0 0 0 0 0\n";
        let found = Traffic { received: 5, received_packets: 6, sent: 7, sent_packets: 8 };
        assert_eq!(Traffic::parse(text, "eth0"), Some(found));
        assert_eq!(Traffic::parse(text, "eth"), None);
    }

    #[test]
    fn hosts_are_found_by_their_address() {
        for host in [0, 2, 15] {
            assert_eq!(host_at(host_address(host).into()), Some(host));
        }
        assert_eq!(host_at(Ipv4Addr::new(10, 32, 0, 2).into()), None);
    }
}
