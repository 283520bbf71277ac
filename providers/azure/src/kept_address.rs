// SPDX-License-Identifier: Apache-2.0
//! The address of a Service that is refused now. It may have been refused before its address was published, while its rules serve.

use std::time::Duration;

use steerage_model::{Family, Ingress, IpMode};
use steerage_provider_api::{Error, Outcome, Owner, Progress};

use crate::merge::Layout;
use crate::provider::{Azure, KNOWN};
use crate::service_state::ServiceState;
use crate::types::{Balancer, Frontend, Part};

/// Until an address that could not be read is read again.
const UNKNOWN_WAIT: Duration = Duration::from_secs(30);

impl Azure {
    /// Hands the address over that the Service has in these frontends, which serve. A failure only puts it off. It costs no request where
    /// this process knows the address, and else one list of public IPs for all Services.
    pub(crate) async fn publish_kept(
        &self,
        owner: &Owner,
        serving: &[Part<Frontend>],
        entry: &mut ServiceState,
        outcome: &mut Outcome,
    ) {
        if let Some((_, known)) = entry.kept.as_ref().filter(|(of, _)| of == owner) {
            outcome.ingress.clone_from(known);
            return;
        }
        if outcome.progress != Progress::Done || serving.is_empty() {
            return;
        }
        match self.kept(owner, serving, entry).await {
            Ok(ingress) if ingress.is_empty() => {}
            Ok(ingress) => {
                entry.kept = Some((owner.clone(), ingress.clone()));
                outcome.ingress = ingress;
            }
            Err(error) => {
                tracing::debug!(service = %owner.service, %error, "address of a refused Service not read; retrying");
                outcome.progress = Progress::Again(UNKNOWN_WAIT);
            }
        }
    }

    async fn kept(
        &self,
        owner: &Owner,
        serving: &[Part<Frontend>],
        entry: &ServiceState,
    ) -> Result<Vec<Ingress>, Error> {
        let mark = self.mark(owner);
        let mut ingress = Vec::new();
        for family in [Family::V4, Family::V6] {
            let mut parts = serving.iter().filter(|part| mark.is_frontend(family, &part.name));
            let Some(part) = parts.next() else { continue };
            if parts.next().is_some() {
                // The Service moves to another address. Its status may have the old one, which serves, too.
                return Ok(entry.announced.clone().unwrap_or_default());
            }
            let public = part.properties.public_ip.as_ref();
            let ip = match public {
                Some(public) => self.public_ips.known_address(&*self.calls, public, KNOWN).await?,
                None => part.properties.private_ip,
            };
            ingress.extend(ip.map(|ip| Ingress { ip: Some(ip), hostname: None, ip_mode: Some(IpMode::Vip) }));
        }
        Ok(ingress)
    }
}

impl Layout {
    /// The frontends of a Service to which packets come.
    pub(crate) fn serving(&self, body: &Balancer, mark: &crate::marks::Mark) -> Vec<Part<Frontend>> {
        let has_rule = |part: &&Part<Frontend>| {
            body.properties.rules.iter().any(|rule| rule.properties.frontend.id.name() == part.name)
        };
        self.frontends(body, mark).into_iter().filter(has_rule).cloned().collect()
    }
}
