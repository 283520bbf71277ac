// SPDX-License-Identifier: Apache-2.0
//! `down`: deletes a lab completely, whatever state it is in.
//!
//! Works from names alone: the namespaces `<lab>-…`, the processes in them, the lab's cgroup and its folder. The records
//! in the folder only make it quicker.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;
use std::time::Duration;

use nix::mount::{MntFlags, umount2};
use nix::sys::signal::Signal;

use crate::cgroup;
use crate::daemon;
use crate::error::{Doing, Error, Result};
use crate::netns;
use crate::progress::{Progress, wait};
use crate::state;

/// Maximum time until all processes have ended.
const GONE_WITHIN: Duration = Duration::from_secs(30);

/// Deletes a lab. Does nothing if there is none.
pub fn down(name: &str) -> Result<()> {
    let progress = Progress::start();
    state::require_root()?;
    let _lock = state::lock(name)?;
    let folder = state::folder(name)?;
    let namespaces = netns::of_lab(name);
    if is_of_kind(name, &namespaces) {
        return Err(Error::Refused(format!(
            "the network namespaces {name}-* are those of a cluster in kind: delete it with \
             `hack/kind/down --name {name}`"
        )));
    }
    end_processes(name, &folder)?;
    for namespace in namespaces {
        netns::delete(&namespace)?;
    }
    cgroup::remove(&state::cgroup(name), None)?;
    unmount_below(&folder);
    match fs::remove_dir_all(&folder) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            return Err(error).doing(|| format!("removing {}", folder.display()));
        }
        _ => {}
    }
    state::remove_lock(name)?;
    progress.say(format!("lab {name} is deleted"));
    Ok(())
}

/// Whether `hack/kind/up` made these: no host of a lab has the name of kind's control plane.
fn is_of_kind(name: &str, namespaces: &[String]) -> bool {
    let control_plane = format!("{name}-control-plane");
    namespaces.contains(&control_plane)
}

/// Kills until no process is left: one that was being started may appear after the first listing.
fn end_processes(name: &str, folder: &Path) -> Result<()> {
    let spared = daemon::ancestors();
    let namespaces = netns::of_lab(name).iter().filter_map(|namespace| netns::inode(namespace)).collect();
    let hint = || format!("list processes with `ip netns pids` for the namespaces {name}-*");
    wait("the end of the lab's processes", GONE_WITHIN, hint, || {
        let mut left = daemon::in_namespaces(&namespaces);
        left.extend(recorded(folder));
        left.extend(cgroup::processes(&state::cgroup(name)));
        left.retain(|pid| !spared.contains(pid));
        left.iter().try_for_each(|pid| daemon::send(*pid, Signal::SIGKILL))?;
        Ok(left.is_empty())
    })
}

/// Recorded processes that still run.
fn recorded(folder: &Path) -> Vec<i32> {
    let entries = fs::read_dir(folder.join("run")).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| serde_json::from_slice::<daemon::Identity>(&fs::read(entry.path()).ok()?).ok())
        .filter(daemon::Identity::alive)
        .map(|identity| identity.pid)
        .collect()
}

/// Nodes mount inside their own mount namespaces. A mount that is visible here all the same would keep the folder busy.
fn unmount_below(folder: &Path) {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let places = mounts.lines().filter_map(|line| line.split(' ').nth(1)).map(Path::new);
    for place in places.filter(|place| place.starts_with(folder)) {
        let _ = umount2(place, MntFlags::MNT_DETACH);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clusters_in_kind_are_not_labs() {
        let namespaces = |hosts: [&str; 2]| hosts.map(|host| format!("steerage-{host}"));
        assert!(is_of_kind("steerage", &namespaces(["client1", "control-plane"])));
        assert!(!is_of_kind("steerage", &namespaces(["client1", "cp"])));
    }
}
