// SPDX-License-Identifier: Apache-2.0
//! Reports each HTTP request of the SDK to the metrics: every page of a list, and every attempt of a call.

use std::sync::atomic::{AtomicBool, Ordering};

use aws_smithy_runtime_api::client::interceptors::context::{Error, FinalizerInterceptorContextRef};
use aws_smithy_runtime_api::client::orchestrator::{Metadata, OrchestratorError};
use aws_smithy_types::config_bag::{Storable, StoreReplace};
use elb::config::interceptors::BeforeTransmitInterceptorContextRef;
use elb::config::{ConfigBag, Intercept, RuntimeComponents};
use elb::error::{BoxError, ConnectorError, ProvideErrorMetadata as _};
use steerage_provider_cloud::{Api, ApiMetrics, RequestResult};
use tokio::time::Instant;

use super::elb;

/// An API of AWS.
#[derive(Debug)]
pub(crate) struct AwsApi {
    /// Its name and actions.
    pub(crate) api: Api,
    /// AWS's code of an action's error.
    error_code: fn(&Error) -> Option<&str>,
}

/// All APIs. No action is in two of them.
pub(crate) static APIS: [&AwsApi; 2] = [&ELBV2, &EC2];

/// Names the actions of an API with the types of their errors: the SDK hands an interceptor errors without their types.
macro_rules! api {
    ($api:ident, $name:literal, $sdk:ident, { $($action:ident: $module:ident::$error:ident,)* }) => {
        pub(super) static $api: AwsApi = AwsApi {
            api: Api { name: $name, actions: &[$(stringify!($action)),*] },
            error_code: {
                fn error_code(error: &Error) -> Option<&str> {
                    $(
                        if let Some(error) = error.downcast_ref::<$sdk::operation::$module::$error>() {
                            return error.code();
                        }
                    )*
                    None
                }
                error_code
            },
        };
    };
}

api!(ELBV2, "ELBv2", elb, {
    AddListenerCertificates: add_listener_certificates::AddListenerCertificatesError,
    AddTags: add_tags::AddTagsError,
    CreateListener: create_listener::CreateListenerError,
    CreateLoadBalancer: create_load_balancer::CreateLoadBalancerError,
    CreateTargetGroup: create_target_group::CreateTargetGroupError,
    DeleteListener: delete_listener::DeleteListenerError,
    DeleteLoadBalancer: delete_load_balancer::DeleteLoadBalancerError,
    DeleteTargetGroup: delete_target_group::DeleteTargetGroupError,
    DeregisterTargets: deregister_targets::DeregisterTargetsError,
    DescribeListenerCertificates: describe_listener_certificates::DescribeListenerCertificatesError,
    DescribeListeners: describe_listeners::DescribeListenersError,
    DescribeLoadBalancerAttributes: describe_load_balancer_attributes::DescribeLoadBalancerAttributesError,
    DescribeLoadBalancers: describe_load_balancers::DescribeLoadBalancersError,
    DescribeTags: describe_tags::DescribeTagsError,
    DescribeTargetGroupAttributes: describe_target_group_attributes::DescribeTargetGroupAttributesError,
    DescribeTargetGroups: describe_target_groups::DescribeTargetGroupsError,
    DescribeTargetHealth: describe_target_health::DescribeTargetHealthError,
    ModifyListener: modify_listener::ModifyListenerError,
    ModifyLoadBalancerAttributes: modify_load_balancer_attributes::ModifyLoadBalancerAttributesError,
    ModifyTargetGroup: modify_target_group::ModifyTargetGroupError,
    ModifyTargetGroupAttributes: modify_target_group_attributes::ModifyTargetGroupAttributesError,
    RegisterTargets: register_targets::RegisterTargetsError,
    RemoveListenerCertificates: remove_listener_certificates::RemoveListenerCertificatesError,
    RemoveTags: remove_tags::RemoveTagsError,
    SetIpAddressType: set_ip_address_type::SetIpAddressTypeError,
    SetSecurityGroups: set_security_groups::SetSecurityGroupsError,
    SetSubnets: set_subnets::SetSubnetsError,
});

pub(super) static EC2: AwsApi = AwsApi {
    api: Api {
        name: "EC2",
        actions: &[
            "AuthorizeSecurityGroupIngress",
            "CreateSecurityGroup",
            "DeleteSecurityGroup",
            "DescribeSecurityGroups",
            "DescribeSubnets",
            "RevokeSecurityGroupIngress",
        ],
    },
    error_code: |error| error.downcast_ref::<steerage_ec2::Refusal>()?.code(),
};

/// Measures the requests of the client that it is given to.
#[derive(Debug)]
pub(super) struct RequestMeter {
    api: &'static AwsApi,
    metrics: ApiMetrics,
}

impl RequestMeter {
    pub(super) fn new(api: &'static AwsApi, metrics: ApiMetrics) -> Self {
        Self { api, metrics }
    }
}

/// The present attempt.
#[derive(Debug)]
struct Attempt {
    began: Instant,
    api: &'static str,
    action: String,
    metrics: ApiMetrics,
    is_counted: AtomicBool,
}

impl Attempt {
    fn count(&self, result: RequestResult<'_>) {
        if !self.is_counted.swap(true, Ordering::Relaxed) {
            self.metrics.requested(self.api, &self.action, result, self.began.elapsed());
        }
    }
}

/// The caller gave the call up: the SDK tells nobody.
impl Drop for Attempt {
    fn drop(&mut self) {
        self.count(RequestResult::Timeout);
    }
}

impl Storable for Attempt {
    type Storer = StoreReplace<Self>;
}

impl Intercept for RequestMeter {
    fn name(&self) -> &'static str {
        "RequestMeter"
    }

    fn read_before_attempt(
        &self,
        _: &BeforeTransmitInterceptorContextRef<'_>,
        _: &RuntimeComponents,
        cfg: &mut ConfigBag,
    ) -> Result<(), BoxError> {
        if let Some(metadata) = cfg.load::<Metadata>() {
            let attempt = Attempt {
                began: Instant::now(),
                api: self.api.api.name,
                action: metadata.name().to_owned(),
                metrics: self.metrics.clone(),
                is_counted: AtomicBool::new(false),
            };
            cfg.interceptor_state().store_put(attempt);
        }
        Ok(())
    }

    /// The SDK calls it also when its timeout ends the attempt.
    fn read_after_attempt(
        &self,
        context: &FinalizerInterceptorContextRef<'_>,
        _: &RuntimeComponents,
        cfg: &mut ConfigBag,
    ) -> Result<(), BoxError> {
        if let Some(attempt) = cfg.load::<Attempt>() {
            let status = context.response().map(|response| response.status().as_u16());
            let result = match context.output_or_error() {
                Some(Ok(_)) => RequestResult::Done,
                Some(Err(error)) => failure(self.api, error, status),
                None => RequestResult::Other,
            };
            attempt.count(result);
        }
        Ok(())
    }
}

fn failure<'a>(api: &AwsApi, error: &'a OrchestratorError<Error>, status: Option<u16>) -> RequestResult<'a> {
    let is_timeout =
        error.is_timeout_error() || error.as_connector_error().is_some_and(ConnectorError::is_timeout);
    match (error.as_operation_error(), status) {
        (Some(refusal), Some(status)) => RequestResult::Refused((api.error_code)(refusal), status),
        _ if is_timeout => RequestResult::Timeout,
        // The second: the answer's head came, its body did not.
        _ if error.is_connector_error() || error.is_response_error() => RequestResult::Connection,
        _ => RequestResult::Other,
    }
}

#[cfg(test)]
mod tests;
