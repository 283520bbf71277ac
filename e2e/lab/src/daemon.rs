// SPDX-License-Identifier: Apache-2.0
//! The lab's background processes. They outlive the verb that starts them, and are recorded so that no other process is
//! killed by mistake.
//!
//! A process is identified by its id, its start time and the machine's boot, since ids are reused.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};

use crate::error::{Doing, Error, Result};
use crate::progress::wait;
use crate::state::{Lab, write};

/// Maximum time until a signalled process has ended.
const GONE_WITHIN: Duration = Duration::from_secs(10);

/// The identity of a process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Its id.
    pub pid: i32,
    /// When it started, in clock ticks since boot (proc(5), field 22 of stat).
    pub start: u64,
    /// The boot that the start time counts from.
    pub boot: String,
}

impl Identity {
    /// The identity of the process that has this id now; `None` if there is none, or only a zombie.
    pub fn of(pid: i32) -> Option<Self> {
        let start = start_time(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)?;
        Some(Self { pid, start, boot: boot_id() })
    }

    /// Whether this process still runs.
    pub fn alive(&self) -> bool {
        Self::of(self.pid).as_ref() == Some(self)
    }

    /// Whether the process has released its files and sockets: its first thread may be a zombie while others still end.
    fn ended(&self) -> bool {
        let is_other =
            |entry: fs::DirEntry| entry.file_name().to_str() != Some(self.pid.to_string().as_str());
        let threads = fs::read_dir(format!("/proc/{}/task", self.pid)).into_iter().flatten().flatten();
        !self.alive() && !threads.into_iter().any(is_other)
    }

    /// Sends a signal, and waits until the process is gone when the signal is to end it.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        if !self.alive() {
            return Ok(());
        }
        send(self.pid, signal)?;
        if matches!(signal, Signal::SIGKILL | Signal::SIGTERM | Signal::SIGINT) {
            let hint = || format!("inspect process {}", self.pid);
            return wait(&format!("the end of process {}", self.pid), GONE_WITHIN, hint, || Ok(self.ended()));
        }
        Ok(())
    }
}

/// Sends a signal to this id. A process that has ended meanwhile is no error.
pub fn send(pid: i32, signal: Signal) -> Result<()> {
    match kill(Pid::from_raw(pid), signal) {
        Err(Errno::ESRCH) | Ok(()) => Ok(()),
        Err(errno) => Err(errno).doing(|| format!("sending {signal} to process {pid}")),
    }
}

/// Starts a component in a namespace, in a session of its own, with a log, and records its identity.
/// The command must not fork into the background.
pub fn spawn(lab: &Lab, component: &str, netns: &str, command: &[String]) -> Result<Identity> {
    if find(lab, component).is_some() {
        return Err(Error::Refused(format!("{component} of lab {} is already running", lab.plan.name)));
    }
    let path = lab.log(component);
    let log = File::options()
        .create(true)
        .append(true)
        .open(&path)
        .doing(|| format!("opening {}", path.display()))?;
    let both = log.try_clone().doing(|| format!("opening {}", path.display()))?;
    let [program, arguments @ ..] = command else {
        return Err(Error::Refused(format!("{component} has no command")));
    };
    let inner = lab.command_in(netns, program.as_ref());
    let mut outer = Command::new("setsid");
    outer.arg(inner.get_program()).args(inner.get_args()).args(arguments);
    outer.env_clear().envs(inner.get_envs().filter_map(|(key, value)| Some((key, value?))));
    outer.env("STEERAGE_CACHE", lab.cache());
    let child = outer
        .current_dir(lab.folder())
        .stdin(Stdio::null())
        .stdout(log)
        .stderr(both)
        .spawn()
        .doing(|| format!("starting {component}"))?;
    let pid = i32::try_from(child.id()).unwrap_or_default();
    let gone = || Error::Refused(format!("{component} ended at once; see {}", path.display()));
    let identity = Identity::of(pid).ok_or_else(gone)?;
    let text = serde_json::to_string(&identity)
        .map_err(|source| Error::Json { path: component.to_owned(), source })?;
    write(&file(lab, component), &text)?;
    Ok(identity)
}

/// The component's process, while it runs.
pub fn find(lab: &Lab, component: &str) -> Option<Identity> {
    let identity: Identity = serde_json::from_slice(&fs::read(file(lab, component)).ok()?).ok()?;
    identity.alive().then_some(identity)
}

/// Stops a component and deletes its record. Does nothing if it does not run.
pub fn stop(lab: &Lab, component: &str, signal: Signal) -> Result<()> {
    if let Some(identity) = find(lab, component) {
        identity.signal(signal)?;
    }
    let _ = fs::remove_file(file(lab, component));
    Ok(())
}

/// All components that were started and not stopped, with their process if it runs.
pub fn all(lab: &Lab) -> Vec<(String, Option<Identity>)> {
    let entries = fs::read_dir(lab.folder().join("run")).into_iter().flatten().flatten();
    let mut names: Vec<_> = entries
        .filter_map(|entry| Some(entry.file_name().to_str()?.strip_suffix(".json")?.to_owned()))
        .collect();
    names.sort();
    names.into_iter().map(|name| (name.clone(), find(lab, &name))).collect()
}

/// Every process whose network namespace is one of these inodes.
pub fn in_namespaces(inodes: &BTreeSet<u64>) -> Vec<i32> {
    processes()
        .filter(|pid| {
            fs::metadata(format!("/proc/{pid}/ns/net")).is_ok_and(|metadata| inodes.contains(&metadata.ino()))
        })
        .collect()
}

/// The caller and its ancestors, which `down` must not kill when it is called from inside the lab.
pub fn ancestors() -> BTreeSet<i32> {
    let mut found = BTreeSet::new();
    let mut next = Some(Pid::this().as_raw());
    while let Some(pid) = next.filter(|pid| *pid > 0 && found.insert(*pid)) {
        next = fs::read_to_string(format!("/proc/{pid}/stat"))
            .ok()
            .and_then(|stat| after_name(&stat)?.get(1)?.parse().ok());
    }
    found
}

fn processes() -> impl Iterator<Item = i32> {
    fs::read_dir("/proc")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

fn file(lab: &Lab, component: &str) -> PathBuf {
    lab.folder().join("run").join(format!("{component}.json"))
}

fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

/// The fields of /proc/PID/stat after the name, which may itself hold blanks and parentheses.
fn after_name(stat: &str) -> Option<Vec<&str>> {
    Some(stat.rsplit_once(')')?.1.split_whitespace().collect())
}

/// The start time of a process; `None` for a zombie.
fn start_time(stat: &str) -> Option<u64> {
    let fields = after_name(stat)?;
    if matches!(*fields.first()?, "Z" | "X") {
        return None;
    }
    fields.get(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAT: &str = "42 (a) b) S 7 42 42 0 -1 0 0 0 0 0 1 1 0 0 20 0 1 0 987654 0 0";

    #[test]
    fn the_start_time_is_found_behind_any_name() {
        assert_eq!(start_time(STAT), Some(987_654));
        assert_eq!(after_name(STAT).unwrap()[1], "7");
    }

    #[test]
    fn a_dead_process_has_no_start_time() {
        assert_eq!(start_time(&STAT.replace(" S ", " Z ")), None);
        assert_eq!(start_time(""), None);
    }

    #[test]
    fn a_reused_id_is_another_process() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let identity = Identity::of(child.id().try_into().unwrap()).unwrap();
        assert!(identity.alive());
        assert!(!Identity { start: identity.start + 1, ..identity.clone() }.alive());
        assert!(!Identity { boot: "another".into(), ..identity.clone() }.alive());
        identity.signal(Signal::SIGKILL).unwrap();
        assert!(!identity.alive(), "a zombie does not run");
        child.wait().unwrap();
        assert!(ancestors().contains(&Pid::this().as_raw()));
    }

    /// A new API server could not listen: the first thread of the old one was a zombie, and others still held its sockets.
    #[test]
    fn a_process_has_ended_when_its_last_thread_has() {
        steerage_requirements::requires!(Program("python3"));
        let second_thread = "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(1.5,)).start(); \
                             ctypes.CDLL(None).pthread_exit(None)";
        let mut child = Command::new("python3").args(["-c", second_thread]).spawn().unwrap();
        let identity = Identity::of(child.id().try_into().unwrap()).unwrap();
        let begun = std::time::Instant::now();
        let since = |done: &dyn Fn() -> bool| {
            while !done() && begun.elapsed() < GONE_WITHIN {
                std::thread::sleep(Duration::from_millis(5));
            }
            begun.elapsed()
        };
        let zombie = since(&|| !identity.alive());
        let ended = since(&|| identity.ended());
        assert!(zombie + Duration::from_millis(500) < ended && ended < GONE_WITHIN, "{zombie:?}, {ended:?}");
        child.wait().unwrap();
    }
}
