// SPDX-License-Identifier: Apache-2.0
//! Attaches the program to the link's ingress, and replaces an earlier one without a gap: by an
//! update of its pinned tcx link, or before Linux 6.6 by a change of its filter.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use aya::programs::links::{FdLink, LinkError, LinkOrder, PinnedLink};
use aya::programs::tc::{
    NlOptions, SchedClassifierLink, SchedClassifierLinkId, TcAttachOptions, TcError, TcHandle,
    qdisc_add_clsact,
};
use aya::programs::{ProgramError, SchedClassifier, TcAttachType};
use aya::sys::SyscallError;

use crate::error::Error;
use crate::syscall;

/// The filter's place, where there is no tcx.
const PRIORITY: u16 = 0x5354;
const HANDLE: TcHandle = TcHandle::new(0, 1);
/// The name of the pinned link.
pub(crate) const LINK: &str = "link";

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
        match by_tcx(program, interface, &pins.join(LINK)) {
            Ok(()) => {
                // A filter of an earlier process would forward each packet again.
                let _ = detach_filter(interface);
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

fn by_tcx(program: &mut SchedClassifier, interface: &str, pin: &Path) -> Result<(), Error> {
    match PinnedLink::from_pin(pin) {
        Ok(link) => match program.attach_to_link(FdLink::from(link).try_into()?) {
            Ok(id) => return keep(program, id),
            // The interface of the pinned link is gone.
            Err(ProgramError::SyscallError(SyscallError { io_error, .. }))
                if io_error.raw_os_error() == Some(libc::ENOLINK) =>
            {
                fs::remove_file(pin).map_err(Error::io("remove", pin.display().to_string()))?;
            }
            Err(error) => return Err(error.into()),
        },
        Err(LinkError::SyscallError(SyscallError { io_error, .. }))
            if io_error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error.into()),
    }
    let order = TcAttachOptions::TcxOrder(LinkOrder::default());
    let id = program.attach_with_options(interface, TcAttachType::Ingress, order)?;
    let link: FdLink = program.take_link(id)?.try_into()?;
    // Dropping the pinned link closes only this process's descriptor of it.
    link.pin(pin)
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
    let programs = syscall::tcx_programs(interface).map_err(Error::io("list the programs of", interface))?;
    Ok(programs.contains(&program.info()?.id()))
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
    let pin = pins.join(LINK);
    match fs::remove_file(&pin) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            return Err(Error::io("remove", pin.display().to_string())(error));
        }
        _ => {}
    }
    detach_filter(interface)
}
