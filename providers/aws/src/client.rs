// SPDX-License-Identifier: Apache-2.0
//! The `ELBv2` calls, one function each, in the crate's own types, and what their errors mean. It decides nothing and remembers nothing.

use std::collections::BTreeMap;
use std::fmt::Debug;

use aws_config::SdkConfig;
use aws_config::retry::RetryConfig;
use aws_sdk_elasticloadbalancingv2 as elb;
use elb::error::{ProvideErrorMetadata, SdkError};
use elb::types::{
    Action, ActionTypeEnum, LoadBalancer, LoadBalancerSchemeEnum, LoadBalancerStateEnum,
    LoadBalancerTypeEnum, Matcher, ProtocolEnum, Tag, TargetDescription, TargetGroup, TargetGroupAttribute,
    TargetHealthStateEnum, TargetTypeEnum,
};
use steerage_provider_api::{Error, HealthState};

use crate::config::Scheme;
use crate::desired::{Group, Health};
use crate::diff::{SeenFront, SeenGroup};

/// A call that failed.
#[derive(Debug)]
pub(crate) struct Failure {
    action: &'static str,
    /// The code that AWS gave; empty where no answer came.
    code: String,
    message: String,
}

type Result<T, E = Failure> = std::result::Result<T, E>;

impl Failure {
    fn of<E, R>(action: &'static str) -> impl FnOnce(SdkError<E, R>) -> Self
    where
        E: ProvideErrorMetadata + std::error::Error + 'static,
        R: Debug + 'static,
    {
        move |error| {
            let code = error.code().unwrap_or_default().to_owned();
            let message = error.message().map_or_else(|| chain(&error), str::to_owned);
            Self { action, code, message }
        }
    }

    pub(crate) fn is(&self, code: &str) -> bool {
        self.code == code
    }

    pub(crate) fn message(&self) -> &str {
        &self.message
    }
}

/// An error and its causes; neither holds anything of the request.
fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |e| e.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        let Failure { action, code, message } = failure;
        let told = format!("ELBv2 {action}: {code}: {message}");
        match code.as_str() {
            "" => Self::Unavailable(format!("ELBv2 {action}: {message}")),
            "Throttling" | "ThrottlingException" | "RequestLimitExceeded" | "TooManyRequestsException" => {
                Self::Throttled { after: None, message: told }
            }
            "AccessDenied" | "AccessDeniedException" | "UnauthorizedOperation" => Self::Denied(told),
            // Without AWS's words: that of a wrong signature quotes the signed request, session token and all.
            "SignatureDoesNotMatch"
            | "InvalidClientTokenId"
            | "UnrecognizedClientException"
            | "ExpiredToken"
            | "ExpiredTokenException"
            | "IncompleteSignature"
            | "MissingAuthenticationToken"
            | "AuthFailure"
            | "OptInRequired" => {
                Self::Denied(format!("ELBv2 {action}: {code}: the credentials are not accepted"))
            }
            "DuplicateLoadBalancerName"
            | "DuplicateTargetGroupName"
            | "DuplicateListener"
            | "ResourceInUse"
            | "LoadBalancerNotFound"
            | "TargetGroupNotFound"
            | "ListenerNotFound"
            | "PriorityInUse" => Self::Conflict(told),
            "OperationNotPermitted" => Self::invalid("OperationNotPermitted", told),
            code if code.starts_with("TooMany") => Self::invalid("QuotaExceeded", told),
            code if code.starts_with("Invalid")
                || code.starts_with("Unsupported")
                || matches!(code, "ValidationError" | "SubnetNotFound" | "IncompatibleProtocols") =>
            {
                Self::invalid("ProviderRefused", told)
            }
            _ => Self::Unavailable(told),
        }
    }
}

/// A load balancer as AWS shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Balancer {
    pub(crate) arn: String,
    pub(crate) name: String,
    pub(crate) hostname: String,
    pub(crate) active: bool,
    /// What AWS says of a load balancer that could not be made.
    pub(crate) failed: Option<String>,
    pub(crate) scheme: Option<Scheme>,
}

/// A registered target as AWS shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Registered {
    pub(crate) id: String,
    pub(crate) state: HealthState,
    pub(crate) reason: String,
}

/// The calls.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    elb: elb::Client,
}

impl Client {
    /// Retries nothing by itself: the controller's queue does, with a rate budget for all Services.
    pub(crate) fn new(sdk: &SdkConfig, endpoint: Option<&str>) -> Self {
        let mut builder = elb::config::Builder::from(sdk).retry_config(RetryConfig::disabled());
        builder
            .set_endpoint_url(endpoint.map(str::to_owned).or_else(|| sdk.endpoint_url().map(str::to_owned)));
        Self { elb: elb::Client::from_conf(builder.build()) }
    }

    pub(crate) async fn balancer_named(&self, name: &str) -> Result<Option<Balancer>> {
        let answer = self.elb.describe_load_balancers().names(name).send().await;
        let found = absent("DescribeLoadBalancers", "LoadBalancerNotFound", answer)?;
        Ok(found.and_then(|f| f.load_balancers.unwrap_or_default().into_iter().next()).map(balancer))
    }

    pub(crate) async fn balancer_at(&self, arn: &str) -> Result<Option<Balancer>> {
        let answer = self.elb.describe_load_balancers().load_balancer_arns(arn).send().await;
        let found = absent("DescribeLoadBalancers", "LoadBalancerNotFound", answer)?;
        Ok(found.and_then(|f| f.load_balancers.unwrap_or_default().into_iter().next()).map(balancer))
    }

    /// Name and ARN of all load balancers in the region.
    pub(crate) async fn all_balancers(&self) -> Result<Vec<(String, String)>> {
        let pages = self.elb.describe_load_balancers().page_size(400).into_paginator().items().send();
        let all = pages.try_collect().await.map_err(Failure::of("DescribeLoadBalancers"))?;
        Ok(all.into_iter().map(balancer).map(|b| (b.name, b.arn)).collect())
    }

    pub(crate) async fn create_balancer(
        &self,
        name: &str,
        scheme: Scheme,
        subnets: &[String],
        tags: &BTreeMap<String, String>,
    ) -> Result<Balancer> {
        let scheme = match scheme {
            Scheme::Internal => LoadBalancerSchemeEnum::Internal,
            Scheme::InternetFacing => LoadBalancerSchemeEnum::InternetFacing,
        };
        let call = self
            .elb
            .create_load_balancer()
            .name(name)
            .r#type(LoadBalancerTypeEnum::Network)
            .scheme(scheme)
            .set_subnets(Some(subnets.to_vec()))
            .set_tags(Some(sdk_tags(tags)));
        let made = call.send().await.map_err(Failure::of("CreateLoadBalancer"))?;
        let made = made.load_balancers.unwrap_or_default().into_iter().next();
        Ok(balancer(made.ok_or_else(|| empty("CreateLoadBalancer"))?))
    }

    pub(crate) async fn delete_balancer(&self, arn: &str) -> Result<()> {
        let answer = self.elb.delete_load_balancer().load_balancer_arn(arn).send().await;
        absent("DeleteLoadBalancer", "LoadBalancerNotFound", answer).map(drop)
    }

    /// The listeners of a load balancer; `None` where there is no such load balancer.
    pub(crate) async fn listeners(&self, balancer: &str) -> Result<Option<Vec<SeenFront>>> {
        let pages = self.elb.describe_listeners().load_balancer_arn(balancer).into_paginator().items().send();
        let found = absent("DescribeListeners", "LoadBalancerNotFound", pages.try_collect().await)?;
        Ok(found.map(|f| f.into_iter().map(front).collect()))
    }

    pub(crate) async fn create_listener(
        &self,
        balancer: &str,
        port: u16,
        protocol: &str,
        group: &str,
        tags: &BTreeMap<String, String>,
    ) -> Result<SeenFront> {
        let call = self
            .elb
            .create_listener()
            .load_balancer_arn(balancer)
            .port(port.into())
            .protocol(ProtocolEnum::from(protocol))
            .default_actions(forward(group))
            .set_tags(Some(sdk_tags(tags)));
        let made = call.send().await.map_err(Failure::of("CreateListener"))?;
        made.listeners
            .unwrap_or_default()
            .into_iter()
            .next()
            .map(front)
            .ok_or_else(|| empty("CreateListener"))
    }

    /// The protocol is sent only where it changes.
    pub(crate) async fn modify_listener(&self, arn: &str, protocol: Option<&str>, group: &str) -> Result<()> {
        let call = self
            .elb
            .modify_listener()
            .listener_arn(arn)
            .set_protocol(protocol.map(ProtocolEnum::from))
            .default_actions(forward(group));
        call.send().await.map(drop).map_err(Failure::of("ModifyListener"))
    }

    pub(crate) async fn delete_listener(&self, arn: &str) -> Result<()> {
        let answer = self.elb.delete_listener().listener_arn(arn).send().await;
        absent("DeleteListener", "ListenerNotFound", answer).map(drop)
    }

    /// The target group of that name, without its attributes.
    pub(crate) async fn group_named(&self, name: &str) -> Result<Option<SeenGroup>> {
        let answer = self.elb.describe_target_groups().names(name).send().await;
        let found = absent("DescribeTargetGroups", "TargetGroupNotFound", answer)?;
        Ok(found.and_then(|f| f.target_groups.unwrap_or_default().into_iter().next()).map(|g| group(&g).1))
    }

    /// Name and state of the target groups that a load balancer uses, without their attributes.
    pub(crate) async fn groups_of(&self, balancer: &str) -> Result<BTreeMap<String, SeenGroup>> {
        let pages =
            self.elb.describe_target_groups().load_balancer_arn(balancer).into_paginator().items().send();
        let found = match absent("DescribeTargetGroups", "TargetGroupNotFound", pages.try_collect().await) {
            Err(failure) if failure.is("LoadBalancerNotFound") => None,
            other => other?,
        };
        Ok(found.unwrap_or_default().iter().map(group).collect())
    }

    /// Name and ARN of all target groups in the region.
    pub(crate) async fn all_groups(&self) -> Result<Vec<(String, String)>> {
        let pages = self.elb.describe_target_groups().page_size(400).into_paginator().items().send();
        let all = pages.try_collect().await.map_err(Failure::of("DescribeTargetGroups"))?;
        Ok(all.iter().map(group).map(|(name, g)| (name, g.arn)).collect())
    }

    pub(crate) async fn attributes(&self, group: &str) -> Result<BTreeMap<String, String>> {
        let answer = self.elb.describe_target_group_attributes().target_group_arn(group).send().await;
        let answer = answer.map_err(Failure::of("DescribeTargetGroupAttributes"))?;
        let pairs =
            answer.attributes.unwrap_or_default().into_iter().filter_map(|a| Some((a.key?, a.value?)));
        Ok(pairs.collect())
    }

    pub(crate) async fn create_group(
        &self,
        wanted: &Group,
        vpc: &str,
        tags: &BTreeMap<String, String>,
    ) -> Result<SeenGroup> {
        let health = &wanted.health;
        let call = self
            .elb
            .create_target_group()
            .name(&wanted.name)
            .target_type(TargetTypeEnum::Instance)
            .protocol(ProtocolEnum::from(wanted.protocol))
            .port(wanted.port.into())
            .vpc_id(vpc)
            .health_check_protocol(health_protocol(health))
            .set_health_check_path(health.path.clone())
            .set_matcher(matcher(health))
            .health_check_port(health.port.to_string())
            .health_check_interval_seconds(health.interval)
            .health_check_timeout_seconds(health.timeout)
            .healthy_threshold_count(health.healthy)
            .unhealthy_threshold_count(health.unhealthy)
            .set_tags(Some(sdk_tags(tags)));
        let made = call.send().await.map_err(Failure::of("CreateTargetGroup"))?;
        let made = made.target_groups.unwrap_or_default().into_iter().next();
        Ok(group(&made.ok_or_else(|| empty("CreateTargetGroup"))?).1)
    }

    pub(crate) async fn modify_health(&self, group: &str, health: &Health) -> Result<()> {
        let call = self
            .elb
            .modify_target_group()
            .target_group_arn(group)
            .health_check_protocol(health_protocol(health))
            .set_health_check_path(health.path.clone())
            .set_matcher(matcher(health))
            .health_check_port(health.port.to_string())
            .health_check_interval_seconds(health.interval)
            .health_check_timeout_seconds(health.timeout)
            .healthy_threshold_count(health.healthy)
            .unhealthy_threshold_count(health.unhealthy);
        call.send().await.map(drop).map_err(Failure::of("ModifyTargetGroup"))
    }

    pub(crate) async fn set_attributes(
        &self,
        group: &str,
        attributes: &BTreeMap<&'static str, String>,
    ) -> Result<()> {
        let one =
            |(key, value): (&&str, &String)| TargetGroupAttribute::builder().key(*key).value(value).build();
        let call = self
            .elb
            .modify_target_group_attributes()
            .target_group_arn(group)
            .set_attributes(Some(attributes.iter().map(one).collect()));
        call.send().await.map(drop).map_err(Failure::of("ModifyTargetGroupAttributes"))
    }

    /// Whether it is gone; false while something still uses it.
    pub(crate) async fn delete_group(&self, arn: &str) -> Result<bool> {
        let answer = self.elb.delete_target_group().target_group_arn(arn).send().await;
        match absent("DeleteTargetGroup", "TargetGroupNotFound", answer) {
            Ok(_) => Ok(true),
            Err(failure) if failure.is("ResourceInUse") => Ok(false),
            Err(failure) => Err(failure),
        }
    }

    /// The tags of each of these, by ARN. What vanished meanwhile has none.
    pub(crate) async fn tags(&self, arns: &[String]) -> Result<BTreeMap<String, BTreeMap<String, String>>> {
        let mut tags = BTreeMap::new();
        // ELBv2 takes at most 20 a call.
        for some in arns.chunks(20) {
            let answer = self.elb.describe_tags().set_resource_arns(Some(some.to_vec())).send().await;
            let answer = answer.map_err(Failure::of("DescribeTags"))?;
            for described in answer.tag_descriptions.unwrap_or_default() {
                let pairs = described.tags.unwrap_or_default().into_iter();
                let pairs = pairs.filter_map(|t| Some((t.key?, t.value.unwrap_or_default())));
                tags.insert(described.resource_arn.unwrap_or_default(), pairs.collect());
            }
        }
        Ok(tags)
    }

    pub(crate) async fn targets(&self, group: &str) -> Result<Vec<Registered>> {
        let answer = self.elb.describe_target_health().target_group_arn(group).send().await;
        let answer = answer.map_err(Failure::of("DescribeTargetHealth"))?;
        let mut targets = Vec::new();
        for described in answer.target_health_descriptions.unwrap_or_default() {
            let (Some(target), Some(health)) = (described.target, described.target_health) else { continue };
            let code = health.reason.as_ref().map_or("", |r| r.as_str());
            let state = match health.state {
                Some(TargetHealthStateEnum::Initial) => HealthState::Initial,
                Some(TargetHealthStateEnum::Healthy) => HealthState::Healthy,
                Some(TargetHealthStateEnum::Draining) => HealthState::Draining,
                Some(TargetHealthStateEnum::Unused) if code == "Target.NotRegistered" => continue,
                Some(TargetHealthStateEnum::Unused) => HealthState::Unused,
                _ => HealthState::Unhealthy,
            };
            let told = [code, health.description.as_deref().unwrap_or_default()];
            let reason = told.into_iter().filter(|t| !t.is_empty()).collect::<Vec<_>>().join(": ");
            targets.push(Registered { id: target.id.unwrap_or_default(), state, reason });
        }
        Ok(targets)
    }

    pub(crate) async fn register(&self, group: &str, ids: &[String]) -> Result<()> {
        let call = self.elb.register_targets().target_group_arn(group).set_targets(Some(sdk_targets(ids)));
        call.send().await.map(drop).map_err(Failure::of("RegisterTargets"))
    }

    pub(crate) async fn deregister(&self, group: &str, ids: &[String]) -> Result<()> {
        let call = self.elb.deregister_targets().target_group_arn(group).set_targets(Some(sdk_targets(ids)));
        call.send().await.map(drop).map_err(Failure::of("DeregisterTargets"))
    }
}

/// `None` for an answer that says that the thing is not there.
fn absent<T, E, R>(action: &'static str, code: &str, answer: Result<T, SdkError<E, R>>) -> Result<Option<T>>
where
    E: ProvideErrorMetadata + std::error::Error + 'static,
    R: Debug + 'static,
{
    match answer.map_err(Failure::of(action)) {
        Ok(found) => Ok(Some(found)),
        Err(failure) if failure.is(code) => Ok(None),
        Err(failure) => Err(failure),
    }
}

fn empty(action: &'static str) -> Failure {
    Failure { action, code: String::new(), message: "the answer is empty".to_owned() }
}

fn balancer(found: LoadBalancer) -> Balancer {
    let state = found.state.unwrap_or_else(|| elb::types::LoadBalancerState::builder().build());
    let failed = (state.code == Some(LoadBalancerStateEnum::Failed))
        .then(|| state.reason.unwrap_or_else(|| "AWS gives no reason".to_owned()));
    Balancer {
        arn: found.load_balancer_arn.unwrap_or_default(),
        name: found.load_balancer_name.unwrap_or_default(),
        hostname: found.dns_name.unwrap_or_default().to_ascii_lowercase(),
        // `active_impaired` still takes traffic.
        active: matches!(
            state.code,
            Some(LoadBalancerStateEnum::Active | LoadBalancerStateEnum::ActiveImpaired)
        ),
        failed,
        scheme: found.scheme.and_then(|s| Scheme::parse(s.as_str())),
    }
}

fn front(found: elb::types::Listener) -> SeenFront {
    let group_arn = match found.default_actions.as_deref() {
        Some([action]) => action.target_group_arn.clone().or_else(|| {
            let groups = action.forward_config.as_ref()?.target_groups.as_deref()?;
            let [only] = groups else { return None };
            only.target_group_arn.clone()
        }),
        _ => None,
    };
    SeenFront {
        arn: found.listener_arn.unwrap_or_default(),
        port: found.port.and_then(|p| p.try_into().ok()).unwrap_or_default(),
        protocol: found.protocol.map_or_else(String::new, |p| p.as_str().to_owned()),
        group_arn,
    }
}

fn group(found: &TargetGroup) -> (String, SeenGroup) {
    let http = found.health_check_protocol == Some(ProtocolEnum::Http);
    let codes = found.matcher.as_ref().and_then(|m| m.http_code.as_deref());
    let seen = SeenGroup {
        arn: found.target_group_arn.clone().unwrap_or_default(),
        health: Health {
            path: http.then(|| found.health_check_path.clone().unwrap_or_default()),
            port: found.health_check_port.as_deref().and_then(|p| p.parse().ok()).unwrap_or_default(),
            interval: found.health_check_interval_seconds.unwrap_or_default(),
            timeout: found.health_check_timeout_seconds.unwrap_or_default(),
            healthy: found.healthy_threshold_count.unwrap_or_default(),
            unhealthy: found.unhealthy_threshold_count.unwrap_or_default(),
        },
        strict: !http || codes == Some("200"),
        attributes: BTreeMap::new(),
    };
    (found.target_group_name.clone().unwrap_or_default(), seen)
}

fn forward(group: &str) -> Action {
    // The type is set, which is all that the builder can miss.
    let builder = Action::builder().r#type(ActionTypeEnum::Forward).target_group_arn(group);
    builder.build()
}

fn health_protocol(health: &Health) -> ProtocolEnum {
    if health.path.is_some() { ProtocolEnum::Http } else { ProtocolEnum::Tcp }
}

/// `/healthz` says 200 or 503, nothing else is a yes.
fn matcher(health: &Health) -> Option<Matcher> {
    health.path.is_some().then(|| Matcher::builder().http_code("200").build())
}

fn sdk_tags(tags: &BTreeMap<String, String>) -> Vec<Tag> {
    tags.iter().map(|(key, value)| Tag::builder().key(key).value(value).build()).collect()
}

fn sdk_targets(ids: &[String]) -> Vec<TargetDescription> {
    ids.iter().map(|id| TargetDescription::builder().id(id).build()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(code: &str) -> Error {
        Failure { action: "CreateListener", code: code.to_owned(), message: "token=SECRET".to_owned() }.into()
    }

    #[test]
    fn codes_are_sorted_by_what_should_happen_next() {
        for code in ["Throttling", "ThrottlingException", "RequestLimitExceeded"] {
            assert!(matches!(error(code), Error::Throttled { .. }), "{code}");
        }
        for code in ["AccessDenied", "ExpiredToken", "SignatureDoesNotMatch"] {
            assert!(matches!(error(code), Error::Denied(_)), "{code}");
        }
        for code in ["DuplicateListener", "TargetGroupNotFound"] {
            assert!(matches!(error(code), Error::Conflict(_)), "{code}");
        }
        assert_eq!(error("TooManyTargetGroups").reason(), "QuotaExceeded");
        assert_eq!(error("InvalidSubnet").reason(), "ProviderRefused");
        assert_eq!(error("OperationNotPermitted").reason(), "OperationNotPermitted");
        for code in ["", "InternalFailure", "ServiceUnavailable"] {
            assert!(matches!(error(code), Error::Unavailable(_)), "{code}");
        }
    }

    #[test]
    fn the_call_is_named_and_no_secret() {
        assert_eq!(
            error("Throttling").to_string(),
            "the provider throttles: ELBv2 CreateListener: Throttling: token=SECRET"
        );
        let told = error("SignatureDoesNotMatch").to_string();
        assert!(told.contains("CreateListener") && !told.contains("SECRET"), "{told}");
    }
}
