// SPDX-License-Identifier: Apache-2.0
//! The folder of a link's pins: the pinned tcx link, and a folder of maps for each layout. Used by
//! `dataplane` and `attach`. Other programs may have files beside these: nothing else is removed.

use std::ffi::OsStr;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use steerage_edge_packet::maps::LAYOUT;

use crate::error::Error;
use crate::maps::NAMES;

/// The name of the pinned link.
pub(crate) const LINK: &str = "link";
/// A folder of pinned maps has this name and the number of their layout.
const MAPS: &str = "maps-";
/// No maps have this layout: maps of the own layout of which some are missing are kept under it.
const SET_ASIDE: u32 = 0;

/// The folder of the maps of this layout.
pub(crate) fn maps_folder(pins: &Path) -> PathBuf {
    folder(pins, LAYOUT)
}

fn folder(pins: &Path, layout: u32) -> PathBuf {
    pins.join(format!("{MAPS}{layout}"))
}

/// The folders of maps, of all layouts. None if `pins` is no folder, or another program's.
fn layouts(pins: &Path) -> Vec<PathBuf> {
    let is_number = |name: &str| !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_digit());
    let is_layout = |path: &PathBuf| {
        let name = path.file_name().and_then(OsStr::to_str).and_then(|name| name.strip_prefix(MAPS));
        name.is_some_and(is_number) && path.is_dir()
    };
    let entries = fs::read_dir(pins).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(is_layout).collect()
}

/// The folders of maps of other layouts. They exist until a program with maps of this layout is
/// attached.
pub(crate) fn other_layouts(pins: &Path) -> Vec<PathBuf> {
    let own = maps_folder(pins);
    layouts(pins).into_iter().filter(|path| *path != own).collect()
}

/// Whether all maps of this layout are pinned.
pub(crate) fn is_complete(maps: &Path) -> bool {
    NAMES.iter().all(|name| maps.join(name).exists())
}

/// Makes the folder of maps of this layout. Maps that were there and cannot be adopted are kept until
/// the next program is attached if the attached one may use them; otherwise they are removed.
pub(crate) fn make_room(pins: &Path) -> Result<(), Error> {
    let own = maps_folder(pins);
    let aside = folder(pins, SET_ASIDE);
    if own.is_dir() && other_layouts(pins).is_empty() {
        fs::rename(&own, &aside).map_err(Error::io("rename", own.display().to_string()))?;
    }
    remove_maps(&own)?;
    fs::create_dir_all(&own).map_err(Error::io("make", own.display().to_string()))
}

/// Once no program uses them.
pub(crate) fn remove_other_layouts(pins: &Path) -> Result<(), Error> {
    for path in other_layouts(pins) {
        // Another version's maps may have other names.
        fs::remove_dir_all(&path).map_err(Error::io("remove", path.display().to_string()))?;
    }
    Ok(())
}

/// The folders of other links beside this one.
pub(crate) fn siblings(pins: &Path) -> Vec<PathBuf> {
    let entries = pins.parent().map(fs::read_dir).into_iter().flatten().flatten().flatten();
    entries.map(|entry| entry.path()).filter(|path| path != pins && is_of_a_link(path)).collect()
}

/// Whether a folder has maps of a data plane.
pub(crate) fn is_of_a_link(pins: &Path) -> bool {
    !layouts(pins).is_empty()
}

/// Removes the pinned link, which detaches its program.
pub(crate) fn remove_link(pins: &Path) -> Result<(), Error> {
    remove_file(&pins.join(LINK))
}

/// Removes the link and the maps, and the folder if nothing else is in it.
pub(crate) fn remove(pins: &Path) -> Result<(), Error> {
    remove_link(pins)?;
    for maps in layouts(pins) {
        remove_maps(&maps)?;
        remove_empty(&maps)?;
    }
    remove_empty(pins)
}

fn remove_maps(maps: &Path) -> Result<(), Error> {
    NAMES.iter().try_for_each(|name| remove_file(&maps.join(name)))
}

fn remove_file(path: &Path) -> Result<(), Error> {
    found(fs::remove_file(path)).map_err(Error::io("remove", path.display().to_string()))
}

fn remove_empty(path: &Path) -> Result<(), Error> {
    match fs::remove_dir(path) {
        Err(error) if error.kind() == ErrorKind::DirectoryNotEmpty => Ok(()),
        result => found(result).map_err(Error::io("remove", path.display().to_string())),
    }
}

/// Nothing to remove is success.
fn found(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        result => result,
    }
}
