// SPDX-License-Identifier: Apache-2.0
//! The life cycle of labs: two side by side, one whose `up` is killed, and nothing left behind.
//!
//! Makes real clusters, hence ignored unless `hack/test e2e` asks for it. Needs root and `hack/prepare`.

#![allow(clippy::unwrap_used)] // the helpers of a test may fail it too; the lint knows test functions only

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use steerage_lab::{Lab, in_netns};

/// Names that no user gives.
const FIRST: &str = "lifea";
const SECOND: &str = "lifeb";

/// What a lab could leave behind on the machine.
#[derive(Debug, PartialEq, Eq)]
struct Machine {
    namespaces: BTreeSet<String>,
    mounts: BTreeSet<String>,
    links: BTreeSet<String>,
    tables: String,
    cgroups: BTreeSet<PathBuf>,
    processes: BTreeSet<String>,
    settings: Vec<String>,
}

impl Machine {
    fn look() -> Self {
        Self {
            namespaces: names("/run/netns").into_iter().filter(|name| ours(name)).collect(),
            mounts: text("/proc/self/mounts").lines().filter(|line| ours(line)).map(str::to_owned).collect(),
            links: names("/sys/class/net"),
            tables: said(&Command::new("nft").args(["list", "tables"]).output().unwrap()),
            cgroups: cgroups("/sys/fs/cgroup".into()),
            processes: processes(),
            settings: ["vm/overcommit_memory", "kernel/panic", "kernel/panic_on_oops", "net/ipv4/ip_forward"]
                .map(|name| text(&format!("/proc/sys/{name}")))
                .to_vec(),
        }
    }
}

#[test]
#[ignore = "makes real clusters: hack/test e2e"]
fn labs_live_side_by_side_and_leave_nothing() {
    for name in [FIRST, SECOND] {
        succeed(&["down", "--name", name]);
    }
    let before = Machine::look();
    assert!(
        before.namespaces.is_empty() && before.cgroups.is_empty() && before.processes.is_empty(),
        "{before:?}"
    );

    succeed(&["up", "--name", FIRST, "--workers", "1", "--edges", "0"]);
    for moment in [0, 400, 4000] {
        kill_in_the_making(Duration::from_millis(moment));
        succeed(&["down", "--name", SECOND]);
        let left = Machine::look();
        assert!(!format!("{left:?}").contains(SECOND), "after a kill at {moment} ms: {left:#?}");
    }
    assert_eq!(ready_nodes(FIRST), 1, "the first lab has not noticed");

    succeed(&["up", "--name", SECOND, "--workers", "1", "--edges", "1", "--service-proxy", "agent"]);
    let refused = lab(&["up", "--name", SECOND]).output().unwrap();
    assert!(!refused.status.success() && said(&refused).contains("hack/lab down"), "{}", said(&refused));
    faults();
    assert_eq!((ready_nodes(FIRST), ready_nodes(SECOND)), (1, 1));

    for name in [SECOND, FIRST] {
        succeed(&["down", "--name", name]);
        succeed(&["down", "--name", name]);
        assert!(Lab::open(name).is_err());
    }
    assert_eq!(Machine::look(), before);
}

/// A node that is off does not answer, one that is cut off neither, and both come back.
fn faults() {
    let second = Lab::open(SECOND).unwrap();
    let client = second.plan.clients()[0].netns.clone();
    let answers = || in_netns(&client, || reaches("10.77.1.1")).unwrap();
    // One packet may be late on a busy machine.
    let answers_soon = || (0..60).any(|_| answers());
    assert!(answers_soon());
    succeed(&["partition", "--name", SECOND, "node1"]);
    assert!(!answers());
    succeed(&["heal", "--name", SECOND, "node1"]);
    assert!(answers_soon());
    succeed(&["kill-node", "--name", SECOND, "node1"]);
    assert!(!answers());
    assert!(!lab(&["exec", "--name", SECOND, "node1", "--", "true"]).status().unwrap().success());
    succeed(&["start-node", "--name", SECOND, "node1"]);
    assert!(answers_soon());
    let inside = lab(&["exec", "--name", SECOND, "node1", "--", "hostname"]).output().unwrap();
    assert_eq!(said(&inside).trim(), "node1");
    succeed(&["stop-apiserver", "--name", SECOND]);
    assert!(!lab(&["kubectl", "--name", SECOND, "--", "get", "nodes"]).status().unwrap().success());
    succeed(&["start-apiserver", "--name", SECOND]);
}

/// Starts a second lab and kills its maker.
fn kill_in_the_making(after: Duration) {
    let mut up: Child = lab(&["up", "--name", SECOND]).stderr(Stdio::null()).spawn().unwrap();
    let start = Instant::now();
    while Lab::open(SECOND).is_err() {
        assert!(start.elapsed() < Duration::from_mins(1), "the lab's folder never came");
        sleep(Duration::from_millis(2));
    }
    sleep(after);
    up.kill().unwrap();
    up.wait().unwrap();
}

fn reaches(address: &str) -> bool {
    Command::new("ping")
        .args(["-c", "1", "-W", "1", address])
        .stdout(Stdio::null())
        .status()
        .unwrap()
        .success()
}

fn ready_nodes(name: &str) -> usize {
    let output = lab(&["kubectl", "--name", name, "--", "get", "nodes", "--no-headers"]).output().unwrap();
    said(&output).lines().filter(|line| line.contains(" Ready ")).count()
}

fn lab(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_steerage-lab"));
    command.args(arguments).env("STEERAGE_LAB", env!("CARGO_BIN_EXE_steerage-lab"));
    command
}

fn succeed(arguments: &[&str]) {
    let output = lab(arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", said(&output));
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

fn ours(text: &str) -> bool {
    text.contains(FIRST) || text.contains(SECOND)
}

fn text(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

fn names(folder: &str) -> BTreeSet<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

fn cgroups(root: PathBuf) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    let mut next = vec![root];
    while let Some(folder) = next.pop() {
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                if ours(&entry.file_name().to_string_lossy()) {
                    found.insert(entry.path());
                }
                next.push(entry.path());
            }
        }
    }
    found
}

/// Every process that was started from a lab's folder.
fn processes() -> BTreeSet<String> {
    let commands = names("/proc").into_iter().filter(|name| name.parse::<u32>().is_ok());
    let commands = commands.map(|pid| text(&format!("/proc/{pid}/cmdline")).replace('\0', " "));
    commands
        .filter(|line| [FIRST, SECOND].iter().any(|name| line.contains(&format!("labs/{name}/"))))
        .collect()
}
