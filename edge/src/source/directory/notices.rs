// SPDX-License-Identifier: Apache-2.0
//! Which files of a directory may have changed, as the kernel says. `directory` asks, and reads them.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, WatchDescriptor};
use steerage_model::chain;
use tokio::io::unix::AsyncFd;

use super::is_json;
use crate::logged_problem::LoggedProblem;
use crate::timer::sleep_until;

/// How often all files' times are read, in case the kernel has missed something, as for a directory of another machine.
pub(super) const SLOW_INTERVAL: Duration = Duration::from_secs(5);
/// The same where the kernel reports no changes.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Which files may have changed.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Look {
    /// All whose times differ, and these.
    AtAll(BTreeSet<PathBuf>),
    At(BTreeSet<PathBuf>),
}

impl Look {
    pub(super) fn at_all() -> Self {
        Self::AtAll(BTreeSet::new())
    }
}

/// Waits until a file may have changed, or until `due`.
pub(super) async fn next_look(directory: &Path, notices: Option<&mut Notices>, due: Option<Instant>) -> Look {
    let Some(notices) = notices.filter(|notices| notices.watch.is_some()) else {
        tokio::time::sleep(POLL_INTERVAL).await;
        return Look::at_all();
    };
    tokio::select! {
        look = notices.next(directory) => look,
        () = sleep_until(due.map(Into::into)) => Look::At(BTreeSet::new()),
        () = tokio::time::sleep(SLOW_INTERVAL) => Look::at_all(),
    }
}

/// What the kernel says of the directory.
pub(super) struct Notices {
    inotify: AsyncFd<Descriptor>,
    /// `None` while the kernel watches no directory.
    watch: Option<WatchDescriptor>,
    problem: LoggedProblem,
}

struct Descriptor(Inotify);

impl AsRawFd for Descriptor {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

#[allow(unsafe_code, reason = "tokio requires a descriptor that stays open and the same")]
fn register(descriptor: Descriptor) -> std::io::Result<AsyncFd<Descriptor>> {
    // SAFETY: a `Descriptor` owns one descriptor for its whole life, and the `AsyncFd` owns the `Descriptor`.
    unsafe { Ok(AsyncFd::register(descriptor)?) }
}

impl Notices {
    /// Watches nothing yet.
    pub(super) fn open(directory: &Path) -> Option<Self> {
        let open = || register(Descriptor(Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)?));
        match open() {
            Ok(inotify) => Some(Self { inotify, watch: None, problem: LoggedProblem::default() }),
            Err(error) => {
                warn_of_polling(directory, &chain(&error));
                None
            }
        }
    }

    /// Watches the directory that has this path now: it may have been replaced. Called before all files' times are read.
    pub(super) fn watch(&mut self, directory: &Path) {
        let whole = AddWatchFlags::IN_CLOSE_WRITE | AddWatchFlags::IN_MOVED_TO;
        let gone = AddWatchFlags::IN_MOVED_FROM | AddWatchFlags::IN_DELETE;
        let of_directory = AddWatchFlags::IN_MOVE_SELF | AddWatchFlags::IN_DELETE_SELF;
        let inotify = &self.inotify.get_ref().0;
        // Of the same directory it is the same watch.
        let (watch, problem) = match inotify.add_watch(directory, whole | gone | of_directory) {
            Ok(watch) => (Some(watch), None),
            // Whoever reads it says so.
            Err(Errno::ENOENT) => (None, None),
            Err(error) => (None, Some(chain(&error))),
        };
        let old = std::mem::replace(&mut self.watch, watch).filter(|old| Some(*old) != watch);
        if let Some(old) = old {
            // Fails if the old directory is gone, and the watch with it.
            let _ = inotify.rm_watch(old);
        }
        if self.problem.set(problem.clone())
            && let Some(problem) = problem
        {
            warn_of_polling(directory, &problem);
        }
    }

    /// Waits until something changes.
    pub(super) async fn next(&mut self, directory: &Path) -> Look {
        let (mut changed, mut is_all) = (BTreeSet::new(), false);
        loop {
            let Ok(mut ready) = self.inotify.readable_mut().await else {
                // As if nothing was said.
                tokio::time::sleep(POLL_INTERVAL).await;
                return Look::AtAll(changed);
            };
            while let Ok(read) = ready.try_io(|fd| Ok(fd.get_ref().0.read_events()?)) {
                let Ok(events) = read else {
                    tokio::time::sleep(POLL_INTERVAL).await;
                    return Look::AtAll(changed);
                };
                for event in events {
                    let is_lost = event.mask.contains(AddWatchFlags::IN_Q_OVERFLOW);
                    if !is_lost && Some(event.wd) != self.watch {
                        // Of a directory that was replaced.
                        continue;
                    }
                    match event.name {
                        Some(name) if is_json(Path::new(&name)) => drop(changed.insert(directory.join(name))),
                        // A link that leads elsewhere now, such as ..data of a mounted ConfigMap; lost notices; the directory was moved or
                        // deleted.
                        Some(_) => is_all |= event.mask.contains(AddWatchFlags::IN_MOVED_TO),
                        None => is_all = true,
                    }
                }
            }
            if is_all {
                return Look::AtAll(changed);
            }
            if !changed.is_empty() {
                return Look::At(changed);
            }
        }
    }
}

fn warn_of_polling(directory: &Path, error: &str) {
    tracing::warn!(
        directory = %directory.display(),
        error,
        "the kernel does not report changes of this directory; reading all files' times ten times a second"
    );
}
