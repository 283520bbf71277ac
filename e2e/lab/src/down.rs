// SPDX-License-Identifier: Apache-2.0
//! `down`: nothing of a lab is left, whatever state it was in.
//!
//! Works from names alone: namespaces called `<lab>-…`, the processes in them, the lab's cgroup, its folder. What
//! the state folder remembers is only the quicker way.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::mount::{MntFlags, umount2};
use nix::sys::signal::Signal;

use crate::daemon;
use crate::error::{Doing, Error, Result};
use crate::netns;
use crate::progress::{Progress, wait};
use crate::state;

const CGROUPS: &str = "/sys/fs/cgroup";

/// How long processes and cgroups may take to go.
const GONE_WITHIN: Duration = Duration::from_secs(30);

/// Ends a lab. Nothing happens when there is none.
pub fn down(name: &str) -> Result<()> {
    let progress = Progress::start();
    let _lock = state::lock(name)?;
    let folder = state::folder(name)?;
    end_processes(name, &folder)?;
    for namespace in netns::of_lab(name) {
        netns::delete(&namespace)?;
    }
    remove_cgroup(&state::cgroup(name))?;
    unmount_below(&folder);
    match fs::remove_dir_all(&folder) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            return Err(error).doing(|| format!("removing {}", folder.display()));
        }
        _ => {}
    }
    state::remove_lock(name)?;
    progress.say(format!("lab {name} is gone"));
    Ok(())
}

/// Kills until nobody is left: a process that was just being started may appear after the first look.
fn end_processes(name: &str, folder: &Path) -> Result<()> {
    let spared = daemon::ancestors();
    let namespaces = netns::of_lab(name).iter().filter_map(|namespace| netns::inode(namespace)).collect();
    let hint = || format!("look with `ip netns pids` at the namespaces {name}-*");
    wait("the end of the lab's processes", GONE_WITHIN, hint, || {
        let mut left = daemon::in_namespaces(&namespaces);
        left.extend(remembered(folder));
        left.extend(in_cgroup(&state::cgroup(name)));
        left.retain(|pid| !spared.contains(pid));
        left.iter().try_for_each(|pid| daemon::send(*pid, Signal::SIGKILL))?;
        Ok(left.is_empty())
    })
}

/// Processes that the lab wrote down and that still are who they were.
fn remembered(folder: &Path) -> Vec<i32> {
    let entries = fs::read_dir(folder.join("run")).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| serde_json::from_slice::<daemon::Identity>(&fs::read(entry.path()).ok()?).ok())
        .filter(daemon::Identity::alive)
        .map(|identity| identity.pid)
        .collect()
}

/// Removes a cgroup with all below it from every hierarchy, as soon as its last process has gone.
pub fn remove_cgroup(name: &str) -> Result<()> {
    let start = Instant::now();
    for folder in cgroup_folders(name) {
        while let Err(error) = remove_tree(&folder) {
            if start.elapsed() > GONE_WITHIN {
                return Err(Error::Io { doing: format!("removing the cgroup {}", folder.display()), source: error });
            }
            sleep(Duration::from_millis(50));
        }
    }
    Ok(())
}

/// The processes in a cgroup and below it.
fn in_cgroup(name: &str) -> Vec<i32> {
    let mut found = Vec::new();
    let mut folders = cgroup_folders(name);
    while let Some(folder) = folders.pop() {
        let processes = fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
        found.extend(processes.lines().filter_map(|pid| pid.parse::<i32>().ok()).filter(|pid| *pid > 0));
        folders.extend(subfolders(&folder));
    }
    found.sort_unstable();
    found.dedup();
    found
}

/// A cgroup in every hierarchy that has it: one each under cgroup v1, one alone under v2.
fn cgroup_folders(name: &str) -> Vec<PathBuf> {
    let root = PathBuf::from(CGROUPS);
    let mut folders = subfolders(&root);
    folders.push(root);
    folders.into_iter().map(|hierarchy| hierarchy.join(name)).filter(|folder| folder.is_dir()).collect()
}

fn remove_tree(folder: &Path) -> std::io::Result<()> {
    for below in subfolders(folder) {
        remove_tree(&below)?;
    }
    match fs::remove_dir(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

fn subfolders(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())).map(|entry| entry.path()).collect()
}

/// Nodes mount inside their own namespaces; whatever is seen here all the same must not keep the folder.
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
    fn a_cgroup_that_nobody_made_is_gone_already() {
        remove_cgroup("steerage-lab-nosuchlab").unwrap();
        assert!(in_cgroup("steerage-lab-nosuchlab").is_empty());
    }
}
