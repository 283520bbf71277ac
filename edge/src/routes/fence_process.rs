// SPDX-License-Identifier: Apache-2.0
//! The first process's side of the [`fence`](super::fence): starts the second process and renews the routes' lifetime.

use std::env;
use std::io::{self, Read as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdin, Command, Stdio};

use nix::fcntl::{FcntlArg, OFlag, fcntl};

use super::fence::{Expiry, TAKEN};

/// The running fence.
#[derive(Debug)]
pub(super) struct FenceProcess {
    child: Child,
    input: ChildStdin,
}

/// Why there is no fence.
#[derive(Debug, thiserror::Error)]
pub(super) enum FenceError {
    /// The fence of another process on this host has the table.
    #[error("the fence of another process serves the table")]
    Taken,
    #[error("cannot start the process that removes routes")]
    Start(#[source] io::Error),
    #[error("the process that removes routes does not read")]
    Write(#[source] io::Error),
    #[error("the process that removes routes has ended: {0}")]
    Ended(std::process::ExitStatus),
}

impl FenceProcess {
    /// Starts the fence with the flags of this process. Returns the lifetime that its predecessor has left, if there was one.
    pub(super) fn start() -> Result<(Self, Option<Expiry>), FenceError> {
        // The file may have been replaced by an upgrade.
        let mut child = Command::new("/proc/self/exe")
            .arg0("steerage-edge")
            .args(env::args_os().skip(1))
            .arg("route-fence")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // Ctrl-C is for the first process.
            .process_group(0)
            .spawn()
            .map_err(FenceError::Start)?;
        let mut bytes = [0; Expiry::LENGTH];
        let is_ready = child.stdout.take().is_some_and(|mut out| out.read_exact(&mut bytes).is_ok());
        match child.stdin.take() {
            Some(input) if is_ready => {
                // A fence that does not read must not stop this process.
                let is_set = fcntl(&input, FcntlArg::F_SETFL(OFlag::O_NONBLOCK));
                is_set.map_err(|errno| FenceError::Start(errno.into()))?;
                Ok((Self { child, input }, Expiry::from_bytes(bytes)))
            }
            _ => {
                let status = child.wait().map_err(FenceError::Start)?;
                let is_taken = status.code() == Some(TAKEN.into());
                Err(if is_taken { FenceError::Taken } else { FenceError::Ended(status) })
            }
        }
    }

    /// Passes the lifetime on. After an error the fence is gone, also one that does not read.
    pub(super) fn renew(&mut self, expiry: Expiry) -> Result<(), FenceError> {
        if let Some(status) = self.child.try_wait().map_err(FenceError::Start)? {
            return Err(FenceError::Ended(status));
        }
        self.input.write_all(&expiry.to_bytes()).map_err(|error| {
            let _ = self.child.kill().and_then(|()| self.child.wait());
            FenceError::Write(error)
        })
    }
}
