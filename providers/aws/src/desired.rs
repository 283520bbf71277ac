// SPDX-License-Identifier: Apache-2.0
//! The wanted `ELBv2` resources. Pure, from the plan's [`LoadBalancer`] and the configuration.

use std::collections::BTreeMap;

use steerage_model::{Family, Protocol, shown};
use steerage_provider_api::{Error, GroupKey, Listener, LoadBalancer, PodPort};
use steerage_provider_cloud::annotation;

use crate::attributes::{GroupWishes, OF_BALANCERS, OF_GROUPS, PRESERVE, Values};
use crate::client::Balancer;
use crate::config::{Config, Scheme};
use crate::health_check::HealthCheckSettings;
use crate::ip_address_type::{IpAddressType, has_udp, ip_families};
use crate::labels::Labels;
use crate::placement::{self, Placement};
use crate::security_group::{self, Security};
use crate::source_nat::{self, SourceNatWish};
use crate::tls::{Tls, TlsWishes};
use crate::{annotations, attributes, health_check, labels, names, peers, reasons, shared};

/// AWS's limit for one network load balancer.
pub(crate) const MAX_LISTENERS: usize = 50;

/// A wanted target group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DesiredGroup {
    pub(crate) name: String,
    pub(crate) protocol: &'static str,
    /// How its targets are reached.
    pub(crate) key: GroupKey,
    /// Over which IP family.
    pub(crate) family: Family,
    pub(crate) health: HealthCheckSettings,
    /// Attributes that must have these values. Others are not changed.
    pub(crate) attributes: Values,
    pub(crate) labels: Labels,
}

impl DesiredGroup {
    /// Whether its targets are pods.
    pub(crate) fn has_pods(&self) -> bool {
        matches!(self.key, GroupKey::Pods(_))
    }

    /// The port of targets that are registered without one, which AWS requires also where each target has its own.
    pub(crate) fn port(&self) -> u16 {
        match self.key {
            GroupKey::NodePort(port) | GroupKey::Pods(PodPort::Number(port)) => port,
            GroupKey::Vip | GroupKey::Pods(PodPort::Name(..)) => 1,
        }
    }
}

/// A wanted listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DesiredListener {
    pub(crate) port: u16,
    pub(crate) protocol: &'static str,
    /// Name of the target group.
    pub(crate) group: String,
    /// Of a TLS listener.
    pub(crate) tls: Option<Tls>,
}

/// All wanted resources of one Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Desired {
    /// Of the load balancer.
    pub(crate) name: String,
    /// The name under which Services share the load balancer. `groups` and `listeners` are those of this Service.
    pub(crate) shared: Option<String>,
    pub(crate) scheme: Scheme,
    pub(crate) ip_address_type: IpAddressType,
    pub(crate) source_nat: SourceNatWish,
    /// Whether an annotation says if it has source NAT.
    pub(crate) says_source_nat: bool,
    pub(crate) placement: Placement,
    pub(crate) security: Security,
    /// The same while the load balancer still has IPv6 that is no longer wanted.
    with_v6: Option<Security>,
    /// Whether an annotation says the IP address type.
    pub(crate) says_ip_address_type: bool,
    /// Attributes of the load balancer that must have these values. Others are not changed.
    pub(crate) attributes: Values,
    /// Of the load balancer.
    pub(crate) labels: Labels,
    pub(crate) groups: Vec<DesiredGroup>,
    pub(crate) listeners: Vec<DesiredListener>,
    /// Whether something is wanted that no list of AWS shows: TLS, values of attributes, or which listeners share pods.
    pub(crate) is_beyond_lists: bool,
    /// Whether an annotation says if targets see the addresses of clients.
    pub(crate) says_client_ip: bool,
}

impl Desired {
    /// Whether a target group of this name is wanted.
    pub(crate) fn has_group(&self, name: &str) -> bool {
        self.groups.iter().any(|group| group.name == name)
    }

    /// Whether a comparison reads the load balancer itself: annotations name its security groups or subnets, or clients need its IPv6.
    pub(crate) fn compares_balancer(&self) -> bool {
        self.placement.is_named()
            || matches!(self.security, Security::Named(_))
            || self.ip_address_type == IpAddressType::DualStack
    }

    /// The security of a load balancer as it is.
    pub(crate) fn security_of(&self, balancer: &Balancer) -> &Security {
        let has_v6 = balancer.ip_address_type == IpAddressType::DualStack;
        self.with_v6.as_ref().filter(|_| has_v6).unwrap_or(&self.security)
    }

    /// The labels of a listener, which has no attributes.
    pub(crate) fn listener_labels(&self) -> Labels {
        Labels { tags: self.labels.tags.clone(), ..Labels::default() }
    }
}

/// The wanted resources. Returns [`Error::Invalid`] if AWS or this provider does not support them.
pub(crate) fn desired(config: &Config, lb: &LoadBalancer) -> Result<Desired, Error> {
    let Some((shared, merged)) = shared::merged(config, lb)? else { return own(config, lb) };
    let name = names::shared_load_balancer(&config.cluster, &shared);
    shared::check_families(&merged)?;
    let of_one = own(config, &merged)?;
    let is_needed = of_one.says_source_nat || of_one.source_nat != SourceNatWish::Off;
    let source_nat = if is_needed { of_one.source_nat } else { SourceNatWish::AsItIs };
    Ok(Desired { name, shared: Some(shared), source_nat, ..of_one })
}

/// The same for a load balancer of one Service.
pub(crate) fn own(config: &Config, lb: &LoadBalancer) -> Result<Desired, Error> {
    check_supported(lb)?;
    peers::check(&lb.annotations)?;
    let families = ip_families(lb)?;
    let ports = merge_ports(&lb.listeners)?;
    let tags = labels::further_tags(&lb.annotations)?;
    let tls_wishes = TlsWishes::read(&lb.annotations, &lb.listeners)?;
    let protocols = ports.values().map(|(protocol, _)| *protocol).collect();
    let wishes = GroupWishes::read(&lb.annotations, &protocols)?;
    let mut listeners: Vec<DesiredListener> = Vec::new();
    let mut groups: Vec<DesiredGroup> = Vec::new();
    for (port, (protocol, key)) in ports {
        let (tls, of_listener, protocol) = tls_wishes.of(port, protocol)?;
        let planned = lb
            .group(key)
            .ok_or_else(|| Error::Unavailable(format!("no target group is planned for port {port}")))?;
        if protocol == "TLS" && planned.affinity.is_some() {
            let problem = format!(
                "The Service has spec.sessionAffinity ClientIP, and annotation {} is ssl, but AWS keeps no client on a target that it \
                 reaches by TLS.",
                annotations::BACKEND_PROTOCOL
            );
            return Err(annotation::conflict(
                &problem,
                "Set spec.sessionAffinity to None, or remove the annotation.",
            ));
        }
        let name = group_name(config, lb, protocol, (key, families.of_targets));
        listeners.push(DesiredListener { port, protocol: of_listener, group: name.clone(), tls });
        if groups.iter().any(|g| g.name == name) {
            continue;
        }
        let attributes = wishes.of(protocol, planned.affinity.is_some());
        let marked = attributes::to_mark(OF_GROUPS, &attributes);
        groups.push(DesiredGroup {
            name,
            protocol,
            key: key.clone(),
            family: families.of_targets,
            health: health_check::health_check(lb, planned, protocol, wishes.has_proxy_protocol())?,
            attributes,
            labels: Labels { tags: tags.clone(), attributes: marked },
        });
    }
    let scheme = scheme(config, lb)?;
    let attributes = attributes::of_balancer(&lb.annotations)?;
    let marked = attributes::to_mark(OF_BALANCERS, &attributes);
    let has_tls = listeners.iter().any(|listener| listener.tls.is_some());
    // Lists show no listeners. Those of pods may share a group, or swap groups.
    let may_swap = listeners.len() > 1 && groups.iter().any(DesiredGroup::has_pods);
    let is_beyond_lists = has_tls || may_swap || !attributes.is_empty() || !wishes.is_empty();
    let ports = listeners.iter().map(|found| (found.port, found.protocol));
    let backend = config.backend_security_group.as_deref();
    let security = security_group::security(lb, ports.clone(), families.of_clients, backend)?;
    let is_ipv4 = families.of_clients == IpAddressType::Ipv4;
    let with_v6 =
        is_ipv4.then(|| security_group::security(lb, ports, IpAddressType::DualStack, backend).ok());
    let placement = placement::placement(config, (scheme, families.of_clients), &lb.annotations)?;
    let source_nat = source_nat::wish(lb, families.of_clients, has_udp(lb), placement.named())?;
    Ok(Desired {
        name: names::load_balancer(&config.cluster, &lb.owner.service),
        shared: None,
        scheme,
        ip_address_type: families.of_clients,
        source_nat,
        says_source_nat: lb.annotations.contains_key(annotations::SOURCE_NAT),
        placement,
        security,
        with_v6: with_v6.flatten(),
        says_ip_address_type: lb.annotations.contains_key(annotations::IP_ADDRESS_TYPE),
        attributes,
        labels: Labels { tags, attributes: marked },
        groups,
        listeners,
        is_beyond_lists,
        says_client_ip: wishes.names(PRESERVE),
    })
}

fn group_name(
    config: &Config,
    lb: &LoadBalancer,
    protocol: &str,
    (key, family): (&GroupKey, Family),
) -> String {
    let service = &lb.owner.service;
    match key {
        GroupKey::Pods(port) => names::pod_group(config, service, protocol, (port, family)),
        GroupKey::NodePort(port) => names::target_group(config, service, protocol, (*port, family)),
        GroupKey::Vip => names::target_group(config, service, protocol, (0, family)),
    }
}

fn check_supported(lb: &LoadBalancer) -> Result<(), Error> {
    let wrong = if !lb.requested_addresses.is_empty() {
        (
            reasons::ADDRESS_NOT_SUPPORTED,
            "The AWS provider does not support requested addresses. No load balancer is created or changed. Remove spec.loadBalancerIP and the annotation steerage.dev/addresses.",
        )
    } else if lb.pool.is_some() {
        (
            reasons::ADDRESS_POOL_NOT_SUPPORTED,
            "The AWS provider has no address pools. No load balancer is created or changed. Remove the annotation steerage.dev/address-pool.",
        )
    } else {
        return Ok(());
    };
    Err(Error::invalid(wrong.0, wrong.1))
}

/// The scheme by annotation, else by flag. Nothing else decides whether a load balancer is public.
fn scheme(config: &Config, lb: &LoadBalancer) -> Result<Scheme, Error> {
    let by_internal = |text: &str| match text {
        "true" => Some(Scheme::Internal),
        "false" => Some(Scheme::InternetFacing),
        _ => None,
    };
    let named = annotated_scheme(lb, annotations::SCHEME, Scheme::parse, "internal or internet-facing")?;
    let internal = annotated_scheme(lb, annotations::INTERNAL, by_internal, "true or false")?;
    if let (Some(named), Some(internal)) = (named, internal)
        && named != internal
    {
        let problem = format!(
            "Annotation {} requests an {} load balancer, and {} an {} one.",
            annotations::SCHEME,
            named.as_str(),
            annotations::INTERNAL,
            internal.as_str()
        );
        let advice = format!("Decide which is right, and keep only {} with that value.", annotations::SCHEME);
        return Err(annotation::conflict(&problem, &advice));
    }
    Ok(named.or(internal).unwrap_or(config.scheme))
}

fn annotated_scheme(
    lb: &LoadBalancer,
    name: &str,
    parse: impl Fn(&str) -> Option<Scheme>,
    values: &str,
) -> Result<Option<Scheme>, Error> {
    let Some(text) = lb.annotations.get(name).map(|text| text.trim()) else { return Ok(None) };
    parse(text).map(Some).ok_or_else(|| {
        let value = shown(text);
        let message = format!(
            "Annotation {name} has the unknown value `{value}`. No load balancer is created or changed. Use {values}."
        );
        Error::invalid(reasons::UNKNOWN_SCHEME, message)
    })
}

/// Protocol and target group of each client-facing port. A port with both TCP and UDP becomes one `TCP_UDP` listener, which can
/// have only one target group.
fn merge_ports(listeners: &[Listener]) -> Result<BTreeMap<u16, (&'static str, &GroupKey)>, Error> {
    let mut ports: BTreeMap<u16, (&'static str, &GroupKey)> = BTreeMap::new();
    for listener in listeners {
        let protocol = match listener.protocol {
            Protocol::Tcp => "TCP",
            Protocol::Udp => "UDP",
            Protocol::Sctp => {
                let message = format!(
                    "Port {} uses SCTP, which network load balancers do not support. No load balancer is created or changed. Remove the port, or use TCP or UDP.",
                    listener.port
                );
                return Err(Error::invalid(reasons::PROTOCOL_NOT_SUPPORTED, message));
            }
        };
        let entry = ports.entry(listener.port).or_insert((protocol, &listener.group));
        if *entry.1 != listener.group {
            return Err(ports_differ(listener.port, entry.1, &listener.group));
        }
        if entry.0 != protocol {
            entry.0 = "TCP_UDP";
        }
    }
    if ports.len() > MAX_LISTENERS {
        let message = format!(
            "The Service has {} ports, but a network load balancer supports {MAX_LISTENERS} listeners. No load balancer is created or changed. Split the Service.",
            ports.len()
        );
        return Err(Error::invalid(reasons::TOO_MANY_PORTS, message));
    }
    Ok(ports)
}

/// The protocols of a port lead to different targets.
fn ports_differ(port: u16, one: &GroupKey, other: &GroupKey) -> Error {
    let only_one = "but a TCP_UDP listener supports only one. No load balancer is created or changed.";
    if let (GroupKey::NodePort(one), GroupKey::NodePort(other)) = (one, other) {
        let message = format!(
            "Port {port} has node port {one} for one protocol and {other} for the other, {only_one} Set the same nodePort for both."
        );
        return Error::invalid(reasons::NODE_PORTS_DIFFER, message);
    }
    let shown = |key: &GroupKey| match key {
        GroupKey::Pods(PodPort::Number(number)) => number.to_string(),
        GroupKey::Pods(PodPort::Name(name, protocol)) => format!("{name} ({protocol})"),
        GroupKey::Vip | GroupKey::NodePort(_) => "none".to_owned(),
    };
    let message = format!(
        "Port {port} has the target ports {} and {}, {only_one} Set the same number as targetPort of both protocols: a name may be \
         another port for each.",
        shown(one),
        shown(other)
    );
    Error::invalid(reasons::TARGET_PORTS_DIFFER, message)
}

#[cfg(test)]
pub(crate) mod tests {
    use std::time::Duration;

    use steerage_model::Key;
    use steerage_provider_api::{HealthCheck, HealthProtocol, Owner, TargetGroup, TargetSet, Targets};
    use steerage_provider_cloud::ClusterId;

    use super::*;

    pub(crate) fn config() -> Config {
        Config {
            cluster: ClusterId { name: "test".to_owned(), uid: "cluster-1".to_owned() },
            vpc: "vpc-1".to_owned(),
            subnets: vec!["subnet-a".to_owned()],
            shared_load_balancers: BTreeMap::new(),
            backend_security_group: None,
            region: None,
            endpoint: None,
            ec2_endpoint: None,
            scheme: Scheme::Internal,
            adopt: std::collections::BTreeSet::new(),
            settle: Duration::from_secs(10),
            activation_poll: Duration::from_secs(10),
            target_group_release: Duration::from_secs(5),
            security_group_release: Duration::from_secs(10),
        }
    }

    pub(crate) fn planned(ports: &[(Protocol, u16, u16)]) -> LoadBalancer {
        planned_as(ports, GroupKey::NodePort, &Targets::Nodes(TargetSet::default()))
    }

    /// The third number of each port is that of the pods.
    pub(crate) fn planned_with_pods(ports: &[(Protocol, u16, u16)]) -> LoadBalancer {
        let mut lb =
            planned_as(ports, |port| GroupKey::Pods(PodPort::Number(port)), &Targets::Pods([].into()));
        for group in &mut lb.groups {
            group.health_check = HealthCheck { protocol: HealthProtocol::Tcp, port: None, ..check() };
        }
        lb.annotations.insert(annotations::TARGET_TYPE.to_owned(), "ip".to_owned());
        lb
    }

    pub(crate) fn check() -> HealthCheck {
        HealthCheck {
            protocol: HealthProtocol::Http { path: "/healthz".to_owned() },
            port: Some(32000),
            is_of_service: false,
            interval: Duration::from_secs(5),
            timeout: Duration::from_secs(3),
            healthy_threshold: 2,
            unhealthy_threshold: 2,
        }
    }

    fn planned_as(
        ports: &[(Protocol, u16, u16)],
        key: impl Fn(u16) -> GroupKey,
        targets: &Targets,
    ) -> LoadBalancer {
        let listener = |&(protocol, port, to): &(Protocol, u16, u16)| Listener {
            name: String::new(),
            protocol,
            port,
            group: key(to),
        };
        let mut groups: Vec<TargetGroup> = Vec::new();
        for (_, _, to) in ports {
            let group = TargetGroup {
                key: key(*to),
                health_check: check(),
                affinity: None,
                targets: targets.clone(),
            };
            if groups.iter().all(|known| known.key != group.key) {
                groups.push(group);
            }
        }
        LoadBalancer {
            owner: Owner { service: Key::new("shop", "web"), uid: "u1".to_owned() },
            families: vec![Family::V4],
            listeners: ports.iter().map(listener).collect(),
            groups,
            requested_addresses: Vec::new(),
            pool: None,
            published: Vec::new(),
            published_hostnames: Vec::new(),
            labels: std::sync::Arc::default(),
            source_ranges: Vec::new(),
            annotations: BTreeMap::new(),
        }
    }

    fn reason(lb: &LoadBalancer) -> &'static str {
        desired(&config(), lb).unwrap_err().reason()
    }

    /// An annotation may have 256 KiB, and conditions and logs repeat what is wrong.
    #[test]
    fn long_annotations_are_not_repeated_whole() {
        let long = "x".repeat(200_000);
        let known = annotations::ALL.iter().chain(steerage_model::annotations::ALL);
        let mut refused = 0;
        for name in known.map(|known| known.name) {
            for value in [long.clone(), format!("{long},{long}"), format!("{long}=1,{long}=1")] {
                let port = [(Protocol::Tcp, 80, 30080)];
                for mut lb in [planned(&port), planned_with_pods(&port)] {
                    lb.annotations.insert(name.to_owned(), value.clone());
                    if let Err(error) = desired(&config(), &lb) {
                        assert!(error.to_string().len() < 1000, "{name}: {}", error.reason());
                        refused += 1;
                    }
                }
            }
        }
        assert!(refused > 100, "{refused}");
    }

    #[test]
    fn each_port_gets_listener_and_group() {
        use Protocol::{Tcp, Udp};
        let made = desired(
            &config(),
            &planned(&[(Tcp, 80, 30080), (Tcp, 53, 30053), (Udp, 53, 30053), (Udp, 99, 30099)]),
        );
        let made = made.unwrap();
        let listeners: Vec<_> = made.listeners.iter().map(|f| (f.port, f.protocol)).collect();
        assert_eq!(listeners, [(53, "TCP_UDP"), (80, "TCP"), (99, "UDP")]);
        let groups: Vec<_> = made.groups.iter().map(|g| (g.port(), g.protocol)).collect();
        assert_eq!(groups, [(30053, "TCP_UDP"), (30080, "TCP"), (30099, "UDP")]);
        assert!(made.listeners.iter().zip(&made.groups).all(|(f, g)| f.group == g.name));
        let keeps = |g: &DesiredGroup| {
            g.attributes.contains_key("target_health_state.unhealthy.connection_termination.enabled")
        };
        assert_eq!(made.groups.iter().map(keeps).collect::<Vec<_>>(), [false, true, false]);
    }

    #[test]
    fn unsupported_settings_have_distinct_reasons() {
        use Protocol::{Sctp, Tcp, Udp};
        assert_eq!(reason(&planned(&[(Sctp, 80, 30080)])), "ProtocolNotSupported");
        assert_eq!(reason(&planned_with_pods(&[(Tcp, 53, 53), (Udp, 53, 54)])), "TargetPortsDiffer");
        assert_eq!(reason(&planned(&[(Tcp, 53, 30053), (Udp, 53, 30054)])), "NodePortsDiffer");
        let many: Vec<_> = (1..=51).map(|p| (Tcp, p, 30000 + p)).collect();
        assert_eq!(reason(&planned(&many)), "TooManyPorts");
        let web = planned(&[(Tcp, 80, 30080)]);
        let pool = Some("gold".to_owned());
        assert_eq!(reason(&LoadBalancer { pool, ..web.clone() }), "AddressPoolNotSupported");
        let requested_addresses = vec!["192.0.2.1".parse().unwrap()];
        assert_eq!(reason(&LoadBalancer { requested_addresses, ..web.clone() }), "AddressNotSupported");
        let annotated = |name: &str, value: &str| {
            let annotations = BTreeMap::from([(name.to_owned(), value.to_owned())]);
            reason(&LoadBalancer { annotations, ..web.clone() })
        };
        assert_eq!(annotated(annotations::SCHEME, "public"), "UnknownScheme");
        assert_eq!(annotated(annotations::SOURCE_RANGES, "192.0.2.0/33"), "InvalidAnnotation");
    }

    #[test]
    fn affinity_needs_targets_without_tls() {
        let of = |backend: &str, is_sticky: bool| {
            let mut lb = planned(&[(Protocol::Tcp, 443, 30443)]);
            lb.groups[0].affinity =
                is_sticky.then(|| steerage_model::Affinity { timeout: Duration::from_mins(1) });
            let named =
                [(annotations::SSL_CERT, "arn:aws:acm:::a"), (annotations::BACKEND_PROTOCOL, backend)];
            lb.annotations = named.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
            let made = desired(&config(), &lb).map_err(|error| (error.reason(), error.to_string()))?;
            Ok::<_, (&str, String)>(made.groups[0].attributes.get("stickiness.enabled").cloned())
        };
        assert_eq!(of("tcp", true), Ok(Some("true".to_owned())));
        assert_eq!(of("tcp", false), Ok(Some("false".to_owned())));
        assert_eq!(of("ssl", false), Ok(None), "AWS refuses the attribute");
        let (reason, message) = of("ssl", true).unwrap_err();
        assert_eq!(reason, "ConflictingAnnotations");
        for part in
            ["sessionAffinity", annotations::BACKEND_PROTOCOL, "No load balancer is created or changed"]
        {
            assert!(message.contains(part), "{message}");
        }
    }

    #[test]
    fn scheme_annotation_overrides_flag() {
        let mut lb = planned(&[(Protocol::Tcp, 80, 30080)]);
        assert_eq!(desired(&config(), &lb).unwrap().scheme, Scheme::Internal);
        lb.annotations.insert(annotations::SCHEME.to_owned(), "internet-facing".to_owned());
        assert_eq!(desired(&config(), &lb).unwrap().scheme, Scheme::InternetFacing);
    }

    /// By the name that every version of the peers knows; ignored, it would make a private Service public.
    #[test]
    fn internal_annotation_is_obeyed_and_must_agree_with_the_scheme() {
        let public = Config { scheme: Scheme::InternetFacing, ..config() };
        let of = |internal: &str, scheme: Option<&str>| {
            let mut lb = planned(&[(Protocol::Tcp, 80, 30080)]);
            lb.annotations.insert(annotations::INTERNAL.to_owned(), internal.to_owned());
            lb.annotations.extend(scheme.map(|scheme| (annotations::SCHEME.to_owned(), scheme.to_owned())));
            desired(&public, &lb).map(|desired| desired.scheme).map_err(|error| error.reason())
        };
        assert_eq!(of("true", None), Ok(Scheme::Internal));
        assert_eq!(of("false", None), Ok(Scheme::InternetFacing));
        assert_eq!(of("true", Some("internal")), Ok(Scheme::Internal));
        assert_eq!(of("true", Some("internet-facing")), Err("ConflictingAnnotations"));
        assert_eq!(of("false", Some("internal")), Err("ConflictingAnnotations"));
        for unclear in ["", "0.0.0.0/0", "yes"] {
            assert_eq!(of(unclear, None), Err("UnknownScheme"), "{unclear}");
        }
    }

    /// The header would reach the health-check port: no node would be healthy, and AWS would send to all of them.
    #[test]
    fn proxy_protocol_changes_the_check_or_is_refused() {
        let mut lb = planned(&[(Protocol::Tcp, 80, 30080)]);
        lb.annotations.insert(annotations::PROXY_PROTOCOL.to_owned(), "*".to_owned());
        let group = desired(&config(), &lb).unwrap().groups.remove(0);
        assert_eq!((group.health.path, group.health.port), (None, Some(32000)));
        assert_eq!(group.attributes["proxy_protocol_v2.enabled"], "true");
        lb.groups[0].health_check.is_of_service = true;
        assert_eq!(reason(&lb), "ConflictingAnnotations");
        lb.annotations.clear();
        assert!(desired(&config(), &lb).unwrap().groups[0].health.path.is_some());
    }

    #[test]
    fn labels_are_those_of_the_annotations() {
        let mut lb = planned(&[(Protocol::Tcp, 80, 30080)]);
        let plain = desired(&config(), &lb).unwrap();
        assert_eq!((&plain.labels, &plain.groups[0].labels), (&Labels::default(), &Labels::default()));
        let cross_zone = "load_balancing.cross_zone.enabled";
        for (name, value) in [
            (annotations::TAGS, "team=shop"),
            (annotations::CROSS_ZONE, "true"),
            (annotations::GROUP_ATTRIBUTES, "preserve_client_ip.enabled=false"),
        ] {
            lb.annotations.insert(name.to_owned(), value.to_owned());
        }
        let made = desired(&config(), &lb).unwrap();
        assert_eq!(made.labels.attributes, [cross_zone].into());
        assert_eq!(made.labels.tags["team"], "shop");
        // Without the annotation, it has Steerage's value again: nothing must be remembered.
        assert_eq!(made.groups[0].labels, made.listener_labels());
    }
}
