// SPDX-License-Identifier: Apache-2.0
//! A node's first process: makes the node's mounts, starts its components, restarts those that end, and reaps
//! zombies. Runs only inside the namespaces that [`crate::node::start`] makes.

use std::collections::HashMap;
use std::fs::{self, File};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use nix::sys::wait::waitpid;
use nix::unistd::{Pid, getpid, sethostname};

use crate::addresses::{Host, ServiceProxy};
use crate::cgroup;
use crate::config::CONTAINERD_SOCKET;
use crate::error::{Doing, Error, Result};
use crate::node::boot_id;
use crate::progress::wait;
use crate::state::{Lab, PATH, write};

/// Kernel settings that a kubelet would otherwise change for the whole machine.
const KERNEL: [(&str, &str); 6] = [
    ("vm/overcommit_memory", "1"),
    ("vm/panic_on_oom", "0"),
    ("kernel/panic", "10"),
    ("kernel/panic_on_oops", "1"),
    ("kernel/keys/root_maxkeys", "1000000"),
    ("kernel/keys/root_maxbytes", "25000000"),
];

/// Delay between the end of a component and its restart.
const PAUSE: Duration = Duration::from_secs(1);

/// A component: its log's name and its command.
type Component = (&'static str, Vec<String>);

/// Becomes the node. Returns only if a component cannot be started at all.
pub fn run(lab: &Lab, host: &Host) -> Result<()> {
    if getpid() != Pid::from_raw(1) {
        return Err(Error::Refused("node-init is for the lab's own use: `hack/lab start-node NODE`".into()));
    }
    cgroup::enter(&format!("{}/{}", lab.cgroup(), host.name))?;
    mounts(lab, host)?;
    sethostname(&host.name).doing(|| "setting the host name".to_owned())?;
    let [containerd, others @ ..] = &components(lab, host)[..] else { return Ok(()) };
    let mut running = HashMap::from([(start(lab, host, containerd)?, containerd.clone())]);
    let hint = || format!("see {}", lab.log(&format!("{}-containerd", host.name)).display());
    wait("an answer of containerd", Duration::from_mins(1), hint, || {
        Ok(UnixStream::connect(CONTAINERD_SOCKET).is_ok())
    })?;
    for component in others {
        running.insert(start(lab, host, component)?, component.clone());
    }
    supervise(lab, host, running)
}

fn supervise(lab: &Lab, host: &Host, mut running: HashMap<i32, Component>) -> Result<()> {
    loop {
        match waitpid(None, None) {
            Ok(status) => {
                let Some(component) = status.pid().and_then(|pid| running.remove(&pid.as_raw())) else {
                    continue;
                };
                eprintln!("{} ended: {status:?}", component.0);
                sleep(PAUSE);
                running.insert(start(lab, host, &component)?, component);
            }
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno).doing(|| "waiting for processes".to_owned()),
        }
    }
}

fn components(lab: &Lab, host: &Host) -> Vec<Component> {
    let folder = lab.node_folder(&host.name);
    let flag = |name: &str, value: PathBuf| format!("--{name}={}", value.display());
    let program = |name: &str| lab.bin(name).display().to_string();
    let mut components = vec![
        ("containerd", vec!["containerd".to_owned(), flag("config", folder.join("containerd.toml"))]),
        (
            "kubelet",
            vec![
                program("kubelet"),
                flag("config", folder.join("kubelet.json")),
                flag("kubeconfig", lab.kubeconfig(&host.name)),
                format!("--hostname-override={}", host.name),
                format!("--node-ip={},{}", host.ipv4, host.ipv6),
            ],
        ),
    ];
    if lab.plan.service_proxy == ServiceProxy::KubeProxy {
        let command = vec![program("kube-proxy"), flag("config", folder.join("kube-proxy.json"))];
        components.push(("kube-proxy", command));
    }
    components
}

fn start(lab: &Lab, host: &Host, (name, command): &Component) -> Result<i32> {
    let path = lab.log(&format!("{}-{name}", host.name));
    let doing = || format!("starting {name} with log {}", path.display());
    let log = File::options().create(true).append(true).open(&path).doing(doing)?;
    let both = log.try_clone().doing(doing)?;
    let [program, arguments @ ..] = &command[..] else {
        return Err(Error::Refused(format!("{name} has no command")));
    };
    let child = Command::new(program)
        .args(arguments)
        .env_clear()
        .env("PATH", PATH)
        .env("HOME", "/root")
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(log)
        .stderr(both)
        .spawn()
        .doing(doing)?;
    Ok(i32::try_from(child.id()).unwrap_or_default())
}

/// The node's own /run, /var/lib, /var/log and BPF file system, and its own view of a few kernel files. `unshare` has made all
/// mounts private already, so these are not visible outside.
fn mounts(lab: &Lab, host: &Host) -> Result<()> {
    let folder = lab.node_folder(&host.name);
    bind(&folder.join("lib"), Path::new("/var/lib"))?;
    bind(&folder.join("log"), Path::new("/var/log"))?;
    mount(Some("tmpfs"), "/run", Some("tmpfs"), MsFlags::MS_NOSUID | MsFlags::MS_NODEV, Some("mode=755"))
        .doing(|| "mounting /run".to_owned())?;
    let bpf = "/sys/fs/bpf";
    mount(Some("bpf"), bpf, Some("bpf"), MsFlags::empty(), Some("mode=700"))
        .doing(|| format!("mounting {bpf}"))?;
    for (name, value) in KERNEL {
        let file = format!("/run/sysctl.{}", name.replace('/', "."));
        fs::write(&file, format!("{value}\n")).doing(|| format!("writing {file}"))?;
        bind(Path::new(&file), &Path::new("/proc/sys").join(name))?;
    }
    // A machine has a new boot id after each start, and Kubernetes notices.
    let boot = fs::read_to_string("/proc/sys/kernel/random/uuid").doing(|| "making a boot id".to_owned())?;
    let file = boot_id(lab, host);
    write(&file, &boot)?;
    bind(&file, Path::new("/proc/sys/kernel/random/boot_id"))
}

fn bind(from: &Path, onto: &Path) -> Result<()> {
    mount(Some(from), onto, None::<&str>, MsFlags::MS_BIND, None::<&str>)
        .doing(|| format!("mounting {} over {}", from.display(), onto.display()))
}
