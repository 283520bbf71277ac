// SPDX-License-Identifier: Apache-2.0
//! Listeners.

use std::collections::BTreeSet;

use async_trait::async_trait;

use super::cloud::{Cloud, Forward, NetworkLb};
use super::{Kind, StandIn};
use crate::client::{CallError, ListenerCalls, Result, Tags};
use crate::diff::ObservedListener;
use crate::ip_address_type::IpAddressType;
use crate::tls::Tls;

fn observed(arn: &str, found: &Forward) -> ObservedListener {
    ObservedListener {
        arn: arn.to_owned(),
        port: found.port,
        protocol: found.protocol.clone(),
        group_arn: Some(found.group.clone()),
        tags: Tags::new(),
        tls: found.tls.clone().map(|tls| Tls { others: BTreeSet::new(), ..tls }),
    }
}

/// Whether a listener can forward to the group, and has targets to spare.
fn check_group(
    cloud: &Cloud,
    quota: usize,
    action: &'static str,
    (balancer, protocol, group): (&str, &str, &str),
) -> Result<()> {
    let refuse = |code: &str, message: String| Err(CallError::made_up(action, code, message));
    let Some(found) = cloud.groups.get(group) else {
        return refuse("TargetGroupNotFound", format!("Target groups '{group}' not found"));
    };
    if found.protocol != protocol && (protocol, found.protocol.as_str()) != ("TLS", "TCP") {
        return refuse("IncompatibleProtocols", format!("{protocol} listener, {} group", found.protocol));
    }
    let is_dual_stack = |found: &&NetworkLb| found.ip_address_type == IpAddressType::DualStack;
    if let Some(dual) = cloud.balancers.get(balancer).filter(is_dual_stack) {
        let has_udp = protocol.ends_with("UDP");
        if has_udp && !dual.source_nat.is_on() {
            return refuse("InvalidConfigurationRequest", "UDP needs source NAT".to_owned());
        }
        if has_udp && !found.is_ipv6 {
            return refuse("InvalidConfigurationRequest", "UDP needs targets with IPv6".to_owned());
        }
    } else if found.is_ipv6 {
        return refuse("InvalidConfigurationRequest", "the load balancer has no IPv6".to_owned());
    }
    let other =
        cloud.listeners.values().any(|forward| forward.group == group && forward.balancer != balancer);
    if other {
        return refuse("TargetGroupAssociationLimit", "one load balancer for a group".to_owned());
    }
    let mut groups: Vec<&String> =
        cloud.listeners.values().filter(|f| f.balancer == balancer).map(|f| &f.group).collect();
    let group = group.to_owned();
    groups.push(&group);
    groups.sort();
    groups.dedup();
    let targets: usize =
        groups.iter().filter_map(|arn| cloud.groups.get(*arn)).map(|g| g.registered().count()).sum();
    if targets > quota {
        return refuse("TooManyTargets", format!("{targets} targets, at most {quota}"));
    }
    Ok(())
}

fn check_certificate(action: &'static str, arn: &str) -> Result<()> {
    let is_there = !arn.ends_with("missing");
    if is_there { Ok(()) } else { Err(CallError::made_up(action, "CertificateNotFound", arn)) }
}

/// The TLS settings of a listener with this protocol: those of the call, or those that it had.
fn made_tls(
    action: &'static str,
    protocol: &str,
    tls: Option<&Tls>,
    had: Option<Tls>,
) -> Result<Option<Tls>> {
    if protocol != "TLS" {
        return Ok(None);
    }
    let others = had.as_ref().map(|had| had.others.clone()).unwrap_or_default();
    let tls = tls.map(|tls| Tls { others, ..tls.clone() }).or(had);
    let tls = tls.ok_or_else(|| CallError::made_up(action, "ValidationError", "TLS needs a certificate"))?;
    check_certificate(action, &tls.certificate)?;
    Ok(Some(tls))
}

fn tls_of<'a>(cloud: &'a mut Cloud, action: &'static str, arn: &str) -> Result<&'a mut Tls> {
    let found = cloud.listeners.get_mut(arn);
    let found = found.ok_or_else(|| CallError::made_up(action, "ListenerNotFound", arn))?;
    found.tls.as_mut().ok_or_else(|| CallError::made_up(action, "ValidationError", "no TLS listener"))
}

#[async_trait]
impl ListenerCalls for StandIn {
    async fn listeners(&self, balancer: &str) -> Result<Option<Vec<ObservedListener>>> {
        self.read("DescribeListeners", 1, balancer.to_owned(), |cloud, _| {
            let of = cloud.listeners.iter().filter(|(_, forward)| forward.balancer == balancer);
            let all = of.map(|(arn, found)| observed(arn, found)).collect();
            Ok(cloud.balancers.contains_key(balancer).then_some(all))
        })
        .await
    }

    async fn create_listener(
        &self,
        balancer: &str,
        (port, protocol): (u16, &str),
        tls: Option<&Tls>,
        group: &str,
        tags: &Tags,
    ) -> Result<ObservedListener> {
        let action = "CreateListener";
        self.write(action, Kind::Mutation, format!("{balancer} {port}"), |cloud, now| {
            let refuse = |code: &str| Err(CallError::made_up(action, code, format!("port {port}")));
            let Some(found) = cloud.balancers.get(balancer) else { return refuse("LoadBalancerNotFound") };
            let name = found.made.name.clone();
            let count = cloud.listeners.values().filter(|f| f.balancer == balancer).count();
            if cloud.listeners.values().any(|f| f.balancer == balancer && f.port == port) {
                return refuse("DuplicateListener");
            }
            if count >= self.quotas.listeners {
                return Err(CallError::made_up(action, "TooManyListeners", "quota"));
            }
            check_group(cloud, self.quotas.targets, action, (balancer, protocol, group))?;
            let tls = made_tls(action, protocol, tls, None)?;
            let made = Forward {
                balancer: balancer.to_owned(),
                port,
                protocol: protocol.to_owned(),
                group: group.to_owned(),
                tags: tags.clone(),
                tls,
            };
            let arn = cloud.arn("listener/net", &name);
            let answer = observed(&arn, &made);
            cloud.listeners.insert(arn, made);
            cloud.note_use(now);
            Ok(answer)
        })
        .await
    }

    async fn modify_listener(
        &self,
        arn: &str,
        protocol: Option<&str>,
        tls: Option<&Tls>,
        group: &str,
    ) -> Result<()> {
        let action = "ModifyListener";
        self.write(action, Kind::Mutation, arn.to_owned(), |cloud, now| {
            let Some(found) = cloud.listeners.get(arn).cloned() else {
                return Err(CallError::made_up(action, "ListenerNotFound", arn));
            };
            let protocol = protocol.unwrap_or(&found.protocol);
            check_group(cloud, self.quotas.targets, action, (&found.balancer, protocol, group))?;
            let tls = made_tls(action, protocol, tls, found.tls.clone())?;
            let changed = Forward { protocol: protocol.to_owned(), group: group.to_owned(), tls, ..found };
            cloud.listeners.insert(arn.to_owned(), changed);
            cloud.note_use(now);
            Ok(())
        })
        .await
    }

    async fn other_certificates(&self, listener: &str) -> Result<BTreeSet<String>> {
        let action = "DescribeListenerCertificates";
        self.read(action, 1, listener.to_owned(), |cloud, _| {
            let found = cloud.listeners.get(listener);
            let found = found.ok_or_else(|| CallError::made_up(action, "ListenerNotFound", listener))?;
            Ok(found.tls.clone().unwrap_or_default().others)
        })
        .await
    }

    async fn add_certificate(&self, listener: &str, arn: &str) -> Result<()> {
        let action = "AddListenerCertificates";
        self.write(action, Kind::Mutation, format!("{listener} {arn}"), |cloud, _| {
            let tls = tls_of(cloud, action, listener)?;
            check_certificate(action, arn)?;
            tls.others.insert(arn.to_owned());
            if tls.others.len() > 25 {
                return Err(CallError::made_up(action, "TooManyCertificates", "25 certificates"));
            }
            Ok(())
        })
        .await
    }

    async fn remove_certificate(&self, listener: &str, arn: &str) -> Result<()> {
        let action = "RemoveListenerCertificates";
        self.write(action, Kind::Mutation, format!("{listener} {arn}"), |cloud, _| {
            let tls = tls_of(cloud, action, listener)?;
            if tls.certificate == arn {
                let message = "Default certificate cannot be removed";
                return Err(CallError::made_up(action, "OperationNotPermitted", message));
            }
            tls.others.remove(arn);
            Ok(())
        })
        .await
    }

    async fn delete_listener(&self, arn: &str) -> Result<()> {
        self.write("DeleteListener", Kind::Mutation, arn.to_owned(), |cloud, now| {
            cloud.listeners.remove(arn);
            cloud.note_use(now);
            Ok(())
        })
        .await
    }
}
