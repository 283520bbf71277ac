// SPDX-License-Identifier: Apache-2.0
//! The address that clients connect to: the VIP, a floating IP of Steerage's own, or one of the user's, which is never deleted.

use std::net::IpAddr;

use http::Method;
use serde_json::{Value, json};
use steerage_model::{Ingress, IpMode};
use steerage_provider_api::{Error, Owner};

use crate::client::{Call, object};
use crate::desired::{Desired, WantedAddress};
use crate::error::CallError;
use crate::provider::OpenStack;
use crate::types::{Balancer, FloatingIp};
use crate::{marks, observe, reasons};

impl OpenStack {
    /// Brings the address in place, and returns what to publish.
    pub(crate) async fn ensure_address(
        &self,
        owner: &Owner,
        wanted: &Desired,
        balancer: &Balancer,
    ) -> Result<Vec<Ingress>, Error> {
        let ours = self.own_floating_ips(owner).await?;
        let port = balancer.vip_port_id.as_deref().unwrap_or_default();
        let address = match &wanted.address {
            WantedAddress::Internal(_) => {
                self.release(&ours).await?;
                balancer.vip_address
            }
            WantedAddress::Floating { network, subnet } => {
                let (kept, others): (Vec<_>, Vec<_>) =
                    ours.into_iter().partition(|ip| ip.floating_network_id == *network);
                let is_attached = |ip: &FloatingIp| ip.port_id.as_deref() == Some(port);
                let mut kept = kept;
                kept.sort_by_key(|ip| (!is_attached(ip), ip.id.clone()));
                // One at a time can have the port.
                self.release(&others).await?;
                self.release(kept.get(1..).unwrap_or_default()).await?;
                let ip = match kept.into_iter().next() {
                    Some(ip) if is_attached(&ip) => ip,
                    Some(ip) => self.attach(&ip, port).await?,
                    None => self.allocate(owner, network, subnet.as_deref(), port).await?,
                };
                Some(ip.address)
            }
            WantedAddress::Given(address) => {
                let ip = self.given(*address, port).await?;
                self.release(&ours).await?;
                if ip.port_id.as_deref() != Some(port) {
                    self.attach(&ip, port).await?;
                }
                Some(*address)
            }
        };
        let ip_mode = Some(if wanted.has_proxy_protocol { IpMode::Proxy } else { IpMode::Vip });
        Ok(address.map(|ip| Ingress { ip: Some(ip), hostname: None, ip_mode }).into_iter().collect())
    }

    /// The floating IPs that Steerage created for the owner.
    pub(crate) async fn own_floating_ips(&self, owner: &Owner) -> Result<Vec<FloatingIp>, CallError> {
        let description = marks::floating(&self.config.cluster, owner);
        let mut found = observe::floating_ips(&*self.calls, &[("description", &description)]).await?;
        found.retain(|ip| ip.description == description);
        Ok(found)
    }

    /// Deletes floating IPs.
    pub(crate) async fn release(&self, ips: &[FloatingIp]) -> Result<(), CallError> {
        for ip in ips {
            let path = format!("floatingips/{}", ip.id);
            let call = Call::neutron(Method::DELETE, "DELETE floatingips", &path, None);
            match self.calls.send(call).await {
                Ok(_) => {
                    tracing::info!(address = %ip.address, "floating IP deleted");
                }
                Err(failure) if failure.is_not_found() => {}
                Err(failure) => return Err(failure),
            }
        }
        Ok(())
    }

    /// The user's floating IP of this address, if the load balancer may have it.
    async fn given(&self, address: IpAddr, port: &str) -> Result<FloatingIp, Error> {
        let text = address.to_string();
        let found = observe::floating_ips(&*self.calls, &[("floating_ip_address", &text)]).await?;
        let unavailable = |problem: &str, advice: &str| {
            let message = format!("The Service requests the address {address}. {problem} {advice}");
            Error::invalid(reasons::ADDRESS_NOT_AVAILABLE, message)
        };
        let Some(ip) = found.into_iter().find(|ip| ip.address == address) else {
            let advice = "Create it in the cluster's project: openstack floating ip create.";
            return Err(unavailable("No floating IP of the project has it.", advice));
        };
        match &ip.port_id {
            Some(other) if other != port => {
                let problem = format!("Its floating IP belongs to the port {other}.");
                Err(unavailable(&problem, "Detach it, or request another address."))
            }
            _ => Ok(ip),
        }
    }

    async fn attach(&self, ip: &FloatingIp, port: &str) -> Result<FloatingIp, Error> {
        self.free(port, &ip.id).await?;
        let body = Some(json!({ "floatingip": { "port_id": port } }));
        let path = format!("floatingips/{}", ip.id);
        self.change(Call::neutron(Method::PUT, "PUT floatingips", &path, body)).await
    }

    async fn allocate(
        &self,
        owner: &Owner,
        network: &str,
        subnet: Option<&str>,
        port: &str,
    ) -> Result<FloatingIp, Error> {
        self.free(port, "").await?;
        let mut ip = json!({
            "floating_network_id": network,
            "port_id": port,
            "description": marks::floating(&self.config.cluster, owner),
        });
        if let Some(subnet) = subnet {
            ip["subnet_id"] = subnet.into();
        }
        let body = Some(json!({ "floatingip": ip }));
        self.change(Call::neutron(Method::POST, "POST floatingips", "floatingips", body)).await
    }

    /// Detaches other floating IPs from the port of the VIP: it can have one.
    async fn free(&self, port: &str, kept: &str) -> Result<(), Error> {
        let found = observe::floating_ips(&*self.calls, &[("port_id", port)]).await?;
        for other in found.iter().filter(|ip| ip.id != kept && ip.port_id.as_deref() == Some(port)) {
            let body = Some(json!({ "floatingip": { "port_id": Value::Null } }));
            let path = format!("floatingips/{}", other.id);
            let _: FloatingIp =
                self.change(Call::neutron(Method::PUT, "PUT floatingips", &path, body)).await?;
        }
        Ok(())
    }

    /// A network that does not exist, or that no router joins with the VIP's subnet, is "not found" to Neutron.
    async fn change(&self, call: Call) -> Result<FloatingIp, Error> {
        let (name, is_new) = (call.name(), call.method == Method::POST);
        match self.calls.send(call).await {
            Ok(answer) => Ok(object(&name, answer, "floatingip")?),
            Err(failure) if failure.is_not_found() && is_new => Err(failure.rejected()),
            Err(failure) => Err(failure.into()),
        }
    }
}
