// SPDX-License-Identifier: Apache-2.0
//! Gives up the addresses that a refused Service requested and did not get, so that other Services can have them.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use steerage_provider_api::{Error, Owner};

use crate::admission::Admission;
use crate::provider::{Azure, KNOWN};
use crate::shared::Written;

impl Azure {
    /// Gives up the addresses that a refused Service requested and does not have, and removes the rules that were to admit its clients there.
    /// Those that it has stay as they are. What is still being changed is given up when the Service is refused again, at the latest at the
    /// next resync.
    pub(crate) async fn release(&self, owner: &Owner) {
        self.address_owners.keep_claims(owner, &BTreeSet::new());
        let admitted = self.address_owners.of(owner);
        if admitted.is_empty() {
            return;
        }
        if let Err(error) = self.close_unserved(owner, admitted).await {
            tracing::warn!(service = %owner.service, %error, "security rules of a refused Service not removed; retrying at the next resync");
        }
    }

    /// Removes the rules for those of these addresses at which the Service has no frontend, and gets none.
    async fn close_unserved(&self, owner: &Owner, mut vips: BTreeSet<IpAddr>) -> Result<(), Error> {
        let Some(security_group) = &self.security_group else { return Ok(()) };
        let mark = self.mark(owner);
        for balancer in &self.balancers {
            // What it wanted before it was refused must not give it a frontend without rules.
            let body = match self.withdraw_and_read(balancer, &owner.service, KNOWN).await {
                Ok(Ok(body)) => body,
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
        if let Written::Done(_) =
            security_group.write(&*self.calls, &owner.service, none, Duration::MAX).await?
        {
            self.address_owners.remove(owner, &vips);
        }
        Ok(())
    }
}
