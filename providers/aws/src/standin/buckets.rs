// SPDX-License-Identifier: Apache-2.0
//! The rates of an account in a region: a bucket of tokens for each kind of call.

use std::time::Duration;

use tokio::time::Instant;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Read,
    Registration,
    Mutation,
    Ec2Read,
    Ec2Write,
}

impl Kind {
    pub(crate) fn is_ec2(self) -> bool {
        matches!(self, Self::Ec2Read | Self::Ec2Write)
    }

    pub(crate) fn is_write(self) -> bool {
        !matches!(self, Self::Read | Self::Ec2Read)
    }

    /// The code with which AWS refuses too many calls.
    pub(super) fn throttled(self) -> &'static str {
        if self.is_ec2() { "RequestLimitExceeded" } else { "ThrottlingException" }
    }

    /// The code of a failure inside AWS.
    pub(super) fn internal(self) -> &'static str {
        if self.is_ec2() { "InternalError" } else { "InternalFailure" }
    }
}

struct Bucket {
    size: f64,
    per_second: f64,
    tokens: f64,
    filled: Instant,
}

/// The buckets. `None` means that nothing is limited.
pub(super) struct Buckets(Option<[Bucket; 5]>);

impl Buckets {
    pub(super) fn full(now: Instant) -> Self {
        let bucket = |size, per_second| Bucket { size, per_second, tokens: size, filled: now };
        Self(Some([
            bucket(40.0, 10.0),
            bucket(20.0, 4.0),
            bucket(20.0, 3.0),
            // Those of EC2: reads in pages, and changes of security groups.
            bucket(100.0, 20.0),
            bucket(50.0, 5.0),
        ]))
    }

    pub(super) fn unlimited() -> Self {
        Self(None)
    }

    /// Takes tokens; false if there are too few.
    pub(super) fn take(&mut self, kind: Kind, tokens: usize, now: Instant) -> bool {
        let Some(buckets) = &mut self.0 else { return true };
        let bucket = &mut buckets[kind as usize];
        let passed = now.saturating_duration_since(bucket.filled);
        bucket.tokens = (bucket.tokens + passed.as_secs_f64() * bucket.per_second).min(bucket.size);
        bucket.filled = now;
        let wanted = Duration::from_secs(tokens as u64).as_secs_f64();
        let has = bucket.tokens >= wanted;
        if has {
            bucket.tokens -= wanted;
        }
        has
    }
}
