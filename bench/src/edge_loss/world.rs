// SPDX-License-Identifier: Apache-2.0
//! All that an event can change: the Service, its nodes, the edge hosts. `events` acts on it, `run` brings it back to the beginning.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::Signal;
use serde_json::Value;
use steerage_meter::Source;
use steerage_meter::client::Target;
use steerage_meter::load::Client;
use steerage_model::Family;

use super::hosts::Hosts;
use super::servers::Servers;
use super::service::{SERVICE, Service, node_set};
use crate::edge::configs;
use crate::edge::load::snmp_counter;
use crate::edge_bed::addresses::{client, vip};
use crate::edge_bed::admin;
use crate::edge_bed::{Bed, FAMILIES, Host, PORT, node_netns};

/// Nodes.
pub(super) const NODES: u8 = 12;
/// Edge hosts. The last one serves only in the events of a third host.
pub(super) const HOSTS: u8 = 3;
/// Addresses of the client in each family.
pub(super) const CLIENTS: u16 = 256;
/// Until a change has reached every host and its probes: two intervals and the timeout of a check.
const SETTLE: Duration = Duration::from_secs(2);
/// Until a VIP answers after a start.
const LIMIT: Duration = Duration::from_secs(30);

/// The edge's program, and the one that takes its place in an upgrade.
#[derive(Clone, Debug)]
pub(super) struct Programs {
    pub(super) edge: PathBuf,
    pub(super) next: PathBuf,
}

pub(super) struct World {
    pub(super) bed: Bed,
    pub(super) hosts: Hosts,
    pub(super) programs: Programs,
    pub(super) service: Service,
    servers: Servers,
}

impl World {
    /// With so many Services beside the one that is measured.
    pub(super) fn new(bed: Bed, programs: Programs, others: u32) -> Result<Self> {
        let hosts = Hosts::new(&bed)?;
        let servers = Servers::start(&bed)?;
        let world = Self { bed, hosts, programs, service: Service::new(3), servers };
        for service in (SERVICE + 1..).take(usize::try_from(others)?) {
            let object = configs::edge_load_balancer(Family::V4, service, &configs::nodes_of(service));
            world.write(&format!("lb-{service}"), &object)?;
        }
        world.write("nodes", &node_set(NODES))?;
        Ok(world)
    }

    fn write(&self, name: &str, object: &Value) -> Result<()> {
        let objects = self.bed.folder.join("objects");
        let new = objects.join("new");
        fs::write(&new, object.to_string())?;
        Ok(fs::rename(new, objects.join(format!("{name}.json")))?)
    }

    /// Lets the Service be as it is here: its object, and the answers of its nodes.
    pub(super) fn apply(&mut self) -> Result<()> {
        self.servers.set_endpoints(&self.service.endpoints())?;
        let object = self.service.object();
        self.write("measured", &object)
    }

    /// The same after a change. Waits until every host says that it has followed, and for what follows from probes.
    pub(super) fn change(&mut self, change: impl FnOnce(&mut Service)) -> Result<()> {
        change(&mut self.service);
        self.apply()?;
        let begun = Instant::now();
        for host in self.hosts.running()? {
            let file =
                self.bed.folder.join(format!("status/EdgeTargetHealth.measured.{}.json", host.netns()));
            let observed = || {
                let status: Value = serde_json::from_slice(&fs::read(&file).ok()?).ok()?;
                status["spec"]["observedGeneration"].as_u64()
            };
            while observed() != Some(self.service.generation.into()) {
                ensure!(begun.elapsed() < LIMIT, "{} does not follow a change: see its log", host.netns());
                sleep(Duration::from_millis(5));
            }
        }
        sleep(SETTLE.saturating_sub(begun.elapsed()));
        Ok(())
    }

    /// Starts the edge of a host.
    pub(super) fn start(&mut self, host: Host) -> Result<()> {
        self.hosts.start(host, &self.programs.edge)
    }

    /// Endpoints on so many nodes, and edges on so many hosts, which serve.
    pub(super) fn begin(&mut self, nodes: u8, hosts: u8) -> Result<()> {
        self.service.begin(nodes);
        self.apply()?;
        for host in self.bed.size.hosts() {
            match (self.hosts.is_running(host)?, host.0 <= hosts) {
                (false, true) => self.start(host)?,
                (true, false) => {
                    self.hosts.end(host, Signal::SIGTERM)?;
                    self.hosts.clean_up(host, &self.programs.edge)?;
                }
                (false, false) if self.bed.folder.join("bpf").join(host.netns()).exists() => {
                    // Of a process that was killed: it would not begin anew.
                    self.hosts.clean_up(host, &self.programs.edge)?;
                }
                _ => {}
            }
        }
        for family in FAMILIES {
            let to = SocketAddr::new(vip(family, SERVICE), PORT);
            let begun = Instant::now();
            while let Err(error) = self.bed.inside("client", || ask(to))? {
                ensure!(begun.elapsed() < LIMIT, "the Service is not served: {error:#}");
                sleep(Duration::from_millis(20));
            }
        }
        sleep(SETTLE);
        Ok(())
    }

    /// The host that serves the IPv4 clients.
    pub(super) fn serving_host(&self) -> Result<Host> {
        self.bed.host_of(vip(Family::V4, SERVICE))
    }

    /// Lets the slots of flows move: the targets are others from now on.
    pub(super) fn move_slots(&mut self) -> Result<()> {
        self.change(|service| service.add(NODES))?;
        self.change(Service::remove)?;
        let mut exceptions = 0.0;
        for host in self.hosts.running()? {
            let metrics = admin::metrics(&host.netns())?;
            let of_host = metrics.value("steerage_edge_flow_exceptions");
            exceptions += of_host.with_context(|| format!("{} counts no flow exceptions", host.netns()))?;
        }
        ensure!(exceptions > 0.0, "no slot of a connection has moved");
        Ok(())
    }

    /// Segments that the nodes' kernels have sent again, of all connections, by their own count.
    pub(super) fn sent_again(&self) -> Result<u64> {
        let mut sum = 0;
        for node in 0..self.bed.size.nodes {
            // Of the thread's own namespace.
            let text =
                self.bed.inside(&node_netns(node), || fs::read_to_string("/proc/thread-self/net/snmp"))??;
            sum += retransmitted(&text).context("the kernel counts no retransmissions")?;
        }
        Ok(sum)
    }
}

/// The clients, one for each family.
pub(super) fn clients() -> Vec<Client> {
    let clients = FAMILIES.map(|family| {
        let address = SocketAddr::new(vip(family, SERVICE), PORT);
        Client {
            from: Source {
                netns: "client".to_owned(),
                addresses: (0..CLIENTS).map(|number| client(family, number)).collect(),
            },
            to: Target { address, datagrams: address, backends: "node".to_owned() },
            what: family.to_string(),
        }
    });
    clients.into()
}

/// Of both families.
fn retransmitted(snmp: &str) -> Option<u64> {
    snmp_counter(snmp, "Tcp", "RetransSegs")
}

/// Asks the Service for a name.
fn ask(to: SocketAddr) -> Result<()> {
    let mut stream = TcpStream::connect_timeout(&to, Duration::from_secs(1))?;
    stream.set_read_timeout(Some(Duration::from_secs(1)))?;
    stream.write_all(b"GET /hostname HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    ensure!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn retransmissions_are_found() {
        let text = "Tcp: RtoMin ActiveOpens RetransSegs InErrs\nTcp: 200 7 3 0\nUdp: x\n";
        assert_eq!((super::retransmitted(text), super::retransmitted("Tcp: x")), (Some(3), None));
    }
}
