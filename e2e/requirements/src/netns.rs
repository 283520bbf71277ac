// SPDX-License-Identifier: Apache-2.0
//! A network namespace of a test's own.

use nix::sched::{CloneFlags, unshare};

/// Runs `test` on a new thread in a new, empty network namespace, which goes with the thread. Needs root: see
/// [`Requirement::NetworkNamespace`](crate::Requirement::NetworkNamespace).
///
/// # Panics
/// If the namespace cannot be made, or `test` panics.
pub fn in_new_netns<T: Send>(test: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let body = || {
            let made = unshare(CloneFlags::CLONE_NEWNET);
            assert!(made.is_ok(), "cannot make a network namespace: {made:?}");
            test()
        };
        match scope.spawn(body).join() {
            Ok(value) => value,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}
