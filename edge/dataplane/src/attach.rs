// SPDX-License-Identifier: Apache-2.0
//! Attaches the program to the link's ingress, and replaces an earlier one without a gap: by an
//! update of its pinned tcx link, or before Linux 6.6 by a change of its filter.

use std::io::ErrorKind;
use std::path::Path;

use aya::programs::links::{FdLink, LinkOrder, PinnedLink};
use aya::programs::tc::{
    NlOptions, SchedClassifierLink, SchedClassifierLinkId, TcAttachOptions, TcError, TcHandle,
    qdisc_add_clsact,
};
use aya::programs::{ProgramError, SchedClassifier, TcAttachType};
use aya::sys::SyscallError;

use crate::error::Error;
use crate::pins::{self, LINK};
use crate::syscall;

/// The filter's place, where there is no tcx.
const PRIORITY: u16 = 0x5354;
const HANDLE: TcHandle = TcHandle::new(0, 1);

/// How the program is attached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    /// By tcx, of Linux 6.6 and newer.
    Tcx,
    /// By a filter of the qdisc `clsact`.
    Filter,
}

/// Attaches the program, by tcx if the kernel has it and `hook` does not say otherwise. `pins`: the
/// folder of the pinned link.
pub(crate) fn attach(
    program: &mut SchedClassifier,
    interface: &str,
    pins: &Path,
    hook: Option<Hook>,
) -> Result<Hook, Error> {
    if hook != Some(Hook::Filter) {
        match by_tcx(program, interface, pins) {
            Ok(()) => {
                // A filter of an earlier process would forward each packet again.
                let _ = detach_filter(interface);
                remove_earlier_names(interface, pins)?;
                return Ok(Hook::Tcx);
            }
            Err(error) if hook == Some(Hook::Tcx) || !lacks_tcx(&error) => return Err(error),
            Err(error) => tracing::debug!(%error, "no tcx; attaching by a filter"),
        }
    }
    by_filter(program, interface)?;
    Ok(Hook::Filter)
}

fn lacks_tcx(error: &Error) -> bool {
    let Error::Program(ProgramError::SyscallError(SyscallError { io_error, .. })) = error else {
        return false;
    };
    matches!(io_error.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP | libc::ENOSYS | libc::EPERM))
}

fn by_tcx(program: &mut SchedClassifier, interface: &str, pins: &Path) -> Result<(), Error> {
    let pin = pins.join(LINK);
    if is_pinned_link_of(interface, pins)? {
        let link = PinnedLink::from_pin(&pin)?;
        let id = program.attach_to_link(FdLink::from(link).try_into()?)?;
        return keep(program, id);
    }
    let order = TcAttachOptions::TcxOrder(LinkOrder::default());
    let id = program.attach_with_options(interface, TcAttachType::Ingress, order)?;
    let link: FdLink = program.take_link(id)?.try_into()?;
    // That of an interface that is gone, or had this name.
    pins::remove_link(pins)?;
    // Dropping the pinned link closes only this process's descriptor of it.
    link.pin(&pin)
        .map_err(|error| Error::io("pin", pin.display().to_string())(std::io::Error::other(error)))?;
    Ok(())
}

/// The link outlives this process: it is pinned, or a filter.
fn keep(program: &mut SchedClassifier, id: SchedClassifierLinkId) -> Result<(), Error> {
    std::mem::forget(program.take_link(id)?);
    Ok(())
}

fn by_filter(program: &mut SchedClassifier, interface: &str) -> Result<(), Error> {
    match qdisc_add_clsact(interface) {
        Err(TcError::NetlinkError(error)) if error.raw_os_error() == Some(libc::EEXIST) => {}
        result => result?,
    }
    let replaced = filter(interface).map(|link| program.attach_to_link(link))?;
    let id = match replaced {
        Ok(id) => id,
        Err(error) if is_missing(&error) => {
            let options = NlOptions { priority: PRIORITY, handle: HANDLE, classid: None };
            let options = TcAttachOptions::Netlink(options);
            program.attach_with_options(interface, TcAttachType::Ingress, options)?
        }
        Err(error) => return Err(error.into()),
    };
    keep(program, id)
}

fn filter(interface: &str) -> Result<SchedClassifierLink, Error> {
    SchedClassifierLink::attached(interface, TcAttachType::Ingress, PRIORITY, HANDLE, None)
        .map_err(Error::io("find", interface))
}

fn is_missing(error: &ProgramError) -> bool {
    let code = match error {
        ProgramError::TcError(TcError::NetlinkError(error)) | ProgramError::NetlinkError(error) => {
            error.raw_os_error()
        }
        _ => None,
    };
    matches!(code, Some(libc::ENOENT | libc::EINVAL))
}

/// Whether packets on the link pass by this program.
pub(crate) fn has_tcx(program: &SchedClassifier, interface: &str) -> Result<bool, Error> {
    let attached = syscall::tcx(interface).map_err(Error::io("list the programs of", interface))?;
    Ok(attached.programs.contains(&program.info()?.id()))
}

/// Whether the pinned link is attached to the interface; not if there is none.
pub(crate) fn is_pinned_link_of(interface: &str, pins: &Path) -> Result<bool, Error> {
    let Some(link) = pinned_link(pins)? else { return Ok(false) };
    let attached = syscall::tcx(interface).map_err(Error::io("list the programs of", interface))?;
    Ok(attached.links.contains(&link.id))
}

/// Removes the pins beside these whose link is attached to the same interface, which had another name
/// then, or to one that is gone: that program would take the packets by maps that nobody writes.
fn remove_earlier_names(interface: &str, pins: &Path) -> Result<(), Error> {
    let siblings = pins::siblings(pins);
    if siblings.is_empty() {
        return Ok(());
    }
    let attached = syscall::tcx(interface).map_err(Error::io("list the programs of", interface))?;
    for sibling in siblings {
        let link = match pinned_link(&sibling) {
            Ok(Some(link)) => link,
            Ok(None) => continue,
            Err(error) => {
                tracing::debug!(folder = %sibling.display(), %error, "no link of a data plane; skipped");
                continue;
            }
        };
        if link.ifindex == 0 || attached.links.contains(&link.id) {
            tracing::info!(
                interface,
                folder = %sibling.display(),
                "removing the eBPF program of an earlier name of the interface"
            );
            pins::remove(&sibling)?;
        }
    }
    Ok(())
}

/// The link that an earlier process has pinned; `None` if there is none by tcx.
fn pinned_link(pins: &Path) -> Result<Option<syscall::TcxLink>, Error> {
    let pin = pins.join(LINK);
    match syscall::pinned_link(&pin) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        result => result.map(Some).map_err(Error::io("open", pin.display().to_string())),
    }
}

/// Removes the filter; none is success, and no such interface.
fn detach_filter(interface: &str) -> Result<(), Error> {
    let filter = match filter(interface) {
        Err(Error::Io { source, .. }) if source.raw_os_error() == Some(libc::ENODEV) => return Ok(()),
        result => result?,
    };
    match aya::programs::links::Link::detach(filter) {
        Err(error) if is_missing(&error) => Ok(()),
        result => Ok(result?),
    }
}

/// Detaches the program of an earlier process; none is success.
pub(crate) fn detach(interface: &str, pins: &Path) -> Result<(), Error> {
    pins::remove_link(pins)?;
    detach_filter(interface)
}
