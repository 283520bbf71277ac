// SPDX-License-Identifier: Apache-2.0
//! Which of the floating IPs that exist clients connect to, and which are deleted. Pure.

use std::net::IpAddr;

use crate::desired::{Desired, WantedAddress};
use crate::reasons;
use crate::types::FloatingIp;

/// What clients connect to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Used {
    Vip,
    /// A floating IP that exists.
    Existing(FloatingIp),
    /// One that has to be created.
    New {
        network: String,
        subnet: Option<String>,
    },
}

/// What happens to floating IPs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AddressPlan {
    pub(crate) used: Used,
    /// Those of Steerage's that are deleted when the address is in place.
    pub(crate) dropped: Vec<FloatingIp>,
    /// Why the address is not the one that the flags ask for.
    pub(crate) incomplete: Option<(&'static str, String)>,
}

/// Plans the address. `ours` are the floating IPs that Steerage created for the Service, `given` is the one that it requests, or else one of
/// the user's that clients know from the load balancer that was there before.
pub(crate) fn plan(
    wanted: &Desired,
    port: &str,
    published: &[IpAddr],
    mut ours: Vec<FloatingIp>,
    given: Option<FloatingIp>,
) -> AddressPlan {
    let is_attached = |ip: &FloatingIp| ip.port_id.as_deref() == Some(port);
    let of = |used, dropped| AddressPlan { used, dropped, incomplete: None };
    match &wanted.address {
        WantedAddress::Given(_) => {
            let Some(given) = given else { return of(Used::Vip, Vec::new()) };
            // One of Steerage's own that its Service requests is the user's from now on.
            ours.retain(|ip| ip.id != given.id);
            of(Used::Existing(given), ours)
        }
        WantedAddress::Floating { network, subnet } => {
            let fits = |ip: &FloatingIp| !wanted.is_address_requested || ip.floating_network_id == *network;
            ours.sort_by_key(|ip| {
                let is_of_network = ip.floating_network_id == *network;
                (!fits(ip), !is_attached(ip), !published.contains(&ip.address), !is_of_network, ip.id.clone())
            });
            if let Some(known) = given.filter(fits) {
                return of(Used::Existing(known), ours);
            }
            match ours.first().filter(|first| fits(first)).cloned() {
                Some(first) => of(Used::Existing(first), ours.split_off(1)),
                None => of(Used::New { network: network.clone(), subnet: subnet.clone() }, ours),
            }
        }
        WantedAddress::Internal => {
            ours.sort_by_key(|ip| (!is_attached(ip), !published.contains(&ip.address), ip.id.clone()));
            match ours.first().filter(|_| !wanted.is_address_requested).cloned() {
                None => of(Used::Vip, ours),
                // The flag may have been lost; the address would be lost with it.
                Some(first) => {
                    let message = format!(
                        "The Service keeps its floating IP {}, although --openstack-floating-network-id is not set and load balancers are \
                         internal. Set the flag again. To give up the address, set the annotation {} to true.",
                        first.address,
                        crate::annotations::INTERNAL
                    );
                    let incomplete = Some((reasons::NO_FLOATING_NETWORK, message));
                    AddressPlan { used: Used::Existing(first), dropped: Vec::new(), incomplete }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use steerage_provider_api::LoadBalancer;

    use super::*;
    use crate::desired::desired;
    use crate::desired::tests::planned;
    use crate::options::tests::config;

    const WEB: (steerage_model::Protocol, u16, u16) = (steerage_model::Protocol::Tcp, 80, 30080);

    fn ip(id: &str, network: &str, port: Option<&str>) -> FloatingIp {
        FloatingIp {
            id: id.to_owned(),
            address: [203, 0, 113, id.as_bytes()[0]].into(),
            floating_network_id: network.to_owned(),
            port_id: port.map(str::to_owned),
            description: String::new(),
            revision_number: None,
        }
    }

    /// The ID of the one that is used, and of those that are deleted.
    fn planned_for(
        network: Option<&str>,
        annotations: &[(&str, &str)],
        ours: &[FloatingIp],
    ) -> (Option<String>, Vec<String>) {
        let mut config = config("amphora");
        config.floating_network = network.map(str::to_owned);
        let annotations = annotations.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let lb = LoadBalancer { annotations: annotations.collect(), ..planned(&[WEB], &[1]) };
        let plan = plan(&desired(&lb, &config).unwrap(), "port", &[], ours.to_vec(), None);
        let used = match plan.used {
            Used::Existing(ip) => Some(ip.id),
            Used::Vip | Used::New { .. } => None,
        };
        (used, plan.dropped.into_iter().map(|ip| ip.id).collect())
    }

    #[test]
    fn flag_that_is_lost_or_changed_takes_no_address() {
        let ours = [ip("a", "net", Some("port"))];
        let kept = (Some("a".to_owned()), Vec::new());
        assert_eq!(planned_for(Some("net"), &[], &ours), kept);
        assert_eq!(planned_for(None, &[], &ours), kept);
        assert_eq!(planned_for(Some("another"), &[], &ours), kept);
        let gone = (None, vec!["a".to_owned()]);
        assert_eq!(planned_for(Some("net"), &[(crate::annotations::INTERNAL, "true")], &ours), gone);
        let named = [(crate::annotations::FLOATING_NETWORK, "another")];
        assert_eq!(planned_for(Some("net"), &named, &ours), gone);
        // One that is not attached is still better than another address, and one is enough.
        let two = [ip("b", "net", None), ip("a", "another", Some("port"))];
        assert_eq!(planned_for(Some("net"), &[], &two), (Some("a".to_owned()), vec!["b".to_owned()]));
    }
}
