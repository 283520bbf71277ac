// SPDX-License-Identifier: Apache-2.0
//! For tests: a network namespace of one's own. Needs root. Behind the feature `testing`.

use nix::sched::{CloneFlags, unshare};

/// Runs `test` on a new thread in a new, empty network namespace, which goes with the thread.
///
/// # Panics
/// When the namespace can't be made, or `test` panics.
pub fn in_new_netns<T: Send>(test: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let body = || {
            let made = unshare(CloneFlags::CLONE_NEWNET);
            assert!(made.is_ok(), "unshare: {made:?} (these tests need root)");
            test()
        };
        match scope.spawn(body).join() {
            Ok(value) => value,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}
