// SPDX-License-Identifier: Apache-2.0
//! The state of a Service while one provider call has it. No I/O.

use std::ops::{Deref, DerefMut};

use tokio::sync::OwnedMutexGuard;
use tokio::time::Instant;

use crate::state::ServiceState;

/// The state, which no other call can have meanwhile.
///
/// A change is noted before it is sent. It may wait for its budget then, and its answer may be late or never come. So all changes of a
/// call count as made when the call ends, or is abandoned: what AWS shows soon after that may be an old state.
pub(crate) struct Entry {
    state: OwnedMutexGuard<ServiceState>,
    /// The times of the last changes, when the call began.
    before: [Option<Instant>; 3],
}

impl Entry {
    /// The state for a call that began then.
    pub(crate) fn new(mut state: OwnedMutexGuard<ServiceState>, began: Instant) -> Self {
        state.began = Some(began);
        let before = [state.written, state.subnets.written, state.security_group_created];
        Self { state, before }
    }
}

impl Deref for Entry {
    type Target = ServiceState;

    fn deref(&self) -> &ServiceState {
        &self.state
    }
}

impl DerefMut for Entry {
    fn deref_mut(&mut self) -> &mut ServiceState {
        &mut self.state
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        let ServiceState { written, subnets, security_group_created, .. } = &mut *self.state;
        for (at, before) in
            [written, &mut subnets.written, security_group_created].into_iter().zip(self.before)
        {
            if *at != before {
                *at = Some(Instant::now());
            }
        }
    }
}
