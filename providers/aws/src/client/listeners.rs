// SPDX-License-Identifier: Apache-2.0
//! Calls about listeners.

use std::collections::BTreeSet;

use async_trait::async_trait;
use elb::types::{Action, ActionTypeEnum, Certificate, ProtocolEnum};

use super::{CallError, Client, ListenerCalls, Result, Tags, elb, empty, sdk_tags, unless_not_found};
use crate::diff::ObservedListener;
use crate::tls::Tls;

#[async_trait]
impl ListenerCalls for Client {
    async fn listeners(&self, balancer: &str) -> Result<Option<Vec<ObservedListener>>> {
        let pages = self.elb.describe_listeners().load_balancer_arn(balancer).into_paginator().items().send();
        let found = unless_not_found("DescribeListeners", "LoadBalancerNotFound", pages.try_collect().await)?;
        Ok(found.map(|f| f.into_iter().map(observed_listener).collect()))
    }

    async fn create_listener(
        &self,
        balancer: &str,
        (port, protocol): (u16, &str),
        tls: Option<&Tls>,
        group: &str,
        tags: &Tags,
    ) -> Result<ObservedListener> {
        let call = self
            .elb
            .create_listener()
            .load_balancer_arn(balancer)
            .port(port.into())
            .protocol(ProtocolEnum::from(protocol))
            .set_certificates(tls.map(|tls| vec![certificate(&tls.certificate)]))
            .set_ssl_policy(tls.map(|tls| tls.policy.clone()))
            .set_alpn_policy(tls.map(|tls| vec![tls.alpn.clone()]))
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

    async fn modify_listener(
        &self,
        arn: &str,
        protocol: Option<&str>,
        tls: Option<&Tls>,
        group: &str,
    ) -> Result<()> {
        let call = self
            .elb
            .modify_listener()
            .listener_arn(arn)
            .set_protocol(protocol.map(ProtocolEnum::from))
            .set_certificates(tls.map(|tls| vec![certificate(&tls.certificate)]))
            .set_ssl_policy(tls.map(|tls| tls.policy.clone()))
            .set_alpn_policy(tls.map(|tls| vec![tls.alpn.clone()]))
            .default_actions(forward(group));
        call.send().await.map(drop).map_err(CallError::of("ModifyListener"))
    }

    async fn other_certificates(&self, listener: &str) -> Result<BTreeSet<String>> {
        let pages =
            self.elb.describe_listener_certificates().listener_arn(listener).into_paginator().items().send();
        let all = pages.try_collect().await.map_err(CallError::of("DescribeListenerCertificates"))?;
        let others = all.into_iter().filter(|certificate| certificate.is_default != Some(true));
        Ok(others.filter_map(|certificate| certificate.certificate_arn).collect())
    }

    async fn add_certificate(&self, listener: &str, arn: &str) -> Result<()> {
        let call = self.elb.add_listener_certificates().listener_arn(listener).certificates(certificate(arn));
        call.send().await.map(drop).map_err(CallError::of("AddListenerCertificates"))
    }

    async fn remove_certificate(&self, listener: &str, arn: &str) -> Result<()> {
        let call =
            self.elb.remove_listener_certificates().listener_arn(listener).certificates(certificate(arn));
        call.send().await.map(drop).map_err(CallError::of("RemoveListenerCertificates"))
    }

    async fn delete_listener(&self, arn: &str) -> Result<()> {
        let answer = self.elb.delete_listener().listener_arn(arn).send().await;
        unless_not_found("DeleteListener", "ListenerNotFound", answer).map(drop)
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
    let is_tls = found.protocol == Some(ProtocolEnum::Tls);
    let first = found.certificates.unwrap_or_default().into_iter().next();
    let tls = is_tls.then(|| Tls {
        certificate: first.and_then(|first| first.certificate_arn).unwrap_or_default(),
        others: BTreeSet::new(),
        policy: found.ssl_policy.unwrap_or_default(),
        alpn: found.alpn_policy.unwrap_or_default().into_iter().next().unwrap_or_else(|| "None".to_owned()),
    });
    ObservedListener {
        arn: found.listener_arn.unwrap_or_default(),
        port: found.port.and_then(|p| p.try_into().ok()).unwrap_or_default(),
        protocol: found.protocol.map_or_else(String::new, |p| p.as_str().to_owned()),
        group_arn,
        tags: Tags::new(),
        tls,
    }
}

fn certificate(arn: &str) -> Certificate {
    Certificate::builder().certificate_arn(arn).build()
}

fn forward(group: &str) -> Action {
    Action::builder().r#type(ActionTypeEnum::Forward).target_group_arn(group).build()
}
