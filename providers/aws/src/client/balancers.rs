// SPDX-License-Identifier: Apache-2.0
//! Calls about load balancers and their listeners.

use std::collections::BTreeMap;

use elb::types::{
    Action, ActionTypeEnum, LoadBalancer, LoadBalancerSchemeEnum, LoadBalancerStateEnum,
    LoadBalancerTypeEnum, ProtocolEnum,
};

use super::{CallError, Client, Result, elb, empty, sdk_tags, unless_not_found};
use crate::config::Scheme;
use crate::diff::ObservedListener;

/// A load balancer, as described by AWS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Balancer {
    pub(crate) arn: String,
    pub(crate) name: String,
    pub(crate) hostname: String,
    pub(crate) active: bool,
    /// AWS's reason if the load balancer could not be created.
    pub(crate) failed: Option<String>,
    pub(crate) scheme: Option<Scheme>,
}

impl Client {
    pub(crate) async fn balancer_named(&self, name: &str) -> Result<Option<Balancer>> {
        let answer = self.elb.describe_load_balancers().names(name).send().await;
        let found = unless_not_found("DescribeLoadBalancers", "LoadBalancerNotFound", answer)?;
        Ok(found.and_then(|f| f.load_balancers.unwrap_or_default().into_iter().next()).map(balancer))
    }

    pub(crate) async fn balancer_at(&self, arn: &str) -> Result<Option<Balancer>> {
        let answer = self.elb.describe_load_balancers().load_balancer_arns(arn).send().await;
        let found = unless_not_found("DescribeLoadBalancers", "LoadBalancerNotFound", answer)?;
        Ok(found.and_then(|f| f.load_balancers.unwrap_or_default().into_iter().next()).map(balancer))
    }

    /// Names and ARNs of all load balancers in the region.
    pub(crate) async fn all_balancers(&self) -> Result<Vec<(String, String)>> {
        let pages = self.elb.describe_load_balancers().page_size(400).into_paginator().items().send();
        let all = pages.try_collect().await.map_err(CallError::of("DescribeLoadBalancers"))?;
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
        let made = call.send().await.map_err(CallError::of("CreateLoadBalancer"))?;
        let made = made.load_balancers.unwrap_or_default().into_iter().next();
        Ok(balancer(made.ok_or_else(|| empty("CreateLoadBalancer"))?))
    }

    pub(crate) async fn delete_balancer(&self, arn: &str) -> Result<()> {
        let answer = self.elb.delete_load_balancer().load_balancer_arn(arn).send().await;
        unless_not_found("DeleteLoadBalancer", "LoadBalancerNotFound", answer).map(drop)
    }

    /// The listeners of a load balancer; `None` if it does not exist.
    pub(crate) async fn listeners(&self, balancer: &str) -> Result<Option<Vec<ObservedListener>>> {
        let pages = self.elb.describe_listeners().load_balancer_arn(balancer).into_paginator().items().send();
        let found = unless_not_found("DescribeListeners", "LoadBalancerNotFound", pages.try_collect().await)?;
        Ok(found.map(|f| f.into_iter().map(observed_listener).collect()))
    }

    pub(crate) async fn create_listener(
        &self,
        balancer: &str,
        port: u16,
        protocol: &str,
        group: &str,
        tags: &BTreeMap<String, String>,
    ) -> Result<ObservedListener> {
        let call = self
            .elb
            .create_listener()
            .load_balancer_arn(balancer)
            .port(port.into())
            .protocol(ProtocolEnum::from(protocol))
            .default_actions(forward(group))
            .set_tags(Some(sdk_tags(tags)));
        let made = call.send().await.map_err(CallError::of("CreateListener"))?;
        made.listeners
            .unwrap_or_default()
            .into_iter()
            .next()
            .map(observed_listener)
            .ok_or_else(|| empty("CreateListener"))
    }

    /// Sends the protocol only if it changes.
    pub(crate) async fn modify_listener(&self, arn: &str, protocol: Option<&str>, group: &str) -> Result<()> {
        let call = self
            .elb
            .modify_listener()
            .listener_arn(arn)
            .set_protocol(protocol.map(ProtocolEnum::from))
            .default_actions(forward(group));
        call.send().await.map(drop).map_err(CallError::of("ModifyListener"))
    }

    pub(crate) async fn delete_listener(&self, arn: &str) -> Result<()> {
        let answer = self.elb.delete_listener().listener_arn(arn).send().await;
        unless_not_found("DeleteListener", "ListenerNotFound", answer).map(drop)
    }
}

fn balancer(found: LoadBalancer) -> Balancer {
    let state = found.state.unwrap_or_else(|| elb::types::LoadBalancerState::builder().build());
    let failed = (state.code == Some(LoadBalancerStateEnum::Failed))
        .then(|| state.reason.unwrap_or_else(|| "AWS gave no reason".to_owned()));
    Balancer {
        arn: found.load_balancer_arn.unwrap_or_default(),
        name: found.load_balancer_name.unwrap_or_default(),
        hostname: found.dns_name.unwrap_or_default().to_ascii_lowercase(),
        // `active_impaired` still forwards traffic.
        active: matches!(
            state.code,
            Some(LoadBalancerStateEnum::Active | LoadBalancerStateEnum::ActiveImpaired)
        ),
        failed,
        scheme: found.scheme.and_then(|s| Scheme::parse(s.as_str())),
    }
}

fn observed_listener(found: elb::types::Listener) -> ObservedListener {
    let group_arn = match found.default_actions.as_deref() {
        Some([action]) => action.target_group_arn.clone().or_else(|| {
            let groups = action.forward_config.as_ref()?.target_groups.as_deref()?;
            let [only] = groups else { return None };
            only.target_group_arn.clone()
        }),
        _ => None,
    };
    ObservedListener {
        arn: found.listener_arn.unwrap_or_default(),
        port: found.port.and_then(|p| p.try_into().ok()).unwrap_or_default(),
        protocol: found.protocol.map_or_else(String::new, |p| p.as_str().to_owned()),
        group_arn,
    }
}

fn forward(group: &str) -> Action {
    Action::builder().r#type(ActionTypeEnum::Forward).target_group_arn(group).build()
}
