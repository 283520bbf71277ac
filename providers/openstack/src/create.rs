// SPDX-License-Identifier: Apache-2.0
//! Creates a load balancer with all that is in it, by one request.

use std::net::IpAddr;

use http::Method;
use ipnet::IpNet;
use steerage_model::Family;
use steerage_provider_api::{Error, LoadBalancer, Outcome};

use crate::apply::{MAX_REFUSED, addresses, again, note_refused};
use crate::client::{Call, object};
use crate::desired::{Desired, WantedAddress};
use crate::error::CallError;
use crate::provider::OpenStack;
use crate::state::{ServiceState, Tree};
use crate::{observe, reasons};

impl OpenStack {
    pub(crate) async fn create(
        &self,
        lb: &LoadBalancer,
        wanted: &Desired,
        entry: &mut ServiceState,
    ) -> Result<Outcome, Error> {
        let (vip, is_required) = self.vip(lb, wanted, entry).await?;
        if wanted.member_subnet != wanted.subnet
            && observe::subnet(&*self.calls, &wanted.member_subnet).await?.is_none()
        {
            let message = format!(
                "The subnet {} of nodes does not exist, or the project does not see it. No load balancer is created. Correct \
                 --openstack-member-subnet-id or the annotation {}.",
                wanted.member_subnet,
                crate::annotations::MEMBER_SUBNET
            );
            return Err(Error::invalid(reasons::REJECTED_BY_PROVIDER, message));
        }
        let nodes = wanted.nodes();
        for _ in 0..=MAX_REFUSED {
            let reduced = wanted.clone().without(|address| entry.refused.must_wait(address));
            let body = Some(reduced.creation(vip.filter(|vip| entry.refused_vip != Some(*vip))));
            let call = Call::octavia(Method::POST, "POST loadbalancers", "loadbalancers", body);
            let name = call.name();
            match self.calls.send(call).await {
                Ok(answer) => {
                    let (tree, is_known) = match Tree::created(&answer) {
                        Some(tree) => (tree, true),
                        None => (Tree::empty(object(&name, answer, "loadbalancer")?), false),
                    };
                    tracing::info!(service = %lb.owner.service, id = tree.balancer.id, "load balancer created");
                    entry.sent();
                    entry.note_read(&lb.owner, tree);
                    (entry.is_verified, entry.is_listed) = (is_known, false);
                    return Ok(again(entry, self));
                }
                Err(failure) if note_refused(&failure, &nodes, &mut entry.refused) => {}
                Err(failure) => match vip.filter(|vip| is_taken(&failure, *vip)) {
                    Some(vip) if is_required => return Err(taken(vip, &failure)),
                    // Somebody else has it by now: another one is better than none.
                    Some(vip) if entry.refused_vip != Some(vip) => entry.refused_vip = Some(vip),
                    _ => return Err(failure.into()),
                },
            }
        }
        Ok(again(entry, self))
    }

    /// The VIP to ask for, and whether it is the only one that will do.
    async fn vip(
        &self,
        lb: &LoadBalancer,
        wanted: &Desired,
        entry: &ServiceState,
    ) -> Result<(Option<IpAddr>, bool), Error> {
        let subnet = observe::subnet(&*self.calls, &wanted.subnet).await?.ok_or_else(|| {
            let message = format!(
                "The subnet {} of VIPs does not exist, or the project does not see it. No load balancer is created. Correct \
                 --openstack-subnet-id or the annotation {}.",
                wanted.subnet,
                crate::annotations::SUBNET
            );
            Error::invalid(reasons::REJECTED_BY_PROVIDER, message)
        })?;
        let is_v4 = wanted.family == Family::V4;
        if (subnet.ip_version == 4) != is_v4 {
            let message = format!(
                "The Service has {} addresses, and the subnet {} of VIPs has IPv{} ones. No load balancer is created. Name another subnet \
                 by {}, or change spec.ipFamilies.",
                wanted.family,
                wanted.subnet,
                subnet.ip_version,
                crate::annotations::SUBNET
            );
            return Err(Error::invalid(reasons::SUBNET_FAMILY_DIFFERS, message));
        }
        Ok(match &wanted.address {
            WantedAddress::Internal(Some(requested)) => (Some(*requested), true),
            // Clients know the address that it had.
            WantedAddress::Internal(None) => {
                let mut published = lb.published.iter().copied();
                let range: Option<IpNet> = subnet.cidr.parse().ok();
                let known = entry
                    .kept_vip
                    .or_else(|| published.find(|ip| range.is_some_and(|range| range.contains(ip))));
                (known, false)
            }
            WantedAddress::Floating { .. } | WantedAddress::Given(_) => (None, false),
        })
    }
}

/// Whether a creation failed because of its VIP. Octavia shows Neutron's conflict as an error of its own.
fn is_taken(failure: &CallError, vip: IpAddr) -> bool {
    failure.message().contains("ConflictException") || addresses(failure.message()).any(|named| named == vip)
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
