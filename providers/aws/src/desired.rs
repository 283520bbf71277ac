// SPDX-License-Identifier: Apache-2.0
//! What a load balancer is in `ELBv2`: pure, from the plan's [`LoadBalancer`] and the configuration.

use std::collections::BTreeMap;

use steerage_model::{Family, Protocol};
use steerage_provider_api::{Error, HealthCheck, HealthProtocol, Listener, LoadBalancer};

use crate::config::{Config, Scheme};
use crate::names;

/// Annotation that chooses the scheme: `internal` or `internet-facing`, as both of AWS's controllers know it.
pub(crate) const SCHEME_ANNOTATION: &str = "service.beta.kubernetes.io/aws-load-balancer-scheme";

/// The most listeners that a network load balancer can have.
const MOST_LISTENERS: usize = 50;

/// A health check as `ELBv2` takes it: within its limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Health {
    /// The path of an HTTP check; `None` is a TCP check.
    pub(crate) path: Option<String>,
    pub(crate) port: u16,
    pub(crate) interval: i32,
    pub(crate) timeout: i32,
    pub(crate) healthy: i32,
    pub(crate) unhealthy: i32,
}

/// A target group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Group {
    pub(crate) name: String,
    pub(crate) protocol: &'static str,
    pub(crate) port: u16,
    pub(crate) health: Health,
    /// Attributes that are kept at these values; others are left alone.
    pub(crate) attributes: BTreeMap<&'static str, String>,
}

/// A listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Front {
    pub(crate) port: u16,
    pub(crate) protocol: &'static str,
    /// The name of its target group.
    pub(crate) group: String,
}

/// All that one Service needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Desired {
    pub(crate) name: String,
    pub(crate) scheme: Scheme,
    pub(crate) groups: Vec<Group>,
    pub(crate) fronts: Vec<Front>,
}

/// What is to be made; [`Error::Invalid`] where AWS, or this provider yet, can't.
pub(crate) fn desired(config: &Config, lb: &LoadBalancer) -> Result<Desired, Error> {
    possible(lb)?;
    let mut fronts: Vec<Front> = Vec::new();
    let mut groups: Vec<Group> = Vec::new();
    for (port, (protocol, node_port)) in merge(&lb.listeners)? {
        let name = names::target_group(&config.cluster, &lb.owner.service, protocol, node_port, &config.vpc);
        fronts.push(Front { port, protocol, group: name.clone() });
        if groups.iter().any(|g| g.name == name) {
            continue;
        }
        groups.push(Group {
            name,
            protocol,
            port: node_port,
            health: health(&lb.health_check),
            attributes: attributes(protocol, lb.affinity.is_some()),
        });
    }
    Ok(Desired {
        name: names::load_balancer(&config.cluster, &lb.owner.service),
        scheme: scheme(config, lb)?,
        groups,
        fronts,
    })
}

fn possible(lb: &LoadBalancer) -> Result<(), Error> {
    let wrong = if !lb.families.contains(&Family::V4) {
        ("FamilyUnsupported", "IPv6 alone is not served on AWS yet: add IPv4 to spec.ipFamilies")
    } else if !lb.requested_addresses.is_empty() {
        (
            "AddressUnsupported",
            "a network load balancer's addresses can't be asked for yet: remove spec.loadBalancerIP and the annotation steerage.dev/addresses",
        )
    } else if lb.pool.is_some() {
        (
            "AddressPoolUnsupported",
            "there are no address pools on AWS: remove the annotation steerage.dev/address-pool",
        )
    } else if !lb.source_ranges.is_empty() {
        (
            "SourceRangesUnsupported",
            "source ranges are not enforced on AWS yet, so nothing is changed: remove spec.loadBalancerSourceRanges, and restrict the nodes' security group instead",
        )
    } else {
        return Ok(());
    };
    Err(Error::invalid(wrong.0, wrong.1))
}

fn scheme(config: &Config, lb: &LoadBalancer) -> Result<Scheme, Error> {
    let Some(text) = lb.annotations.get(SCHEME_ANNOTATION) else { return Ok(config.scheme) };
    Scheme::parse(text).ok_or_else(|| {
        Error::invalid(
            "SchemeUnknown",
            format!("{SCHEME_ANNOTATION} is {text:?}: use internal or internet-facing"),
        )
    })
}

/// Protocol and node port of each port that clients connect to. A port used by TCP and UDP is one `TCP_UDP` listener, which can have
/// one target group only.
fn merge(listeners: &[Listener]) -> Result<BTreeMap<u16, (&'static str, u16)>, Error> {
    let mut ports: BTreeMap<u16, (&'static str, u16)> = BTreeMap::new();
    for listener in listeners {
        let protocol = match listener.protocol {
            Protocol::Tcp => "TCP",
            Protocol::Udp => "UDP",
            Protocol::Sctp => {
                let message = format!("port {}: network load balancers do not know SCTP", listener.port);
                return Err(Error::invalid("ProtocolUnsupported", message));
            }
        };
        let Some(node_port) = listener.node_port else {
            let message = format!(
                "port {} has no node port, and instances are reached by node ports: set spec.allocateLoadBalancerNodePorts to true",
                listener.port
            );
            return Err(Error::invalid("NoNodePort", message));
        };
        let entry = ports.entry(listener.port).or_insert((protocol, node_port));
        if entry.1 != node_port {
            let message = format!(
                "port {} has node port {} for one protocol and {node_port} for the other, but a TCP_UDP listener has only one: give both the same nodePort",
                listener.port, entry.1
            );
            return Err(Error::invalid("NodePortsDiffer", message));
        }
        if entry.0 != protocol {
            entry.0 = "TCP_UDP";
        }
    }
    if ports.len() > MOST_LISTENERS {
        let message =
            format!("{} ports: a network load balancer has at most {MOST_LISTENERS} listeners", ports.len());
        return Err(Error::invalid("TooManyPorts", message));
    }
    Ok(ports)
}

fn health(check: &HealthCheck) -> Health {
    let seconds = |d: std::time::Duration| i32::try_from(d.as_secs()).unwrap_or(i32::MAX);
    let count = |n: u32| i32::try_from(n).unwrap_or(i32::MAX).clamp(2, 10);
    let interval = seconds(check.interval).clamp(5, 300);
    Health {
        path: match &check.protocol {
            HealthProtocol::Http { path } => Some(path.clone()),
            HealthProtocol::Tcp => None,
        },
        port: check.port,
        interval,
        timeout: seconds(check.timeout).clamp(2, 120).min(interval),
        healthy: count(check.healthy_threshold),
        unhealthy: count(check.unhealthy_threshold),
    }
}

/// What is kept at a value of ours, each because the default breaks a promise:
/// the client's address reaches the pod, without PROXY protocol; and where the last pod of a node terminates, `/healthz` fails
/// at once while the pod still serves what it has, so an unhealthy target's connections must not be reset (not
/// known for UDP).
fn attributes(protocol: &str, sticky: bool) -> BTreeMap<&'static str, String> {
    let mut attributes = BTreeMap::from([
        ("deregistration_delay.timeout_seconds", "300".to_owned()),
        ("preserve_client_ip.enabled", "true".to_owned()),
        ("proxy_protocol_v2.enabled", "false".to_owned()),
        ("stickiness.enabled", sticky.to_string()),
        ("stickiness.type", "source_ip".to_owned()),
    ]);
    if protocol == "TCP" {
        attributes.insert("target_health_state.unhealthy.connection_termination.enabled", "false".to_owned());
        attributes.insert("target_health_state.unhealthy.draining_interval_seconds", "300".to_owned());
    }
    attributes
}

#[cfg(test)]
pub(crate) mod tests {
    use std::time::Duration;

    use steerage_model::Key;
    use steerage_provider_api::Owner;

    use super::*;

    pub(crate) fn config() -> Config {
        Config {
            cluster: "test".to_owned(),
            vpc: "vpc-1".to_owned(),
            subnets: vec!["subnet-a".to_owned()],
            region: None,
            endpoint: None,
            scheme: Scheme::Internal,
        }
    }

    pub(crate) fn planned(ports: &[(Protocol, u16, u16)]) -> LoadBalancer {
        let listener = |&(protocol, port, node_port): &(Protocol, u16, u16)| Listener {
            name: String::new(),
            protocol,
            port,
            node_port: (node_port != 0).then_some(node_port),
        };
        LoadBalancer {
            owner: Owner { service: Key::new("shop", "web"), uid: "u1".to_owned() },
            families: vec![Family::V4],
            listeners: ports.iter().map(listener).collect(),
            health_check: HealthCheck {
                protocol: HealthProtocol::Http { path: "/healthz".to_owned() },
                port: 32000,
                interval: Duration::from_secs(5),
                timeout: Duration::from_secs(3),
                healthy_threshold: 2,
                unhealthy_threshold: 2,
            },
            affinity: None,
            requested_addresses: Vec::new(),
            pool: None,
            published: Vec::new(),
            source_ranges: Vec::new(),
            annotations: BTreeMap::new(),
        }
    }

    fn reason(lb: &LoadBalancer) -> &'static str {
        desired(&config(), lb).unwrap_err().reason()
    }

    #[test]
    fn ports_become_listeners_and_groups() {
        use Protocol::{Tcp, Udp};
        let made = desired(
            &config(),
            &planned(&[(Tcp, 80, 30080), (Tcp, 53, 30053), (Udp, 53, 30053), (Udp, 99, 30099)]),
        );
        let made = made.unwrap();
        let fronts: Vec<_> = made.fronts.iter().map(|f| (f.port, f.protocol)).collect();
        assert_eq!(fronts, [(53, "TCP_UDP"), (80, "TCP"), (99, "UDP")]);
        let groups: Vec<_> = made.groups.iter().map(|g| (g.port, g.protocol)).collect();
        assert_eq!(groups, [(30053, "TCP_UDP"), (30080, "TCP"), (30099, "UDP")]);
        assert!(made.fronts.iter().zip(&made.groups).all(|(f, g)| f.group == g.name));
        let keeps = |g: &Group| {
            g.attributes.contains_key("target_health_state.unhealthy.connection_termination.enabled")
        };
        assert_eq!(made.groups.iter().map(keeps).collect::<Vec<_>>(), [false, true, false]);
    }

    #[test]
    fn what_can_not_be_had_is_said() {
        use Protocol::{Sctp, Tcp, Udp};
        assert_eq!(reason(&planned(&[(Sctp, 80, 30080)])), "ProtocolUnsupported");
        assert_eq!(reason(&planned(&[(Tcp, 80, 0)])), "NoNodePort");
        assert_eq!(reason(&planned(&[(Tcp, 53, 30053), (Udp, 53, 30054)])), "NodePortsDiffer");
        let many: Vec<_> = (1..=51).map(|p| (Tcp, p, 30000 + p)).collect();
        assert_eq!(reason(&planned(&many)), "TooManyPorts");
        let web = planned(&[(Tcp, 80, 30080)]);
        assert_eq!(reason(&LoadBalancer { families: vec![Family::V6], ..web.clone() }), "FamilyUnsupported");
        let pool = Some("gold".to_owned());
        assert_eq!(reason(&LoadBalancer { pool, ..web.clone() }), "AddressPoolUnsupported");
        let requested_addresses = vec!["192.0.2.1".parse().unwrap()];
        assert_eq!(reason(&LoadBalancer { requested_addresses, ..web.clone() }), "AddressUnsupported");
        let source_ranges = vec!["192.0.2.0/24".parse().unwrap()];
        assert_eq!(reason(&LoadBalancer { source_ranges, ..web.clone() }), "SourceRangesUnsupported");
        let annotations = BTreeMap::from([(SCHEME_ANNOTATION.to_owned(), "public".to_owned())]);
        assert_eq!(reason(&LoadBalancer { annotations, ..web }), "SchemeUnknown");
    }

    #[test]
    fn the_annotation_wins_over_the_flag() {
        let mut lb = planned(&[(Protocol::Tcp, 80, 30080)]);
        assert_eq!(desired(&config(), &lb).unwrap().scheme, Scheme::Internal);
        lb.annotations.insert(SCHEME_ANNOTATION.to_owned(), "internet-facing".to_owned());
        assert_eq!(desired(&config(), &lb).unwrap().scheme, Scheme::InternetFacing);
    }

    #[test]
    fn health_checks_are_kept_within_the_limits() {
        let check = |interval, timeout, healthy, unhealthy| {
            let lb = planned(&[]);
            let h = health(&HealthCheck {
                interval: Duration::from_secs(interval),
                timeout: Duration::from_secs(timeout),
                healthy_threshold: healthy,
                unhealthy_threshold: unhealthy,
                ..lb.health_check
            });
            (h.interval, h.timeout, h.healthy, h.unhealthy)
        };
        assert_eq!(check(1, 1, 1, 1), (5, 2, 2, 2));
        assert_eq!(check(10, 6, 3, 3), (10, 6, 3, 3));
        assert_eq!(check(5, 60, 2, 2), (5, 5, 2, 2));
        assert_eq!(check(9999, 9999, 99, u32::MAX), (300, 120, 10, 10));
    }
}
