// SPDX-License-Identifier: Apache-2.0
//! The `ELBv2` calls, one function per call, in this crate's own types. Called by `provider`, `observe`, `targets` and
//! `inventory`. It decides nothing and remembers nothing.

mod balancers;
mod error;
mod groups;
mod targets;

use std::collections::BTreeMap;

use aws_config::SdkConfig;
use aws_config::retry::RetryConfig;
use aws_sdk_elasticloadbalancingv2 as elb;
use elb::types::Tag;

pub(crate) use balancers::Balancer;
pub(crate) use error::CallError;
use error::{Result, empty, unless_not_found};
pub(crate) use targets::RegisteredTarget;

/// Resources in one `DescribeTags` call: the limit of `ELBv2`.
const TAGS_BATCH: usize = 20;

#[derive(Clone, Debug)]
pub(crate) struct Client {
    elb: elb::Client,
}

impl Client {
    /// The client does not retry: the controller's queue does, with one rate budget for all Services.
    pub(crate) fn new(sdk: &SdkConfig, endpoint: Option<&str>) -> Self {
        let mut builder = elb::config::Builder::from(sdk).retry_config(RetryConfig::disabled());
        builder
            .set_endpoint_url(endpoint.map(str::to_owned).or_else(|| sdk.endpoint_url().map(str::to_owned)));
        Self { elb: elb::Client::from_conf(builder.build()) }
    }

    /// The tags of each resource, by ARN. A resource that no longer exists is missing from the result.
    pub(crate) async fn tags(&self, arns: &[String]) -> Result<BTreeMap<String, BTreeMap<String, String>>> {
        let mut tags = BTreeMap::new();
        for some in arns.chunks(TAGS_BATCH) {
            let answer = self.elb.describe_tags().set_resource_arns(Some(some.to_vec())).send().await;
            let answer = answer.map_err(CallError::of("DescribeTags"))?;
            for described in answer.tag_descriptions.unwrap_or_default() {
                let pairs = described.tags.unwrap_or_default().into_iter();
                let pairs = pairs.filter_map(|t| Some((t.key?, t.value.unwrap_or_default())));
                tags.insert(described.resource_arn.unwrap_or_default(), pairs.collect());
            }
        }
        Ok(tags)
    }
}

fn sdk_tags(tags: &BTreeMap<String, String>) -> Vec<Tag> {
    tags.iter().map(|(key, value)| Tag::builder().key(key).value(value).build()).collect()
}
