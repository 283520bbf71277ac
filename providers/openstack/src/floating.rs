// SPDX-License-Identifier: Apache-2.0
//! The address that clients connect to: the VIP, a floating IP of Steerage's own, or one of the user's, which is never deleted. The old
//! address goes when the new one is in place.

use std::net::IpAddr;

use http::Method;
use serde_json::{Value, json};
use steerage_model::{Family, Ingress, IpMode, Key};
use steerage_provider_api::{Error, LoadBalancer, Owner};

use crate::address::{AddressPlan, Used, plan};
use crate::adoption::is_floating_of_peer;
use crate::client::{Call, object};
use crate::desired::{Desired, WantedAddress};
use crate::error::CallError;
use crate::insist::insist;
use crate::provider::OpenStack;
use crate::state::{Addressed, ServiceState};
use crate::types::{Balancer, FloatingIp};
use crate::{marks, observe, reasons};

/// What is published, and why it is not what was asked for.
pub(crate) type Address = (Vec<Ingress>, Option<(&'static str, String)>);

impl OpenStack {
    /// Brings the address in place, and returns what to publish.
    pub(crate) async fn ensure_address(
        &self,
        lb: &LoadBalancer,
        wanted: &Desired,
        balancer: &Balancer,
        entry: &mut ServiceState,
    ) -> Result<Address, Error> {
        let port = balancer.floating_port();
        let mark = self.floating_mark(&lb.owner, wanted.shared.as_deref());
        let mut ours = self.own_floating_ips(&mark).await?;
        for ip in self.adopted_ips(&lb.owner, balancer).await? {
            tracing::info!(service = %lb.owner.service, address = %ip.address, "floating IP adopted");
            ours.push(self.describe(&ip, &mark).await?);
        }
        let known = entry.addressed.as_ref().filter(|known| known.uid == lb.owner.uid);
        let known = known.map(|known| known.address);
        let AddressPlan { used, dropped, incomplete } =
            self.plan_address(lb, wanted, balancer, ours.clone(), &entry.spare, known).await?;
        let mut own: Vec<IpAddr> = ours.iter().map(|ip| ip.address).collect();
        own.extend(
            entry
                .addressed
                .iter()
                .filter(|known| known.is_own && known.uid == lb.owner.uid)
                .map(|known| known.address),
        );
        let address = match used {
            Used::Vip => balancer.vip(Family::V4).map(|(vip, _)| vip),
            Used::Existing(ip) if ip.port_id.as_deref() == Some(port) => Some(ip.address),
            used => {
                if let (Some(shared), Used::Existing(ip)) = (&wanted.shared, &used) {
                    self.check_shared_address(shared, ip, port).await?;
                }
                let mut attached = self.attach(lb, used, port, &ours, (entry, &mark)).await?;
                let is_kept = matches!(wanted.address, WantedAddress::Floating { .. });
                if is_kept && is_floating_of_peer(&attached, &lb.owner.service) {
                    // The new load balancer does not have the name by which it would be adopted.
                    attached = self.describe(&attached, &mark).await?;
                }
                own.extend(Some(attached.address).filter(|_| marks::is_floating(&attached.description)));
                Some(attached.address)
            }
        };
        if let (WantedAddress::Given(_), Some(address)) = (&wanted.address, address)
            && let Some(own) = ours.iter().find(|ip| ip.address == address)
        {
            self.give(&lb.owner, own).await?;
        }
        self.release(Some(&lb.owner.service), &dropped).await?;
        entry.addressed = address.map(|address| Addressed {
            uid: lb.owner.uid.clone(),
            address,
            is_own: own.contains(&address),
            is_given: matches!(wanted.address, WantedAddress::Given(_)),
        });
        let ip_mode = Some(if wanted.has_proxy_protocol { IpMode::Proxy } else { IpMode::Vip });
        let of = |family: &Family| match family {
            Family::V4 => address,
            Family::V6 => balancer.vip(Family::V6).map(|(vip, _)| vip),
        };
        let published = wanted.families.iter().filter_map(of);
        Ok((published.map(|ip| Ingress { ip: Some(ip), hostname: None, ip_mode }).collect(), incomplete))
    }

    /// What will happen to floating IPs. Reads only.
    pub(crate) async fn plan_address(
        &self,
        lb: &LoadBalancer,
        wanted: &Desired,
        balancer: &Balancer,
        ours: Vec<FloatingIp>,
        others: &[Balancer],
        known: Option<IpAddr>,
    ) -> Result<AddressPlan, Error> {
        let port = balancer.floating_port();
        let mut ports = vec![port];
        ports.extend(others.iter().map(Balancer::floating_port));
        let given = match &wanted.address {
            WantedAddress::Given(address) => Some(self.given(lb, *address, &ports).await?),
            WantedAddress::Floating { .. } => self.kept_ip(lb, balancer, &ours, &ports[1..], known).await?,
            WantedAddress::Internal => None,
        };
        Ok(plan(wanted, port, &lb.published, ours, given))
    }

    /// A floating IP that the Service publishes without requesting it, as after an adoption, and that was on the load balancer which this one
    /// replaces: it moves.
    async fn kept_ip(
        &self,
        lb: &LoadBalancer,
        balancer: &Balancer,
        ours: &[FloatingIp],
        old_ports: &[&str],
        known: Option<IpAddr>,
    ) -> Result<Option<FloatingIp>, Error> {
        let is_vip = |address: &IpAddr| balancer.vips().any(|(vip, _)| vip == *address);
        let is_own = |address: &IpAddr| ours.iter().any(|ip| ip.address == *address);
        let mut published = lb.published.iter().filter(|address| address.is_ipv4());
        let Some(address) = published.find(|address| !is_vip(address) && !is_own(address)) else {
            return Ok(None);
        };
        let found = self.floating_ips(&[("floating_ip_address", &address.to_string())]).await?;
        let is_kept = |ip: &FloatingIp| {
            let was_there = match ip.port_id.as_deref() {
                Some(port) => old_ports.contains(&port),
                None => known == Some(*address),
            };
            let namespace = lb.owner.service.namespace();
            ip.address == *address
                && was_there
                && !marks::is_floating(&ip.description)
                && marks::reserved_for(&ip.description).is_none_or(|reserved| reserved == namespace)
        };
        Ok(found.into_iter().find(is_kept))
    }

    /// The floating IPs that pass a filter. A cloud without routers has none.
    pub(crate) async fn floating_ips(&self, filter: &[(&str, &str)]) -> Result<Vec<FloatingIp>, CallError> {
        match observe::floating_ips(&*self.calls, filter).await {
            Err(failure) if failure.is_not_found() && self.config.floating_network.is_none() => {
                Ok(Vec::new())
            }
            result => result,
        }
    }

    /// The description of the floating IPs that Steerage creates for the owner, or for the load balancer that is shared under this name.
    pub(crate) fn floating_mark(&self, owner: &Owner, shared: Option<&str>) -> String {
        match shared {
            Some(shared) => marks::shared_floating(&self.config.cluster, shared),
            None => marks::floating(&self.config.cluster, owner),
        }
    }

    /// Deletes floating IPs: of this Service, or of a load balancer that several share.
    pub(crate) async fn release(&self, service: Option<&Key>, ips: &[FloatingIp]) -> Result<(), CallError> {
        for ip in ips {
            let path = format!("floatingips/{}", ip.id);
            let call = Call::neutron(Method::DELETE, "DELETE floatingips", &path, None);
            match self.calls.send(call).await {
                Ok(_) => {
                    let service = service.map(tracing::field::display);
                    tracing::info!(service, address = %ip.address, "floating IP deleted");
                }
                Err(failure) if failure.is_not_found() => {}
                Err(failure) => return Err(failure),
            }
        }
        Ok(())
    }

    /// The floating IP of the address that the Service requests, if the load balancer may have it.
    async fn given(&self, lb: &LoadBalancer, address: IpAddr, ports: &[&str]) -> Result<FloatingIp, Error> {
        let found = self.requested_ip(address).await?;
        self.permitted(lb, (address, found), ports).await
    }

    async fn requested_ip(&self, address: IpAddr) -> Result<Option<FloatingIp>, CallError> {
        let found = self.floating_ips(&[("floating_ip_address", &address.to_string())]).await?;
        Ok(found.into_iter().find(|ip| ip.address == address))
    }

    /// What was found of a requested address, if the load balancer may have it.
    async fn permitted(
        &self,
        lb: &LoadBalancer,
        (address, found): (IpAddr, Option<FloatingIp>),
        ports: &[&str],
    ) -> Result<FloatingIp, Error> {
        let unavailable = |problem: &str, advice: &str| {
            let message = format!("The Service requests the address {address}. {problem} {advice}");
            Error::invalid(reasons::ADDRESS_NOT_AVAILABLE, message)
        };
        let Some(ip) = found else {
            let advice = format!(
                "Create it in the cluster's project: `openstack floating ip create --floating-ip-address {address} NETWORK` (by Neutron's \
                 default policy only an administrator chooses an address). Or request one that `openstack floating ip list` shows."
            );
            return Err(unavailable("No floating IP of the project has it.", &advice));
        };
        if self.is_of_another(&ip, &lb.owner) {
            let problem = "Steerage created it for another Service.";
            return Err(unavailable(problem, "Request another address."));
        }
        let Some(other) = ip.port_id.as_deref().filter(|port| !ports.contains(port)) else {
            let is_reserved = marks::reserved_for(&ip.description)
                .is_some_and(|namespace| namespace != lb.owner.service.namespace());
            // Clients know it as this Service's, wherever it was attached.
            if is_reserved && ip.port_id.is_none() && !lb.published.contains(&address) {
                let problem = "The floating IP's description reserves it for another namespace.";
                return Err(unavailable(
                    problem,
                    "Request another address, or ask the operator of Steerage to change the description.",
                ));
            }
            return Ok(ip);
        };
        let (problem, advice) = self.holder(lb, &ip, other).await;
        Err(unavailable(&problem, &advice))
    }

    /// Whether Steerage created the floating IP, and not for the Service alone.
    fn is_of_another(&self, ip: &FloatingIp, owner: &Owner) -> bool {
        marks::is_floating(&ip.description) && ip.description != marks::floating(&self.config.cluster, owner)
    }

    /// Refuses a requested address that the Service cannot have, before anything is created for it: each change of the project's Octavia
    /// takes its time from others'. What has the address now may be something else that lets go of it when the load balancer is there, such
    /// as the one that this replaces.
    pub(crate) async fn check_given(&self, lb: &LoadBalancer, address: IpAddr) -> Result<(), Error> {
        let found = self.requested_ip(address).await?;
        let can_be_let_go = found.as_ref().filter(|ip| !self.is_of_another(ip, &lb.owner));
        if let Some(port) = can_be_let_go.and_then(|ip| ip.port_id.as_ref()) {
            let balancers = observe::balancers_with(&*self.calls, "vip_port_id", port).await?;
            let balancer = balancers.iter().find(|balancer| balancer.vip_port_id.as_ref() == Some(port));
            let holder = balancer.and_then(|balancer| marks::owner(&self.config.cluster, balancer));
            if holder.is_none_or(|holder| holder.service == lb.owner.service) {
                return Ok(());
            }
        }
        self.permitted(lb, (address, found), &[]).await.map(drop)
    }

    /// What has a requested floating IP, and what to do. A tenant learns the name of another namespace's Service only where the address is the
    /// tenant's.
    async fn holder(&self, lb: &LoadBalancer, ip: &FloatingIp, port: &str) -> (String, String) {
        let detach = format!(
            "Detach it if nothing needs it there (`openstack floating ip unset --port {}`), or request another address.",
            ip.address
        );
        let found = observe::balancers_with(&*self.calls, "vip_port_id", port).await.unwrap_or_default();
        let Some(balancer) = found.iter().find(|found| found.vip_port_id.as_deref() == Some(port)) else {
            return (format!("Its floating IP belongs to the port {port}."), detach);
        };
        let id = &balancer.id;
        let Some(holder) = marks::owner(&self.config.cluster, balancer) else {
            let problem = format!("Its floating IP is attached to the load balancer {id} (port {port}).");
            return (problem, detach);
        };
        let (service, namespace) = (&lb.owner.service, lb.owner.service.namespace());
        tracing::warn!(%service, address = %ip.address, holder = %holder.service, "requested floating IP is attached to another Service");
        let is_the_tenants = holder.service.namespace() == namespace
            || marks::reserved_for(&ip.description) == Some(namespace)
            || lb.published.contains(&ip.address);
        let user = if is_the_tenants {
            format!("the Service {}", holder.service)
        } else {
            "a Service in another namespace".to_owned()
        };
        let problem = format!("Its floating IP is attached to the load balancer {id} of {user}.");
        // That Service's controller would attach it again.
        (problem, "Request another address, or remove the request from that Service first.".to_owned())
    }

    /// Gives the port of the VIP another floating IP. What is on the port goes from it at the last moment, and comes back on a failure.
    async fn attach(
        &self,
        lb: &LoadBalancer,
        used: Used,
        port: &str,
        ours: &[FloatingIp],
        (entry, mark): (&ServiceState, &str),
    ) -> Result<FloatingIp, Error> {
        let known = entry.addressed.as_ref().filter(|known| known.uid == lb.owner.uid);
        let on_port = self.floating_ips(&[("port_id", port)]).await?;
        let present = on_port.into_iter().find(|ip| ip.port_id.as_deref() == Some(port));
        let Some(present) = present else {
            return match used {
                Used::New { network, subnet } => {
                    self.allocate(mark, &network, subnet.as_deref(), Some(port)).await
                }
                Used::Existing(ip) => self.connect_ip(&ip, Some(port)).await,
                Used::Vip => Err(Error::Unavailable("the VIP needs no floating IP".to_owned())),
            };
        };
        if matches!(used, Used::New { .. }) && present.description == marks::requested(&lb.owner.service) {
            // It was Steerage's until the Service requested it, which it does no more.
            return self.describe(&present, mark).await;
        }
        let is_given = known.is_some_and(|known| known.is_given && known.address == present.address);
        let is_known = known.is_some_and(|known| known.address == present.address);
        let was_own = known.is_some_and(|known| known.is_own && known.address == present.address);
        let is_published = lb.published.contains(&present.address) || is_known;
        if matches!(used, Used::New { .. }) && is_published && !is_given && !ours.contains(&present) {
            // Somebody changed its description. Clients know it.
            if was_own && !marks::is_floating(&present.description) {
                self.describe(&present, mark).await?;
            }
            return Ok(present);
        }
        if !is_published && !ours.iter().any(|ip| ip.id == present.id) {
            let message = format!(
                "The load balancer's VIP (port {port}) has the floating IP {}, which is not Steerage's. It stays, and nothing is published. \
                 Detach it, or request it by steerage.dev/addresses.",
                present.address
            );
            return Err(Error::invalid(reasons::ADDRESS_NOT_AVAILABLE, message));
        }
        let next = match used {
            Used::New { network, subnet } => self.allocate(mark, &network, subnet.as_deref(), None).await?,
            Used::Existing(ip) => ip,
            Used::Vip => return Ok(present),
        };
        self.connect_ip(&present, None).await?;
        match self.connect_ip(&next, Some(port)).await {
            Ok(attached) => Ok(attached),
            Err(error) => {
                // Whatever its revision is by now.
                let present = FloatingIp { revision_number: None, ..present };
                let is_throttled = |error: &Error| matches!(error, Error::Throttled { .. });
                insist(is_throttled, || self.connect_ip(&present, Some(port))).await?;
                Err(error)
            }
        }
    }

    async fn allocate(
        &self,
        mark: &str,
        network: &str,
        subnet: Option<&str>,
        port: Option<&str>,
    ) -> Result<FloatingIp, Error> {
        let mut ip = json!({
            "floating_network_id": network,
            "port_id": port,
            "description": mark,
        });
        if let Some(subnet) = subnet {
            ip["subnet_id"] = subnet.into();
        }
        let body = Some(json!({ "floatingip": ip }));
        self.change(Call::neutron(Method::POST, "POST floatingips", "floatingips", body)).await
    }

    /// Attaches a floating IP to a port, or detaches it.
    async fn connect_ip(&self, ip: &FloatingIp, port: Option<&str>) -> Result<FloatingIp, Error> {
        // A user's may be requested by several Services at the same time: the first one has it.
        let is_contended = port.is_some() && !marks::is_floating(&ip.description);
        let revision = ip.revision_number.filter(|_| is_contended);
        self.put(ip, &json!({ "port_id": port }), revision).await
    }

    async fn describe(&self, ip: &FloatingIp, description: &str) -> Result<FloatingIp, Error> {
        self.put(ip, &json!({ "description": description }), None).await
    }

    /// Makes one of Steerage's floating IPs the user's, who requests it: it is not deleted any more.
    async fn give(&self, owner: &Owner, ip: &FloatingIp) -> Result<FloatingIp, Error> {
        tracing::info!(service = %owner.service, address = %ip.address, "floating IP handed over to the user: the Service requests it");
        self.describe(ip, &marks::requested(&owner.service)).await
    }

    async fn put(
        &self,
        ip: &FloatingIp,
        changes: &Value,
        revision: Option<u64>,
    ) -> Result<FloatingIp, Error> {
        let body = Some(json!({ "floatingip": changes }));
        let path = format!("floatingips/{}", ip.id);
        let call = Call::neutron(Method::PUT, "PUT floatingips", &path, body);
        self.change(Call { if_match: revision, ..call }).await
    }

    async fn change(&self, call: Call) -> Result<FloatingIp, Error> {
        let name = call.name();
        Ok(object(&name, self.calls.send(call).await?, "floatingip")?)
    }
}

#[cfg(test)]
mod tests;
