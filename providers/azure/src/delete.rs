// SPDX-License-Identifier: Apache-2.0
//! Deletes everything of an owner: first what admits clients, then its parts of the load balancer, then its public IPs. What is left after
//! a crash still says whose it is.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use steerage_provider_api::{Error, Owner, Progress};

use crate::admission::{Admission, SecurityGroupDocument};
use crate::document::BalancerDocument;
use crate::merge::Intent;
use crate::provider::{Azure, RECENT};
use crate::service_state::ServiceState;
use crate::shared::{Shared, Written};

impl Azure {
    pub(crate) async fn delete_all(
        &self,
        owner: &Owner,
        entry: &mut ServiceState,
    ) -> Result<Progress, Error> {
        let (calls, mark) = (&*self.calls, self.mark(owner));
        if entry.complete.as_ref().is_some_and(|complete| complete.owner == *owner) {
            entry.complete = None;
        }
        let (mut vips, mut present) = (BTreeSet::new(), Vec::new());
        let mut trouble = None;
        if let Some(security_group) = &self.security_group {
            match security_group.withdraw(calls, &owner.service, RECENT).await {
                Ok(Some(wait)) => return Ok(Progress::Again(wait)),
                Ok(None) => {}
                Err(error) => trouble = Some(error),
            }
        }
        for balancer in &self.balancers {
            // What is under way for it would come back after its deletion.
            let body = match self.withdraw_and_read(balancer, &owner.service, RECENT).await {
                Ok(Ok(body)) => body,
                Ok(Err(wait)) => return Ok(Progress::Again(wait)),
                // Another one has its name: nothing in it is Steerage's.
                Err(Error::Invalid { .. }) if !self.has_parts(balancer, |of| *of == mark).await? => continue,
                // It is known to have nothing of the Service.
                Err(_) if entry.alone.is_some_and(|alone| alone != balancer.document.layout.is_internal) => {
                    continue;
                }
                Err(error) => return Err(error),
            };
            if !balancer.document.layout.frontends_of(body.as_ref(), &mark).is_empty() {
                vips.extend(self.vips(balancer, body.as_ref(), &mark).await?);
                present.push(balancer);
            }
        }
        let ours = self.public_ips.of_service(calls, owner, RECENT).await?;
        let ours: Vec<_> = ours.into_iter().filter(|(of, _)| of == owner).map(|(_, ip)| ip).collect();
        vips.extend(ours.iter().filter_map(|ip| ip.properties.ip_address));

        self.address_owners.leave_out_of_others(owner, &mut vips);
        let admitted = &self.address_owners.of(owner) - &vips;
        let is_known = !vips.is_empty();
        vips.extend(&admitted);
        if let Some(security_group) = self.security_group.as_ref().filter(|_| !vips.is_empty()) {
            let closed = match trouble {
                Some(error) => Err(error),
                None => self.close(security_group, owner, &present, vips.clone()).await,
            };
            match closed {
                Ok(Some(wait)) => return Ok(Progress::Again(wait)),
                // A new Service of the name gets no rules for them.
                Ok(None) => entry.vips.retain(|vip| !vips.contains(vip)),
                // It was to get rules, and the group that is to have them cannot be changed: it has none.
                Err(error @ (Error::Invalid { .. } | Error::Denied(_))) if !is_known => {
                    tracing::warn!(service = %owner.service, %error, "security group not read; rules may be left over");
                }
                Err(error) => return Err(error),
            }
        }
        for balancer in &present {
            let absent = Intent::Absent(mark.clone(), owner.service.clone());
            if let Written::Again(wait) = self.write(balancer, &owner.service, absent, Duration::MAX).await? {
                return Ok(Progress::Again(wait));
            }
        }
        let names: BTreeSet<String> = ours.into_iter().map(|ip| ip.name).collect();
        // A deletion whose answer was read before is asked for until it is complete.
        let running = entry.operations.keys().filter(|name| name.starts_with(&mark.part("")));
        let names: BTreeSet<String> = names.iter().chain(running).cloned().collect();
        if let Some(wait) = self.public_ips.delete(calls, &names, &mut entry.operations).await? {
            return Ok(Progress::Again(wait));
        }
        self.address_owners.forget(owner);
        Ok(Progress::Done)
    }

    /// Takes away the rules that admit clients to these addresses. When to call again; `None` if they are gone.
    async fn close(
        &self,
        security_group: &Shared<SecurityGroupDocument>,
        owner: &Owner,
        present: &[&Shared<BalancerDocument>],
        vips: BTreeSet<IpAddr>,
    ) -> Result<Option<Duration>, Error> {
        let calls = &*self.calls;
        let group = match security_group.look_past(calls, RECENT).await? {
            Written::Again(wait) => return Ok(Some(wait)),
            Written::Done(group) => group.unwrap_or_default(),
        };
        if security_group.document.present(&group, &vips).denies {
            // Nobody may connect whom the rules deny, also not for a moment.
            for balancer in present {
                let withdrawn = Intent::Withdrawn(self.mark(owner));
                let written = self.write(balancer, &owner.service, withdrawn, Duration::MAX).await?;
                if let Written::Again(wait) = written {
                    return Ok(Some(wait));
                }
            }
        }
        let none = Admission::none(vips);
        Ok(match security_group.write(calls, &owner.service, none, Duration::MAX).await? {
            Written::Again(wait) => Some(wait),
            Written::Done(_) => None,
        })
    }
}
