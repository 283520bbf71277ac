// SPDX-License-Identifier: Apache-2.0
//! Reads the account through AWS's API, by AWS's SDK. Decides nothing.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context as _, Result};
use aws_config::timeout::TimeoutConfig;
use aws_config::{BehaviorVersion, Region};
use aws_credential_types::Credentials;
use aws_sdk_elasticloadbalancingv2 as elb;
use elb::types::{ProtocolEnum, TargetGroup, TargetHealthStateEnum, TargetTypeEnum};
use steerage_ec2::{Filter, IpPermission};

use crate::cloud::{Admission, Attributes, Balancer, Check, Cloud, Group, Listener, TargetKind, Transport};
use crate::last_read::{Gone, LastRead};

/// The region of the account.
pub const REGION: &str = "us-east-1";

/// A reader of one account.
#[derive(Debug)]
pub struct Reader {
    elb: elb::Client,
    ec2: steerage_ec2::Client,
    /// Private addresses of instances, which keep them for life.
    instances: HashMap<String, Ipv4Addr>,
    /// Instances without an address, which were logged.
    unknown: BTreeSet<String>,
    balancers: LastRead<Balancer>,
    groups: LastRead<Group>,
}

impl Reader {
    /// A reader of the API at this address.
    pub async fn connect(api: SocketAddr) -> Self {
        let url = format!("http://{api}");
        let sdk = aws_config::defaults(BehaviorVersion::latest())
            .region(Region::new(REGION))
            .credentials_provider(Credentials::new("lab", "lab", None, None, "lab"))
            .endpoint_url(&url)
            .load()
            .await;
        let ec2 = steerage_ec2::Client::new(&sdk, &url, &TimeoutConfig::disabled(), None);
        let (instances, unknown, balancers, groups) = Default::default();
        Self { elb: elb::Client::new(&sdk), ec2, instances, unknown, balancers, groups }
    }

    /// The account as it is now. One of which a call fails is as it was last read, and left out if it is gone by then: the others follow
    /// all the same.
    pub async fn read(&mut self) -> Result<Cloud> {
        let mut cloud = Cloud::default();
        let (mut balancers, mut groups) = (Vec::new(), Vec::new());
        let pages = self.elb.describe_load_balancers().into_paginator().items().send();
        for found in pages.try_collect().await.context("DescribeLoadBalancers")? {
            let arn = found.load_balancer_arn.clone().unwrap_or_default();
            balancers.push((arn, self.balancer(found).await));
        }
        let pages = self.elb.describe_target_groups().into_paginator().items().send();
        for found in pages.try_collect().await.context("DescribeTargetGroups")? {
            let arn = found.target_group_arn.clone().unwrap_or_default();
            groups.push((arn, self.group(&found).await));
        }
        cloud.balancers = self.balancers.take(balancers).into_values().collect();
        cloud.groups = self.groups.take(groups);
        Ok(cloud)
    }

    async fn balancer(&self, found: elb::types::LoadBalancer) -> Result<Balancer> {
        let hostname = found.dns_name.unwrap_or_default().to_ascii_lowercase();
        let admitted = self.admitted(found.security_groups.unwrap_or_default()).await?;
        let listeners = self.listeners(&found.load_balancer_arn.unwrap_or_default()).await?;
        Ok(Balancer { hostname, admitted, listeners })
    }

    async fn group(&mut self, found: &TargetGroup) -> Result<Group> {
        let arn = found.target_group_arn.clone().unwrap_or_default();
        let kind = match found.target_type {
            Some(TargetTypeEnum::Ip) => TargetKind::Address,
            _ => TargetKind::Instance,
        };
        let attributes =
            Attributes::of(&self.attributes(&arn).await?, kind, &transports(found.protocol.as_ref()));
        Ok(Group { check: check(found), attributes, targets: self.targets(&arn).await? })
    }

    /// What security groups admit from IPv4 ranges.
    async fn admitted(&self, groups: Vec<String>) -> Result<Option<Vec<Admission>>> {
        if groups.is_empty() {
            return Ok(None);
        }
        let wanted = Filter { name: "group-id".to_owned(), values: groups };
        let found = self.ec2.describe_security_groups(&[wanted]).await.context("DescribeSecurityGroups")?;
        let rules = found.into_iter().flat_map(|group| group.ip_permissions);
        Ok(Some(rules.flat_map(admissions).collect()))
    }

    async fn listeners(&self, balancer: &str) -> Result<Vec<Listener>> {
        let pages = self.elb.describe_listeners().load_balancer_arn(balancer).into_paginator().items().send();
        let found = pages.try_collect().await.map_err(gone).context("DescribeListeners")?;
        let listener = |found: elb::types::Listener| {
            let action = found.default_actions.unwrap_or_default().into_iter().next()?;
            Some(Listener {
                port: u16::try_from(found.port?).ok()?,
                transports: transports(found.protocol.as_ref()),
                group: action.target_group_arn?,
            })
        };
        Ok(found.into_iter().filter_map(listener).collect())
    }

    async fn attributes(&self, group: &str) -> Result<BTreeMap<String, String>> {
        let answer = self.elb.describe_target_group_attributes().target_group_arn(group).send().await;
        let found =
            answer.map_err(gone).context("DescribeTargetGroupAttributes")?.attributes.unwrap_or_default();
        Ok(found.into_iter().filter_map(|one| Some((one.key?, one.value?))).collect())
    }

    /// The registered targets. One that drains is shown, and registered no longer.
    async fn targets(&mut self, group: &str) -> Result<BTreeMap<String, SocketAddr>> {
        let answer = self.elb.describe_target_health().target_group_arn(group).send().await;
        let found = answer
            .map_err(gone)
            .context("DescribeTargetHealth")?
            .target_health_descriptions
            .unwrap_or_default();
        let mut targets = BTreeMap::new();
        for described in found {
            let state = described.target_health.and_then(|health| health.state);
            let Some(target) = described.target else { continue };
            let (Some(id), Some(port)) = (target.id, target.port.and_then(|port| u16::try_from(port).ok()))
            else {
                continue;
            };
            if state == Some(TargetHealthStateEnum::Draining) {
                continue;
            }
            let address = match id.parse() {
                Ok(address) => address,
                Err(_) => match self.address_of(&id).await {
                    Ok(address) => address,
                    Err(error) => {
                        if self.unknown.insert(id.clone()) {
                            eprintln!("target {id} of {group} has no address, and gets no flows: {error:#}");
                        }
                        continue;
                    }
                },
            };
            targets.insert(id, (address, port).into());
        }
        Ok(targets)
    }

    async fn address_of(&mut self, instance: &str) -> Result<Ipv4Addr> {
        if let Some(known) = self.instances.get(instance) {
            return Ok(*known);
        }
        let found = self.ec2.describe_instances(&[instance.to_owned()]).await.context("DescribeInstances")?;
        let address = found.into_iter().next().and_then(|found| found.private_ip_address?.parse().ok());
        let address = address.with_context(|| format!("instance {instance} has no private address"))?;
        self.instances.insert(instance.to_owned(), address);
        self.unknown.remove(instance);
        Ok(address)
    }
}

/// Marks the error of a call for what is gone.
fn gone<E>(error: E) -> anyhow::Error
where
    E: elb::error::ProvideErrorMetadata + std::error::Error + Send + Sync + 'static,
{
    if error.code().is_some_and(|code| code.ends_with("NotFound")) { Gone.into() } else { error.into() }
}

/// One for each range of a rule.
fn admissions(rule: IpPermission) -> Vec<Admission> {
    let transports = match rule.ip_protocol.as_str() {
        "tcp" => vec![Transport::Tcp],
        "udp" => vec![Transport::Udp],
        "-1" => vec![Transport::Tcp, Transport::Udp],
        _ => Vec::new(),
    };
    let port = |port: Option<i32>, absent: u16| port.and_then(|port| port.try_into().ok()).unwrap_or(absent);
    let ports = port(rule.from_port, 0)..=port(rule.to_port, u16::MAX);
    let ranges = rule.ip_ranges.into_iter();
    let sources = ranges.filter_map(|range| range.cidr_ip.parse().ok());
    let admission = |source| Admission { transports: transports.clone(), ports: ports.clone(), source };
    sources.map(admission).collect()
}

/// None for TLS, which this load balancer does not terminate.
fn transports(protocol: Option<&ProtocolEnum>) -> Vec<Transport> {
    match protocol {
        Some(ProtocolEnum::Tcp) => vec![Transport::Tcp],
        Some(ProtocolEnum::Udp) => vec![Transport::Udp],
        Some(ProtocolEnum::TcpUdp) => vec![Transport::Tcp, Transport::Udp],
        _ => Vec::new(),
    }
}

/// The settings of a group that are absent have AWS's defaults.
fn check(found: &TargetGroup) -> Check {
    let seconds = |value: Option<i32>, default: u64| {
        Duration::from_secs(value.and_then(|value| value.try_into().ok()).unwrap_or(default))
    };
    let count =
        |value: Option<i32>, default: u32| value.and_then(|value| value.try_into().ok()).unwrap_or(default);
    let is_http = found.health_check_protocol == Some(ProtocolEnum::Http);
    Check {
        path: is_http.then(|| found.health_check_path.clone().unwrap_or_else(|| "/".to_owned())),
        // Else it is `traffic-port`.
        port: found.health_check_port.as_deref().and_then(|port| port.parse().ok()),
        interval: seconds(found.health_check_interval_seconds, 30),
        timeout: seconds(found.health_check_timeout_seconds, if is_http { 6 } else { 10 }),
        healthy_threshold: count(found.healthy_threshold_count, 5),
        unhealthy_threshold: count(found.unhealthy_threshold_count, 2),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};

    use steerage_ec2::IpRange;

    use super::*;

    #[test]
    fn check_of_a_group_is_read() {
        let group = TargetGroup::builder()
            .health_check_protocol(ProtocolEnum::Http)
            .health_check_path("/healthz")
            .health_check_port("31234")
            .health_check_interval_seconds(5)
            .health_check_timeout_seconds(4)
            .healthy_threshold_count(2)
            .unhealthy_threshold_count(3);
        let found = check(&group.build());
        assert_eq!((found.path.as_deref(), found.port), (Some("/healthz"), Some(31234)));
        assert_eq!((found.interval, found.timeout), (Duration::from_secs(5), Duration::from_secs(4)));
        assert_eq!((found.healthy_threshold, found.unhealthy_threshold), (2, 3));
    }

    #[test]
    fn rule_of_a_security_group_is_read_with_each_range() {
        let range = |text: &str| IpRange { cidr_ip: text.to_owned(), description: None };
        let rule = IpPermission {
            ip_protocol: "udp".to_owned(),
            from_port: Some(53),
            to_port: Some(54),
            ip_ranges: vec![range("192.0.2.0/24"), range("198.51.100.7/32")],
            ipv6_ranges: Vec::new(),
            prefix_list_ids: Vec::new(),
        };
        let found = admissions(rule);
        assert_eq!(found.len(), 2);
        assert_eq!(
            (found[0].transports.as_slice(), found[0].ports.clone()),
            (&[Transport::Udp][..], 53..=54)
        );
        assert_eq!(found[1].source.to_string(), "198.51.100.7/32");
        let all = IpPermission {
            ip_protocol: "-1".to_owned(),
            ip_ranges: vec![range("0.0.0.0/0")],
            ..IpPermission::default()
        };
        let found = admissions(all);
        assert_eq!((found[0].transports.len(), found[0].ports.clone()), (2, 0..=65535));
    }

    #[test]
    fn tcp_check_on_the_traffic_port_has_no_path_and_no_port_of_its_own() {
        let group = TargetGroup::builder()
            .health_check_protocol(ProtocolEnum::Tcp)
            .health_check_path("/ignored")
            .health_check_port("traffic-port");
        let found = check(&group.build());
        assert_eq!((found.path, found.port, found.timeout), (None, None, Duration::from_secs(10)));
    }

    /// Answers one request of an API with two load balancers, of which one is gone, and two target groups, of which one is broken.
    fn answer(mut stream: TcpStream) {
        let mut read = Vec::new();
        let request = loop {
            let mut buffer = [0; 4096];
            let count = stream.read(&mut buffer).unwrap();
            read.extend_from_slice(&buffer[..count]);
            let text = String::from_utf8_lossy(&read).into_owned();
            if count == 0 || text.contains("Action=") {
                break text;
            }
        };
        let member = |fields: &str| format!("<member>{fields}</member>");
        let balancer = |name: &str| {
            member(&format!("<LoadBalancerArn>{name}</LoadBalancerArn><DNSName>{name}.lab</DNSName>"))
        };
        let group = |name: &str| member(&format!("<TargetGroupArn>{name}</TargetGroupArn>"));
        let listener = member(
            "<Port>80</Port><Protocol>TCP</Protocol><DefaultActions><member><Type>forward</Type><TargetGroupArn>g</TargetGroupArn></member></DefaultActions>",
        );
        let failed =
            |code: &str| (400, format!("<ErrorResponse><Error><Code>{code}</Code></Error></ErrorResponse>"));
        let action =
            request.split("Action=").nth(1).and_then(|rest| rest.split('&').next()).unwrap_or_default();
        let (status, result) = match action {
            "DescribeLoadBalancers" => {
                (200, format!("<LoadBalancers>{}{}</LoadBalancers>", balancer("gone"), balancer("stays")))
            }
            "DescribeListeners" if request.contains("gone") => failed("LoadBalancerNotFound"),
            "DescribeListeners" => (200, format!("<Listeners>{listener}</Listeners>")),
            "DescribeTargetGroups" => {
                (200, format!("<TargetGroups>{}{}</TargetGroups>", group("broken"), group("g")))
            }
            "DescribeTargetHealth" if request.contains("broken") => failed("ValidationError"),
            "DescribeTargetHealth" => {
                let target = |id| member(&format!("<Target><Id>{id}</Id><Port>8080</Port></Target>"));
                let all = ["i-gone", "10.2.0.1"].map(target).concat();
                (200, format!("<TargetHealthDescriptions>{all}</TargetHealthDescriptions>"))
            }
            "DescribeInstances" => failed("InvalidInstanceID.NotFound"),
            _ => (200, String::new()),
        };
        let body = if status == 200 {
            format!("<{action}Response><{action}Result>{result}</{action}Result></{action}Response>")
        } else {
            result
        };
        let head =
            format!("HTTP/1.1 {status} OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", body.len());
        stream.write_all(head.as_bytes()).unwrap();
        stream.write_all(body.as_bytes()).unwrap();
    }

    #[tokio::test]
    async fn vanished_load_balancer_and_broken_group_do_not_stop_the_others() {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = server.local_addr().unwrap();
        std::thread::spawn(move || server.incoming().for_each(|stream| answer(stream.unwrap())));
        let cloud = Reader::connect(address).await.read().await.unwrap();
        let shown: Vec<_> =
            cloud.balancers.iter().map(|found| (found.hostname.as_str(), found.listeners.len())).collect();
        assert_eq!(shown, [("stays.lab", 1)]);
        assert_eq!(cloud.groups.keys().collect::<Vec<_>>(), ["g"]);
        assert_eq!(cloud.groups["g"].targets.keys().collect::<Vec<_>>(), ["10.2.0.1"], "and an instance");
    }
}
