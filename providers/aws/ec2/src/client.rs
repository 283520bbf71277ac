// SPDX-License-Identifier: Apache-2.0
//! Sends actions by the runtime of AWS's SDK.

use std::collections::HashMap;
use std::sync::Arc;

use aws_config::timeout::TimeoutConfig;
use aws_config::{BehaviorVersion, SdkConfig};
use aws_runtime::auth::SigV4OperationSigningConfig;
use aws_runtime::auth::sigv4::{SCHEME_ID, SigV4AuthScheme};
use aws_runtime::service_clock_skew::ServiceClockSkewInterceptor;
use aws_runtime::user_agent::{ApiMetadata, UserAgentInterceptor};
use aws_smithy_runtime::client::defaults::default_http_client_plugin_v2;
use aws_smithy_runtime::client::http::connection_poisoning::ConnectionPoisoningInterceptor;
use aws_smithy_runtime::client::orchestrator::operation::Operation;
use aws_smithy_runtime::client::retries::classifiers::{HttpStatusCodeClassifier, TransientErrorClassifier};
use aws_smithy_runtime_api::client::auth::static_resolver::StaticAuthSchemeOptionResolver;
use aws_smithy_runtime_api::client::auth::{
    AuthSchemeOptionResolverParams, SharedAuthScheme, SharedAuthSchemeOptionResolver,
};
use aws_smithy_runtime_api::client::http::SharedHttpClient;
use aws_smithy_runtime_api::client::identity::SharedIdentityResolver;
use aws_smithy_runtime_api::client::interceptors::SharedInterceptor;
use aws_smithy_runtime_api::client::orchestrator::{HttpRequest, HttpResponse, OrchestratorError};
use aws_smithy_runtime_api::client::result::SdkError;
use aws_smithy_runtime_api::client::runtime_components::RuntimeComponentsBuilder;
use aws_smithy_runtime_api::client::runtime_plugin::{
    RuntimePlugin as _, SharedRuntimePlugin, StaticRuntimePlugin,
};
use aws_smithy_types::body::SdkBody;
use aws_smithy_types::config_bag::Layer;
use aws_types::SigningName;
use aws_types::region::SigningRegion;
use serde::de::{DeserializeOwned, IgnoredAny};

use crate::answer::{Created, Instances, Page, SecurityGroups, Subnets, refusal};
use crate::error::{Error, Refusal};
use crate::form::Form;
use crate::types::{
    Filter, Instance, IpPermission, NewSecurityGroup, SecurityGroup, Subnet, Tag, write_filters,
    write_permissions, write_tags,
};

/// Items in one page of a list: the limit of EC2.
const PAGE: &str = "1000";

/// Every action that this crate knows.
const ACTIONS: [&str; 8] = [
    "AuthorizeSecurityGroupIngress",
    "CreateSecurityGroup",
    "CreateTags",
    "DeleteSecurityGroup",
    "DescribeInstances",
    "DescribeSecurityGroups",
    "DescribeSubnets",
    "RevokeSecurityGroupIngress",
];

/// Posts a form and returns the text of the answer.
type Post = Operation<String, String, Refusal>;

/// A client of one region. Copies share connections.
#[derive(Clone, Debug)]
pub struct Client {
    actions: Arc<HashMap<&'static str, Post>>,
}

impl Client {
    /// A client with the region, credentials, clock and HTTP client of `sdk`, for EC2 at this URL. It does not retry. The interceptor
    /// sees every request with its action's name; a refusal is there a [`Refusal`].
    pub fn new(
        sdk: &SdkConfig,
        endpoint: &str,
        timeouts: &TimeoutConfig,
        interceptor: Option<&SharedInterceptor>,
    ) -> Self {
        let behavior = sdk.behavior_version().unwrap_or_else(BehaviorVersion::latest);
        // All actions share its connections.
        let http = sdk.http_client().or_else(|| default_http_client(behavior));
        let plugin = SharedRuntimePlugin::new(plugin(sdk));
        let post = |action: &'static str| {
            let post = Operation::builder().service_name("EC2").operation_name(action).no_retry();
            let mut post = post
                .behavior_version(behavior)
                .endpoint_url(endpoint)
                .timeout_config(timeouts.clone())
                .runtime_plugin(plugin.clone());
            if let Some(http) = http.clone() {
                post = post.http_client(http);
            }
            if let Some(sleep) = sdk.sleep_impl() {
                post = post.sleep_impl(sleep);
            }
            if let Some(clock) = sdk.time_source() {
                post = post.time_source(clock);
            }
            if let Some(interceptor) = interceptor {
                post = post.interceptor(interceptor.clone());
            }
            (action, post.serializer(request).deserializer(text).build())
        };
        Self { actions: Arc::new(ACTIONS.into_iter().map(post).collect()) }
    }

    /// All instances with these IDs.
    pub async fn describe_instances(&self, ids: &[String]) -> Result<Vec<Instance>, Error> {
        let mut form = Form::new("DescribeInstances");
        form.put_list("InstanceId", ids);
        let reservations = self.page::<Instances>(form).await?.0;
        Ok(reservations.into_iter().flat_map(|one| one.instances_set.items).collect())
    }

    /// All security groups that pass every filter.
    pub async fn describe_security_groups(&self, filters: &[Filter]) -> Result<Vec<SecurityGroup>, Error> {
        self.list::<SecurityGroups>("DescribeSecurityGroups", filters).await
    }

    /// All subnets that pass every filter.
    pub async fn describe_subnets(&self, filters: &[Filter]) -> Result<Vec<Subnet>, Error> {
        self.list::<Subnets>("DescribeSubnets", filters).await
    }

    /// Creates a security group, which admits nothing, and returns its ID.
    pub async fn create_security_group(&self, group: &NewSecurityGroup<'_>) -> Result<Option<String>, Error> {
        let mut form = Form::new("CreateSecurityGroup");
        form.put("GroupName", group.name);
        form.put("GroupDescription", group.description);
        form.put("VpcId", group.vpc);
        if !group.tags.is_empty() {
            form.put("TagSpecification.1.ResourceType", "security-group");
            write_tags(&mut form, "TagSpecification.1.", &group.tags);
        }
        Ok(self.call::<Created>(form).await?.group_id)
    }

    /// Adds rules to a security group.
    pub async fn authorize_security_group_ingress(
        &self,
        group: &str,
        permissions: &[IpPermission],
    ) -> Result<(), Error> {
        self.change_rules("AuthorizeSecurityGroupIngress", group, permissions).await
    }

    /// Removes rules from a security group, whatever their descriptions.
    pub async fn revoke_security_group_ingress(
        &self,
        group: &str,
        permissions: &[IpPermission],
    ) -> Result<(), Error> {
        self.change_rules("RevokeSecurityGroupIngress", group, permissions).await
    }

    /// Deletes a security group.
    pub async fn delete_security_group(&self, group: &str) -> Result<(), Error> {
        let mut form = Form::new("DeleteSecurityGroup");
        form.put("GroupId", group);
        self.done(form).await
    }

    /// Sets tags of resources.
    pub async fn create_tags(&self, resources: &[String], tags: &[Tag]) -> Result<(), Error> {
        let mut form = Form::new("CreateTags");
        form.put_list("ResourceId", resources);
        write_tags(&mut form, "", tags);
        self.done(form).await
    }

    async fn change_rules(
        &self,
        action: &'static str,
        group: &str,
        permissions: &[IpPermission],
    ) -> Result<(), Error> {
        let mut form = Form::new(action);
        form.put("GroupId", group);
        write_permissions(&mut form, permissions);
        self.done(form).await
    }

    /// Reads all pages.
    async fn list<P: Page>(&self, action: &'static str, filters: &[Filter]) -> Result<Vec<P::Item>, Error> {
        let (mut all, mut next) = (Vec::new(), None::<String>);
        loop {
            let mut form = Form::new(action);
            write_filters(&mut form, filters);
            form.put("MaxResults", PAGE);
            form.put_option("NextToken", next.as_deref());
            let (items, token) = self.page::<P>(form).await?;
            all.extend(items);
            // A token that comes back for itself would never end.
            if token.is_none() || token == next {
                return Ok(all);
            }
            next = token;
        }
    }

    async fn page<P: Page>(&self, form: Form) -> Result<(Vec<P::Item>, Option<String>), Error> {
        Ok(self.call::<P>(form).await?.split())
    }

    /// For an action whose answer says nothing.
    async fn done(&self, form: Form) -> Result<(), Error> {
        self.call::<IgnoredAny>(form).await.map(drop)
    }

    async fn call<A: DeserializeOwned>(&self, form: Form) -> Result<A, Error> {
        let Some(post) = self.actions.get(form.action) else {
            return Err(
                Box::new(SdkError::construction_failure(format!("{} is not known", form.action))).into()
            );
        };
        let text = post.invoke(form.finish()).await.map_err(Box::new)?;
        Ok(quick_xml::de::from_str(&text)?)
    }
}

/// The client for HTTPS that AWS's SDK has by default, which obeys `HTTPS_PROXY`.
fn default_http_client(behavior: BehaviorVersion) -> Option<SharedHttpClient> {
    let plugin = default_http_client_plugin_v2(behavior)?;
    plugin.runtime_components(&RuntimeComponentsBuilder::new("EC2")).http_client()
}

/// Signature, user agent and clock, as the clients of AWS's SDK have them.
fn plugin(sdk: &SdkConfig) -> StaticRuntimePlugin {
    let mut config = Layer::new("EC2");
    config.store_put(AuthSchemeOptionResolverParams::new(()));
    config.store_put(SigV4OperationSigningConfig {
        region: sdk.region().cloned().map(SigningRegion::from),
        name: Some(SigningName::from_static("ec2")),
        ..SigV4OperationSigningConfig::default()
    });
    config.store_put(ApiMetadata::new("ec2", env!("CARGO_PKG_VERSION")));
    if let Some(app) = sdk.app_name() {
        config.store_put(app.clone());
    }
    let mut components = RuntimeComponentsBuilder::new("EC2");
    components.push_auth_scheme(SharedAuthScheme::new(SigV4AuthScheme::new()));
    components.set_auth_scheme_option_resolver(Some(SharedAuthSchemeOptionResolver::new(
        StaticAuthSchemeOptionResolver::new(vec![SCHEME_ID]),
    )));
    if let Some(credentials) = sdk.credentials_provider() {
        components.set_identity_resolver(SCHEME_ID, SharedIdentityResolver::new(credentials));
    }
    components.set_identity_cache(sdk.identity_cache());
    // Nothing is tried again, but what looks transient ends its connection.
    components.push_retry_classifier(HttpStatusCodeClassifier::default());
    components.push_retry_classifier(TransientErrorClassifier::<Refusal>::new());
    for interceptor in [
        SharedInterceptor::new(ServiceClockSkewInterceptor::new()),
        SharedInterceptor::new(UserAgentInterceptor::new()),
        SharedInterceptor::new(ConnectionPoisoningInterceptor::new()),
    ] {
        components.push_interceptor(interceptor);
    }
    StaticRuntimePlugin::new().with_config(config.freeze()).with_runtime_components(components)
}

fn request(form: String) -> Result<HttpRequest, aws_smithy_runtime_api::box_error::BoxError> {
    let mut request = HttpRequest::new(SdkBody::from(form));
    request.set_method("POST")?;
    request.headers_mut().insert("content-type", "application/x-www-form-urlencoded");
    Ok(request)
}

fn text(response: &HttpResponse) -> Result<String, OrchestratorError<Refusal>> {
    let body = response.body().bytes().unwrap_or_default();
    let body = String::from_utf8_lossy(body);
    if response.status().is_success() {
        return Ok(body.into_owned());
    }
    Err(OrchestratorError::operation(refusal(&body)))
}

#[cfg(test)]
mod tests;
