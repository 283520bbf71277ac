// SPDX-License-Identifier: Apache-2.0
//! Finds the IDs of subnets and of named security groups. One read serves all Services for a minute: both hardly change.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use steerage_provider_api::Error;
use steerage_provider_cloud::AfterFailure;
use tokio::time::Instant;

use crate::annotations::IP_ADDRESS_TYPE;
use crate::desired::Desired;
use crate::ip_address_type::IpAddressType;
use crate::named_groups::{NameAndId, NamedGroups};
use crate::placement::{Placed, Placement};
use crate::provider::Aws;
use crate::subnets::{Subnet, without_ipv6};

/// A read is used for this time.
pub(crate) const AGE: Duration = Duration::from_mins(1);

/// The IDs of security groups by name, and when they were read.
pub(crate) type KnownGroupNames = HashMap<String, (Instant, String)>;

impl Aws {
    /// Where a new load balancer goes.
    pub(crate) async fn resolved(&self, wanted: &Desired) -> Result<Placement, Error> {
        if !wanted.placement.needs_lookup() {
            return Ok(wanted.placement.clone());
        }
        let all = self.subnets(AfterFailure::Retry).await?;
        wanted.placement.resolved(&self.config, &all)
    }

    /// The subnets of the VPC, for load balancers that exist. After a failure of EC2 nobody asks again for a while: a thousand Services
    /// that wait for its answer one after the other would not follow their endpoints.
    pub(crate) async fn subnets_to_compare(&self) -> Result<Arc<[Subnet]>, Error> {
        self.subnets(AfterFailure::GiveUp).await
    }

    /// Adds to AWS's refusal of IPv6 which of the load balancer's subnets have none.
    pub(crate) async fn name_lacking_ipv6(
        &self,
        refusal: Error,
        kind: IpAddressType,
        placed: &Placed,
    ) -> Error {
        let Error::Invalid { reason, message } = refusal else { return refusal };
        if kind == IpAddressType::DualStack
            && let Ok(all) = self.subnets_to_compare().await
        {
            let lacking = without_ipv6(&all, placed.keys());
            if !lacking.is_empty() {
                let lacking: Vec<&str> = lacking.into_iter().map(String::as_str).collect();
                let lacking = lacking.join(", ");
                return Error::invalid(
                    reason,
                    format!(
                        "{message} Without an IPv6 range: {lacking}. Add one to each, choose other subnets, or set {IP_ADDRESS_TYPE} to ipv4."
                    ),
                );
            }
        }
        Error::Invalid { reason, message }
    }

    async fn subnets(&self, after_failure: AfterFailure) -> Result<Arc<[Subnet]>, Error> {
        let read = async { self.client.subnets(&self.config.vpc).await.map(Arc::<[Subnet]>::from) };
        Ok(self.subnets.get(after_failure, read).await?)
    }

    /// The IDs of the security groups that an annotation names.
    pub(crate) async fn named_group_ids(&self, named: &NamedGroups) -> Result<BTreeSet<String>, Error> {
        let (mut found, unknown) = self.known_groups(named);
        if !unknown.is_empty() {
            let read = self.client.security_groups_named(&self.config.vpc, &unknown).await?;
            self.remember_groups(&read);
            found.extend(read);
        }
        named.ids(&self.config.vpc, &found)
    }

    /// The IDs of the names that were just read, and the other names.
    fn known_groups(&self, named: &NamedGroups) -> (Vec<NameAndId>, Vec<String>) {
        let known = self.group_names.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut found, mut unknown) = (Vec::new(), Vec::new());
        for name in named.names() {
            match known.get(name).filter(|(read, _)| read.elapsed() < AGE) {
                Some((_, id)) => found.push((name.clone(), id.clone())),
                None => unknown.push(name.clone()),
            }
        }
        (found, unknown)
    }

    /// Remembers the names that are those of one group. The others may be corrected at any moment.
    fn remember_groups(&self, read: &[NameAndId]) {
        let mut known = self.group_names.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|_, (read, _)| read.elapsed() < AGE);
        for (name, id) in read {
            if read.iter().filter(|(other, _)| other == name).count() == 1 {
                known.insert(name.clone(), (Instant::now(), id.clone()));
            }
        }
    }
}
