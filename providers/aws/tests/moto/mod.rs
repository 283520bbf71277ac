// SPDX-License-Identifier: Apache-2.0
//! A moto server and a proxy for one test, as a harness of the conformance suite.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::Context as _;
use async_trait::async_trait;
use aws_config::timeout::TimeoutConfig;
use aws_config::{BehaviorVersion, Region, SdkConfig};
use aws_credential_types::Credentials;
use aws_sdk_elasticloadbalancingv2 as elb;
use bytes::Bytes;
use elb::types::{LoadBalancerAttribute, LoadBalancerTypeEnum, ProtocolEnum, Tag, TargetTypeEnum};
use steerage_ec2 as ec2;
use steerage_provider_api::{Compare, LoadBalancer, Owner, Provider as _, Target};
use steerage_provider_aws::{ApiMetrics, Aws, ClusterId, Config, Scheme};
use steerage_provider_conformance::{Call, CannedResponse, Harness, Proxy, Snapshot, Upstream};
use steerage_testmoto::{Release, Server, classify, parameters};

const FOREIGN: &str = "somebody";

pub(crate) struct Moto {
    server: Server,
    proxy: Proxy,
    sdk: SdkConfig,
    /// Bypasses the proxy.
    pub(crate) elb: elb::Client,
    /// Bypasses the proxy too.
    pub(crate) ec2: ec2::Client,
    pub(crate) config: Config,
    pub(crate) instances: Vec<String>,
}

impl Moto {
    /// Starts moto with a VPC, two subnets and instances. The last instance is stopped.
    pub(crate) async fn start(instances: usize) -> anyhow::Result<Self> {
        let server = Server::start(Release::QUICK)?;
        let (vpc, subnets) = server.network()?;
        let instances = server.instances(&subnets[0], instances)?;
        server.stop(instances.last().context("no instance")?)?;
        let proxy = Proxy::start(Upstream::http(server.addr()), classify).await?;
        let sdk = aws_config::defaults(BehaviorVersion::latest())
            .region(Region::new("us-east-1"))
            .credentials_provider(Credentials::new("test", "test", None, None, "test"))
            .load()
            .await;
        let url = format!("http://{}", server.addr());
        let elb = elb::config::Builder::from(&sdk).endpoint_url(&url).build();
        let ec2 = ec2::Client::new(&sdk, &url, &TimeoutConfig::disabled(), None);
        let config = Config {
            cluster: ClusterId { name: "conformance".to_owned(), uid: "cluster-1".to_owned() },
            vpc,
            subnets,
            backend_security_group: None,
            region: None,
            endpoint: Some(proxy.url()),
            ec2_endpoint: Some(proxy.url()),
            scheme: Scheme::Internal,
            shared_load_balancers: BTreeMap::new(),
            adopt: BTreeSet::new(),
            // moto shows every change at once.
            settle: Duration::ZERO,
            activation_poll: Duration::from_millis(10),
            target_group_release: Duration::from_millis(150),
            security_group_release: Duration::from_millis(300),
        };
        let elb = elb::Client::from_conf(elb);
        Ok(Self { server, proxy, sdk, elb, ec2, config, instances })
    }

    /// A provider with another configuration.
    pub(crate) fn provider(&self, config: Config) -> Aws {
        Aws::new(config, &self.sdk, ApiMetrics::default())
    }

    /// Requests a certificate for this domain and returns its ARN.
    pub(crate) fn certificate(&self, domain: &str) -> anyhow::Result<String> {
        self.server.certificate(domain)
    }

    /// Tags a resource of EC2.
    pub(crate) async fn tag(&self, id: &str, key: &str, value: &str) -> anyhow::Result<()> {
        let tag = ec2::Tag { key: key.to_owned(), value: value.to_owned() };
        Ok(self.ec2.create_tags(&[id.to_owned()], &[tag]).await?)
    }

    /// Creates a security group of somebody else, and returns its ID.
    pub(crate) async fn security_group(&self, name: &str) -> anyhow::Result<String> {
        let vpc = &self.config.vpc;
        let group = ec2::NewSecurityGroup { name, description: name, vpc, tags: Vec::new() };
        let id = self.ec2.create_security_group(&group).await?.context("no ID")?;
        self.tag(&id, "Name", name).await?;
        Ok(id)
    }

    /// Stops an instance.
    pub(crate) fn stop(&self, index: usize) -> anyhow::Result<()> {
        self.server.stop(&self.instances[index])
    }

    pub(crate) async fn balancers(&self) -> anyhow::Result<Vec<elb::types::LoadBalancer>> {
        Ok(self.elb.describe_load_balancers().into_paginator().items().send().try_collect().await?)
    }

    pub(crate) async fn groups(&self) -> anyhow::Result<Vec<elb::types::TargetGroup>> {
        Ok(self.elb.describe_target_groups().send().await?.target_groups.unwrap_or_default())
    }

    pub(crate) async fn listeners(&self, balancer: &str) -> anyhow::Result<Vec<elb::types::Listener>> {
        let answer = self.elb.describe_listeners().load_balancer_arn(balancer).send().await?;
        Ok(answer.listeners.unwrap_or_default())
    }

    pub(crate) async fn tags(&self, arn: &str) -> anyhow::Result<BTreeMap<String, String>> {
        let answer = self.elb.describe_tags().resource_arns(arn).send().await?;
        let tags =
            answer.tag_descriptions.unwrap_or_default().into_iter().flat_map(|d| d.tags.unwrap_or_default());
        Ok(tags.filter_map(|t| Some((t.key?, t.value?))).collect())
    }

    pub(crate) async fn ids(&self, group: &str) -> anyhow::Result<BTreeSet<String>> {
        let answer = self.elb.describe_target_health().target_group_arn(group).send().await?;
        let all = answer.target_health_descriptions.unwrap_or_default();
        Ok(all.into_iter().filter_map(|d| d.target?.id).collect())
    }

    /// The owner's load balancer and target groups.
    async fn of(&self, owner: &Owner) -> anyhow::Result<(Option<String>, Vec<elb::types::TargetGroup>)> {
        let (mut balancer, mut groups) = (None, Vec::new());
        for found in self.balancers().await? {
            let arn = found.load_balancer_arn.unwrap_or_default();
            if self.tags(&arn).await?.get("steerage.dev/uid") == Some(&owner.uid) {
                balancer = Some(arn);
            }
        }
        for found in self.groups().await? {
            let arn = found.target_group_arn.clone().unwrap_or_default();
            if self.tags(&arn).await?.get("steerage.dev/uid") == Some(&owner.uid) {
                groups.push(found);
            }
        }
        Ok((balancer, groups))
    }

    /// The security groups that the provider created.
    pub(crate) async fn security_groups(&self) -> anyhow::Result<Vec<ec2::SecurityGroup>> {
        let tagged = ec2::Filter::new("tag-key", "steerage.dev/uid");
        Ok(self.ec2.describe_security_groups(&[tagged]).await?)
    }

    /// Has all resources carry this UID of a cluster, as an operator does after a restore.
    pub(crate) async fn hand_over(&self, cluster_uid: &str) -> anyhow::Result<()> {
        let mut arns = Vec::new();
        for balancer in self.balancers().await? {
            let arn = balancer.load_balancer_arn.unwrap_or_default();
            arns.extend(self.listeners(&arn).await?.into_iter().filter_map(|l| l.listener_arn));
            arns.push(arn);
        }
        arns.extend(self.groups().await?.into_iter().filter_map(|g| g.target_group_arn));
        let tag = Tag::builder().key("steerage.dev/cluster-uid").value(cluster_uid).build();
        self.elb.add_tags().set_resource_arns(Some(arns)).tags(tag).send().await?;
        let groups: Vec<String> =
            self.security_groups().await?.into_iter().map(|group| group.group_id).collect();
        if !groups.is_empty() {
            let key = "steerage.dev/cluster-uid".to_owned();
            let tag = ec2::Tag { key, value: cluster_uid.to_owned() };
            self.ec2.create_tags(&groups, &[tag]).await?;
        }
        Ok(())
    }

    fn node(&self, id: &str) -> String {
        let index = self.instances.iter().position(|i| i == id);
        index.map_or_else(
            || id.to_owned(),
            |i| if i + 1 == self.instances.len() { bad_node() } else { node(i) },
        )
    }
}

fn node(index: usize) -> String {
    format!("node-{index}")
}

fn bad_node() -> String {
    "node-0-stopped".to_owned()
}

#[async_trait]
impl Harness for Moto {
    type Provider = Aws;

    async fn fresh(&self) -> anyhow::Result<Aws> {
        Ok(self.provider(self.config.clone()))
    }

    fn proxy(&self) -> &Proxy {
        &self.proxy
    }

    async fn snapshot(&self) -> anyhow::Result<Snapshot> {
        let text = self.server.snapshot()?;
        Ok(text
            .lines()
            .filter_map(|l| l.split_once('\t'))
            .map(|(n, c)| (n.to_owned(), c.to_owned()))
            .collect())
    }

    async fn targets(&self, owner: &Owner) -> anyhow::Result<BTreeMap<String, BTreeSet<String>>> {
        let groups = self.server.targets(&owner.uid)?.into_iter();
        let nodes = |ids: BTreeSet<String>| ids.iter().map(|id| self.node(id)).collect();
        Ok(groups.map(|(group, ids)| (group, nodes(ids))).collect())
    }

    fn target(&self, index: usize) -> Target {
        target(node(index), &self.instances[index])
    }

    fn bad_target(&self) -> Target {
        target(bad_node(), &self.instances[self.instances.len() - 1])
    }

    fn throttle(&self) -> CannedResponse {
        // ELBv2 has the first error, EC2 the second, and neither SDK looks at the root's name.
        let body = "<ErrorResponse><Error><Type>Sender</Type><Code>Throttling</Code><Message>Rate exceeded</Message></Error>\
                    <Errors><Error><Code>RequestLimitExceeded</Code><Message>Request limit exceeded.</Message></Error></Errors></ErrorResponse>";
        CannedResponse { status: 400, content_type: "text/xml", body: Bytes::from_static(body.as_bytes()) }
    }

    async fn plant_foreign(&self, lb: &LoadBalancer) -> anyhow::Result<()> {
        // Finds the provider's names by letting it create and delete the load balancer.
        let url = Some(format!("http://{}", self.server.addr()));
        let direct = Config { endpoint: url.clone(), ec2_endpoint: url, ..self.config.clone() };
        let provider = self.provider(direct);
        provider.apply(lb, Compare::Remembered).await?;
        let (balancer, groups) = self.of(&lb.owner).await?;
        let balancers = self.balancers().await?;
        let balancer = balancers
            .into_iter()
            .find(|b| b.load_balancer_arn == balancer)
            .context("the provider created no load balancer")?;
        steerage_provider_conformance::converge_deleted(&provider, &lb.owner).await?;
        let name = balancer.load_balancer_name.unwrap_or_default();
        let similar = format!("{}-kin", &name[..20].trim_end_matches('-'));
        for name in [&name, &similar] {
            let made = self
                .elb
                .create_load_balancer()
                .name(name)
                .r#type(LoadBalancerTypeEnum::Network)
                .set_subnets(Some(self.config.subnets.clone()))
                .tags(foreign_tag());
            made.send().await?;
        }
        let names: Vec<String> =
            groups.into_iter().filter_map(|g| g.target_group_name).chain([similar]).collect();
        for name in names {
            let made = self
                .elb
                .create_target_group()
                .name(name)
                .target_type(TargetTypeEnum::Instance)
                .protocol(ProtocolEnum::Tcp)
                .port(8080)
                .vpc_id(&self.config.vpc)
                .tags(foreign_tag());
            made.send().await?;
        }
        Ok(())
    }

    async fn remove_foreign(&self) -> anyhow::Result<()> {
        for balancer in self.balancers().await? {
            let arn = balancer.load_balancer_arn.unwrap_or_default();
            let tags = self.tags(&arn).await?;
            if tags.contains_key(FOREIGN) && !tags.contains_key("steerage.dev/uid") {
                self.elb.delete_load_balancer().load_balancer_arn(arn).send().await?;
            }
        }
        for group in self.groups().await? {
            let arn = group.target_group_arn.unwrap_or_default();
            let tags = self.tags(&arn).await?;
            if tags.contains_key(FOREIGN) && !tags.contains_key("steerage.dev/uid") {
                self.elb.delete_target_group().target_group_arn(arn).send().await?;
            }
        }
        Ok(())
    }

    /// Adds a tag to the load balancer and to the listener that stays, and sets an attribute that the provider does not manage.
    async fn mark(&self, owner: &Owner) -> anyhow::Result<()> {
        let balancer = self.of(owner).await?.0.context("no load balancer")?;
        let mut arns = vec![balancer.clone()];
        arns.extend(
            self.listeners(&balancer)
                .await?
                .into_iter()
                .filter(|l| l.port == Some(80))
                .filter_map(|l| l.listener_arn),
        );
        self.elb.add_tags().set_resource_arns(Some(arns)).tags(foreign_tag()).send().await?;
        let crossing =
            LoadBalancerAttribute::builder().key("load_balancing.cross_zone.enabled").value("true").build();
        self.elb
            .modify_load_balancer_attributes()
            .load_balancer_arn(balancer)
            .attributes(crossing)
            .send()
            .await?;
        Ok(())
    }

    async fn marked(&self, owner: &Owner) -> anyhow::Result<bool> {
        let balancer = self.of(owner).await?.0.context("no load balancer")?;
        let mut marked = self.tags(&balancer).await?.contains_key(FOREIGN);
        for listener in self.listeners(&balancer).await?.iter().filter(|l| l.port == Some(80)) {
            marked &= self.tags(listener.listener_arn().unwrap_or_default()).await?.contains_key(FOREIGN);
        }
        let attributes =
            self.elb.describe_load_balancer_attributes().load_balancer_arn(balancer).send().await?;
        let crossing = |a: &LoadBalancerAttribute| {
            a.key() == Some("load_balancing.cross_zone.enabled") && a.value() == Some("true")
        };
        Ok(marked && attributes.attributes.unwrap_or_default().iter().any(crossing))
    }

    fn nodes_in(&self, call: &Call) -> Option<BTreeSet<String>> {
        let moves = matches!(call.name.as_str(), "RegisterTargets" | "DeregisterTargets");
        let ids = parameters(&call.body).into_iter().filter(|(key, _)| key.ends_with(".Id"));
        moves.then(|| ids.map(|(_, id)| self.node(&id)).collect())
    }

    /// One more than others need: security groups belong to another API.
    fn steady_reads(&self) -> usize {
        3
    }
}

fn foreign_tag() -> Tag {
    Tag::builder().key(FOREIGN).value("else").build()
}

pub(crate) fn target(node: String, instance: &str) -> Target {
    Target {
        node,
        addresses: Vec::new(),
        provider_id: Some(format!("aws:///us-east-1a/{instance}")),
        zone: None,
        pod_cidrs: Vec::new(),
        weight: 1,
    }
}
