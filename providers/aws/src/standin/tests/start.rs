// SPDX-License-Identifier: Apache-2.0
//! What the start of the controller asks AWS.

use steerage_provider_api::Error;

use super::driver::{changes, provider, standin};
use crate::standin::faults::{Fault, Faults};

/// Nothing works without load balancers; much does without EC2, and AWS may answer later.
#[tokio::test(start_paused = true)]
async fn only_refused_credentials_end_the_start() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    for (call, code, is_denied) in [
        ("DescribeLoadBalancers", "InvalidClientTokenId", true),
        ("DescribeLoadBalancers", "AccessDenied", true),
        ("DescribeLoadBalancers", "Throttling", false),
        ("DescribeSubnets", "UnauthorizedOperation", false),
    ] {
        cloud.set_faults(Faults::Once(call, Fault::Code(code)));
        let checked = aws.check().await;
        assert_eq!(matches!(checked, Err(Error::Denied(_))), is_denied, "{call}: {code}: {checked:?}");
        if let Err(error) = checked {
            assert!(error.to_string().contains(call), "{error}");
        }
    }
    aws.check().await.unwrap();
    assert_eq!(changes(&cloud), [""; 0]);
}
