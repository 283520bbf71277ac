// SPDX-License-Identifier: Apache-2.0
//! Makes, enters, lists and deletes named network namespaces.
//!
//! Not by `ip netns add`, which would leave a mount over /run/netns behind.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns, unshare};

use crate::error::{Doing, Error, Result};

const FOLDER: &str = "/run/netns";

/// The file of a named namespace.
pub fn path(name: &str) -> PathBuf {
    Path::new(FOLDER).join(name)
}

/// Makes an empty namespace of this name, with the kernel settings of a lab's hosts.
pub fn create(name: &str, forwarding: bool) -> Result<()> {
    let file = path(name);
    fs::create_dir_all(FOLDER).doing(|| format!("making {FOLDER}"))?;
    File::create_new(&file).doing(|| format!("making {}", file.display()))?;
    on_thread(|| {
        unshare(CloneFlags::CLONE_NEWNET).doing(|| "making a network namespace".to_owned())?;
        mount(Some("/proc/thread-self/ns/net"), &file, None::<&str>, MsFlags::MS_BIND, None::<&str>)
            .doing(|| format!("naming the network namespace {name}"))?;
        settings(forwarding)
    })
}

/// Runs `work` on a thread of its own inside the named namespace. Sockets that it opens stay in that namespace; the rest of the
/// process does not move.
pub fn in_netns<T: Send>(name: &str, work: impl FnOnce() -> T + Send) -> Result<T> {
    let file = path(name);
    let namespace = File::open(&file).map_err(|source| match source.kind() {
        ErrorKind::NotFound => Error::Refused(format!(
            "there is no network namespace {name}: is the lab up (`hack/lab status`)?"
        )),
        _ => Error::Io { doing: format!("opening {}", file.display()), source },
    })?;
    on_thread(|| {
        setns(namespace, CloneFlags::CLONE_NEWNET).doing(|| format!("entering {name}"))?;
        Ok(work())
    })
}

/// The names of all namespaces of a lab.
pub fn of_lab(lab: &str) -> Vec<String> {
    let prefix = format!("{lab}-");
    let entries = fs::read_dir(FOLDER).into_iter().flatten().flatten();
    let mut names: Vec<_> = entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| name.starts_with(&prefix))
        .collect();
    names.sort();
    names
}

/// The identity of a namespace: its inode, as in /proc/PID/ns/net of its processes. `None` also for the file of a killed `up`
/// that had not mounted the namespace yet.
pub fn inode(name: &str) -> Option<u64> {
    let own = fs::metadata("/proc/self/ns/net").ok()?;
    fs::metadata(path(name)).ok().filter(|found| found.dev() == own.dev()).map(|found| found.ino())
}

/// Whether a namespace of this name exists.
pub fn exists(name: &str) -> bool {
    path(name).exists()
}

/// Removes the name; the namespace goes with its last process. Does nothing if there is none.
///
/// Once `ip netns add` has mounted [`FOLDER`] onto itself, the mount of an older name is below that mount, out of reach of any
/// path, and the file is busy. Hence a mount namespace in which everything above can be unmounted without taking foreign names
/// away: a file that is no mount point *there* can be deleted, and the kernel then ends its mounts everywhere.
pub fn delete(name: &str) -> Result<()> {
    let file = path(name);
    let doing = || format!("deleting {}", file.display());
    on_thread(|| {
        unshare(CloneFlags::CLONE_NEWNS).doing(|| "making a mount namespace".to_owned())?;
        let private = MsFlags::MS_PRIVATE | MsFlags::MS_REC;
        mount(None::<&str>, "/", None::<&str>, private, None::<&str>).doing(doing)?;
        loop {
            // Fails where a killed `up` had made only the file.
            while umount2(&file, MntFlags::MNT_DETACH).is_ok() {}
            match fs::remove_file(&file) {
                Err(error) if error.kind() == ErrorKind::ResourceBusy => {
                    umount2(FOLDER, MntFlags::MNT_DETACH).doing(doing)?;
                }
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error).doing(doing),
                _ => return Ok(()),
            }
        }
    })
}

fn on_thread<T: Send>(work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    thread::scope(|scope| {
        scope
            .spawn(work)
            .join()
            .unwrap_or_else(|_| Err(Error::Refused("the work in a namespace panicked".into())))
    })
}

/// Settings of the calling thread's namespace. Later interfaces inherit the defaults.
fn settings(forwarding: bool) -> Result<()> {
    let flag = if forwarding { "1" } else { "0" };
    let mut settings = vec![
        ("ipv4/ip_forward".to_owned(), flag),
        ("ipv6/conf/all/forwarding".to_owned(), flag),
        ("ipv6/conf/default/forwarding".to_owned(), flag),
    ];
    for scope in ["all", "default"] {
        settings.extend([
            // Routes are asymmetric here: replies bypass the edge.
            (format!("ipv4/conf/{scope}/rp_filter"), "0"),
            (format!("ipv4/conf/{scope}/send_redirects"), "0"),
            (format!("ipv4/conf/{scope}/accept_redirects"), "0"),
            // Without duplicate address detection an address is usable at once.
            (format!("ipv6/conf/{scope}/accept_dad"), "0"),
            (format!("ipv6/conf/{scope}/accept_ra"), "0"),
            (format!("ipv6/conf/{scope}/accept_redirects"), "0"),
        ]);
    }
    for (name, value) in settings {
        let file = format!("/proc/sys/net/{name}");
        fs::write(&file, value).doing(|| format!("writing {value} to {file}"))?;
    }
    // The bridge filter exists only where its module is loaded. It must not see the lab's bridges.
    for name in ["iptables", "ip6tables", "arptables"] {
        let _ = fs::write(format!("/proc/sys/net/bridge/bridge-nf-call-{name}"), "0");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::process;

    use steerage_requirements::requires;

    use super::*;

    #[test]
    fn namespace_is_made_entered_and_deleted() {
        requires!(NetworkNamespace);
        let name = format!("nstest{}-x", process::id());
        create(&name, true).unwrap();
        assert_eq!(of_lab(&format!("nstest{}", process::id())), [name.as_str()]);
        let inside = in_netns(&name, || fs::metadata("/proc/thread-self/ns/net").unwrap().ino()).unwrap();
        assert_eq!(Some(inside), inode(&name));
        assert_ne!(inside, fs::metadata("/proc/self/ns/net").unwrap().ino());
        let bound = in_netns(&name, || TcpListener::bind("127.0.0.1:0").is_ok()).unwrap();
        assert!(bound, "binding needs no link");
        delete(&name).unwrap();
        delete(&name).unwrap();
        assert!(!exists(&name));
        assert!(in_netns(&name, || ()).is_err());
    }

    /// `ip netns add` bind-mounts /run/netns onto itself, and so hides the mounts that were there before.
    #[test]
    fn namespace_is_deleted_after_iproute2_has_mounted_over_the_folder() {
        requires!(NetworkNamespace, Program("ip"));
        on_thread(|| {
            unshare(CloneFlags::CLONE_NEWNS).unwrap();
            mount(None::<&str>, "/", None::<&str>, MsFlags::MS_PRIVATE | MsFlags::MS_REC, None::<&str>)
                .unwrap();
            mount(Some("run"), "/run", Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
            let created = |name: &str| {
                let made = process::Command::new("ip").args(["netns", "add", name]).status();
                assert!(made.unwrap().success(), "{name}");
            };
            create("nstest-before", true).unwrap();
            created("nstest-foreign");
            create("nstest-after", true).unwrap();
            created("nstest-another");
            for name in ["nstest-before", "nstest-after"] {
                delete(name).unwrap();
                delete(name).unwrap();
                assert!(!exists(name));
            }
            for name in ["nstest-foreign", "nstest-another"] {
                assert!(inode(name).is_some(), "{name} still has its name");
            }
            Ok(())
        })
        .unwrap();
    }
}
