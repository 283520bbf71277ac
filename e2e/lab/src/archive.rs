// SPDX-License-Identifier: Apache-2.0
//! Reads image archives: the image's name, its JSON files, and a version that changes with the file.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::command::run;
use crate::error::{Doing, Error, Result};
use crate::state::Lab;

/// The first name of the image in `<stem>.tar` of the lab's images.
pub fn name_of(lab: &Lab, stem: &str) -> Result<String> {
    let archive = lab.images().join(format!("{stem}.tar"));
    let manifest = manifest(&archive)?;
    let name = manifest[0]["RepoTags"][0].as_str();
    name.map(str::to_owned).ok_or_else(|| {
        Error::Refused(format!(
            "{} contains no image name; build it again with hack/prepare or hack/images",
            archive.display()
        ))
    })
}

/// The docker-archive manifest of an archive.
pub fn manifest(archive: &Path) -> Result<Value> {
    json_in(archive, "manifest.json")
}

/// A JSON file of an archive.
pub fn json_in(archive: &Path, file: &str) -> Result<Value> {
    let text = run(Command::new("tar").arg("-xOf").arg(archive).arg(file))?;
    serde_json::from_str(&text).map_err(|source| Error::Json { path: archive.display().to_string(), source })
}

/// A version that changes whenever the file is written.
pub fn version(archive: &Path) -> Result<String> {
    let metadata = fs::metadata(archive).doing(|| format!("reading {}", archive.display()))?;
    Ok(format!("{}.{}.{}", metadata.mtime(), metadata.mtime_nsec(), metadata.size()))
}
