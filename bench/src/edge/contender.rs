// SPDX-License-Identifier: Apache-2.0
//! The load balancers: whether they are here, how they start on a load-balancer host for so many Services, and how they end.

use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use steerage_model::Family;

use super::configs;
use super::load::exchange;
use crate::edge_bed::addresses::{node_address, vip, vips};
use crate::edge_bed::admin::{self, ADMIN};
use crate::edge_bed::{Bed, Host, PORT, command};
use crate::host;
use crate::usage::Group;

/// How long a contender may take until it serves.
const START_LIMIT: Duration = Duration::from_mins(10);
/// More Services than these were not loaded within four minutes: 10,000.
const MOST_NAT: u32 = 5000;

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Contender {
    /// Nothing: the client connects to a node. A reference
    Direct,
    /// The host routes all VIPs to one node. A reference: what one more hop costs
    Routed,
    /// steerage-edge
    Edge,
    /// `HAProxy` in TCP mode
    Haproxy,
    /// Envoy's TCP and UDP proxies
    Envoy,
    /// IPVS with direct routing
    Ipvs,
    /// A ruleset as kube-proxy's nftables mode makes it
    Nat,
}

impl Contender {
    /// Heading of its column, and key in JSON.
    pub fn title(self) -> &'static str {
        match self {
            Self::Direct => "no load balancer",
            Self::Routed => "routing",
            Self::Edge => "steerage-edge",
            Self::Haproxy => "HAProxy",
            Self::Envoy => "Envoy",
            Self::Ipvs => "IPVS",
            Self::Nat => "nftables NAT",
        }
    }

    /// Whether it terminates connections.
    pub fn is_proxy(self) -> bool {
        matches!(self, Self::Haproxy | Self::Envoy)
    }

    /// Whether it forwards datagrams.
    pub fn has_udp(self) -> bool {
        self != Self::Haproxy
    }

    /// Why it cannot be measured here.
    pub fn missing(self, programs: &Programs) -> Option<String> {
        let absent = |file: &Path| (!file.exists()).then(|| format!("{} is missing", file.display()));
        match self {
            Self::Direct | Self::Routed => None,
            Self::Edge => absent(&programs.edge),
            Self::Envoy => absent(&programs.envoy),
            Self::Haproxy => absent_program("haproxy"),
            Self::Nat => absent_program("nft"),
            Self::Ipvs => absent_program("ipvsadm").or_else(|| {
                // Loads the module where there is one.
                let _ = Command::new("modprobe").args(["-q", "ip_vs"]).status();
                let has = Path::new("/proc/net/ip_vs").exists();
                (!has).then(|| "this kernel has no ip_vs".to_owned())
            }),
        }
    }
}

/// Why it cannot serve so many Services here: each of a proxy's listeners is an open file, Envoy's once for each core and protocol.
pub fn too_many(contender: Contender, services: u32) -> Option<String> {
    if contender == Contender::Nat && services > MOST_NAT {
        return Some(format!("nft needs many minutes to load the chains of more than {MOST_NAT}"));
    }
    let cores = thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let needed = usize::try_from(services).ok()?
        * match contender {
            Contender::Envoy => 2 * cores,
            Contender::Haproxy => 1,
            _ => return None,
        }
        + 7000;
    let limits = fs::read_to_string("/proc/self/limits").ok()?;
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    let hard: usize = line.split_whitespace().nth(1)?.parse().ok()?;
    (needed > hard).then(|| format!("it needs {needed} open files, and {hard} are allowed"))
}

/// Why a program of the system is not here.
pub fn absent_program(name: &str) -> Option<String> {
    let found = Command::new("sh").args(["-c", &format!("command -v {name}")]).stdout(Stdio::null()).status();
    (!found.is_ok_and(|status| status.success())).then(|| format!("{name} is missing"))
}

/// Files of programs.
#[derive(Clone, Debug)]
pub struct Programs {
    /// steerage-edge.
    pub edge: PathBuf,
    /// The envoy of the wheel.
    pub envoy: PathBuf,
}

impl Programs {
    /// This edge, or the one beside this program; Envoy where `hack/prepare` puts it.
    pub fn new(edge: Option<PathBuf>) -> Result<Self> {
        let edge = host::given_or_beside(edge, "steerage-edge")?;
        Ok(Self { edge, envoy: host::prepared("envoy")? })
    }
}

/// A contender at work on a host.
#[derive(Debug)]
pub struct Running {
    /// Which one.
    pub contender: Contender,
    /// Of its VIPs.
    pub family: Family,
    /// Where.
    pub host: Host,
    /// Its processes and what they have in the kernel.
    pub group: Arc<Group>,
    children: Vec<Child>,
    /// From the start of the process to the first answered request.
    pub started_in: Duration,
}

impl Running {
    /// Starts it, and waits until it serves the first and the last Service.
    pub fn start(
        bed: &Bed,
        programs: &Programs,
        contender: Contender,
        family: Family,
        host: Host,
        services: u32,
    ) -> Result<Self> {
        bed.forget_neighbours()?;
        let mut running = Self::launched(bed, programs, contender, family, host, services)?;
        let begun = Instant::now();
        running.wait_until_served(bed, services)?;
        running.started_in += begun.elapsed();
        Ok(running)
    }

    /// Starts it. It may not serve yet.
    pub fn launched(
        bed: &Bed,
        programs: &Programs,
        contender: Contender,
        family: Family,
        host: Host,
        services: u32,
    ) -> Result<Self> {
        let group = Arc::new(Group::new(next_number())?);
        let mut running =
            Self { contender, family, host, group, children: Vec::new(), started_in: Duration::ZERO };
        running.prepare(bed, services)?;
        let begun = Instant::now();
        running.launch(bed, programs)?;
        running.started_in = begun.elapsed();
        Ok(running)
    }

    /// Addresses that serve each of these Services.
    pub fn targets(contender: Contender, family: Family, services: impl Iterator<Item = u32>) -> Vec<IpAddr> {
        let target = |service: u32| match contender {
            Contender::Direct => node_address(family, configs::nodes_of(service)[0]),
            _ => vip(family, service),
        };
        services.map(target).collect()
    }

    /// IDs of its processes.
    pub fn processes(&self) -> Vec<i32> {
        self.group.processes()
    }

    fn prepare(&self, bed: &Bed, services: u32) -> Result<()> {
        let file = |name: &str, text: String| fs::write(bed.folder.join(name), text);
        let (family, vips) = (self.family, vips(self.family));
        match self.contender {
            Contender::Direct => {}
            Contender::Routed => {
                let command = format!("ip route add {vips} via {}", node_address(family, 0));
                bed.shell(&self.host.netns(), &command)?;
            }
            Contender::Edge => write_objects(&self.objects(bed), family, services)?,
            Contender::Haproxy => file("haproxy.cfg", configs::haproxy(family, services, &bed.folder))?,
            Contender::Envoy => {
                let endpoints = configs::envoy_endpoints(family, 0, &configs::nodes_of(0));
                fs::write(configs::envoy_endpoints_file(&bed.folder), endpoints.to_string())?;
                file("envoy.json", configs::envoy(family, services, &bed.folder))?;
            }
            Contender::Ipvs => file("ipvs", configs::ipvs(family, services))?,
            Contender::Nat => file("nat.nft", configs::nat(family, services))?,
        }
        if self.has_local_vips() {
            bed.shell(&self.host.netns(), &format!("ip route add local {vips} dev lo"))?;
        }
        bed.route_vips(family, self.is_routed_to().then_some(self.host))
    }

    /// The edge's folder of objects.
    pub fn objects(&self, bed: &Bed) -> PathBuf {
        bed.folder.join(format!("objects-{}", self.host.netns()))
    }

    fn has_local_vips(&self) -> bool {
        !matches!(self.contender, Contender::Direct | Contender::Routed | Contender::Edge)
    }

    /// Whether nobody on the link answers for its VIPs: they are routed, or IPv6 addresses that the host has by a route alone.
    fn is_routed_to(&self) -> bool {
        self.contender == Contender::Routed || (self.family == Family::V6 && self.has_local_vips())
    }

    fn launch(&mut self, bed: &Bed, programs: &Programs) -> Result<()> {
        let folder = &bed.folder;
        let path = |name: &str| folder.join(name).display().to_string();
        match self.contender {
            Contender::Direct | Contender::Routed => Ok(()),
            Contender::Edge => {
                let name = self.host.netns();
                fs::create_dir_all(folder.join("status"))?;
                let edge = programs.edge.display().to_string();
                let (objects, status, bpf, interface) = (
                    self.objects(bed).display().to_string(),
                    path("status"),
                    path(&format!("bpf/{name}")),
                    self.host.interface(),
                );
                self.spawn(
                    folder,
                    &[
                        &edge,
                        "--host-name",
                        &name,
                        "--admin-address",
                        &ADMIN.to_string(),
                        "--group",
                        "bench",
                        "--interface",
                        &interface,
                        "--bpf-dir",
                        &bpf,
                        "--objects-dir",
                        &objects,
                        "--status-dir",
                        &status,
                        "--statements-port",
                        "0",
                    ],
                )
            }
            Contender::Haproxy => self.spawn(folder, &["haproxy", "-db", "-f", &path("haproxy.cfg")]),
            Contender::Envoy => {
                let envoy = programs.envoy.display().to_string();
                self.spawn(
                    folder,
                    &[&envoy, "-c", &path("envoy.json"), "--log-level", "error", "--disable-hot-restart"],
                )
            }
            Contender::Ipvs => self.run_to_end(&format!("ipvsadm --restore <{}", path("ipvs"))),
            Contender::Nat => self.run_to_end(&format!("nft -f {}", path("nat.nft"))),
        }
    }

    /// Starts a process of the group in the host's namespace.
    pub fn spawn(&mut self, folder: &Path, arguments: &[&str]) -> Result<()> {
        let program = Path::new(arguments[0]).file_name().unwrap_or_default().to_string_lossy().into_owned();
        let log = fs::File::options()
            .create(true)
            .append(true)
            .open(folder.join(format!("{program}-{}.log", self.host.netns())))?;
        let child = command(&self.host.netns())
            .args(["sh", "-c", "ulimit -n $(ulimit -H -n); echo $$ >\"$0\"; exec \"$@\""])
            .arg(self.group.procs_file())
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .with_context(|| format!("cannot start {program}"))?;
        self.children.push(child);
        Ok(())
    }

    /// Runs a script as a member of the group, so that what it loads into the kernel counts as the group's.
    fn run_to_end(&self, script: &str) -> Result<()> {
        let output = command(&self.host.netns())
            .args(["sh", "-ec", &format!("echo $$ >\"$0\"; {script}")])
            .arg(self.group.procs_file())
            .output()?;
        ensure!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
        Ok(())
    }

    fn wait_until_served(&mut self, bed: &Bed, services: u32) -> Result<()> {
        let begun = Instant::now();
        for address in Self::targets(self.contender, self.family, [0, services - 1].into_iter()) {
            loop {
                self.ensure_runs()?;
                match bed.inside("client", || exchange(SocketAddr::new(address, PORT), 0))? {
                    Ok(_) => break,
                    Err(error) => ensure!(
                        begun.elapsed() < START_LIMIT,
                        "{} serves nothing: {error:#}",
                        self.contender.title()
                    ),
                }
                thread::sleep(Duration::from_millis(2));
            }
        }
        Ok(())
    }

    fn ensure_runs(&mut self) -> Result<()> {
        for child in &mut self.children {
            if let Some(status) = child.try_wait()? {
                bail!("{} ended with {status}: see its log", self.contender.title());
            }
        }
        Ok(())
    }

    /// SIGKILL to all of its processes; what is in the kernel stays.
    pub fn kill(&mut self) {
        for pid in self.processes() {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
        for child in &mut self.children {
            let _ = child.wait();
        }
        self.children.clear();
    }

    /// The edge is killed and starts again with what is in the kernel: the time until it is ready.
    pub fn restart_edge(&mut self, bed: &Bed, programs: &Programs) -> Result<Duration> {
        self.kill();
        let begun = Instant::now();
        self.launch(bed, programs)?;
        self.wait_until_ready()?;
        Ok(begun.elapsed())
    }

    /// Waits until the edge has listed its objects, and the kernel has them.
    pub fn wait_until_ready(&mut self) -> Result<()> {
        let begun = Instant::now();
        loop {
            self.ensure_runs()?;
            if admin::is_ready(&self.host.netns())? {
                return Ok(());
            }
            ensure!(begun.elapsed() < START_LIMIT, "steerage-edge is not ready");
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// Ends it and removes what it has in the kernel.
    pub fn end(mut self, bed: &Bed, programs: &Programs) -> Result<()> {
        self.kill();
        let netns = self.host.netns();
        if self.has_local_vips() {
            bed.shell(&netns, &format!("ip route del local {} dev lo || true", vips(self.family)))?;
        }
        bed.route_vips(self.family, None)?;
        match self.contender {
            Contender::Routed => {
                bed.shell(&netns, &format!("ip route del {}", vips(self.family)))?;
            }
            Contender::Edge => {
                let command = format!(
                    "{} --interface {} --bpf-dir {} cleanup",
                    programs.edge.display(),
                    self.host.interface(),
                    bed.folder.join("bpf").join(&netns).display()
                );
                bed.shell(&netns, &command)?;
            }
            Contender::Ipvs => drop(bed.shell(&netns, "ipvsadm --clear")?),
            Contender::Nat => drop(bed.shell(
                &netns,
                if self.family == Family::V4 {
                    "nft delete table ip kube-proxy"
                } else {
                    "nft delete table ip6 kube-proxy"
                },
            )?),
            Contender::Direct | Contender::Haproxy | Contender::Envoy => {}
        }
        Ok(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The edge's objects, one file for each.
fn write_objects(folder: &Path, family: Family, services: u32) -> Result<()> {
    let _ = fs::remove_dir_all(folder);
    fs::create_dir_all(folder)?;
    for service in 0..services {
        fs::write(
            folder.join(format!("lb-{service}.json")),
            configs::edge_load_balancer(family, service, &configs::nodes_of(service)).to_string(),
        )?;
    }
    Ok(())
}

/// Each cgroup needs its own.
fn next_number() -> usize {
    static NEXT: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
    NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed)
}
