// SPDX-License-Identifier: Apache-2.0
//! How long AWS would take to admit recorded calls: a token bucket for each kind of call, per account and region. Pure.
//!
//! Sizes and rates are those of the stand-in of `providers/aws`: of ELBv2, AWS documents the bucket of reads; those of registrations
//! and of other changes are what the AWS Load Balancer Controller keeps to. EC2 has buckets for each action; AWS documents their
//! sizes by category.

use std::collections::BTreeMap;
use std::time::Duration;

/// Which API a call is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Api {
    /// Load balancers, target groups, listeners.
    Elbv2,
    /// Security groups, subnets, instances.
    Ec2,
}

#[derive(Clone, Copy, Debug)]
struct Bucket {
    size: f64,
    per_second: f64,
}

/// Name of the bucket from which a call takes a token, and the bucket.
fn bucket(api: Api, action: &str) -> (&str, Bucket) {
    let is_read = is_read(action);
    match (api, action) {
        (Api::Elbv2, _) if is_read => ("ELBv2 reads", Bucket { size: 40.0, per_second: 10.0 }),
        (Api::Elbv2, "RegisterTargets" | "DeregisterTargets") => {
            ("ELBv2 registrations", Bucket { size: 20.0, per_second: 4.0 })
        }
        (Api::Elbv2, _) => ("ELBv2 changes", Bucket { size: 20.0, per_second: 3.0 }),
        (Api::Ec2, action) if is_read => (action, Bucket { size: 100.0, per_second: 20.0 }),
        (Api::Ec2, action) => (action, Bucket { size: 50.0, per_second: 5.0 }),
    }
}

/// Whether the action changes nothing.
pub(super) fn is_read(action: &str) -> bool {
    action.starts_with("Describe") || action.starts_with("Get")
}

/// The least time in which AWS admits these calls: all buckets are full at the start, nobody else calls, and AWS answers at once. The emptiest bucket decides.
pub(super) fn least_time<'a>(calls: impl IntoIterator<Item = (Api, &'a str, u32)>) -> Duration {
    let mut buckets: BTreeMap<(Api, &str), (Bucket, f64)> = BTreeMap::new();
    for (api, action, count) in calls {
        let (name, bucket) = bucket(api, action);
        buckets.entry((api, name)).or_insert((bucket, 0.0)).1 += f64::from(count);
    }
    let waits = buckets.values().map(|(bucket, calls)| (calls - bucket.size).max(0.0) / bucket.per_second);
    Duration::from_secs_f64(waits.fold(0.0, f64::max))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn millis(calls: &[(Api, &str, u32)]) -> u128 {
        least_time(calls.iter().copied()).as_millis()
    }

    #[test]
    fn full_bucket_admits_its_size_at_once_and_then_its_rate() {
        let registrations = |count| millis(&[(Api::Elbv2, "RegisterTargets", count)]);
        assert_eq!([20, 21, 24, 100].map(registrations), [0, 250, 1000, 20_000]);
        assert_eq!(millis(&[]), 0);
    }

    #[test]
    fn actions_of_one_bucket_share_its_tokens() {
        let both = [(Api::Elbv2, "RegisterTargets", 100), (Api::Elbv2, "DeregisterTargets", 100)];
        assert_eq!(millis(&both), 45_000);
        let changes = [(Api::Elbv2, "CreateListener", 10), (Api::Elbv2, "AddTags", 16)];
        assert_eq!(millis(&changes), 2000);
    }

    #[test]
    fn slowest_bucket_decides() {
        let calls = [
            (Api::Elbv2, "DescribeTargetHealth", 60),
            (Api::Elbv2, "CreateTargetGroup", 50),
            (Api::Elbv2, "RegisterTargets", 20),
        ];
        assert_eq!(millis(&calls), 10_000);
        assert_eq!(millis(&calls[..1]), 2000);
    }

    #[test]
    fn ec2_counts_each_action_alone() {
        let reads = [(Api::Ec2, "DescribeSubnets", 120), (Api::Ec2, "DescribeSecurityGroups", 120)];
        assert_eq!(millis(&reads), 1000);
        assert_eq!(millis(&[(Api::Ec2, "AuthorizeSecurityGroupIngress", 60)]), 2000);
    }
}
