// SPDX-License-Identifier: Apache-2.0
//! Public IPs of users: Steerage uses them as they are, and never deletes them.

use std::net::IpAddr;
use std::sync::PoisonError;
use std::time::Duration;

use steerage_model::Family;
use steerage_provider_api::{Error, Owner};

use super::{GET, Prepared, PublicIps, Usable, by_name};
use crate::client::{Calls, read};
use crate::desired::Given;
use crate::types::PublicIp;
use crate::{annotations, marks, reasons};

impl PublicIps {
    /// A public IP of the user. `balancer` is the path of the load balancer that may use it.
    pub(crate) async fn given(
        &self,
        calls: &dyn Calls,
        of: (&Owner, Family),
        by: (Option<&str>, &Given),
        balancer: &str,
        age: Duration,
    ) -> Result<Prepared, Error> {
        let found = self.find_given(calls, of, by, balancer, age).await;
        if found.is_err() {
            // Somebody may have corrected it by the next try.
            self.known.forget().await;
        }
        found
    }

    async fn find_given(
        &self,
        calls: &dyn Calls,
        (owner, family): (&Owner, Family),
        (group, by): (Option<&str>, &Given),
        balancer: &str,
        age: Duration,
    ) -> Result<Prepared, Error> {
        let is_own_group = group.is_none_or(|group| group.eq_ignore_ascii_case(&self.config.resource_group));
        let shown_group = group.unwrap_or(&self.config.resource_group);
        let (found, what) = match by {
            Given::Name(name) => {
                let path = self.config.public_ip_path(group, name);
                let found = read::<PublicIp>(calls, GET, &path).await?;
                if is_own_group {
                    // Azure ignores the case of names, and the list has them as Azure shows them.
                    let name = found.as_ref().map_or(name, |ip| &ip.name);
                    self.known.expect_answer(name).note_answer(found.clone()).await;
                }
                (found, format!("named {name}"))
            }
            Given::Address(address) => {
                let has = |ip: &PublicIp| ip.properties.ip_address == Some(*address);
                let found = if is_own_group {
                    self.all(calls, age).await?.values().find(|ip| has(ip)).cloned()
                } else {
                    self.find(calls, shown_group, *address).await?
                };
                (found, format!("with the address {address}"))
            }
        };
        let refuse = |reason, problem: String, advice: &str| {
            let message = format!("{problem} No load balancer is created or changed. {advice}");
            Err(Error::invalid(reason, message))
        };
        let unusable =
            |problem: String, advice: &str| refuse(reasons::ADDRESS_NOT_AVAILABLE, problem, advice);
        let Some(ip) = found else {
            let problem = format!("The resource group {shown_group} has no public IP {what}.");
            return unusable(
                problem,
                &format!("Create it there, or name its resource group by {}.", annotations::RESOURCE_GROUP),
            );
        };
        let name = &ip.name;
        let of = marks::owner(&self.config.cluster, &ip.tags);
        let is_ours = of.as_ref() == Some(owner);
        if of.is_some_and(|other| other.service != owner.service) {
            let problem = format!("Steerage created the public IP {what} for another Service.");
            return unusable(problem, "Request another one.");
        }
        if let Some(tag) = marks::of_others(&self.config.cluster, &ip.tags) {
            let problem = format!("The tag {tag} says that the public IP {name} is another controller's.");
            return unusable(problem, "Remove the tag if it is not any more, or request another public IP.");
        }
        let sku = ip.sku.as_ref().and_then(|sku| sku.get("name")).and_then(serde_json::Value::as_str);
        if sku.is_some_and(|sku| !sku.eq_ignore_ascii_case("Standard")) {
            let problem = format!("The public IP {name} is not of the SKU Standard.");
            return unusable(problem, "Upgrade it, or request another one.");
        }
        let user = ip.properties.ip_configuration.as_ref().map(|user| &user.id);
        if let Some(user) = user.filter(|user| !user.is_in(balancer)) {
            let problem = format!("The public IP {name} is used by {}.", user.0);
            return unusable(problem, "Remove it there first: Azure takes an address in one place only.");
        }
        let id = ip.id.as_ref().map_or_else(|| self.config.public_ip_path(group, name), |id| id.0.clone());
        match (ip.properties.ip_address, ip.properties.provisioning_state.unwrap_or_default()) {
            (_, state) if state.is_busy() => {
                self.known.forget().await;
                Ok(Prepared::Again(self.config.poll))
            }
            // Azure refuses every change of the load balancer, for all Services, also one that gives it another address.
            (_, state) if state.is_failed() && user.is_some() => refuse(
                reasons::PUBLIC_IP_NOT_READY,
                format!(
                    "Azure's last change of the public IP {name} failed, and Azure takes no change of the load balancer until the public \
                     IP is written again."
                ),
                &format!(
                    "Write it again: `az network public-ip update --ids {id}`. Its activity log has the reason of the failure."
                ),
            ),
            (_, state) if state.is_failed() => unusable(
                format!("Azure's last change of the public IP {name} failed."),
                &format!("Write it again: `az network public-ip update --ids {id}`. Or request another one."),
            ),
            (Some(address), _) if Family::of(address) == family => {
                Ok(Prepared::Ready(Usable::new(id, address, is_ours)))
            }
            (Some(address), _) => unusable(
                format!("The public IP {name} has the address {address}, which is no {family}."),
                "Request another one.",
            ),
            (None, _) => unusable(
                format!("The public IP {name} has no address yet."),
                "Set its allocation method to Static, or request another one.",
            ),
        }
    }

    /// The public IP of another resource group with this address. Once its name is known, the group is not listed again.
    async fn find(&self, calls: &dyn Calls, group: &str, address: IpAddr) -> Result<Option<PublicIp>, Error> {
        let has = |ip: &PublicIp| ip.properties.ip_address == Some(address);
        let key = (group.to_ascii_lowercase(), address);
        let names = || self.names.lock().unwrap_or_else(PoisonError::into_inner);
        let name = names().get(&key).cloned();
        if let Some(name) = name {
            let path = self.config.public_ip_path(Some(group), &name);
            if let Some(ip) = read::<PublicIp>(calls, GET, &path).await?.filter(has) {
                return Ok(Some(ip));
            }
        }
        let found = by_name(calls, &self.config, Some(group)).await?.into_values().find(has);
        match &found {
            Some(ip) => drop(names().insert(key, ip.name.clone())),
            None => drop(names().remove(&key)),
        }
        Ok(found)
    }
}
