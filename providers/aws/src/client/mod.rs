// SPDX-License-Identifier: Apache-2.0
//! The calls to AWS, `ELBv2` and EC2: the traits through which all of this crate makes them, and the SDK behind these. `tags` reads the
//! tags of any number of resources, `requests` measures the SDK's requests.

mod balancers;
mod calls;
mod endpoint;
mod error;
mod groups;
mod listeners;
mod requests;
mod security_groups;
mod subnets;
mod tags;
mod targets;

use std::collections::BTreeMap;
use std::time::Duration;

use aws_config::SdkConfig;
use aws_config::retry::RetryConfig;
use aws_config::timeout::TimeoutConfig;
use aws_sdk_elasticloadbalancingv2 as elb;
use aws_smithy_runtime_api::client::interceptors::SharedInterceptor;
use elb::types::Tag;
use steerage_provider_cloud::ApiMetrics;

pub(crate) use balancers::{Balancer, NewBalancer};
pub(crate) use calls::{
    BalancerCalls, Calls, GroupCalls, ListenerCalls, SecurityGroupCalls, SubnetCalls, TargetCalls,
};
pub(crate) use error::{CallError, Result};
use error::{empty, unless_not_found};
pub(crate) use groups::ListedGroup;
pub(crate) use requests::APIS;
use requests::{EC2, ELBV2, RequestMeter};
pub(crate) use tags::read as read_tags;
pub(crate) use targets::RegisteredTarget;

/// Resources in one `DescribeTags` call: the limit of `ELBv2`.
pub(crate) const TAGS_BATCH: usize = 20;

/// Load balancers in one `DescribeLoadBalancers` call that names them: the limit of `ELBv2`.
pub(crate) const BALANCERS_BATCH: usize = 20;

/// The tags of one resource.
pub(crate) type Tags = BTreeMap<String, String>;

/// The calls over the SDK.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    elb: elb::Client,
    ec2: steerage_ec2::Client,
}

impl Client {
    /// The client does not retry: the controller's queue does, with one rate budget for all Services. Without an endpoint, an API has
    /// that of `sdk`, or else the region's.
    pub(crate) fn new(
        sdk: &SdkConfig,
        endpoint: Option<&str>,
        ec2_endpoint: Option<&str>,
        metrics: ApiMetrics,
    ) -> Self {
        let url = |endpoint: Option<&str>| endpoint.or(sdk.endpoint_url()).map(str::to_owned);
        let mut elb = elb::config::Builder::from(sdk)
            .retry_config(RetryConfig::disabled())
            .interceptor(RequestMeter::new(&ELBV2, metrics.clone()));
        elb.set_endpoint_url(url(endpoint));
        let elb = elb.build();
        // What waits for EC2 holds up the Service's other changes.
        let timeouts = TimeoutConfig::builder().connect_timeout(Duration::from_secs(5));
        let timeouts = timeouts.operation_timeout(Duration::from_secs(10)).build();
        let meter = SharedInterceptor::new(RequestMeter::new(&EC2, metrics));
        let url = url(ec2_endpoint).unwrap_or_else(|| endpoint::ec2(sdk));
        let ec2 = steerage_ec2::Client::new(sdk, &url, &timeouts, Some(&meter));
        Self { elb: elb::Client::from_conf(elb), ec2 }
    }
}

fn ec2_tags(tags: Vec<steerage_ec2::Tag>) -> Tags {
    tags.into_iter().map(|tag| (tag.key, tag.value)).collect()
}

fn sdk_tags(tags: &Tags) -> Vec<Tag> {
    tags.iter().map(|(key, value)| Tag::builder().key(key).value(value).build()).collect()
}
