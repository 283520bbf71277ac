// SPDX-License-Identifier: Apache-2.0
//! Cgroups of a lab: every node lives below `steerage-lab-<lab>/<node>` in every hierarchy and sees that as its root.
//!
//! A node's kubelet therefore counts only its own containers, and `down` finds all cgroups of a lab by name. Under
//! cgroup v1 the folder lies below the caller's cgroup, whose limits continue to apply.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};

use crate::error::{Doing, Error, Result};

/// How long the kernel may take to empty a cgroup whose processes were killed.
const GONE_WITHIN: Duration = Duration::from_secs(30);

/// One tree of cgroups.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Hierarchy {
    /// Where it is mounted.
    mount: PathBuf,
    /// Its controllers, as mount(8) takes them; `None` for version 2.
    controllers: Option<String>,
    /// The caller's cgroup, relative to the root.
    own: PathBuf,
}

impl Hierarchy {
    /// A folder below the caller's own cgroup, or below the root of version 2, where a cgroup with processes in it
    /// cannot delegate controllers.
    fn below(&self, name: &str) -> PathBuf {
        if self.controllers.is_some() { self.mount.join(&self.own).join(name) } else { self.mount.join(name) }
    }
}

/// Moves the calling process below `name` in every hierarchy, and makes that the root of its view. The caller must
/// have a mount namespace of its own.
pub fn enter(name: &str) -> Result<()> {
    let hierarchies = hierarchies()?;
    for hierarchy in &hierarchies {
        let folder = hierarchy.below(name);
        fs::create_dir_all(&folder).doing(|| format!("making the cgroup {}", folder.display()))?;
        if hierarchy.controllers.as_deref().is_some_and(|names| names.split(',').any(|name| name == "cpuset"))
        {
            inherit_cpuset(&hierarchy.mount, &folder)?;
        }
        if hierarchy.controllers.is_none() {
            hand_controllers_on(&hierarchy.mount, &folder);
        }
        join(&folder)?;
    }
    unshare(CloneFlags::CLONE_NEWCGROUP).doing(|| "making a cgroup namespace".to_owned())?;
    for Hierarchy { mount: place, controllers, .. } in &hierarchies {
        let kind = if controllers.is_some() { "cgroup" } else { "cgroup2" };
        let doing = || format!("mounting {}", place.display());
        umount2(place, MntFlags::MNT_DETACH).doing(doing)?;
        mount(Some(kind), place, Some(kind), MsFlags::empty(), controllers.as_deref()).doing(doing)?;
        if controllers.is_none() {
            let leaf = place.join("init");
            fs::create_dir_all(&leaf).doing(|| format!("making the cgroup {}", leaf.display()))?;
            join(&leaf)?;
        }
    }
    Ok(())
}

/// The processes below `name`, in any hierarchy.
pub fn processes(name: &str) -> Vec<i32> {
    let mut found = Vec::new();
    let mut folders = folders(name);
    while let Some(folder) = folders.pop() {
        let text = fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
        // A process outside this PID namespace is listed as 0.
        found.extend(text.lines().filter_map(|pid| pid.parse::<i32>().ok()).filter(|pid| *pid > 0));
        folders.extend(subfolders(&folder));
    }
    found.sort_unstable();
    found.dedup();
    found
}

/// Removes `name`, or `name/below`, from every hierarchy as soon as its last process has gone.
pub fn remove(name: &str, below: Option<&str>) -> Result<()> {
    let start = Instant::now();
    for folder in folders(name) {
        let folder = below.map_or_else(|| folder.clone(), |below| folder.join(below));
        while let Err(source) = remove_tree(&folder) {
            if start.elapsed() > GONE_WITHIN {
                return Err(Error::Io { doing: format!("removing the cgroup {}", folder.display()), source });
            }
            sleep(Duration::from_millis(20));
        }
    }
    Ok(())
}

fn join(folder: &Path) -> Result<()> {
    fs::write(folder.join("cgroup.procs"), "0").doing(|| format!("joining the cgroup {}", folder.display()))
}

/// Under version 2 a cgroup has the controllers that its parent delegates. The others set no limit here.
fn hand_controllers_on(root: &Path, folder: &Path) {
    let steps: Vec<_> = folder.ancestors().skip(1).take_while(|step| step.starts_with(root)).collect();
    for step in steps.into_iter().rev() {
        let controllers = fs::read_to_string(step.join("cgroup.controllers")).unwrap_or_default();
        for controller in controllers.split_whitespace() {
            let _ = fs::write(step.join("cgroup.subtree_control"), format!("+{controller}"));
        }
    }
}

/// A new cpuset of version 1 is empty, and no process can join it.
fn inherit_cpuset(root: &Path, folder: &Path) -> Result<()> {
    let steps: Vec<_> = folder.ancestors().take_while(|step| *step != root).collect();
    for step in steps.into_iter().rev() {
        let Some(parent) = step.parent() else { continue };
        for file in ["cpuset.cpus", "cpuset.mems"] {
            let doing = || format!("setting {} of {}", file, step.display());
            if fs::read_to_string(step.join(file)).doing(doing)?.trim().is_empty() {
                let value = fs::read_to_string(parent.join(file)).doing(doing)?;
                fs::write(step.join(file), value).doing(doing)?;
            }
        }
    }
    Ok(())
}

fn hierarchies() -> Result<Vec<Hierarchy>> {
    let read = |path: &str| fs::read_to_string(path).doing(|| format!("reading {path}"));
    Ok(parse(&read("/proc/self/mounts")?, &read("/proc/self/cgroup")?))
}

/// Joins the mounts (proc(5)) with the caller's cgroups (cgroups(7)).
fn parse(mounts: &str, own: &str) -> Vec<Hierarchy> {
    let places: Vec<(&str, &str)> = own
        .lines()
        .filter_map(|line| {
            let mut fields = line.splitn(3, ':').skip(1);
            Some((fields.next()?, fields.next()?.trim_start_matches('/')))
        })
        .collect();
    let mut found: Vec<Hierarchy> = Vec::new();
    for line in mounts.lines() {
        let [_, mount, kind, options, ..] = line.split(' ').collect::<Vec<_>>()[..] else { continue };
        let options: Vec<_> = options.split(',').collect();
        let place = places.iter().find(|(names, _)| match kind {
            "cgroup" => !names.is_empty() && names.split(',').all(|name| options.contains(&name)),
            "cgroup2" => names.is_empty(),
            _ => false,
        });
        let Some((names, own)) = place else { continue };
        let hierarchy = Hierarchy {
            mount: mount.into(),
            controllers: (!names.is_empty()).then(|| (*names).to_owned()),
            own: own.into(),
        };
        if !found.iter().any(|known| known.mount == hierarchy.mount) {
            found.push(hierarchy);
        }
    }
    found
}

/// The folders of this name, at any depth of the hierarchies.
fn folders(name: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut next: Vec<_> =
        hierarchies().unwrap_or_default().into_iter().map(|hierarchy| hierarchy.mount).collect();
    while let Some(folder) = next.pop() {
        for below in subfolders(&folder) {
            let list = if below.file_name().is_some_and(|own| own == name) { &mut found } else { &mut next };
            list.push(below);
        }
    }
    found
}

fn remove_tree(folder: &Path) -> io::Result<()> {
    subfolders(folder).iter().try_for_each(|below| remove_tree(below))?;
    match fs::remove_dir(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

fn subfolders(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| entry.path())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
tmpfs /sys/fs/cgroup tmpfs rw,mode=755 0 0
cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,relatime,cpu,cpuacct 0 0
cgroup /sys/fs/cgroup/memory cgroup rw,relatime,memory 0 0
cgroup /sys/fs/cgroup/systemd cgroup rw,name=systemd 0 0
cgroup2 /sys/fs/cgroup/unified cgroup2 rw,nsdelegate 0 0
";
    const OWN: &str = "9:name=systemd:/\n4:memory:/jobs/7\n2:cpu,cpuacct:/\n0::/\n";

    #[test]
    fn version_1_goes_below_the_caller_and_version_2_below_the_root() {
        let found = parse(MOUNTS, OWN);
        let places: Vec<_> = found.iter().map(|one| one.below("x").display().to_string()).collect();
        assert_eq!(
            places,
            [
                "/sys/fs/cgroup/cpu,cpuacct/x",
                "/sys/fs/cgroup/memory/jobs/7/x",
                "/sys/fs/cgroup/systemd/x",
                "/sys/fs/cgroup/unified/x"
            ]
        );
        assert_eq!(found[2].controllers.as_deref(), Some("name=systemd"));
        assert_eq!(found[3].controllers, None);
    }

    #[test]
    fn version_2_alone_is_understood() {
        let found = parse("cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n", "0::/user.slice/x\n");
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].below("y"), Path::new("/sys/fs/cgroup/y"));
    }

    #[test]
    fn removing_a_missing_cgroup_succeeds() {
        remove("steerage-lab-nosuchlab", None).unwrap();
        assert!(processes("steerage-lab-nosuchlab").is_empty());
    }
}
