// SPDX-License-Identifier: Apache-2.0
//! Target groups that AWS does not delete, because something uses them, and when each is tried again. No I/O.

use std::collections::BTreeMap;
use std::time::Duration;

use steerage_provider_api::Error;
use tokio::time::Instant;

use crate::delete::{is_overdue, retry_after};
use crate::reasons;

/// By ARN.
#[derive(Debug, Default)]
pub(crate) struct GroupsInUse(BTreeMap<String, InUse>);

#[derive(Clone, Copy, Debug)]
struct InUse {
    since: Instant,
    /// When it is tried again.
    next: Instant,
}

/// What to do about a target group that AWS does not delete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RetryDeletion {
    pub(crate) after: Duration,
    /// Whether AWS should have released it by now, so that something else uses it.
    pub(crate) is_overdue: bool,
}

impl GroupsInUse {
    /// AWS did not delete the group. It is tried again after `shortest` at the earliest.
    pub(crate) fn refused(&mut self, arn: &str, shortest: Duration) -> RetryDeletion {
        let now = Instant::now();
        let since = self.0.get(arn).map_or(now, |known| known.since);
        let (after, is_overdue) = retry_after(Some(since), shortest);
        self.0.insert(arn.to_owned(), InUse { since, next: now + after });
        RetryDeletion { after, is_overdue }
    }

    /// The group is gone.
    pub(crate) fn deleted(&mut self, arn: &str) {
        self.0.remove(arn);
    }

    /// The same as the last [`refused`](Self::refused), with the time that is left; `None` if the group may be tried now.
    pub(crate) fn must_wait(&self, arn: &str) -> Option<RetryDeletion> {
        let known = self.0.get(arn)?;
        let after = known.next.saturating_duration_since(Instant::now());
        (!after.is_zero()).then(|| RetryDeletion { after, is_overdue: is_overdue(known.since) })
    }
}

/// What users are told of a target group that keeps a Service from being deleted, or one of its name from being created again.
pub(crate) fn in_use(name: &str, arn: &str) -> Error {
    let message = format!(
        "AWS does not delete the target group {name} of the deleted Service, because another load balancer uses it. The finalizer stays \
         until the group is deleted. Steerage tries again at the next resync. Remove the listeners and rules that forward to the group. \
         This shows their load balancer: aws elbv2 describe-target-groups --target-group-arns {arn}"
    );
    Error::invalid(reasons::TARGET_GROUP_IN_USE, message)
}
