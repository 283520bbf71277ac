// SPDX-License-Identifier: Apache-2.0
//! A lab on disk: one folder in the build cache, which every verb starts from.
//!
//! It holds Kubernetes' state, logs and credentials too. `down` removes the whole folder.

use std::env;
use std::fs::{self, File};
use std::path::{self, Path, PathBuf};
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::unistd::geteuid;

use crate::addresses::{Plan, check_name};
use crate::error::{Doing, Error, Result};
use crate::netns;

/// The `PATH` of all processes of a lab, which do not inherit the caller's environment.
pub const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A command that was just killed holds its lock for a moment.
const LOCK_WITHIN: Duration = Duration::from_secs(5);

/// Folders that a node covers with its own mounts.
const COVERED: [&str; 3] = ["/run", "/var/lib", "/var/log"];

/// A lab that exists, or is being made.
#[derive(Debug, Clone)]
pub struct Lab {
    /// Its composition.
    pub plan: Plan,
    cache: PathBuf,
}

impl Lab {
    /// Opens a lab that `up` made.
    pub fn open(name: &str) -> Result<Self> {
        check_name(name)?;
        let cache = cache()?;
        let file = folder_in(&cache, name).join("lab.json");
        let text = fs::read(&file).map_err(|_| {
            Error::Refused(format!("there is no lab {name}: make it with `hack/lab up --name {name}`"))
        })?;
        let plan = serde_json::from_slice(&text)
            .map_err(|source| Error::Json { path: file.display().to_string(), source })?;
        Ok(Self { plan, cache })
    }

    /// A lab that does not exist yet.
    pub fn plan(plan: Plan) -> Result<Self> {
        Ok(Self { plan, cache: cache()? })
    }

    /// Makes the folder of a new lab and saves its plan.
    pub fn create(&self) -> Result<()> {
        let folder = self.folder();
        if let Some(covered) = COVERED.iter().find(|covered| folder.starts_with(covered)) {
            return Err(Error::Refused(format!(
                "STEERAGE_CACHE lies in {covered}, which every node of a lab covers: choose another place"
            )));
        }
        for part in ["config", "credentials", "logs", "run", "nodes", "edges"] {
            let part = folder.join(part);
            fs::create_dir_all(&part).doing(|| format!("making {}", part.display()))?;
        }
        let text = serde_json::to_string_pretty(&self.plan)
            .map_err(|source| Error::Json { path: "lab.json".into(), source })?;
        write(&folder.join("lab.json"), &text)
    }

    /// The folder of this lab.
    pub fn folder(&self) -> PathBuf {
        folder_in(&self.cache, &self.plan.name)
    }

    /// The cache folder, with builds and labs.
    pub fn cache(&self) -> &Path {
        &self.cache
    }

    /// The container images that `hack/prepare` and `hack/images` write.
    pub fn images(&self) -> PathBuf {
        self.cache.join("images")
    }

    /// An executable that `hack/prepare` built.
    pub fn bin(&self, name: &str) -> PathBuf {
        self.cache.join("bin").join(name)
    }

    /// The kubeconfig of a user; `admin` has all rights.
    pub fn kubeconfig(&self, user: &str) -> PathBuf {
        self.folder().join("credentials").join(format!("{user}.kubeconfig"))
    }

    /// A certificate (`.crt`), key (`.key`) or other file of the lab's credentials.
    pub fn credential(&self, file: &str) -> PathBuf {
        self.folder().join("credentials").join(file)
    }

    /// The log of a component, such as `kube-apiserver` or `node1-kubelet`.
    pub fn log(&self, component: &str) -> PathBuf {
        self.folder().join("logs").join(format!("{component}.log"))
    }

    /// The folder of a node: its /var/lib, its /var/log, its configuration.
    pub fn node_folder(&self, node: &str) -> PathBuf {
        self.folder().join("nodes").join(node)
    }

    /// The file with the version of the edge's image, which `install` writes.
    pub fn edge_version(&self) -> PathBuf {
        self.folder().join("edges/version")
    }

    /// Whether `install` has started the edges.
    pub fn has_edge(&self) -> bool {
        self.edge_version().exists()
    }

    /// The copy of the lab's own binary that nodes run as their first process.
    pub fn executable(&self) -> PathBuf {
        self.folder().join("steerage-lab")
    }

    /// The cgroup under which all containers of this lab live, in every hierarchy.
    pub fn cgroup(&self) -> String {
        cgroup(&self.plan.name)
    }

    /// kubectl as administrator, run beside the control plane.
    pub fn kubectl(&self) -> Command {
        self.kubectl_as("admin")
    }

    /// kubectl as the given user.
    pub fn kubectl_as(&self, user: &str) -> Command {
        let mut command = self.command_in(&self.plan.control_plane().netns, &self.bin("kubectl"));
        command.arg("--kubeconfig").arg(self.kubeconfig(user));
        command
    }

    /// A program inside a namespace, with a clean environment.
    pub fn command_in(&self, netns: &str, program: &Path) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net={}", netns::path(netns).display())).arg("--").arg(program);
        command.env_clear().env("PATH", PATH).env("HOME", self.folder());
        command
    }
}

/// Held while a verb changes the composition of a lab, so that `up` and `down` never interleave. The kernel releases it when its
/// holder dies.
pub type Lock = Flock<File>;

/// Takes the lab's lock. Fails if another verb holds it.
pub fn lock(name: &str) -> Result<Lock> {
    check_name(name)?;
    let folder = cache()?.join("labs");
    fs::create_dir_all(&folder).doing(|| format!("making {}", folder.display()))?;
    let path = folder.join(format!("{name}.lock"));
    let file = File::create(&path).doing(|| format!("opening {}", path.display()))?;
    let start = Instant::now();
    let mut file = file;
    loop {
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(lock) => return Ok(lock),
            Err((again, Errno::EWOULDBLOCK)) if start.elapsed() < LOCK_WITHIN => file = again,
            Err((_, Errno::EWOULDBLOCK)) => {
                return Err(Error::Refused(format!(
                    "another command is changing lab {name}: wait for it, or end it"
                )));
            }
            Err((_, errno)) => {
                return Err(Error::Io { doing: format!("locking {}", path.display()), source: errno.into() });
            }
        }
        sleep(Duration::from_millis(50));
    }
}

/// Removes the lock file, while the lock is still held.
pub fn remove_lock(name: &str) -> Result<()> {
    match fs::remove_file(cache()?.join("labs").join(format!("{name}.lock"))) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).doing(|| "removing the lock".into())
        }
        _ => Ok(()),
    }
}

/// The folder of a lab by name, whether it exists or not.
pub fn folder(name: &str) -> Result<PathBuf> {
    Ok(folder_in(&cache()?, name))
}

/// The name of a lab's cgroup in every hierarchy.
pub fn cgroup(name: &str) -> String {
    format!("steerage-lab-{name}")
}

/// Writes a file atomically.
pub fn write(path: &Path, text: &str) -> Result<()> {
    let doing = || format!("writing {}", path.display());
    let half = path.with_extension("half");
    fs::write(&half, text).doing(doing)?;
    fs::rename(&half, path).doing(doing)
}

fn folder_in(cache: &Path, name: &str) -> PathBuf {
    cache.join("labs").join(name)
}

/// `STEERAGE_CACHE`, or the default of hack/env.
fn cache() -> Result<PathBuf> {
    let set = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache = set("STEERAGE_CACHE")
        .or_else(|| set("XDG_CACHE_HOME").map(|folder| folder.join("steerage")))
        .or_else(|| set("HOME").map(|home| home.join(".cache/steerage")))
        .ok_or_else(|| Error::Refused("neither STEERAGE_CACHE nor HOME is set".into()))?;
    // Daemons have another working directory.
    path::absolute(&cache).doing(|| format!("finding {}", cache.display()))
}

/// Namespaces, mounts and cgroups need root.
pub fn require_root() -> Result<()> {
    if geteuid().is_root() {
        return Ok(());
    }
    Err(Error::Refused("a lab needs root: run this as root".into()))
}
