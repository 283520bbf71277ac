// SPDX-License-Identifier: Apache-2.0
//! Which load balancers of cloud-provider-openstack can be adopted, and why others cannot. Pure. `adopt` reads them and takes them over.
//!
//! That controller names a load balancer after its cluster and the Service, and gives it the name as a tag too. Two clusters may have the
//! same name, so the Service must also publish the load balancer's address, or name its ID.

use steerage_model::{Key, shown};
use steerage_provider_api::{Error, Owner};

use crate::annotations::LOAD_BALANCER_ID;
use crate::desired::Desired;
use crate::diff::l4;
use crate::marks;
use crate::reasons;
use crate::types::{Balancer, FloatingIp, Listener};

/// Tags of Steerage begin with it.
const STEERAGE: &str = "steerage.dev/";
/// The names of that controller's load balancers begin with it.
const OF_PEER: &str = "kube_service_";
/// Its names have at most so many bytes.
const LONGEST_NAME: usize = 255;

/// The name that cloud-provider-openstack gives a Service's load balancer. `cluster` is its `--cluster-name`.
pub(crate) fn peer_name(cluster: &str, service: &Key) -> String {
    let mut name = format!("{OF_PEER}{cluster}_{}_{}", service.namespace(), service.name());
    name.truncate(name.floor_char_boundary(LONGEST_NAME));
    name
}

/// Whether a load balancer has the name that cloud-provider-openstack gives one of this Service, in whatever cluster.
pub(crate) fn is_of_peer(balancer: &Balancer, service: &Key) -> bool {
    let end = format!("_{}_{}", service.namespace(), service.name());
    balancer.name.starts_with(OF_PEER)
        && (balancer.name.ends_with(&end) || balancer.name.len() >= LONGEST_NAME)
}

/// Whether a listener or pool is the owner's: by its tag, or because cloud-provider-openstack made it in a load balancer that Steerage adopted.
/// Its names, such as `listener_0_kube_service_…`, have the load balancer's, and may be cut off.
pub(crate) fn is_part(owner: &Owner, balancer: &Balancer, name: &str, tags: &[String]) -> bool {
    if marks::is_part(tags, owner) || marks::is_of_service(tags, &balancer.tags, &owner.service) {
        return true;
    }
    let of_others = tags.iter().any(|tag| *tag != balancer.name);
    let made = ["listener_", "pool_"].iter().find_map(|kind| name.strip_prefix(kind)?.split_once('_'));
    let is_named = made.is_some_and(|(index, of)| {
        index.parse::<u16>().is_ok() && !of.is_empty() && balancer.name.starts_with(of)
    });
    balancer.name.starts_with(OF_PEER) && is_named && !of_others
}

/// Whether cloud-provider-openstack created this floating IP for the Service.
pub(crate) fn is_floating_of_peer(ip: &FloatingIp, service: &Key) -> bool {
    ip.description
        .starts_with(&format!("Floating IP for Kubernetes external service {service} from cluster "))
}

/// A load balancer that may be the Service's.
#[derive(Clone, Debug)]
pub(crate) struct Candidate {
    pub(crate) balancer: Balancer,
    pub(crate) listeners: Vec<Listener>,
    /// Whether the Service publishes its address, or names its ID.
    pub(crate) is_known: bool,
    /// Whether it is of the project, and in a network of VIPs that the flags or the Service name.
    pub(crate) is_ours: bool,
    /// Whether it has a node of this cluster, where the annotation alone names it.
    pub(crate) has_nodes: bool,
}

fn refuse(balancer: &Balancer, why: &str, advice: &str) -> Error {
    let message = format!(
        "The Service has the load balancer {}, which Steerage did not create for it, and does not take over: {why}. It is not changed, and \
         no other one is created. {advice}",
        balancer.id
    );
    Error::invalid(reasons::ADOPTION_REFUSED, message)
}

/// The annotation names a load balancer that nobody finds: a typing error would change the Service's address.
pub(crate) fn names_nothing(id: &str) -> Error {
    let message = format!(
        "Annotation {LOAD_BALANCER_ID} names the load balancer {}, which does not exist, or the project does not see it. No load balancer \
         is created or changed. Correct the ID; for a new load balancer, remove the annotation.",
        shown(id)
    );
    Error::invalid(reasons::ADOPTION_REFUSED, message)
}

/// What is told of a Service that has a load balancer, and whose annotation names another one.
pub(crate) fn names_another(wanted: &Desired, balancer: &Balancer) -> Option<(&'static str, String)> {
    let id = wanted.adopts.as_ref().filter(|id| **id != balancer.id)?;
    let message = format!(
        "The Service is served by the load balancer {}, and annotation {LOAD_BALANCER_ID} names another one, {}. The annotation has no \
         effect. Remove it, or set it to {}. For the other load balancer, delete the Service and create it again.",
        balancer.id,
        shown(id),
        balancer.id
    );
    Some((reasons::ADOPTION_REFUSED, message))
}

/// How a Service gets a load balancer in place of the one that it has.
pub(crate) fn for_a_new_one(service: &Key) -> String {
    format!(
        "For a new load balancer, remove {LOAD_BALANCER_ID} if the Service has it, and clear its status: `kubectl patch service -n {} {} \
         --subresource=status --type=merge -p '{{\"status\":{{\"loadBalancer\":null}}}}'`.",
        service.namespace(),
        service.name()
    )
}

/// Refuses a load balancer that must not be adopted. `cluster` is the cluster's name for cloud-provider-openstack; `None` without the flag.
pub(crate) fn judge(
    cluster: Option<&str>,
    owner: &Owner,
    wanted: &Desired,
    found: &Candidate,
) -> Result<(), Error> {
    let Candidate { balancer, listeners, is_known, is_ours, has_nodes } = found;
    // Not told: the names and tags of others, which a tenant must not learn.
    let refuse = |why: &str, advice: &str| Err(refuse(balancer, why, advice));
    let or_new = |advice: &str| format!("{advice} {}", for_a_new_one(&owner.service));
    if !is_ours || !has_nodes {
        return refuse(
            if *is_ours {
                "only the annotation names it, and none of its members is a node of this cluster"
            } else {
                "it is of another project, or in another network than VIPs of this cluster"
            },
            &or_new(&format!("Correct {LOAD_BALANCER_ID} if it names the load balancer.")),
        );
    }
    if balancer.tags.iter().any(|tag| tag.starts_with(STEERAGE)) {
        return refuse(
            "it has tags of Steerage, for another Service or cluster",
            &for_a_new_one(&owner.service),
        );
    }
    let Some(cluster) = cluster else {
        return refuse(
            "--openstack-adopt is not set",
            &or_new("Set the flag to the cluster's name for cloud-provider-openstack."),
        );
    };
    let name = peer_name(cluster, &owner.service);
    if balancer.name != name {
        return refuse(
            &format!("cloud-provider-openstack would call it {name}"),
            &or_new("Correct --openstack-adopt."),
        );
    }
    if balancer.tags.iter().any(|tag| tag.starts_with(OF_PEER) && *tag != name) {
        return refuse(
            "another Service shares it, as a tag says",
            "Give the other Service a load balancer of its own first.",
        );
    }
    if !is_known {
        return refuse(
            "the Service does not publish its address, and another cluster may have the same name",
            &format!(
                "If the load balancer is this Service's, set the annotation {LOAD_BALANCER_ID} to its ID. Otherwise rename it."
            ),
        );
    }
    for listener in listeners {
        let is_wanted = |one: &crate::desired::WantedListener| {
            one.port == listener.protocol_port && one.protocol == l4(&listener.protocol)
        };
        let Some(one) = wanted.listeners.iter().find(|one| is_wanted(one)) else { continue };
        if !is_part(owner, balancer, &listener.name, &listener.tags) {
            return refuse(
                &format!(
                    "its listener {} on port {} belongs to another program or Service",
                    listener.id, listener.protocol_port
                ),
                "Delete the listener, or use another port.",
            );
        }
        if one.protocol != listener.protocol {
            return refuse(
                &format!(
                    "its listener on port {} has the protocol {}, and Steerage forwards {}",
                    listener.protocol_port, listener.protocol, one.protocol
                ),
                "Remove what requests the protocol while cloud-provider-openstack runs.",
            );
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use steerage_model::Protocol;

    use super::*;
    use crate::desired::desired;
    use crate::desired::tests::{owner, planned};
    use crate::options::tests::config;

    fn balancer(name: &str, tags: &[&str]) -> Balancer {
        let body = json!({ "id": "lb1", "name": name, "tags": tags, "provisioning_status": "ACTIVE", "vip_address": "10.0.0.1",
            "vip_port_id": "p", "vip_subnet_id": "s" });
        serde_json::from_value(body).unwrap()
    }

    fn listener(name: &str, protocol: &str, tags: &[&str]) -> Listener {
        let body = json!({ "id": "l1", "name": name, "provisioning_status": "ACTIVE", "protocol": protocol, "protocol_port": 80,
            "default_pool_id": "pool", "admin_state_up": true, "tags": tags });
        serde_json::from_value(body).unwrap()
    }

    const NAME: &str = "kube_service_prod_shop_web";

    #[test]
    fn name_tags_and_address_decide() {
        let wanted = desired(&planned(&[(Protocol::Tcp, 80, 30080)], &[1]), &config("amphora")).unwrap();
        let judged = |cluster, balancer, listeners: Vec<Listener>, is_known| {
            let found = Candidate { balancer, listeners, is_known, is_ours: true, has_nodes: true };
            judge(cluster, &owner(), &wanted, &found).map_err(|error| {
                assert_eq!(error.reason(), "AdoptionRefused");
                error.to_string()
            })
        };
        let peers = || vec![listener("listener_0_kube_service_prod_shop_web", "TCP", &[NAME])];
        assert_eq!(judged(Some("prod"), balancer(NAME, &[NAME]), peers(), true), Ok(()));
        assert_eq!(judged(Some("prod"), balancer(NAME, &["team=a"]), peers(), true), Ok(()));
        for (cluster, balancer, listeners, is_known, part) in [
            (None, balancer(NAME, &[NAME]), peers(), true, "--openstack-adopt is not set"),
            (Some("test"), balancer(NAME, &[NAME]), peers(), true, "kube_service_test_shop_web"),
            (Some("prod"), balancer("mine", &[NAME]), peers(), true, "would call it"),
            (Some("prod"), balancer(NAME, &[NAME, "kube_service_prod_shop_api"]), peers(), true, "shares it"),
            (Some("prod"), balancer(NAME, &["steerage.dev/uid=u9"]), peers(), true, "tags of Steerage"),
            (Some("prod"), balancer(NAME, &[NAME]), peers(), false, "another cluster"),
            (
                Some("prod"),
                balancer(NAME, &[NAME]),
                vec![listener("mine", "TCP", &[])],
                true,
                "another program",
            ),
            (
                Some("prod"),
                balancer(NAME, &[NAME]),
                vec![listener("listener_0_kube_service_prod_shop_web", "HTTP", &[])],
                true,
                "protocol HTTP",
            ),
        ] {
            let message = judged(cluster, balancer, listeners, is_known).unwrap_err();
            assert!(message.contains(part) && message.contains("no other one is created"), "{message}");
        }
    }

    #[test]
    fn parts_of_the_peer_are_known_by_their_names() {
        let adopted = balancer(NAME, &[]);
        let is = |balancer: &Balancer, name: &str, tags: &[&str]| {
            is_part(&owner(), balancer, name, &tags.iter().map(|tag| (*tag).to_owned()).collect::<Vec<_>>())
        };
        assert!(is(&adopted, "listener_0_kube_service_prod_shop_web", &[NAME]));
        assert!(is(&adopted, "pool_12_kube_service_prod_shop_web", &[]));
        assert!(is(&adopted, "whatever", &["steerage.dev/uid=u1"]));
        for (name, tags) in [
            ("listener_0_kube_service_prod_shop_web", &["kube_service_prod_shop_api"][..]),
            ("listener_0_kube_service_prod_shop_web2", &[]),
            ("listener_x_kube_service_prod_shop_web", &[]),
            ("mine", &[NAME]),
        ] {
            assert!(!is(&adopted, name, tags), "{name}");
        }
        assert!(!is(&balancer("mine", &[]), "listener_0_mine", &[]));
    }

    #[test]
    fn names_are_cut_off_as_the_peer_does() {
        let name = peer_name(&"c".repeat(250), &owner().service);
        assert_eq!(name.len(), 255);
        assert_eq!(peer_name("prod", &owner().service), NAME);
        let of = |service: &str| FloatingIp {
            id: String::new(),
            address: [203, 0, 113, 1].into(),
            floating_network_id: String::new(),
            port_id: None,
            description: format!("Floating IP for Kubernetes external service {service} from cluster prod"),
            revision_number: None,
        };
        assert!(is_floating_of_peer(&of("shop/web"), &owner().service));
        assert!(!is_floating_of_peer(&of("shop/web2"), &owner().service));
    }
}
