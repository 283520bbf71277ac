// SPDX-License-Identifier: Apache-2.0
//! The `ELBv2` calls: the traits through which all of this crate makes them, and the SDK behind these. `tags` reads the tags of
//! any number of resources, `requests` measures the SDK's requests.

mod balancers;
mod calls;
mod error;
mod groups;
mod listeners;
mod requests;
mod tags;
mod targets;

use std::collections::BTreeMap;

use aws_config::SdkConfig;
use aws_config::retry::RetryConfig;
use aws_sdk_elasticloadbalancingv2 as elb;
use elb::types::Tag;

use crate::api_metrics::ApiMetrics;

pub(crate) use balancers::{Balancer, NewBalancer};
pub(crate) use calls::{BalancerCalls, Elbv2, GroupCalls, ListenerCalls, TargetCalls};
pub(crate) use error::{CallError, Result};
use error::{empty, unless_not_found};
pub(crate) use groups::ListedGroup;
use requests::RequestMeter;
pub(crate) use requests::{ACTIONS, ELBV2};
pub(crate) use tags::read as read_tags;
pub(crate) use targets::RegisteredTarget;

/// Resources in one `DescribeTags` call: the limit of `ELBv2`.
pub(crate) const TAGS_BATCH: usize = 20;

/// The tags of one resource.
pub(crate) type Tags = BTreeMap<String, String>;

/// The calls over the SDK.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    elb: elb::Client,
}

impl Client {
    /// The client does not retry: the controller's queue does, with one rate budget for all Services.
    pub(crate) fn new(sdk: &SdkConfig, endpoint: Option<&str>, metrics: ApiMetrics) -> Self {
        let mut builder = elb::config::Builder::from(sdk)
            .retry_config(RetryConfig::disabled())
            .interceptor(RequestMeter::new(metrics));
        builder
            .set_endpoint_url(endpoint.map(str::to_owned).or_else(|| sdk.endpoint_url().map(str::to_owned)));
        Self { elb: elb::Client::from_conf(builder.build()) }
    }
}

fn sdk_tags(tags: &Tags) -> Vec<Tag> {
    tags.iter().map(|(key, value)| Tag::builder().key(key).value(value).build()).collect()
}
