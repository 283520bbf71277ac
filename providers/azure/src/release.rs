// SPDX-License-Identifier: Apache-2.0
//! What a refused Service requested: others may have the addresses that it did not get.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use steerage_provider_api::{Error, Owner};

use crate::admission::Admission;
use crate::provider::{Azure, KNOWN};
use crate::shared::Written;
use crate::state::ServiceState;

impl Azure {
    /// Gives up the addresses that a refused Service requested and does not have, and takes away the rules that were to admit its clients
    /// there. Those that it has stay as they are.
    pub(crate) async fn release(&self, owner: &Owner, entry: &ServiceState) {
        self.address_owners.keep_claims(owner, &BTreeSet::new());
        let unserved = &self.address_owners.of(owner) - &entry.vips;
        if unserved.is_empty() {
            return;
        }
        if let Err(error) = self.close_unserved(owner, unserved).await {
            tracing::warn!(service = %owner.service, %error, "rules of addresses that the refused Service does not have are not removed; retrying when it is refused again");
        }
    }

    /// Takes away the rules for those of these addresses at which the Service has no frontend.
    async fn close_unserved(&self, owner: &Owner, mut vips: BTreeSet<IpAddr>) -> Result<(), Error> {
        let Some(guard) = &self.guard else { return Ok(()) };
        let mark = self.mark(owner);
        for balancer in &self.balancers {
            let body = match self.balancer(balancer, KNOWN).await {
                Ok(Ok(body)) => body,
                // What is under way may give it a frontend.
                Ok(Err(_)) => return Ok(()),
                // Another one has its name: nothing in it is Steerage's.
                Err(Error::Invalid { .. }) if !self.has_parts(balancer, |of| *of == mark).await? => continue,
                Err(error) => return Err(error),
            };
            vips = &vips - &self.vips(balancer, body.as_ref(), &mark).await?;
        }
        if vips.is_empty() {
            return Ok(());
        }
        let none = Admission::none(vips.clone());
        if let Written::Done(_) = guard.write(&*self.calls, &owner.service, none, Duration::MAX).await? {
            self.address_owners.remove(owner, &vips);
        }
        Ok(())
    }
}
