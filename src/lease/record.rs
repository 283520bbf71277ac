// SPDX-License-Identifier: Apache-2.0
//! The fields of the Lease object that candidates read and write. Pure.

use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LeaseRecord {
    /// `metadata.resourceVersion`.
    pub(super) version: String,
    /// `None` if it was released.
    pub(super) holder: Option<String>,
    /// How long others must wait after the last change.
    pub(super) duration: Option<Duration>,
}

impl LeaseRecord {
    pub(super) fn of(lease: &Lease) -> Self {
        let spec = lease.spec.as_ref();
        let seconds = spec.and_then(|spec| spec.lease_duration_seconds);
        Self {
            version: lease.metadata.resource_version.clone().unwrap_or_default(),
            holder: spec.and_then(|spec| spec.holder_identity.clone()).filter(|holder| !holder.is_empty()),
            duration: seconds.and_then(|seconds| u64::try_from(seconds).ok()).map(Duration::from_secs),
        }
    }
}

/// A Lease to create.
pub(super) fn new(namespace: &str, name: &str) -> Lease {
    Lease {
        metadata: ObjectMeta {
            namespace: Some(namespace.to_owned()),
            name: Some(name.to_owned()),
            ..ObjectMeta::default()
        },
        spec: None,
    }
}

/// `lease`, acquired or renewed by `me`. The times in it are informative: no candidate reads them.
pub(super) fn held_by(mut lease: Lease, me: &str, duration: Duration) -> Lease {
    let spec = lease.spec.get_or_insert_default();
    let now = MicroTime(Timestamp::now());
    if spec.holder_identity.as_deref() != Some(me) {
        let earlier = spec.lease_transitions.unwrap_or(0);
        spec.lease_transitions =
            Some(if lease.metadata.resource_version.is_some() { earlier + 1 } else { 0 });
        spec.acquire_time = Some(now.clone());
        spec.holder_identity = Some(me.to_owned());
    }
    spec.lease_duration_seconds = Some(i32::try_from(duration.as_secs()).unwrap_or(i32::MAX));
    spec.renew_time = Some(now);
    lease
}

/// `lease`, released, so that the next candidate does not wait.
pub(super) fn released(mut lease: Lease) -> Lease {
    let spec: &mut LeaseSpec = lease.spec.get_or_insert_default();
    spec.holder_identity = None;
    spec.renew_time = Some(MicroTime(Timestamp::now()));
    // The API server rejects zero.
    spec.lease_duration_seconds = Some(1);
    lease
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_acquired_renewed_taken_over_and_released() {
        let fresh = held_by(new("system", "steerage"), "a", Duration::from_secs(15));
        assert_eq!(fresh.spec.as_ref().and_then(|spec| spec.lease_transitions), Some(0));
        let mut stored = fresh;
        stored.metadata.resource_version = Some("7".into());
        let want = |holder: Option<&str>, seconds| LeaseRecord {
            version: "7".into(),
            holder: holder.map(str::to_owned),
            duration: Some(Duration::from_secs(seconds)),
        };
        assert_eq!(LeaseRecord::of(&stored), want(Some("a"), 15));
        let renewed = held_by(stored.clone(), "a", Duration::from_secs(15));
        let times = |lease: &Lease| {
            lease.spec.as_ref().map(|spec| (spec.lease_transitions, spec.acquire_time.clone()))
        };
        assert_eq!(times(&renewed), times(&stored), "a renewal is no transition");
        let taken = held_by(stored.clone(), "b", Duration::from_secs(20));
        assert_eq!(LeaseRecord::of(&taken), want(Some("b"), 20));
        assert_eq!(taken.spec.as_ref().and_then(|spec| spec.lease_transitions), Some(1));
        assert_eq!(LeaseRecord::of(&released(taken)), want(None, 1));
    }
}
