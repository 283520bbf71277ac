// SPDX-License-Identifier: Apache-2.0
//! Creates a load balancer with all that is in it, by one request.

use std::net::IpAddr;

use http::Method;
use ipnet::IpNet;
use steerage_model::Family;
use steerage_provider_api::{Error, LoadBalancer, Outcome};
use tokio::time::Instant;

use crate::apply::{MAX_REFUSED, addresses, again, missing_member_subnet, note_refused};
use crate::client::{Call, object};
use crate::config::Driver;
use crate::desired::{Desired, WantedAddress};
use crate::error::CallError;
use crate::provider::OpenStack;
use crate::state::{ServiceState, Tree};
use crate::types::Subnet;
use crate::vips::{SEVERAL_VIPS, WantedVip};
use crate::{observe, reasons};

impl OpenStack {
    pub(crate) async fn create(
        &self,
        lb: &LoadBalancer,
        wanted: &Desired,
        entry: &mut ServiceState,
    ) -> Result<Outcome, Error> {
        if let WantedAddress::Given(address) = &wanted.address {
            self.check_given(lb, *address).await?;
        }
        let vips = self.new_vips(lb, wanted, entry).await?;
        for member_subnet in vips.iter().map(|vip| &vip.wanted.member_subnet) {
            if vips.iter().any(|vip| vip.subnet == *member_subnet)
                || observe::subnet(&*self.calls, member_subnet).await?.is_some()
            {
                continue;
            }
            return Err(missing_member_subnet(member_subnet, "No load balancer is created."));
        }
        // What is refused or fails is told when the load balancer is there.
        if self.open_rules(&lb.owner, wanted, entry).await.is_more {
            return Ok(again(entry, self));
        }
        let families: Vec<Family> = vips.iter().map(|vip| vip.wanted.family).collect();
        let nodes = wanted.nodes();
        for _ in 0..=MAX_REFUSED {
            let reduced = wanted.clone().for_families(&families);
            let reduced = reduced.without(|address| entry.refused.must_wait(address));
            let asked = vips
                .iter()
                .map(|vip| (vip.subnet.as_str(), vip.address.filter(|ip| !entry.refused_vips.contains(ip))));
            let body = Some(reduced.creation(&asked.collect::<Vec<_>>()));
            let call = Call::octavia(Method::POST, "POST loadbalancers", "loadbalancers", body);
            let name = call.name();
            if let Some(shared) = &wanted.shared {
                self.begin_shared_creation(shared)?;
            }
            let answer = self.calls.send(call).await;
            if let Some(shared) = &wanted.shared
                && answer.as_ref().err().is_none_or(|failure| !failure.is_unanswered())
            {
                self.end_shared_creation(shared);
            }
            match answer {
                Ok(answer) => {
                    let (tree, is_known) = match Tree::created(&answer) {
                        Some(tree) => (tree, true),
                        None => (Tree::empty(object(&name, answer, "loadbalancer")?), false),
                    };
                    tracing::info!(service = %lb.owner.service, id = tree.balancer.id, "load balancer created");
                    entry.sent();
                    entry.note_read(&lb.owner, tree);
                    (entry.is_verified, entry.is_listed) = (is_known, false);
                    // An amphora's creation that fails leaves the load balancer itself in ERROR. OVN's driver may make the parts later.
                    entry.unchecked_since = (self.config.driver() == Driver::Ovn).then(Instant::now);
                    return Ok(again(entry, self));
                }
                Err(failure) if note_refused(&failure, &nodes, &mut entry.refused) => {}
                Err(failure) => {
                    let asked: Vec<(IpAddr, bool)> = vips
                        .iter()
                        .filter_map(|vip| Some((vip.address?, vip.wanted.requested.is_some())))
                        .collect();
                    let conflicting = conflicting_vips(&failure, asked);
                    // Somebody else has it by now: another one is better than none.
                    let other = conflicting
                        .iter()
                        .find(|(ip, is_required)| !is_required && !entry.refused_vips.contains(ip));
                    match (other, conflicting.iter().find(|(_, is_required)| *is_required)) {
                        (Some((vip, _)), _) => entry.refused_vips.push(*vip),
                        (None, Some((vip, _))) => return Err(taken(*vip, &failure)),
                        (None, None) => return Err(failure.into()),
                    }
                }
            }
        }
        Ok(again(entry, self))
    }

    /// The VIPs to ask for. The second one is left out if Octavia's API is too old for it.
    async fn new_vips<'a>(
        &self,
        lb: &LoadBalancer,
        wanted: &'a Desired,
        entry: &ServiceState,
    ) -> Result<Vec<NewVip<'a>>, Error> {
        let mut found = Vec::new();
        let mut network: Option<String> = None;
        for vip in &wanted.vips {
            if !found.is_empty() && self.version().await?.is_some_and(|version| version < SEVERAL_VIPS) {
                break;
            }
            let is_published = wanted.address == WantedAddress::Internal || vip.family == Family::V6;
            // Clients know the address that it had.
            let known: Vec<IpAddr> =
                entry.kept_vips.iter().chain(&lb.published).copied().filter(|_| is_published).collect();
            let Some(subnet) = self.vip_subnet(vip, wanted, &known).await? else { continue };
            if network.get_or_insert_with(|| subnet.network_id.clone()) != &subnet.network_id {
                let message = format!(
                    "The subnets {} of VIPs are of different networks, and a load balancer has one. No load balancer is created. Name \
                     subnets of one network by --openstack-subnet-id, --openstack-ipv6-subnet-id and the annotation {}.",
                    wanted
                        .vips
                        .iter()
                        .filter_map(|vip| vip.subnet.as_deref())
                        .collect::<Vec<_>>()
                        .join(" and "),
                    crate::annotations::SUBNET
                );
                return Err(Error::invalid(reasons::REJECTED_BY_PROVIDER, message));
            }
            let known = known.into_iter().find(|ip| contains(&subnet, *ip));
            found.push(NewVip { wanted: vip, address: vip.requested.or(known), subnet: subnet.id });
        }
        Ok(found)
    }

    /// The subnet of a VIP. Of the subnets of a network, one with an address that clients know or request; `None` if the network has none of
    /// the Service's second family.
    async fn vip_subnet(
        &self,
        vip: &WantedVip,
        wanted: &Desired,
        known: &[IpAddr],
    ) -> Result<Option<Subnet>, Error> {
        let missing = |what: &str, flags: &str, annotation: &str| {
            let message = format!(
                "The {what} of VIPs does not exist, or the project does not see it. No load balancer is created. Correct {flags}the \
                 annotation {annotation}."
            );
            Error::invalid(reasons::REJECTED_BY_PROVIDER, message)
        };
        let Some(id) = &vip.subnet else {
            let network = wanted.network.as_deref().unwrap_or_default();
            let mut all = observe::subnets_of(&*self.calls, network).await?;
            if all.is_empty() {
                return Err(missing(
                    &format!("network {network} with a subnet"),
                    "",
                    crate::annotations::NETWORK,
                ));
            }
            let version = if vip.family == Family::V4 { 4 } else { 6 };
            all.retain(|subnet| subnet.ip_version == version);
            let has = |subnet: &Subnet| vip.requested.iter().chain(known).any(|ip| contains(subnet, *ip));
            all.sort_by_key(|subnet| (!has(subnet), subnet.id.clone()));
            return match all.into_iter().next() {
                None if wanted.vips.first() == Some(vip) => Err(missing(
                    &format!("{} subnet of the network {network}", vip.family),
                    "spec.ipFamilies or ",
                    crate::annotations::NETWORK,
                )),
                first => Ok(first),
            };
        };
        let subnet =
            observe::subnet(&*self.calls, id).await?.map(|subnet| Subnet { id: id.clone(), ..subnet });
        let subnet = subnet.ok_or_else(|| {
            missing(
                &format!("subnet {id}"),
                "--openstack-subnet-id, --openstack-ipv6-subnet-id or ",
                crate::annotations::SUBNET,
            )
        })?;
        if (subnet.ip_version == 4) != (vip.family == Family::V4) {
            let message = format!(
                "The Service has {} addresses, and the subnet {} of VIPs has IPv{} ones. No load balancer is created. Name another subnet \
                 by {} or --openstack-ipv6-subnet-id, or change spec.ipFamilies.",
                vip.family,
                subnet.id,
                subnet.ip_version,
                crate::annotations::SUBNET
            );
            return Err(Error::invalid(reasons::SUBNET_FAMILY_DIFFERS, message));
        }
        Ok(Some(subnet))
    }
}

fn contains(subnet: &Subnet, address: IpAddr) -> bool {
    subnet.cidr.parse::<IpNet>().is_ok_and(|range| range.contains(&address))
}

/// A VIP to ask for.
struct NewVip<'a> {
    wanted: &'a WantedVip,
    subnet: String,
    /// The requested address, or the one that clients know.
    address: Option<IpAddr>,
}

/// The VIPs because of which a creation failed. Octavia shows Neutron's conflict as an error of its own.
fn conflicting_vips(failure: &CallError, mut vips: Vec<(IpAddr, bool)>) -> Vec<(IpAddr, bool)> {
    let named: Vec<IpAddr> = addresses(failure.message()).collect();
    if vips.iter().any(|(vip, _)| named.contains(vip)) {
        vips.retain(|(vip, _)| named.contains(vip));
    } else if !failure.message().contains("ConflictException") {
        vips.clear();
    }
    vips
}

fn taken(vip: IpAddr, failure: &CallError) -> Error {
    let message = format!(
        "The Service requests the address {vip}, which the subnet of VIPs does not give: {}. No load balancer is created. Request another \
         address.",
        failure.message().trim_end_matches('.')
    );
    Error::invalid(reasons::ADDRESS_NOT_AVAILABLE, message)
}

#[cfg(test)]
mod tests {
    use steerage_model::Protocol;

    use crate::desired::tests::planned;
    use crate::scripted::{Scripted, settle};

    const WEB: (Protocol, u16, u16) = (Protocol::Tcp, 80, 30080);

    #[tokio::test(start_paused = true)]
    async fn subnet_of_nodes_that_does_not_exist_is_named() {
        let cloud = Scripted::new();
        let provider = cloud.provider_with(|config| "nowhere".clone_into(&mut config.member_subnet));
        let error = settle(&provider, &planned(&[WEB], &[1])).await.unwrap_err();
        assert_eq!(error.reason(), "RejectedByProvider");
        assert!(error.to_string().contains("--openstack-member-subnet-id"), "{error}");
        assert!(cloud.writes().is_empty());
    }
}
