// SPDX-License-Identifier: Apache-2.0
//! What the start of the controller asks AWS.

use futures::future::join_all;
use steerage_model::Key;
use steerage_provider_api::{Error, Owner, Provider as _};

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

/// Every worker has a Service that needs the list of the start.
#[tokio::test(start_paused = true)]
async fn services_that_wait_for_a_list_that_fails_do_not_repeat_it() {
    let cloud = standin(1);
    let aws = provider(&cloud);
    let owner = |index| Owner { service: Key::new("shop", format!("web-{index}")), uid: "u".to_owned() };
    let owners: Vec<Owner> = (0..20).map(owner).collect();
    cloud.set_faults(Faults::Random(1.0));
    let answers = join_all(owners.iter().map(|owner| aws.target_health(owner))).await;
    assert!(answers.iter().all(Result::is_err), "{answers:?}");
    // ELBv2's first list, and that of EC2.
    assert_eq!(cloud.take_calls().len(), 2);
    cloud.set_faults(Faults::None);
    let answers = join_all(owners.iter().map(|owner| aws.target_health(owner))).await;
    assert!(answers.iter().all(Result::is_ok), "{answers:?}");
}
