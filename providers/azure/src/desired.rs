// SPDX-License-Identifier: Apache-2.0
//! What a planned load balancer needs in Azure. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use steerage_model::{Family, Key, Protocol};
use steerage_provider_api::{Error, HealthCheck, HealthProtocol, LoadBalancer, SharedSet, TargetSet};
use steerage_provider_cloud::annotation::conflict;

use crate::config::Config;
use crate::marks::Mark;
use crate::options::{Options, Sources};
use crate::{annotations, limits, peers, reasons};

/// Which address clients connect to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum WantedAddress {
    /// A private one of this subnet.
    Private { subnet: String, address: Option<IpAddr> },
    /// A public IP that Steerage creates and deletes.
    New(NewPublicIp),
    /// A public IP of the user.
    Given { group: Option<String>, by: Given },
}

/// What names a public IP of the user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Given {
    Name(String),
    Address(IpAddr),
}

/// A public IP of Steerage's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NewPublicIp {
    pub(crate) prefix: Option<String>,
    pub(crate) dns_label: Option<String>,
    pub(crate) tags: BTreeMap<String, String>,
}

/// The nodes of a pool, by address.
pub(crate) type Nodes = BTreeMap<IpAddr, String>;

/// The pool of a frontend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum WantedPool {
    /// One that many Services use.
    Shared(SharedSet),
    /// One of the Service's own.
    Own(Nodes),
}

/// One address of a load balancer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WantedFrontend {
    pub(crate) family: Family,
    pub(crate) address: WantedAddress,
    pub(crate) pool: WantedPool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WantedRule {
    /// As Azure writes it.
    pub(crate) protocol: &'static str,
    pub(crate) port: u16,
    pub(crate) idle_minutes: u32,
    pub(crate) has_tcp_reset: bool,
    pub(crate) distribution: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WantedProbe {
    pub(crate) port: u16,
    /// `None` for TCP.
    pub(crate) path: Option<String>,
    pub(crate) interval: u64,
    pub(crate) threshold: u32,
}

/// Everything of a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Desired {
    pub(crate) service: Key,
    pub(crate) mark: Mark,
    pub(crate) is_internal: bool,
    pub(crate) frontends: Vec<WantedFrontend>,
    pub(crate) rules: Vec<WantedRule>,
    pub(crate) probe: WantedProbe,
    pub(crate) sources: Sources,
    /// Nodes that cannot be targets, with the reason.
    pub(crate) refused: Vec<(String, String)>,
}

/// What a planned load balancer needs.
pub(crate) fn desired(lb: &LoadBalancer, config: &Config) -> Result<Desired, Error> {
    peers::check(&lb.annotations)?;
    let options = Options::read(&lb.annotations)?;
    let sources = Sources::read(&lb.source_ranges, &lb.annotations)?;
    limits::check_service(lb, &sources)?;
    if let Some(pool) = &lb.pool {
        let message = format!(
            "The Service names the AddressPool {pool}, and Azure has none. No load balancer is created or changed. Remove \
             steerage.dev/address-pool."
        );
        return Err(Error::invalid(reasons::ADDRESS_POOL_NOT_SUPPORTED, message));
    }
    if config.security_group.is_none() && !sources.is_everybody() {
        let message = "The Service limits its clients, and Steerage does not know the network security group of the nodes. No load \
                       balancer is created or changed. Set --azure-network-security-group, or remove the ranges and service tags.";
        return Err(Error::invalid(reasons::NO_SECURITY_GROUP, message));
    }
    if options.is_internal && lb.families.contains(&Family::V6) {
        let message = format!(
            "The Service is internal and has IPv6, for which Azure has no floating IP. No load balancer is created or changed. Set \
             spec.ipFamilies to IPv4, or remove {}.",
            annotations::INTERNAL
        );
        return Err(Error::invalid(reasons::INTERNAL_IPV6_NOT_SUPPORTED, message));
    }
    let mut refused = BTreeMap::new();
    // The capabilities say that nodes are reached by VIP: there is one group.
    let Some(group) = lb.groups.first() else {
        return Err(Error::Unavailable("the plan has no target group".to_owned()));
    };
    let set = group.nodes().cloned().unwrap_or_default();
    let frontends = lb.families.iter().map(|family| {
        Ok(WantedFrontend {
            family: *family,
            address: address(lb, *family, &options, config)?,
            pool: pool(&set, *family, &mut refused),
        })
    });
    let frontends = frontends.collect::<Result<Vec<_>, Error>>()?;
    // A node that serves over one family is not refused.
    refused.retain(|_, (_, count)| *count == lb.families.len());
    let rule = |protocol: Protocol, port| WantedRule {
        protocol: if protocol == Protocol::Udp { "Udp" } else { "Tcp" },
        port,
        idle_minutes: options.idle_minutes,
        has_tcp_reset: options.has_tcp_reset && protocol == Protocol::Tcp,
        distribution: if group.affinity.is_some() { "SourceIP" } else { "Default" },
    };
    Ok(Desired {
        service: lb.owner.service.clone(),
        mark: Mark::new(&config.cluster, &lb.owner),
        is_internal: options.is_internal,
        frontends,
        rules: lb.listeners.iter().map(|listener| rule(listener.protocol, listener.port)).collect(),
        probe: probe(&group.health_check, lb.listeners.first().map_or(0, |listener| listener.port)),
        sources,
        refused: refused.into_iter().map(|(node, (why, _))| (node, why)).collect(),
    })
}

fn address(
    lb: &LoadBalancer,
    family: Family,
    options: &Options,
    config: &Config,
) -> Result<WantedAddress, Error> {
    let of = options.of(family);
    let mut requested: BTreeSet<IpAddr> =
        lb.requested_addresses.iter().copied().filter(|address| Family::of(*address) == family).collect();
    requested.extend(of.address);
    if requested.len() > 1 {
        let problem =
            format!("The Service requests several {family} addresses, and a load balancer has one.");
        return Err(conflict(&problem, "Request one."));
    }
    if let Some(other) = lb.requested_addresses.iter().find(|ip| !lb.families.contains(&Family::of(**ip))) {
        let problem = format!("The Service requests the address {other}, which is not of its IP families.");
        return Err(conflict(&problem, "Request an address of a family of the Service."));
    }
    let requested = requested.into_iter().next();
    if options.is_internal {
        let Some(subnet) = options.subnet.as_ref().or(config.subnet.as_ref()) else {
            let message = format!(
                "The Service is internal, and no subnet is known. No load balancer is created or changed. Set --azure-subnet, or {}.",
                annotations::SUBNET
            );
            return Err(Error::invalid(reasons::ADDRESS_NOT_AVAILABLE, message));
        };
        let subnet = format!("{}/subnets/{subnet}", config.network);
        return Ok(WantedAddress::Private { subnet, address: requested });
    }
    let group = options.resource_group.clone();
    match (&of.public_ip, requested) {
        (Some(_), Some(_)) => {
            let problem =
                format!("The Service requests a public IP for {family} by its name and by its address.");
            Err(conflict(&problem, "Keep one of them."))
        }
        (Some(name), None) => Ok(WantedAddress::Given { group, by: Given::Name(name.clone()) }),
        (None, Some(address)) => Ok(WantedAddress::Given { group, by: Given::Address(address) }),
        (None, None) => Ok(WantedAddress::New(NewPublicIp {
            prefix: of.prefix.clone(),
            dns_label: options.dns_label.clone(),
            tags: options.tags.clone(),
        })),
    }
}

/// The pool for these nodes. Those without an address of the family are counted.
fn pool(set: &TargetSet, family: Family, refused: &mut BTreeMap<String, (String, usize)>) -> WantedPool {
    let nodes = nodes(set, family, refused);
    match set.shared {
        Some(shared) => WantedPool::Shared(shared),
        None => WantedPool::Own(nodes),
    }
}

/// The addresses of nodes. A node without one of the family is noted.
pub(crate) fn nodes(
    set: &TargetSet,
    family: Family,
    refused: &mut BTreeMap<String, (String, usize)>,
) -> Nodes {
    let mut nodes = Nodes::new();
    let mut without = BTreeMap::new();
    for target in &*set.targets {
        let mut addresses = target.addresses.iter().copied();
        if let Some(address) = addresses.find(|address| Family::of(*address) == family) {
            nodes.insert(address, target.node.clone());
        } else {
            let why = format!(
                "the node has no internal {family} address; set one, or let the cloud controller manager set it"
            );
            without.insert(target.node.clone(), why);
        }
    }
    for (node, why) in without {
        refused.entry(node).or_insert((why, 0)).1 += 1;
    }
    nodes
}

/// Azure takes intervals of whole seconds, and at most two minutes until it decides.
fn probe(check: &HealthCheck, port: u16) -> WantedProbe {
    let interval = check.interval.as_secs().clamp(5, 60);
    let most = u32::try_from(119 / interval).unwrap_or(2);
    WantedProbe {
        port: check.port.unwrap_or(port),
        path: match &check.protocol {
            HealthProtocol::Http { path } => Some(path.clone()),
            HealthProtocol::Tcp => None,
        },
        interval,
        threshold: check.unhealthy_threshold.clamp(1, most),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::time::Duration;

    use steerage_provider_api::{GroupKey, Listener, Owner, Target, TargetGroup, Targets};

    use super::*;
    use crate::config::tests::config;
    use crate::marks::tests::UID;

    pub(crate) fn node(index: u8) -> Target {
        Target {
            node: format!("n{index}"),
            addresses: vec![format!("10.0.0.{index}").parse().unwrap()],
            provider_id: None,
            zone: None,
            pod_cidrs: Vec::new(),
            weight: 1,
        }
    }

    /// `shop/web` on these TCP ports, with these nodes.
    pub(crate) fn planned(ports: &[u16], nodes: &[u8]) -> LoadBalancer {
        named("web", ports, nodes)
    }

    pub(crate) fn named(name: &str, ports: &[u16], nodes: &[u8]) -> LoadBalancer {
        let uid = if name == "web" {
            UID.to_owned()
        } else {
            let digest = name.bytes().fold(7_u64, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte.into()));
            format!("{:08x}-0000-4000-8000-{:012x}", digest >> 32 & 0xffff_ffff, digest & 0xffff_ffff)
        };
        let group = TargetGroup {
            key: GroupKey::Vip,
            health_check: HealthCheck {
                protocol: HealthProtocol::Http { path: "/healthz".to_owned() },
                port: Some(10256),
                is_of_service: false,
                interval: Duration::from_secs(5),
                timeout: Duration::from_secs(2),
                healthy_threshold: 2,
                unhealthy_threshold: 2,
            },
            affinity: None,
            targets: Targets::Nodes(TargetSet::own(nodes.iter().copied().map(node))),
        };
        let listener = |port: &u16| Listener {
            name: String::new(),
            protocol: Protocol::Tcp,
            port: *port,
            group: GroupKey::Vip,
        };
        LoadBalancer {
            owner: Owner { service: Key::new("shop", name), uid },
            families: vec![Family::V4],
            listeners: ports.iter().map(listener).collect(),
            groups: vec![group],
            requested_addresses: Vec::new(),
            pool: None,
            published: Vec::new(),
            published_hostnames: Vec::new(),
            labels: std::sync::Arc::default(),
            source_ranges: Vec::new(),
            annotations: BTreeMap::new(),
        }
    }

    pub(crate) fn annotated(mut lb: LoadBalancer, name: &str, value: &str) -> LoadBalancer {
        lb.annotations.insert(name.to_owned(), value.to_owned());
        lb
    }

    #[test]
    fn service_says_which_address_it_gets() {
        let address = |lb: &LoadBalancer| desired(lb, &config()).map(|all| all.frontends[0].address.clone());
        let lb = planned(&[80], &[1]);
        assert!(matches!(address(&lb), Ok(WantedAddress::New(_))));
        let internal = annotated(lb.clone(), annotations::INTERNAL, "true");
        let fixed = annotated(internal.clone(), annotations::IPV4, "10.0.0.9");
        for (lb, wanted) in [(&internal, None), (&fixed, Some("10.0.0.9".parse().unwrap()))] {
            let subnet = format!("{}/subnets/nodes", config().network);
            assert_eq!(address(lb).unwrap(), WantedAddress::Private { subnet, address: wanted });
        }
        let named = annotated(lb.clone(), annotations::PIP_NAME, "mine");
        assert!(
            matches!(address(&named), Ok(WantedAddress::Given { by: Given::Name(name), .. }) if name == "mine")
        );
        let mut requested = lb.clone();
        requested.requested_addresses = vec!["192.0.2.1".parse().unwrap()];
        assert!(matches!(address(&requested), Ok(WantedAddress::Given { by: Given::Address(_), .. })));
        for wrong in [
            annotated(requested.clone(), annotations::IPV4, "192.0.2.2"),
            annotated(requested.clone(), annotations::PIP_NAME, "mine"),
            LoadBalancer {
                requested_addresses: vec!["192.0.2.1".parse().unwrap(), "192.0.2.2".parse().unwrap()],
                ..lb.clone()
            },
            LoadBalancer { requested_addresses: vec!["2001:db8::1".parse().unwrap()], ..lb.clone() },
        ] {
            assert_eq!(address(&wrong).unwrap_err().reason(), "ConflictingAnnotations");
        }
        let mut without = config();
        without.subnet = None;
        assert_eq!(desired(&internal, &without).unwrap_err().reason(), "AddressNotAvailable");
    }

    #[test]
    fn what_azure_lacks_is_refused() {
        let lb = planned(&[80], &[1]);
        let v6 = LoadBalancer { families: vec![Family::V4, Family::V6], ..lb.clone() };
        assert!(desired(&v6, &config()).is_ok());
        let internal = annotated(v6, annotations::INTERNAL, "true");
        assert_eq!(desired(&internal, &config()).unwrap_err().reason(), "InternalIPv6NotSupported");
        let limited = LoadBalancer { source_ranges: vec!["10.0.0.0/8".parse().unwrap()], ..lb.clone() };
        let error = desired(&limited, &config()).unwrap_err();
        assert!(
            error.reason() == "NoSecurityGroup"
                && error.to_string().contains("--azure-network-security-group")
        );
        let tags = annotated(lb.clone(), annotations::ALLOWED_SERVICE_TAGS, "AzureCloud");
        assert_eq!(desired(&tags, &config()).unwrap_err().reason(), "NoSecurityGroup");
        let with = Config { security_group: Some("/g".to_owned()), ..config() };
        assert!(desired(&limited, &with).is_ok());
        let pool = LoadBalancer { pool: Some("a".to_owned()), ..lb };
        assert_eq!(desired(&pool, &config()).unwrap_err().reason(), "AddressPoolNotSupported");
    }

    #[test]
    fn nodes_are_of_the_family_and_probes_within_azures_limits() {
        let mut lb = planned(&[80], &[1, 2, 2]);
        lb.families = vec![Family::V4, Family::V6];
        let all = desired(&lb, &config()).unwrap();
        assert!(matches!(&all.frontends[0].pool, WantedPool::Own(nodes) if nodes.len() == 2));
        assert!(matches!(&all.frontends[1].pool, WantedPool::Own(nodes) if nodes.is_empty()));
        assert!(all.refused.is_empty(), "it serves over IPv4");
        lb.families = vec![Family::V6];
        assert_eq!(desired(&lb, &config()).unwrap().refused.len(), 2);
        let probe = |interval, threshold| {
            let mut lb = planned(&[80], &[1]);
            let check = &mut lb.groups[0].health_check;
            (check.interval, check.unhealthy_threshold) = (Duration::from_secs(interval), threshold);
            let probe = desired(&lb, &config()).unwrap().probe;
            (probe.port, probe.interval, probe.threshold)
        };
        assert_eq!(probe(5, 2), (10256, 5, 2));
        assert_eq!(probe(1, 1), (10256, 5, 1));
        assert_eq!(probe(60, 10), (10256, 60, 1));
        assert_eq!(probe(10, 100), (10256, 10, 11));
    }
}
