// SPDX-License-Identifier: Apache-2.0
//! Adopts the load balancer that cloud-provider-openstack created for a Service: it gets Steerage's tags, and the usual changes do the rest:
//! own pools, listeners that switch to them, and that controller's pools go. Without the flag, it refuses a second load balancer beside that
//! one.
//!
//! The tags come first: from then on the load balancer is found again after a restart, and deleted with its Service.

use std::collections::BTreeSet;
use std::net::IpAddr;

use http::Method;
use serde_json::json;
use steerage_provider_api::{Error, LoadBalancer, Outcome, Owner};

use crate::adoption::{
    Candidate, for_a_new_one, is_floating_of_peer, is_of_peer, judge, names_nothing, peer_name,
};
use crate::apply::{again, check_kept};
use crate::client::{Call, list};
use crate::desired::Desired;
use crate::error::CallError;
use crate::marks;
use crate::observe;
use crate::provider::OpenStack;
use crate::state::ServiceState;
use crate::step::Step;
use crate::types::{Balancer, FloatingIp, Member, Provisioning, Reference};

impl OpenStack {
    /// Takes over the load balancer of another controller that the Service has, if there is one. `None` if not: then one is created.
    pub(crate) async fn adopt(
        &self,
        lb: &LoadBalancer,
        wanted: &Desired,
        entry: &mut ServiceState,
    ) -> Result<Option<Outcome>, Error> {
        let was_served = !entry.known_addresses(&lb.owner, &[]).is_empty();
        let Some(found) = self.candidate(lb, wanted, was_served).await? else { return Ok(None) };
        if let Some(shared) = &wanted.shared {
            let message = format!(
                "The Service publishes the load balancer {} of cloud-provider-openstack, and requests the shared one {shared}. That of another \
                 controller cannot be shared. It is not changed. Remove the annotation steerage.dev/shared-load-balancer, or clear the \
                 Service's status.",
                found.balancer.id
            );
            return Err(Error::invalid(crate::reasons::ADOPTION_REFUSED, message));
        }
        judge(self.config.adopt.as_deref(), &lb.owner, wanted, &found)?;
        let Candidate { balancer, .. } = found;
        check_kept(&balancer, wanted)?;
        match balancer.provisioning_status {
            Provisioning::Active => {}
            Provisioning::Error => {
                return Err(Error::Unavailable(format!(
                    "Octavia reports ERROR for the load balancer {}, which is adopted when it is repaired. To repair it, as Octavia's \
                     administrator: `openstack loadbalancer failover {}`.",
                    balancer.name, balancer.id
                )));
            }
            Provisioning::Pending | Provisioning::Deleting => {
                entry.changing.get_or_insert_with(tokio::time::Instant::now);
                entry.note_pending(&balancer)?;
                return Ok(Some(again(entry, self)));
            }
        }
        let service = &lb.owner.service;
        tracing::info!(%service, name = balancer.name, "adopting load balancer of cloud-provider-openstack");
        self.tag(&balancer, wanted, entry).await.map(Some)
    }

    /// Gives a load balancer all tags of Steerage.
    async fn tag(
        &self,
        balancer: &Balancer,
        wanted: &Desired,
        entry: &mut ServiceState,
    ) -> Result<Outcome, Error> {
        let tags = marks::merged(&balancer.tags, &wanted.tags).unwrap_or_else(|| balancer.tags.clone());
        let step = Step::UpdateBalancer { id: balancer.id.clone(), changes: json!({ "tags": tags }) };
        entry.forget();
        match self.calls.send(step.call()).await {
            Ok(_) => {}
            Err(failure) if failure.is_busy() => {}
            Err(failure) => return Err(failure.into()),
        }
        entry.sent();
        Ok(again(entry, self))
    }

    /// What would be adopted, in words; `None` if nothing.
    pub(crate) async fn preview_adoption(
        &self,
        lb: &LoadBalancer,
        wanted: &Desired,
    ) -> Result<Option<String>, Error> {
        let Some(found) = self.candidate(lb, wanted, false).await? else { return Ok(None) };
        judge(self.config.adopt.as_deref(), &lb.owner, wanted, &found)?;
        check_kept(&found.balancer, wanted)?;
        Ok(Some(format!("adopts the load balancer {} of cloud-provider-openstack", found.balancer.name)))
    }

    /// The load balancer of another controller that is the Service's: by the ID in its annotation, by the address that it publishes, and with
    /// the flag by its name. An ID that names nothing is an error, unless the Service had a load balancer that is gone.
    async fn candidate(
        &self,
        lb: &LoadBalancer,
        wanted: &Desired,
        was_served: bool,
    ) -> Result<Option<Candidate>, Error> {
        let calls = &*self.calls;
        let mut known: Vec<Balancer> = Vec::new();
        if let Some(id) = &wanted.adopts {
            known.extend(observe::balancer(calls, id).await?);
            if known.is_empty() && !was_served {
                // After a restart, a floating IP of Steerage shows the same, and so does a published address that no load balancer has.
                let mark = self.floating_mark(&lb.owner, wanted.shared.as_deref());
                let is_gone = !lb.published.is_empty() && self.published_balancers(lb).await?.is_empty();
                if !is_gone && self.own_floating_ips(&mark).await?.is_empty() {
                    return Err(names_nothing(id));
                }
            }
        }
        let is_named = !known.is_empty();
        if !is_named {
            known.extend(self.published_balancers(lb).await?);
        }
        // One that is neither named in the annotation nor of the peer's kind is the user's business.
        known.retain(|found| {
            wanted.adopts.as_ref() == Some(&found.id) || is_of_peer(found, &lb.owner.service)
        });
        let mut found = None;
        // A VIP may be in several networks: ours comes first.
        for balancer in known {
            let is_ours = self.is_ours(&balancer, wanted).await?;
            if found.as_ref().is_none_or(|(_, _, is_first)| is_ours && !is_first) {
                found = Some((balancer, true, is_ours));
            }
        }
        if let (None, Some(cluster)) = (&found, &self.config.adopt) {
            let name = peer_name(cluster, &lb.owner.service);
            let named = observe::balancers_with(calls, "name", &name).await?;
            // In another network, it is another cluster's of the same name.
            for balancer in named.into_iter().filter(|found| found.name == name) {
                if found.is_none() && self.is_ours(&balancer, wanted).await? {
                    found = Some((balancer, false, true));
                }
            }
        }
        let Some((balancer, is_known, is_ours)) = found else { return Ok(None) };
        let call = Call::octavia(Method::GET, "GET listeners", "listeners", None);
        let listeners = list(calls, call, "listeners", &[("loadbalancer_id", &balancer.id)]).await?;
        let has_nodes = !is_named
            || !is_ours
            || self.publishes(lb, &balancer).await?
            || self.has_nodes(lb, &balancer).await?;
        Ok(Some(Candidate { balancer, listeners, is_known, is_ours, has_nodes }))
    }

    /// The load balancers of the project that have an address which the Service publishes.
    async fn published_balancers(&self, lb: &LoadBalancer) -> Result<Vec<Balancer>, CallError> {
        let calls = &*self.calls;
        let mut known = Vec::new();
        for address in &lb.published {
            let text = address.to_string();
            let floating = self.floating_ips(&[("floating_ip_address", &text)]).await?;
            let port = floating.into_iter().find(|ip| ip.address == *address).and_then(|ip| ip.port_id);
            let all = match &port {
                Some(port) => observe::balancers_with(calls, "vip_port_id", port).await?,
                None => observe::balancers_with(calls, "vip_address", &text).await?,
            };
            let has = |found: &Balancer| {
                found.vips().any(|(vip, on)| vip == *address || port.as_deref() == Some(on))
            };
            known.extend(all.into_iter().filter(has));
        }
        Ok(known)
    }

    /// Looks whether the load balancer whose address the Service publishes is the Service's and has lost tags, before another one is created
    /// beside it: it gets them back if the UIDs in those that are left say so. `None` if there is no such load balancer.
    pub(crate) async fn restore_tags(
        &self,
        lb: &LoadBalancer,
        wanted: &Desired,
        entry: &mut ServiceState,
    ) -> Result<Option<Outcome>, Error> {
        if wanted.shared.is_some() || lb.published.is_empty() {
            return Ok(None);
        }
        for balancer in self.published_balancers(lb).await? {
            let id = &balancer.id;
            if marks::has_lost_tags(&self.config.cluster, &lb.owner, &balancer.tags) {
                match balancer.provisioning_status {
                    Provisioning::Active => {}
                    Provisioning::Error => {
                        return Err(Error::Unavailable(format!(
                            "Octavia reports ERROR for the load balancer {id}, which has lost tags of Steerage and gets them back when it is \
                             repaired. To repair it, as Octavia's administrator: `openstack loadbalancer failover {id}`."
                        )));
                    }
                    Provisioning::Pending | Provisioning::Deleting => {
                        entry.changing.get_or_insert_with(tokio::time::Instant::now);
                        entry.note_pending(&balancer)?;
                        return Ok(Some(again(entry, self)));
                    }
                }
                tracing::warn!(service = %lb.owner.service, id, "load balancer has lost tags; restoring them");
                return self.tag(&balancer, wanted, entry).await.map(Some);
            }
            if balancer.name == wanted.name
                && marks::is_missing_owner_tags(&self.config.cluster, &lb.owner, &balancer.tags)
            {
                let service = &lb.owner.service;
                let tags: Vec<String> = wanted.tags.iter().map(|tag| format!("--tag {tag}")).collect();
                let message = format!(
                    "The Service publishes an address of the load balancer {id}, which has Steerage's name for it and lacks tags of Steerage. \
                     It is not changed, and no other one is created. If it is the Service's: `openstack loadbalancer set {} {id}`. {}",
                    tags.join(" "),
                    for_a_new_one(service)
                );
                return Err(Error::invalid(crate::reasons::OBJECT_NOT_OWNED, message));
            }
        }
        Ok(None)
    }

    /// Whether a load balancer is of our project, and its VIP in a network that the flags or the Service name.
    async fn is_ours(&self, balancer: &Balancer, wanted: &Desired) -> Result<bool, CallError> {
        let project = self.calls.project().await?;
        if let (Some(ours), Some(its)) = (&project, &balancer.project_id)
            && ours != its
        {
            return Ok(false);
        }
        let named = wanted.vips.iter().filter_map(|vip| vip.subnet.as_ref());
        let subnets: BTreeSet<&String> =
            named.chain([&self.config.subnet]).chain(&self.config.ipv6_subnet).collect();
        if balancer.vip_subnet_id.as_ref().is_some_and(|its| subnets.contains(its)) {
            return Ok(true);
        }
        let Some(network) = &balancer.vip_network_id else { return Ok(false) };
        if wanted.network.as_ref() == Some(network) {
            return Ok(true);
        }
        for subnet in subnets {
            let found = observe::subnet(&*self.calls, subnet).await?;
            if found.is_some_and(|subnet| subnet.network_id == *network) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Whether the Service publishes an address of the load balancer.
    async fn publishes(&self, lb: &LoadBalancer, balancer: &Balancer) -> Result<bool, CallError> {
        if balancer.vips().any(|(vip, _)| lb.published.contains(&vip)) {
            return Ok(true);
        }
        let port = balancer.floating_port();
        let on_port = self.floating_ips(&[("port_id", port)]).await?;
        Ok(on_port.iter().any(|ip| ip.port_id.as_deref() == Some(port) && lb.published.contains(&ip.address)))
    }

    /// Whether a member of the load balancer is a node of this cluster.
    async fn has_nodes(&self, lb: &LoadBalancer, balancer: &Balancer) -> Result<bool, CallError> {
        let nodes = lb.groups.iter().filter_map(|group| group.nodes());
        let nodes: BTreeSet<IpAddr> = nodes
            .flat_map(|nodes| nodes.targets.iter())
            .flat_map(|target| target.addresses.clone())
            .collect();
        let call = Call::octavia(Method::GET, "GET pools", "pools", None);
        let pools: Vec<Reference> =
            list(&*self.calls, call, "pools", &[("loadbalancer_id", &balancer.id)]).await?;
        for pool in pools {
            let path = format!("pools/{}/members", pool.id);
            let call = Call::octavia(Method::GET, "GET members", &path, None);
            let members: Vec<Member> = list(&*self.calls, call, "members", &[]).await?;
            if members.iter().any(|member| nodes.contains(&member.address)) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The floating IPs that cloud-provider-openstack created for a load balancer that Steerage adopted, and that are not marked yet.
    pub(crate) async fn adopted_ips(
        &self,
        owner: &Owner,
        balancer: &Balancer,
    ) -> Result<Vec<FloatingIp>, CallError> {
        if !is_of_peer(balancer, &owner.service) {
            return Ok(Vec::new());
        }
        let port = balancer.floating_port();
        let mut found = self.floating_ips(&[("port_id", port)]).await?;
        found.retain(|ip| ip.port_id.as_deref() == Some(port) && is_floating_of_peer(ip, &owner.service));
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use steerage_model::Protocol;
    use steerage_provider_api::{Compare, Provider as _};

    use super::*;
    use crate::annotations::LOAD_BALANCER_ID;
    use crate::desired::tests::planned;
    use crate::scripted::{Scripted, settle};

    const NAME: &str = "kube_service_kubernetes_shop_web";

    /// A load balancer of cloud-provider-openstack with one member, and the provider that would take it over.
    fn of_peer(cloud: &Scripted, id: &str, node: &str, changes: &[(&str, &str)]) {
        let mut balancer = json!({ "id": id, "name": NAME, "tags": [NAME], "vip_subnet_id": "subnet", "provider": "amphora",
            "listeners": [{ "name": format!("listener_0_{NAME}"), "protocol": "TCP", "protocol_port": 80, "tags": [NAME],
                "default_pool": { "name": format!("pool_0_{NAME}"), "protocol": "TCP", "lb_algorithm": "ROUND_ROBIN",
                    "members": [{ "address": node, "protocol_port": 30080, "weight": 1 }] } }] });
        for (key, value) in changes {
            balancer[*key] = (*value).into();
        }
        cloud.add("loadbalancers", &balancer);
    }

    /// Another cluster of the project may have the same name: the annotation alone proves nothing.
    #[tokio::test(start_paused = true)]
    async fn load_balancer_that_an_annotation_names_must_be_this_clusters() {
        for (node, changes, part) in [
            ("10.0.0.1", &[][..], None),
            ("10.0.7.7", &[], Some("none of its members")),
            ("10.0.0.1", &[("project_id", "p2")], Some("another project")),
            ("10.0.0.1", &[("vip_subnet_id", "far"), ("vip_network_id", "far")], Some("another network")),
            ("10.0.0.1", &[("name", "secret-name")], Some("would call it")),
        ] {
            let cloud = Scripted::new();
            of_peer(&cloud, "theirs", node, changes);
            let provider = cloud.provider_with(|config| config.adopt = Some("kubernetes".to_owned()));
            let annotations = BTreeMap::from([(LOAD_BALANCER_ID.to_owned(), "theirs".to_owned())]);
            let lb = LoadBalancer { annotations, ..planned(&[(Protocol::Tcp, 80, 30080)], &[1]) };
            let result = settle(&provider, &lb).await;
            let Some(part) = part else {
                assert_eq!(crate::scripted::ids(&cloud), ["theirs"]);
                result.unwrap();
                continue;
            };
            let error = result.unwrap_err();
            assert_eq!(error.reason(), "AdoptionRefused");
            let message = error.to_string();
            assert!(message.contains(part) && !message.contains("secret-name"), "{message}");
            assert!(cloud.writes().is_empty());
        }
    }

    /// A typing error in a migration would change the address unseen.
    #[tokio::test(start_paused = true)]
    async fn annotation_that_names_nothing_makes_no_load_balancer() {
        let cloud = Scripted::new();
        let plain = planned(&[(Protocol::Tcp, 80, 30080)], &[1]);
        let annotations = BTreeMap::from([(LOAD_BALANCER_ID.to_owned(), "tpyo".to_owned())]);
        let named = LoadBalancer { annotations, ..plain.clone() };
        let error = settle(&cloud.provider(), &named).await.unwrap_err();
        assert_eq!(error.reason(), "AdoptionRefused");
        assert!(error.to_string().contains("tpyo"), "{error}");
        assert!(cloud.provider().preview(&named).await.is_err());
        assert!(cloud.writes().is_empty());
        // One that is served keeps what it has, and its condition says so.
        let before = settle(&cloud.provider(), &plain).await.unwrap();
        let provider = cloud.provider();
        for _ in 0..2 {
            let after = settle(&provider, &named).await.unwrap();
            assert_eq!(after.ingress, before.ingress);
            let (reason, message) = after.incomplete.unwrap();
            assert!(reason == "AdoptionRefused" && message.contains("tpyo"), "{message}");
        }
        // So does one whose load balancer somebody deleted: it is replaced with its address, also after a restart.
        for provider in [provider, cloud.provider()] {
            cloud.remove("loadbalancers", &crate::scripted::ids(&cloud)[0]);
            let after = provider.apply(&named, Compare::InPlace).await.unwrap();
            assert_eq!(after.progress, steerage_provider_api::Progress::Again(std::time::Duration::ZERO));
            assert_eq!(settle(&provider, &named).await.unwrap().ingress, before.ingress);
        }
    }

    /// The other controller wrote the annotation, which stays after the adoption. Nothing but the Service's status has the address.
    #[tokio::test(start_paused = true)]
    async fn internal_load_balancer_that_is_gone_is_replaced_after_a_restart() {
        let cloud = Scripted::new();
        let provider = || cloud.provider_with(|config| config.floating_network = None);
        let plain = planned(&[(Protocol::Tcp, 80, 30080)], &[1]);
        let before = settle(&provider(), &plain).await.unwrap();
        let id = crate::scripted::ids(&cloud)[0].clone();
        cloud.remove("loadbalancers", &id);
        let annotations = BTreeMap::from([(LOAD_BALANCER_ID.to_owned(), id)]);
        let published = before.ingress.iter().filter_map(|ingress| ingress.ip).collect();
        let named = LoadBalancer { annotations, published, ..plain };
        let after = settle(&provider(), &named).await.unwrap();
        assert_eq!(after.ingress, before.ingress);
    }

    #[tokio::test(start_paused = true)]
    async fn address_in_two_networks_is_that_of_ours() {
        let cloud = Scripted::new();
        let vip = ("vip_address", "10.0.0.50");
        of_peer(&cloud, "far", "10.0.0.1", &[vip, ("vip_subnet_id", "far"), ("vip_network_id", "far")]);
        of_peer(&cloud, "near", "10.0.0.1", &[vip]);
        let provider = cloud.provider_with(|config| config.adopt = Some("kubernetes".to_owned()));
        let lb = LoadBalancer {
            published: vec!["10.0.0.50".parse().unwrap()],
            ..planned(&[(Protocol::Tcp, 80, 30080)], &[1])
        };
        let wanted = crate::desired::desired(&lb, &provider.config).unwrap();
        assert_eq!(provider.candidate(&lb, &wanted, false).await.unwrap().unwrap().balancer.id, "near");
    }

    #[tokio::test(start_paused = true)]
    async fn lost_tags_make_no_second_load_balancer() {
        let cloud = Scripted::new();
        let lb = planned(&[(Protocol::Tcp, 80, 30080)], &[1]);
        let before = settle(&cloud.provider(), &lb).await.unwrap();
        let lb = LoadBalancer { published: vec![before.ingress[0].ip.unwrap()], ..lb };
        let made = cloud.all("loadbalancers")[0].clone();
        let id = made["id"].as_str().unwrap();
        let all: Vec<String> = serde_json::from_value(made["tags"].clone()).unwrap();
        for lost in ["steerage.dev/cluster=", "steerage.dev/service="] {
            let left: Vec<_> = all.iter().filter(|tag| !tag.starts_with(lost)).collect();
            assert_eq!(left.len() + 1, all.len(), "{all:?}");
            cloud.set("loadbalancers", ("id", id), &json!({ "tags": left }));
            assert_eq!(settle(&cloud.provider(), &lb).await.unwrap().ingress, before.ingress);
            let mut tags: Vec<String> =
                serde_json::from_value(cloud.all("loadbalancers")[0]["tags"].clone()).unwrap();
            let mut whole = all.clone();
            tags.sort();
            whole.sort();
            assert_eq!(tags, whole);
        }
        // What is left does not say enough.
        let without = |key: &str| all.iter().filter(|tag| !tag.starts_with(key)).cloned().collect();
        for left in
            [vec!["team=a".to_owned()], without("steerage.dev/cluster-uid="), without("steerage.dev/uid=")]
        {
            cloud.set("loadbalancers", ("id", id), &json!({ "tags": left }));
            cloud.writes();
            let error = settle(&cloud.provider(), &lb).await.unwrap_err();
            assert!(error.reason() == "ObjectNotOwned" && error.to_string().contains(id), "{error} {left:?}");
            assert!(cloud.writes().is_empty());
        }
        // Of another cluster, it is none of ours.
        let foreign: Vec<String> =
            all.iter().map(|tag| tag.replace("cluster-uid=", "cluster-uid=another-")).collect();
        cloud.set("loadbalancers", ("id", id), &json!({ "tags": foreign }));
        settle(&cloud.provider(), &lb).await.unwrap();
        assert_eq!(cloud.all("loadbalancers").len(), 2);
    }
}
