// SPDX-License-Identifier: Apache-2.0
//! Starts, watches over and ends the two programs, from a thread of its own.
//!
//! The kernel ends them when the thread that started them ends (`PR_SET_PDEATHSIG`, prctl(2)), and a test's thread ends with
//! that test: hence one thread that lives as long as the server.

use std::fs::{self, File};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::Options;
use crate::credentials::Files;

/// How long a program may take to be ready. Generous: other tests may have the machine to themselves.
const START: Duration = Duration::from_mins(2);
const POLL: Duration = Duration::from_millis(50);
/// Free ports are found by asking, and may be taken by another before they are used.
const ATTEMPTS: u32 = 3;
/// The ports of servers: this many from the first one on.
const FIRST_PORT: u16 = 20_000;
const PORTS: u16 = 12_000;
const FOLDER: &str = "steerage-testserver-";

enum Order {
    Cut,
    Heal,
}

type Answer = anyhow::Result<()>;

/// The handle of the thread.
#[derive(Debug)]
pub(crate) struct Keeper {
    orders: Option<mpsc::Sender<(Order, mpsc::Sender<Answer>)>>,
    thread: Option<JoinHandle<()>>,
    address: SocketAddr,
    files: Files,
    kubeconfig: PathBuf,
    users: AtomicU32,
}

impl Keeper {
    pub(crate) fn start(options: Options) -> anyhow::Result<Self> {
        let binaries = steerage_requirements::kube_apiserver().map_err(anyhow::Error::msg)?;
        sweep(&std::env::temp_dir());
        let (orders, inbox) = mpsc::channel();
        let (started, start) = mpsc::channel();
        let thread = thread::spawn(move || {
            let plane = match start_any(&binaries, &options) {
                Ok(plane) => plane,
                Err(error) => {
                    let _ = started.send(Err(error));
                    return;
                }
            };
            let _ = started.send(Ok((plane.address, plane.files.clone())));
            serve(plane, &inbox);
        });
        let (address, files) = start.recv().context("the server's thread ended")??;
        let kubeconfig = files.path("kubeconfig");
        Ok(Self {
            orders: Some(orders),
            thread: Some(thread),
            address,
            files,
            kubeconfig,
            users: AtomicU32::new(0),
        })
    }

    pub(crate) fn cut(&self) -> Answer {
        self.order(Order::Cut)
    }

    pub(crate) fn heal(&self) -> Answer {
        self.order(Order::Heal)
    }

    pub(crate) fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    pub(crate) fn kubeconfig_for(&self, user: &str, groups: &[&str]) -> anyhow::Result<PathBuf> {
        let number = self.users.fetch_add(1, Ordering::Relaxed);
        self.files.put_kubeconfig(self.address, &format!("kubeconfig-{number}"), user, groups)
    }

    fn order(&self, order: Order) -> Answer {
        let (answer, answered) = mpsc::channel();
        let orders = self.orders.as_ref().context("the server is ending")?;
        orders.send((order, answer)).map_err(|_| anyhow!("the server's thread ended"))?;
        answered.recv().context("the server's thread ended")?
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.orders = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The two programs.
struct Plane {
    binaries: PathBuf,
    arguments: Vec<String>,
    files: Files,
    etcd_address: SocketAddr,
    address: SocketAddr,
    etcd: Option<Child>,
    api_server: Option<Child>,
}

fn serve(mut plane: Plane, inbox: &mpsc::Receiver<(Order, mpsc::Sender<Answer>)>) {
    while let Ok((order, answer)) = inbox.recv() {
        let done = match order {
            Order::Cut => {
                end(plane.api_server.take());
                Ok(())
            }
            Order::Heal => plane.start_api_server(),
        };
        let _ = answer.send(done);
    }
}

fn start_any(binaries: &Path, options: &Options) -> anyhow::Result<Plane> {
    let mut attempt = 1;
    loop {
        match Plane::start(binaries, options) {
            Err(error) if attempt == ATTEMPTS => return Err(error),
            Err(_) => attempt += 1,
            started => return started,
        }
    }
}

impl Plane {
    fn start(binaries: &Path, options: &Options) -> anyhow::Result<Self> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("{FOLDER}{}-{number}", std::process::id()));
        fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        let [etcd_address, address] = free_addresses(options.address)?;
        let mut plane = Self {
            binaries: binaries.to_owned(),
            arguments: options.arguments.clone(),
            files: Files::write(folder, address, &options.administrators)?,
            etcd_address,
            address,
            etcd: None,
            api_server: None,
        };
        plane.start_etcd()?;
        plane.start_api_server()?;
        Ok(plane)
    }

    fn start_etcd(&mut self) -> anyhow::Result<()> {
        let client = format!("http://{}", self.etcd_address);
        // Nobody joins: whichever port it finds will do.
        let peer = "http://127.0.0.1:0";
        let mut command = Command::new(self.binaries.join("etcd"));
        command.arg("--data-dir").arg(self.files.path("etcd")).args([
            "--listen-client-urls",
            &client,
            "--advertise-client-urls",
            &client,
            "--listen-peer-urls",
            peer,
            "--initial-advertise-peer-urls",
            peer,
            "--initial-cluster",
            &format!("default={peer}"),
            "--unsafe-no-fsync",
        ]);
        let address = self.etcd_address;
        let log = self.files.path("etcd.log");
        let child = self.etcd.insert(spawn(command, &log)?);
        wait_until(child, &log, || Ok(TcpStream::connect(address).map(drop)?))
    }

    fn start_api_server(&mut self) -> anyhow::Result<()> {
        if self.api_server.is_some() {
            return Ok(());
        }
        let mut command = Command::new(self.binaries.join("kube-apiserver"));
        let file = |flag: &str, name: &str| format!("{flag}={}", self.files.path(name).display());
        command.args([
            format!("--etcd-servers=http://{}", self.etcd_address),
            format!("--bind-address={}", self.address.ip()),
            format!("--advertise-address={}", self.address.ip()),
            format!("--secure-port={}", self.address.port()),
            file("--tls-cert-file", "server.crt"),
            file("--tls-private-key-file", "server.key"),
            file("--token-auth-file", "tokens.csv"),
            file("--service-account-key-file", "accounts.pub"),
            file("--service-account-signing-key-file", "accounts.key"),
        ]);
        command.args([
            // A loopback address cannot be an endpoint of the Service `kubernetes`.
            "--endpoint-reconciler-type=none",
            "--service-cluster-ip-range=10.96.0.0/16,fd00:10:96::/112",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--authorization-mode=RBAC",
            "--anonymous-auth=false",
            // Nobody makes the default service accounts that it waits for.
            "--disable-admission-plugins=ServiceAccount",
            "--allow-privileged=true",
        ]);
        command.args(&self.arguments);
        let log = self.files.path("kube-apiserver.log");
        let kubeconfig = self.files.path("kubeconfig");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let child = self.api_server.insert(spawn(command, &log)?);
        let ready = wait_until(child, &log, || runtime.block_on(is_ready(&kubeconfig)));
        if ready.is_err() {
            end(self.api_server.take());
        }
        ready
    }
}

impl Drop for Plane {
    fn drop(&mut self) {
        end(self.api_server.take());
        end(self.etcd.take());
        let _ = fs::remove_dir_all(&self.files.folder);
    }
}

async fn is_ready(kubeconfig: &Path) -> anyhow::Result<()> {
    let client = crate::client(kubeconfig).await?;
    let request = http::Request::get("/readyz").body(Vec::new())?;
    tokio::time::timeout(Duration::from_secs(5), client.request_text(request)).await??;
    Ok(())
}

fn spawn(mut command: Command, log: &Path) -> anyhow::Result<Child> {
    let output = File::options().create(true).append(true).open(log)?;
    command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
    end_with_thread(&mut command);
    let name = command.get_program().display().to_string();
    command.spawn().with_context(|| format!("cannot start {name}"))
}

#[allow(
    unsafe_code,
    reason = "a closure between fork and exec; it makes one system call and allocates nothing"
)]
fn end_with_thread(command: &mut Command) {
    // SAFETY: prctl(2) is async-signal-safe, and the closure touches no memory of the parent.
    unsafe {
        command.pre_exec(|| Ok(nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?));
    }
}

fn wait_until(child: &mut Child, log: &Path, mut ready: impl FnMut() -> Answer) -> Answer {
    let begun = Instant::now();
    while let Err(error) = ready() {
        if let Some(status) = child.try_wait()? {
            bail!("it ended with {status}; its last words:\n{}", last_words(log));
        }
        if begun.elapsed() > START {
            let seconds = START.as_secs();
            bail!("not ready after {seconds} s ({error:#}); its last words:\n{}", last_words(log));
        }
        thread::sleep(POLL);
    }
    Ok(())
}

fn last_words(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(15)..].join("\n")
}

fn end(child: Option<Child>) {
    if let Some(mut child) = child {
        let _ = child.kill();
        let _ = child.wait();
    }
}

/// A free port of loopback for etcd and one of `address` for the API server. They stay free while nobody listens on them, also for the
/// seconds until the API server starts and while it is cut off: they are below the range from which the kernel chooses the ports of
/// others, and each process tries them in another order.
fn free_addresses(address: Ipv4Addr) -> anyhow::Result<[SocketAddr; 2]> {
    static TRIED: AtomicU32 = AtomicU32::new(0);
    let free = |address: Ipv4Addr| {
        let next = || {
            let tried = TRIED.fetch_add(1, Ordering::Relaxed);
            let number = std::process::id().wrapping_mul(61).wrapping_add(tried) % u32::from(PORTS);
            u16::try_from(number).map_or(FIRST_PORT, |number| FIRST_PORT + number)
        };
        let mut ports = std::iter::repeat_with(next).take(PORTS.into());
        let port = ports.find(|port| TcpListener::bind((address, *port)).is_ok()).context("no free port")?;
        anyhow::Ok(SocketAddr::from((address, port)))
    };
    Ok([free(Ipv4Addr::LOCALHOST)?, free(address)?])
}

/// Removes the folders of servers whose process is gone: one that was killed cannot clean up.
fn sweep(temporary: &Path) {
    let entries = fs::read_dir(temporary).into_iter().flatten().flatten();
    for entry in entries {
        let name = entry.file_name();
        let process =
            name.to_str().and_then(|name| name.strip_prefix(FOLDER)?.split('-').next()?.parse().ok());
        if process.is_some_and(|pid| kill(Pid::from_raw(pid), None).is_err()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}
