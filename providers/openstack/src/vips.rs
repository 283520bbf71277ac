// SPDX-License-Identifier: Apache-2.0
//! The VIPs of a load balancer: one for each IP family of its Service. Pure.

use std::net::IpAddr;

use steerage_model::Family;
use steerage_provider_api::LoadBalancer;

use crate::config::Config;
use crate::options::Options;
use crate::reasons;
use crate::types::Balancer;

/// The oldest version of Octavia's API with several VIPs of a load balancer.
pub(crate) const SEVERAL_VIPS: (u32, u32) = (2, 26);

/// A VIP as it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WantedVip {
    pub(crate) family: Family,
    /// `None` if it is chosen from the network that the Service names.
    pub(crate) subnet: Option<String>,
    /// Through which nodes of the family are reached.
    pub(crate) member_subnet: String,
    /// The address, if the Service requests it.
    pub(crate) requested: Option<IpAddr>,
}

/// The VIPs in the order of the Service's families, those without a subnet left out.
pub(crate) fn vips(lb: &LoadBalancer, options: &Options, config: &Config) -> Vec<WantedVip> {
    let Some(first) = lb.families.first().copied() else { return Vec::new() };
    let of = |family: Family| {
        let named = |subnet: &Option<String>| subnet.clone().filter(|_| family == first);
        let configured = || config.vip_subnet(family, first).map(str::to_owned);
        let subnet = named(&options.subnet);
        let subnet = if options.network.is_some() { subnet } else { Some(subnet.or_else(configured)?) };
        let member_subnet =
            named(&options.member_subnet).unwrap_or_else(|| config.nodes_subnet(family).to_owned());
        Some(WantedVip { family, subnet, member_subnet, requested: None })
    };
    lb.families.iter().filter_map(|family| of(*family)).collect()
}

/// Why a load balancer lacks a VIP of one of the Service's families; `None` if it has all. `network` is the one that the Service names.
pub(crate) fn missing(
    families: &[Family],
    wanted: &[WantedVip],
    network: Option<&str>,
    balancer: &Balancer,
    version: Option<(u32, u32)>,
) -> Option<(&'static str, String)> {
    let family = families.iter().find(|family| balancer.vip(**family).is_none())?;
    if families.len() < 2 {
        return None;
    }
    let (why, advice) = match version {
        _ if wanted.iter().all(|vip| vip.family != *family) => (
            format!("no subnet of {family} VIPs is known"),
            "Set --openstack-ipv6-subnet-id, and create the Service again.",
        ),
        Some(version) if version < SEVERAL_VIPS => (
            format!(
                "Octavia's API has the version {}.{}, and a second VIP needs {}.{}",
                version.0, version.1, SEVERAL_VIPS.0, SEVERAL_VIPS.1
            ),
            "Upgrade Octavia and create the Service again.",
        ),
        _ if let Some(network) = network => (
            format!(
                "the network {network} had no {family} subnet when the load balancer was created, or the Service one family, and Octavia \
                 adds no VIP to a load balancer that exists"
            ),
            "Add a subnet of the family to the network if it has none, and create the Service again.",
        ),
        _ => ("Octavia adds no VIP to a load balancer that exists".to_owned(), "Create the Service again."),
    };
    let message = format!(
        "The Service has two IP families, and its load balancer has no {family} address: {why}. It serves clients of the other family. \
         {advice} For one family, set spec.ipFamilyPolicy to SingleStack."
    );
    Some((reasons::DUAL_STACK_NOT_SUPPORTED, message))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::desired::tests::planned;
    use crate::options::tests::config;

    #[test]
    fn each_family_has_a_vip_where_a_subnet_is_known() {
        use Family::{V4, V6};
        let named = [(crate::annotations::SUBNET, "mine"), (crate::annotations::MEMBER_SUBNET, "nodes")];
        for (families, ipv6, annotations, expected) in [
            (&[V4][..], false, &[][..], &[(V4, "subnet", "members")][..]),
            (&[V6], false, &[], &[(V6, "subnet", "members")]),
            (&[V6], true, &[], &[(V6, "six", "nodes-six")]),
            (&[V4, V6], true, &[], &[(V4, "subnet", "members"), (V6, "six", "nodes-six")]),
            (&[V6, V4], true, &[], &[(V6, "six", "nodes-six"), (V4, "subnet", "members")]),
            (&[V4, V6], true, &named, &[(V4, "mine", "nodes"), (V6, "six", "nodes-six")]),
            (&[V4, V6], false, &[], &[(V4, "subnet", "members")]),
            (&[V6, V4], false, &named, &[(V6, "mine", "nodes")]),
        ] {
            let mut config = config("amphora");
            if ipv6 {
                (config.ipv6_subnet, config.ipv6_member_subnet) =
                    (Some("six".to_owned()), Some("nodes-six".to_owned()));
            }
            let annotations =
                annotations.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
            let lb = LoadBalancer { families: families.to_vec(), annotations, ..planned(&[], &[]) };
            let options = Options::read(&lb.annotations, &config).unwrap();
            let found = vips(&lb, &options, &config);
            let found: Vec<_> = found
                .iter()
                .map(|vip| (vip.family, vip.subnet.as_deref().unwrap(), vip.member_subnet.as_str()))
                .collect();
            assert_eq!(found, expected, "{families:?} {ipv6}");
        }
    }

    #[test]
    fn missing_family_is_told_with_what_to_do() {
        use Family::{V4, V6};
        let vip = |family| WantedVip { family, subnet: None, member_subnet: String::new(), requested: None };
        let balancer = |more: serde_json::Value| -> Balancer {
            let body = json!({ "id": "1", "provisioning_status": "ACTIVE", "vip_address": "10.0.0.1", "vip_port_id": "p",
                "vip_subnet_id": "s", "additional_vips": more });
            serde_json::from_value(body).unwrap()
        };
        let one = balancer(json!([]));
        let both = balancer(json!([{ "ip_address": "2001:db8::1", "port_id": "p", "subnet_id": "s6" }]));
        assert_eq!(missing(&[V4, V6], &[vip(V4), vip(V6)], None, &both, None), None);
        assert_eq!(missing(&[V4], &[vip(V4)], None, &one, None), None);
        for (wanted, network, version, part) in [
            (vec![vip(V4)], None, Some((2, 30)), "--openstack-ipv6-subnet-id"),
            (vec![vip(V4), vip(V6)], None, Some((2, 25)), "version 2.25"),
            (vec![vip(V4), vip(V6)], Some("n1"), Some((2, 25)), "version 2.25"),
            (
                vec![vip(V4), vip(V6)],
                None,
                Some((2, 26)),
                "exists. It serves clients of the other family. Create",
            ),
            (vec![vip(V4), vip(V6)], Some("n1"), Some((2, 26)), "the network n1 had no IPv6 subnet"),
        ] {
            let (reason, message) = missing(&[V4, V6], &wanted, network, &one, version).unwrap();
            assert_eq!(reason, "DualStackNotSupported");
            assert!(message.contains(part) && message.contains("no IPv6 address"), "{message}");
        }
    }
}
