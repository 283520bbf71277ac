// SPDX-License-Identifier: Apache-2.0
//! Steerage's edge on the edge hosts: extracted from its image, and run as a background process outside the cluster.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use nix::mount::{MsFlags, mount};
use nix::sys::signal::Signal;
use nix::sys::statfs::{BPF_FS_MAGIC, statfs};

use crate::addresses::{Host, Role};
use crate::archive;
use crate::command::run;
use crate::credentials::kubeconfig_for_token;
use crate::daemon;
use crate::error::{Doing, Error, Result};
use crate::netns::in_netns;
use crate::probe::is_well;
use crate::progress::wait;
use crate::state::{Lab, write};

/// The edge's default admin port.
pub const ADMIN_PORT: u16 = 10359;

/// Maximum time until an edge is ready.
const READY_WITHIN: Duration = Duration::from_mins(1);

/// The privileges that edge/README.md asks for, and no others.
const PRIVILEGES: [&str; 3] =
    ["setpriv", "--no-new-privs", "--bounding-set=-all,+net_admin,+net_raw,+bpf,+perfmon"];

/// The kubeconfig of all edges, by user.
const USER: &str = "edge";

/// Extracts the edge's program from its image, writes a kubeconfig with this token, (re)starts the edges that do not run this
/// program, and waits until all are ready.
pub fn install(lab: &Lab, token: &str) -> Result<()> {
    kubeconfig_for_token(lab, USER, token)?;
    let archive = lab.images().join("steerage-edge.tar");
    let version = archive::version(&archive)?;
    let marker = lab.edge_version();
    let same = fs::read_to_string(&marker).is_ok_and(|known| known == version);
    if !same {
        unpack(lab, &archive)?;
    }
    for host in lab.plan.edges() {
        if same && daemon::find(lab, &host.name).is_some() {
            continue;
        }
        daemon::stop(lab, &host.name, Signal::SIGTERM)?;
        launch(lab, &host, &[])?;
    }
    write(&marker, &version)?;
    lab.plan.edges().iter().try_for_each(|host| wait_until_ready(lab, host))
}

/// Stops the edge of a host if it runs, and starts it with these flags.
pub fn restart(lab: &Lab, host: &Host, flags: &[String]) -> Result<()> {
    daemon::stop(lab, &host.name, Signal::SIGTERM)?;
    start(lab, host, flags)
}

/// Starts the edge of a host with these flags, and waits until it is ready.
pub fn start(lab: &Lab, host: &Host, flags: &[String]) -> Result<()> {
    launch(lab, host, flags)?;
    wait_until_ready(lab, host)
}

/// Sends a signal to the edge of a host, and waits for its end if the signal ends it.
pub fn signal(lab: &Lab, host: &Host, signal: Signal) -> Result<()> {
    let off =
        || Error::Refused(format!("no edge runs on {0}: `hack/lab start-edge {0}` starts it", host.name));
    daemon::find(lab, &host.name).ok_or_else(off)?.signal(signal)
}

/// The edge host of this name.
pub fn find(lab: &Lab, name: &str) -> Result<Host> {
    let host = lab.plan.find(name)?;
    if matches!(host.role, Role::Edge(_)) {
        return Ok(host);
    }
    Err(Error::Refused(format!("{name} is not an edge host of lab {}", lab.plan.name)))
}

/// The path of the program that `install` has extracted.
pub fn program(lab: &Lab) -> Result<String> {
    fs::read_to_string(lab.folder().join("edges/entry"))
        .map_err(|_| Error::Refused("the edge is not installed: run `hack/lab install` first".into()))
}

fn launch(lab: &Lab, host: &Host, flags: &[String]) -> Result<()> {
    let bpf_dir = mounted_bpf(lab)?.join(&host.name);
    let program = program(lab)?;
    // An edge host has a host name of its own.
    let named = ["unshare", "-u", "sh", "-c", r#"hostname "$0" && exec "$@""#, &host.name];
    let mut command: Vec<_> = named.map(str::to_owned).to_vec();
    command.extend(PRIVILEGES.map(str::to_owned));
    let settings = [
        format!("KUBECONFIG={}", lab.kubeconfig(USER).display()),
        format!("STEERAGE_BPF_DIR={}", bpf_dir.display()),
    ];
    command.push("env".to_owned());
    command.extend(settings);
    command.push(program);
    command.extend_from_slice(flags);
    daemon::spawn(lab, &host.name, &host.netns, &command).map(drop)
}

/// The lab's own BPF file system. Programs and maps in it end with it.
fn mounted_bpf(lab: &Lab) -> Result<PathBuf> {
    let folder = lab.folder().join("bpf");
    fs::create_dir_all(&folder).doing(|| format!("making {}", folder.display()))?;
    let is_mounted = statfs(&folder).is_ok_and(|found| found.filesystem_type() == BPF_FS_MAGIC);
    if !is_mounted {
        mount(Some("bpf"), &folder, Some("bpf"), MsFlags::empty(), None::<&str>)
            .map_err(std::io::Error::from)
            .doing(|| format!("mounting a BPF file system at {}", folder.display()))?;
    }
    Ok(folder)
}

/// Unpacks the image's layers and notes the path of its entry point.
fn unpack(lab: &Lab, archive: &Path) -> Result<()> {
    let folder = lab.folder().join("edges");
    let root = folder.join("root");
    let _ = fs::remove_dir_all(&root);
    fs::create_dir_all(&root).doing(|| format!("making {}", root.display()))?;
    let manifest = archive::manifest(archive)?;
    let incomplete =
        || Error::Refused(format!("{} is not a container image: run hack/images", archive.display()));
    for layer in manifest[0]["Layers"].as_array().ok_or_else(incomplete)? {
        run(Command::new("tar")
            .arg("-xf")
            .arg(archive)
            .arg("-C")
            .arg(&folder)
            .arg(layer.as_str().ok_or_else(incomplete)?))?;
        let layer = folder.join(layer.as_str().ok_or_else(incomplete)?);
        run(Command::new("tar").arg("-xf").arg(&layer).arg("-C").arg(&root))?;
    }
    let config = manifest[0]["Config"].as_str().ok_or_else(incomplete)?;
    let config = archive::json_in(archive, config)?;
    let entry = config["config"]["Entrypoint"][0].as_str().ok_or_else(incomplete)?;
    let program: PathBuf = root.join(entry.trim_start_matches('/'));
    write(&folder.join("entry"), &program.display().to_string())
}

fn wait_until_ready(lab: &Lab, host: &Host) -> Result<()> {
    let log = lab.log(&host.name);
    wait(
        &format!("a ready {}", host.name),
        READY_WITHIN,
        || format!("see {}", log.display()),
        || {
            if daemon::find(lab, &host.name).is_none() {
                return Err(Error::Refused(format!(
                    "the edge on {} has ended: see {}",
                    host.name,
                    log.display()
                )));
            }
            in_netns(&host.netns, || is_well(ADMIN_PORT, "/readyz"))
        },
    )
}
