// SPDX-License-Identifier: Apache-2.0
//! Which load balancers of other controllers can be adopted, and why others cannot. Pure. `adopt` reads them and takes them over.
//!
//! Only tags say whose a load balancer is: users cannot write them. The host name in a Service's status only says where to look.

use std::collections::{BTreeMap, BTreeSet};

use clap::ValueEnum as _;
use steerage_model::Key;
use steerage_provider_api::{Error, Owner};
use steerage_provider_cloud::{
    ClusterId,
    marks::{self, CLUSTER, CLUSTER_UID, Ownership},
};

use crate::annotations::{GROUP_ATTRIBUTES, IP_ADDRESS_TYPE, SECURITY_GROUPS, SOURCE_NAT};
use crate::attributes::PRESERVE;
use crate::client::{Balancer, Tags};
use crate::config::{Config, Peer};
use crate::desired::{Desired, DesiredGroup};
use crate::diff::{ObservedGroup, ObservedListener};
use crate::ip_address_type::IpAddressType;
use crate::security_group::Security;
use crate::{annotations, reasons, security_group_sync, source_nat_sync};

/// Tag of cloud-provider-aws: followed by the cluster's name. Its value is `owned`.
const CCM_CLUSTER_PREFIX: &str = "kubernetes.io/cluster/";
/// Tag of cloud-provider-aws: `namespace/name` of the Service.
const CCM_SERVICE: &str = "kubernetes.io/service-name";
/// Tag of the AWS Load Balancer Controller: the cluster's name.
const ALBC_CLUSTER: &str = "elbv2.k8s.aws/cluster";
/// Tag of the AWS Load Balancer Controller: `namespace/name` of the Service.
const ALBC_SERVICE: &str = "service.k8s.aws/stack";
/// Tag of its security group for one load balancer, whose rules admit clients.
const ALBC_FRONT: (&str, &str) = ("service.k8s.aws/resource", "ManagedLBSecurityGroup");
/// Tag of its security group for all load balancers of a cluster, which rules of the nodes name as their source.
const ALBC_BACKEND: (&str, &str) = ("elbv2.k8s.aws/resource", "backend-sg");

/// AWS's limit for names of load balancers. It refuses to look for longer ones.
const MAX_NAME: usize = 32;

impl Peer {
    /// The name in the flag.
    pub(crate) fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }

    fn made(self, cluster: &str, service: &str, tags: &Tags) -> bool {
        let has = |key: &str, value: &str| tags.get(key).is_some_and(|found| found == value);
        match self {
            Self::CloudProviderAws => {
                has(&format!("{CCM_CLUSTER_PREFIX}{cluster}"), "owned") && has(CCM_SERVICE, service)
            }
            Self::AwsLoadBalancerController => has(ALBC_CLUSTER, cluster) && has(ALBC_SERVICE, service),
        }
    }
}

/// The controller that made a resource for this Service of this cluster, by the resource's tags. Tags that also name another Service or
/// cluster name nobody: a user may have added some by an annotation.
fn maker(cluster: &ClusterId, service: &Key, tags: &Tags) -> Option<Peer> {
    let (cluster, service) = (cluster.name.as_str(), service.to_string());
    let other_service =
        [CCM_SERVICE, ALBC_SERVICE].iter().any(|key| tags.get(*key).is_some_and(|found| *found != service));
    let is_other = |(key, value): (&String, &String)| match key.strip_prefix(CCM_CLUSTER_PREFIX) {
        Some(name) => name != cluster && value == "owned",
        None => key == ALBC_CLUSTER && value != cluster,
    };
    if other_service || tags.iter().any(is_other) {
        return None;
    }
    Peer::value_variants().iter().copied().find(|peer| peer.made(cluster, &service, tags))
}

/// The finalizers that keep a Service after the adoption of its load balancer. That of cloud-provider-aws is Kubernetes' own, which Steerage
/// sets too.
pub(crate) fn finalizers(config: &Config) -> &'static [&'static str] {
    let is_adopted = config.adopt.contains(&Peer::AwsLoadBalancerController);
    if is_adopted { &["service.k8s.aws/resources"] } else { &[] }
}

/// Where a host name leads.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Hostname<'a> {
    /// The load balancer's name, perhaps in lower case.
    pub(crate) balancer: &'a str,
    /// Whether it is that of a network load balancer. Others are classic or application load balancers.
    pub(crate) is_network: bool,
}

impl<'a> Hostname<'a> {
    /// `None` for a host name that is not of an AWS load balancer: `<name>-<hash>.elb.<region>.<domain>`, or with the region first.
    pub(crate) fn parse(text: &'a str) -> Option<Self> {
        let mut labels = text.split('.');
        let (balancer, _) = labels.next()?.rsplit_once('-')?;
        // No name begins so: AWS puts it before the names of internal load balancers of other types.
        let balancer = balancer.strip_prefix("internal-").unwrap_or(balancer);
        if balancer.len() > MAX_NAME {
            return None;
        }
        let is_network = labels.next()? == "elb";
        (is_network || labels.next()? == "elb").then_some(Self { balancer, is_network })
    }
}

/// A load balancer that a Service publishes, with all that decides whether it can be adopted.
#[derive(Debug)]
pub(crate) struct Candidate {
    pub(crate) balancer: Balancer,
    pub(crate) tags: Tags,
    pub(crate) listeners: Vec<ObservedListener>,
    /// The target groups that its listeners use, by name.
    pub(crate) groups: BTreeMap<String, ObservedGroup>,
    /// IDs of the security groups that the AWS Load Balancer Controller made for this Service, and for the cluster.
    pub(crate) front_groups: BTreeSet<String>,
    pub(crate) backend_groups: BTreeSet<String>,
    /// IDs of the security groups that an annotation of the Service names.
    pub(crate) named_groups: BTreeSet<String>,
}

/// Whose load balancer it is.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The owner's: the adoption began already.
    Ours,
    /// That of the controller which made it for the same Service.
    Of(Peer),
}

/// The tags of the security groups that the AWS Load Balancer Controller makes for one Service.
pub(crate) fn front_tags(cluster: &ClusterId, service: &Key) -> Tags {
    let tags = [(ALBC_CLUSTER, cluster.name.clone()), (ALBC_SERVICE, service.to_string())];
    let tags = tags.into_iter().chain([(ALBC_FRONT.0, ALBC_FRONT.1.to_owned())]);
    tags.map(|(key, value)| (key.to_owned(), value)).collect()
}

/// The tags of the security group that it makes for the cluster.
pub(crate) fn backend_tags(cluster: &ClusterId) -> Tags {
    let tags = [(ALBC_CLUSTER, cluster.name.as_str()), ALBC_BACKEND];
    tags.map(|(key, value)| (key.to_owned(), value.to_owned())).into()
}

/// Whether a resource with these tags is one of a controller whose load balancers are adopted, and no Steerage's yet.
pub(crate) fn is_adoptable(config: &Config, service: &Key, tags: &Tags) -> bool {
    !is_marked(tags) && maker(&config.cluster, service, tags).is_some_and(|peer| config.adopt.contains(&peer))
}

/// Whether a Steerage says whose the resource is.
fn is_marked(tags: &Tags) -> bool {
    tags.contains_key(marks::CLUSTER) || tags.contains_key(marks::CLUSTER_UID)
}

/// Why a published load balancer is not adopted.
pub(crate) fn refused(name: &str, why: &str) -> Error {
    let message = format!(
        "The load balancer {name}, whose host name the Service has in its status, is not adopted. {why} Nothing is changed in AWS."
    );
    Error::invalid(reasons::ADOPTION_REFUSED, message)
}

/// Whose load balancer it is, if it can be adopted without that clients lose something.
pub(crate) fn judge(
    config: &Config,
    owner: &Owner,
    wanted: &Desired,
    found: &Candidate,
) -> Result<Verdict, Error> {
    let Candidate { balancer, tags, .. } = found;
    let refuse = |why: String| Err(refused(&balancer.name, &why));
    match marks::ownership(&config.cluster, tags) {
        Ownership::Ours(of) if of == *owner => return Ok(Verdict::Ours),
        _ if is_marked(tags) => {
            return refuse(format!(
                "Its tags {CLUSTER} and {CLUSTER_UID} say that it belongs to another cluster or Service. Correct the tags if \
                 they are wrong."
            ));
        }
        _ => {}
    }
    let Some(peer) = maker(&config.cluster, &owner.service, tags) else {
        return refuse(format!(
            "Its tags do not say that cloud-provider-aws or aws-load-balancer-controller created it for the Service {} of a cluster \
             that is called {} as in --aws-cluster-name. If it is another's, clear status.loadBalancer of the Service: it then gets a \
             new load balancer with another host name.",
            owner.service, config.cluster.name
        ));
    };
    if !config.adopt.contains(&peer) {
        return Err(not_named(&balancer.name, peer));
    }
    if let Err(why) = check(config, &owner.service, wanted, found) {
        return refuse(why);
    }
    Ok(Verdict::Of(peer))
}

fn not_named(balancer: &str, peer: Peer) -> Error {
    let why = format!(
        "It is of {0}, which --aws-adopt does not name. Stop {0} for this Service, then add {0} to --aws-adopt. If another host name is \
         wanted instead, clear status.loadBalancer of the Service.",
        peer.name()
    );
    refused(balancer, &why)
}

/// Without the flag: refuses to create a second load balancer for a Service that publishes one of another controller with these tags, or
/// one whose adoption began. Its clients would not follow to another host name.
pub(crate) fn check_unadopted(
    cluster: &ClusterId,
    owner: &Owner,
    balancer: &str,
    tags: &Tags,
) -> Result<(), Error> {
    if marks::ownership(cluster, tags) == Ownership::Ours(owner.clone()) {
        return Err(refused(balancer, "Its adoption is not complete. Set --aws-adopt again until it is."));
    }
    match maker(cluster, &owner.service, tags) {
        Some(peer) if !is_marked(tags) => Err(not_named(balancer, peer)),
        _ => Ok(()),
    }
}

/// Says what the load balancer cannot become without a loss.
fn check(config: &Config, service: &Key, wanted: &Desired, found: &Candidate) -> Result<(), String> {
    let Candidate { balancer, listeners, .. } = found;
    if !balancer.is_network {
        return Err(
            "It is no network load balancer, and AWS cannot change that. Move clients to a new Service."
                .to_owned(),
        );
    }
    if let Some(why) = &balancer.failed {
        return Err(format!("AWS could not create it: {why}. Delete it."));
    }
    if balancer.vpc != config.vpc {
        return Err(format!(
            "It is in {}, but --aws-vpc-id is {}. Correct the flag, or create another Service, and move clients to it.",
            balancer.vpc, config.vpc
        ));
    }
    if balancer.ip_address_type == IpAddressType::DualStack && wanted.ip_address_type == IpAddressType::Ipv4 {
        return Err(format!(
            "Its clients may use IPv6, but the Service requests IPv4 alone. Set annotation {IP_ADDRESS_TYPE} to dualstack."
        ));
    }
    if balancer.ip_address_type != wanted.ip_address_type && !wanted.says_ip_address_type {
        return Err(format!(
            "Its clients use IPv4 alone, but spec.ipFamilies has IPv6. Set annotation {IP_ADDRESS_TYPE} to ipv4 to keep that, or to dualstack."
        ));
    }
    let has_udp = |listener: &ObservedListener| source_nat_sync::has_udp(&listener.protocol);
    if balancer.ip_address_type != wanted.ip_address_type && listeners.iter().any(has_udp) {
        return Err(format!(
            "It has a listener with UDP, so AWS does not change over which IP families clients reach it. Set annotation {IP_ADDRESS_TYPE} to {}.",
            balancer.ip_address_type.as_str()
        ));
    }
    if balancer.source_nat.is_on()
        && !wanted.source_nat.is_met_by(&balancer.source_nat)
        && !wanted.says_source_nat
    {
        return Err(format!(
            "It has prefixes for IPv6 source NAT, but no port of the Service has UDP. Set annotation {SOURCE_NAT} to on to keep them, or to off."
        ));
    }
    if balancer.scheme != Some(wanted.scheme) {
        let has = balancer.scheme.map_or("unknown", crate::config::Scheme::as_str);
        return Err(format!(
            "Its scheme is {has}, but the Service requests {}, and AWS cannot change it. Set annotation {} to {has}.",
            wanted.scheme.as_str(),
            annotations::SCHEME
        ));
    }
    // The other controller hides clients from pods by default, so that the pods' security groups may admit the load balancer alone.
    let hides = |group: &DesiredGroup| group.has_pods() && matches!(group.protocol, "TCP" | "TLS");
    if !wanted.says_client_ip && wanted.groups.iter().any(hides) {
        return Err(format!(
            "Its targets are pods, whose security groups may not admit clients: the other controller hides these by default, and Steerage \
             does not. Say in annotation {GROUP_ATTRIBUTES} which it shall be, {PRESERVE}=false or {PRESERVE}=true."
        ));
    }
    wanted.placement.check(&balancer.placed).map_err(|error| error.to_string())?;
    security_group_sync::check(wanted, balancer).map_err(|error| error.to_string())?;
    check_security_groups(config, &wanted.security, found)?;
    let is_wanted = |listener: &&ObservedListener| wanted.listeners.iter().any(|w| w.port == listener.port);
    let of_others = |listener: &&ObservedListener| !is_adoptable(config, service, &listener.tags);
    if let Some(taken) = listeners.iter().filter(is_wanted).find(of_others) {
        return Err(format!(
            "Its listener on port {} does not have the tags of that controller. Delete the listener, or give it the tags of the load \
             balancer.",
            taken.port
        ));
    }
    Ok(())
}

/// Rules of the nodes may name a group of the load balancer as their source. So none may leave that could be named, and none may stay
/// that admits more than the Service does.
fn check_security_groups(config: &Config, wanted: &Security, found: &Candidate) -> Result<(), String> {
    let Candidate { balancer, front_groups, backend_groups, named_groups, .. } = found;
    let attached = &balancer.security_groups;
    let list = |ids: BTreeSet<&String>| ids.into_iter().cloned().collect::<Vec<_>>().join(", ");
    let all = || list(attached.iter().collect());
    match wanted {
        Security::Rules(_) => {
            let unknown: BTreeSet<&String> = attached
                .iter()
                .filter(|id| {
                    let is_nodes = config.backend_security_group.as_ref() == Some(*id);
                    !is_nodes && !front_groups.contains(*id) && !backend_groups.contains(*id)
                })
                .collect();
            if !unknown.is_empty() {
                return Err(format!(
                    "Rules of the nodes may name its security groups {}, whose rules Steerage does not know. Name all its groups in \
                     annotation {SECURITY_GROUPS}, which keeps them as they are: {}.",
                    list(unknown),
                    all()
                ));
            }
            if attached.iter().any(|id| front_groups.contains(id)) && attached.is_disjoint(backend_groups) {
                return Err(format!(
                    "Rules of the nodes may name its only security group, which Steerage would replace. Name it in annotation \
                     {SECURITY_GROUPS}, which keeps it as it is: {}.",
                    all()
                ));
            }
        }
        Security::Named(_) => {
            let missing: BTreeSet<&String> = attached.difference(named_groups).collect();
            if !missing.is_empty() {
                return Err(format!(
                    "Annotation {SECURITY_GROUPS} does not name its security groups {}, which rules of the nodes may name. Add them.",
                    list(missing)
                ));
            }
        }
        Security::Open => {}
    }
    Ok(())
}

#[cfg(test)]
#[path = "adoption/tests.rs"]
mod tests;
