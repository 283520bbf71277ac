// SPDX-License-Identifier: Apache-2.0
//! Finds image archives, and loads those that changed into nodes.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::path::PathBuf;
use std::thread;

use crate::addresses::Host;
use crate::archive::version;
use crate::command::run;
use crate::config::CONTAINERD_SOCKET;
use crate::error::{Doing, Error, Result};
use crate::node;
use crate::state::{Lab, write};

/// Images that `install` loads; `up` leaves them out.
const OWN: &str = "steerage-";

/// The archives that every node of a lab gets at its first start.
pub fn common(lab: &Lab) -> Result<Vec<PathBuf>> {
    let archives = archives(lab, |name| !name.starts_with(OWN))?;
    if archives.is_empty() {
        return Err(Error::Refused(format!("no images in {}: run hack/prepare", lab.images().display())));
    }
    Ok(archives)
}

/// The archives of Steerage itself.
pub fn own(lab: &Lab) -> Result<Vec<PathBuf>> {
    archives(lab, |name| name.starts_with(OWN))
}

fn archives(lab: &Lab, wanted: impl Fn(&str) -> bool) -> Result<Vec<PathBuf>> {
    let folder = lab.images();
    let entries =
        fs::read_dir(&folder).doing(|| format!("reading {}: run hack/prepare", folder.display()))?;
    let mut found: Vec<_> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "tar"))
        .filter(|path| path.file_stem().and_then(OsStr::to_str).is_some_and(&wanted))
        .collect();
    found.sort();
    Ok(found)
}

/// Loads archives into nodes, all nodes at once; gives back how many loads were needed.
pub fn load(lab: &Lab, nodes: &[Host], archives: &[PathBuf]) -> Result<usize> {
    thread::scope(|scope| {
        let loads: Vec<_> = nodes.iter().map(|host| scope.spawn(|| load_into(lab, host, archives))).collect();
        loads
            .into_iter()
            .map(|load| {
                load.join().unwrap_or_else(|_| Err(Error::Refused("loading an image panicked".into())))
            })
            .sum()
    })
}

fn load_into(lab: &Lab, host: &Host, archives: &[PathBuf]) -> Result<usize> {
    let path = lab.node_folder(&host.name).join("images.json");
    let mut known: BTreeMap<String, String> =
        fs::read(&path).ok().and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default();
    let mut loads = 0;
    for archive in archives {
        let name = archive.display().to_string();
        let version = version(archive)?;
        if known.get(&name) == Some(&version) {
            continue;
        }
        let mut import = node::command(lab, host, "ctr".as_ref())?;
        import.args(["-a", CONTAINERD_SOCKET, "-n", "k8s.io", "images", "import"]).arg(archive);
        run(&mut import)?;
        loads += 1;
        known.insert(name, version);
        let text = serde_json::to_string_pretty(&known)
            .map_err(|source| Error::Json { path: path.display().to_string(), source })?;
        write(&path, &text)?;
    }
    Ok(loads)
}
