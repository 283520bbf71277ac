// SPDX-License-Identifier: Apache-2.0
//! What a test needs of the machine: root, commands, a Kubernetes API server, moto, OpenStack's APIs, the stand-ins of clouds. A test that
//! lacks something skips with a printed reason, so that `hack/test quick` passes for everybody. With `STEERAGE_REQUIRE_ALL=1`, which `hack/test` sets, it fails
//! instead, so that nothing is skipped there. With `STEERAGE_QUICK=1`, which `hack/test quick` sets, it skips whatever the machine
//! has, so that quick means the same for everybody. A dependency of tests only.

mod netns;

use std::collections::BTreeSet;
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use nix::sched::{CloneFlags, unshare};

pub use netns::in_new_netns;

/// Something that a machine may lack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Requirement {
    /// The user id 0.
    Root,
    /// Permission to make network namespaces: root.
    NetworkNamespace,
    /// A program in `PATH`.
    Program(&'static str),
    /// Attachment of eBPF programs by tcx: Linux 6.6, by the kernel's version, and not by what a program under test finds out.
    Tcx,
    /// etcd and kube-apiserver, which `hack/prepare` builds.
    KubeApiserver,
    /// The virtual environment with moto, which `hack/prepare` makes.
    Moto,
    /// The virtual environment with Keystone, Neutron and Octavia, which `hack/prepare` makes.
    OpenStack,
    /// The virtual environment of the stand-ins of GCE and Azure, which `hack/prepare` makes.
    Clouds,
    /// An environment variable that is set and not empty.
    Variable(&'static str),
}

impl Requirement {
    /// Checks the machine; the error says what is missing and what to do.
    ///
    /// # Errors
    /// If the requirement is not met.
    pub fn check(self) -> Result<(), String> {
        if !matches!(self, Self::Program(_) | Self::Variable(_)) && variable("STEERAGE_QUICK").is_some() {
            return Err(format!("{} are left out by hack/test quick", self.as_str()));
        }
        match self {
            Self::Root => root(),
            Self::NetworkNamespace => network_namespace(),
            Self::Tcx => tcx(&std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default()),
            Self::Program(name) => program(name),
            Self::KubeApiserver => kube_apiserver().map(drop),
            Self::Moto => moto_python().map(drop),
            Self::OpenStack => openstack_python().map(drop),
            Self::Clouds => clouds_python().map(drop),
            Self::Variable(name) => variable(name).map(drop).ok_or_else(|| format!("{name} is not set")),
        }
    }

    fn as_str(self) -> &'static str {
        match self {
            Self::Root => "tests as root",
            Self::NetworkNamespace => "tests with packets",
            Self::Tcx => "tests of tcx",
            Self::KubeApiserver => "tests on an API server",
            Self::Moto => "tests on moto",
            Self::OpenStack => "tests on OpenStack's APIs",
            Self::Clouds => "tests on the stand-ins of clouds",
            Self::Program(name) | Self::Variable(name) => name,
        }
    }
}

/// Returns from the calling test, with a printed reason, unless the machine meets every [`Requirement`]. A test that returns a
/// value names it first, as those in `proptest!` do: `requires!(Ok(()); NetworkNamespace)`.
#[macro_export]
macro_rules! requires {
    ($value:expr; $($requirement:ident $(($argument:expr))?),+ $(,)?) => {
        if $crate::skips(&[$($crate::Requirement::$requirement $(($argument))?),+]) {
            return $value;
        }
    };
    ($($requirement:ident $(($argument:expr))?),+ $(,)?) => { $crate::requires!((); $($requirement $(($argument))?),+) };
}

/// Whether the calling test has to skip; prints the reason once per test. Called by [`requires!`].
///
/// # Panics
/// If a requirement is not met and `STEERAGE_REQUIRE_ALL` is set.
#[allow(clippy::panic, reason = "fails the calling test")]
pub fn skips(requirements: &[Requirement]) -> bool {
    static PRINTED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let Some(reason) = requirements.iter().find_map(|requirement| requirement.check().err()) else {
        return false;
    };
    assert!(variable("STEERAGE_REQUIRE_ALL").is_none(), "STEERAGE_REQUIRE_ALL is set, and {reason}");
    let thread = std::thread::current();
    let line = format!("skipped: {}: {reason}\n", thread.name().unwrap_or("a test"));
    if PRINTED.lock().unwrap_or_else(PoisonError::into_inner).insert(line.clone()) {
        // Written past the print macros: the test harness shows what those print only for failed tests.
        let _ = std::io::stderr().write_all(line.as_bytes());
    }
    true
}

/// The folder of etcd and kube-apiserver: `KUBEBUILDER_ASSETS` if that is set, else the project's cache.
///
/// # Errors
/// If there is no such folder, or a program is missing in it.
pub fn kube_apiserver() -> Result<PathBuf, String> {
    let folder = variable("KUBEBUILDER_ASSETS").or_else(|| Some(cache()?.join("bin")));
    let folder = folder.ok_or("neither KUBEBUILDER_ASSETS nor HOME is set")?;
    for name in ["etcd", "kube-apiserver"] {
        let path = folder.join(name);
        if !path.exists() {
            return Err(format!(
                "{} is missing: run hack/prepare, or set KUBEBUILDER_ASSETS",
                path.display()
            ));
        }
    }
    Ok(folder)
}

/// The Python interpreter of the virtual environment that has moto.
///
/// # Errors
/// If the environment is missing.
pub fn moto_python() -> Result<PathBuf, String> {
    let venv = cache().ok_or("neither STEERAGE_CACHE nor HOME is set")?.join("venv");
    if venv.join("bin/moto_server").exists() {
        return Ok(venv.join("bin/python"));
    }
    Err(format!("moto is not in {}: run hack/prepare", venv.display()))
}

/// The Python interpreter of the virtual environment that has Keystone, Neutron and Octavia.
///
/// # Errors
/// If the environment is missing.
pub fn openstack_python() -> Result<PathBuf, String> {
    let venv = cache().ok_or("neither STEERAGE_CACHE nor HOME is set")?.join("openstack");
    if venv.join("bin/octavia-api").exists() {
        return Ok(venv.join("bin/python"));
    }
    Err(format!("OpenStack's APIs are not in {}: run hack/prepare openstack", venv.display()))
}

/// The Python interpreter of the virtual environment of the stand-ins of GCE and Azure.
///
/// # Errors
/// If the environment is missing.
pub fn clouds_python() -> Result<PathBuf, String> {
    let venv = cache().ok_or("neither STEERAGE_CACHE nor HOME is set")?.join("clouds");
    if venv.join("ready").exists() {
        return Ok(venv.join("bin/python"));
    }
    Err(format!("the stand-ins of clouds are not in {}: run hack/prepare clouds", venv.display()))
}

/// The folder of everything that `hack/prepare` builds, as in `hack/env`.
fn cache() -> Option<PathBuf> {
    let base = || variable("XDG_CACHE_HOME").or_else(|| Some(variable("HOME")?.join(".cache")));
    variable("STEERAGE_CACHE").or_else(|| Some(base()?.join("steerage")))
}

fn variable(name: &str) -> Option<PathBuf> {
    std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

fn root() -> Result<(), String> {
    if nix::unistd::geteuid().is_root() { Ok(()) } else { Err("this needs root".into()) }
}

/// Tried on a thread of its own: a network namespace belongs to the thread that made it.
fn network_namespace() -> Result<(), String> {
    match std::thread::spawn(|| unshare(CloneFlags::CLONE_NEWNET)).join() {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => Err(format!("network namespaces need root: {error}")),
        Err(_) => Err("the probe for network namespaces panicked".into()),
    }
}

/// Of a kernel's release, such as `6.1.0-50-cloud-amd64`.
fn tcx(release: &str) -> Result<(), String> {
    let mut numbers = release.split(['.', '-']).map_while(|number| number.trim().parse::<u32>().ok());
    if numbers.next().zip(numbers.next()) >= Some((6, 6)) {
        return Ok(());
    }
    Err(format!("tcx needs Linux 6.6, and this is {}", release.trim()))
}

fn program(name: &str) -> Result<(), String> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    if std::env::split_paths(&path).any(|folder| folder.join(name).is_file()) {
        return Ok(());
    }
    Err(format!("the program {name} is not in PATH"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_has_tcx_since_its_version() {
        for (release, has_tcx) in [
            ("6.6.0\n", true),
            ("6.12.117+deb13-cloud-amd64\n", true),
            ("7.0", true),
            ("6.5.13-9-generic", false),
            ("5.15.0-204-generic", false),
            ("", false),
        ] {
            assert_eq!(tcx(release).is_ok(), has_tcx, "{release}");
        }
    }

    #[test]
    fn missing_program_is_named() {
        assert_eq!(Requirement::Program("sh").check(), Ok(()));
        let error = Requirement::Program("no-such-program").check();
        assert_eq!(error, Err("the program no-such-program is not in PATH".to_owned()));
    }
}
