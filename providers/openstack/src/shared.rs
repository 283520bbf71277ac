// SPDX-License-Identifier: Apache-2.0
//! What of load balancers that several Services share is OpenStack's: the annotations of the whole. Pure.

use steerage_model::Family;
use steerage_provider_api::{Error, LoadBalancer};
use steerage_provider_cloud::annotation::conflict;
use steerage_provider_cloud::shared::{self, SharedLoadBalancer, SharedLoadBalancers};

use crate::annotations::{
    AVAILABILITY_ZONE, FLAVOR, FLOATING_NETWORK, FLOATING_SUBNET, INTERNAL, LOAD_BALANCER_ID, MEMBER_SUBNET,
    NETWORK, SUBNET,
};
use crate::config::Config;
use crate::desired::own;
use crate::reasons;

/// The annotations that concern a load balancer as a whole.
const OF_THE_WHOLE: &[&str] =
    &[INTERNAL, FLOATING_NETWORK, FLOATING_SUBNET, SUBNET, MEMBER_SUBNET, NETWORK, FLAVOR, AVAILABILITY_ZONE];
/// The operator's file.
const FLAG: &str = "--openstack-shared-load-balancers";

/// Reads the file of `--openstack-shared-load-balancers`. `config` has the other settings.
pub(crate) fn read(text: &str, config: &Config) -> Result<SharedLoadBalancers, String> {
    let check = |shared: &SharedLoadBalancer| match own(&shared.example(), config, None) {
        Ok(_) => Ok(()),
        Err(error) => Err(error.to_string()),
    };
    shared::read(text, OF_THE_WHOLE, check)
}

/// The shared load balancer that the Service names, and the Service's request with the annotations of the whole. `None` if it names none.
pub(crate) fn merged(config: &Config, lb: &LoadBalancer) -> Result<Option<(String, LoadBalancer)>, Error> {
    let Some((name, merged)) = shared::merged(&config.shared_load_balancers, OF_THE_WHOLE, FLAG, lb)? else {
        return Ok(None);
    };
    let advice = "Remove it, or let the Service have a load balancer of its own.";
    if !lb.requested_addresses.is_empty() {
        let problem =
            format!("The Service requests an address, but shares the load balancer {name} with others.");
        return Err(conflict(&problem, advice));
    }
    if lb.annotations.contains_key(LOAD_BALANCER_ID) {
        let problem = format!(
            "Annotation {LOAD_BALANCER_ID} names a load balancer, but the Service requests the shared one {name}."
        );
        return Err(conflict(&problem, advice));
    }
    Ok(Some((name, merged)))
}

/// The families of a shared load balancer: those whose subnets the operator names, whichever Service is first.
pub(crate) fn families(config: &Config, has_network: bool) -> Vec<Family> {
    match &config.ipv6_subnet {
        Some(subnet) if *subnet == config.subnet => vec![Family::V6],
        Some(_) => vec![Family::V4, Family::V6],
        // The network may have a subnet of each.
        None if has_network => vec![Family::V4, Family::V6],
        None => vec![Family::V4],
    }
}

/// Refuses a Service that has no family of the load balancer.
pub(crate) fn check_families(shared: &str, of_service: &[Family], of_whole: &[Family]) -> Result<(), Error> {
    if of_service.iter().any(|family| of_whole.contains(family)) {
        return Ok(());
    }
    let shown =
        |families: &[Family]| families.iter().map(ToString::to_string).collect::<Vec<_>>().join(" and ");
    let message = format!(
        "The Service has {} addresses, and the shared load balancer {shared} has {} ones. Nothing of this Service is created or changed. \
         Change spec.ipFamilies, use another load balancer, or ask the operator of Steerage to set --openstack-ipv6-subnet-id before the \
         load balancer is created.",
        shown(of_service),
        shown(of_whole)
    );
    Err(Error::invalid(reasons::SUBNET_FAMILY_DIFFERS, message))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use steerage_model::Protocol;
    use steerage_model::annotations::SHARED_LOAD_BALANCER;

    use super::*;
    use crate::desired::desired;
    use crate::desired::tests::planned;
    use crate::options::tests::config;

    const FILE: &str = r#"{"web": {"namespaces": ["shop"], "annotations": {
        "service.beta.kubernetes.io/openstack-internal-load-balancer": "true"}}}"#;

    #[test]
    fn settings_of_the_whole_come_from_the_file_alone() {
        let config =
            Config { shared_load_balancers: read(FILE, &config("amphora")).unwrap(), ..config("amphora") };
        let with = |annotations: &[(&str, &str)]| {
            let annotations: BTreeMap<String, String> =
                annotations.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
            let lb = LoadBalancer { annotations, ..planned(&[(Protocol::Tcp, 80, 30080)], &[1]) };
            desired(&lb, &config).map_err(|error| error.reason())
        };
        let web = (SHARED_LOAD_BALANCER, "web");
        let shared = with(&[web]).unwrap();
        assert_eq!(shared.shared.as_deref(), Some("web"));
        assert!(
            shared.tags.contains(&"steerage.dev/shared-load-balancer=web".to_owned()),
            "{:?}",
            shared.tags
        );
        assert!(shared.tags.iter().all(|tag| !tag.contains("shop/web")), "{:?}", shared.tags);
        assert!(shared.part_tags.contains(&"steerage.dev/service=shop/web".to_owned()));
        assert_ne!(shared.name, with(&[]).unwrap().name);
        for name in OF_THE_WHOLE.iter().chain(&[LOAD_BALANCER_ID]) {
            assert_eq!(with(&[web, (name, "true")]).unwrap_err(), "ConflictingAnnotations", "{name}");
        }
        assert_eq!(with(&[(SHARED_LOAD_BALANCER, "other")]).unwrap_err(), "SharedLoadBalancerNotPermitted");
    }

    /// The families and the address are the operator's, whichever Service is first.
    #[test]
    fn families_of_a_service_change_nothing_of_the_whole() {
        use Family::{V4, V6};
        let text = r#"{"web": {"namespaces": ["shop"]}}"#;
        let one = Config { floating_network: Some("net".to_owned()), ..config("amphora") };
        let one = Config { shared_load_balancers: read(text, &one).unwrap(), ..one };
        let six = |subnet: &str| Config {
            ipv6_subnet: Some(subnet.to_owned()),
            ipv6_member_subnet: Some(subnet.to_owned()),
            ..one.clone()
        };
        let annotations = BTreeMap::from([(SHARED_LOAD_BALANCER.to_owned(), "web".to_owned())]);
        let of = |families: &[Family], config: &Config| {
            let lb = LoadBalancer {
                families: families.to_vec(),
                annotations: annotations.clone(),
                ..planned(&[(Protocol::Tcp, 80, 30080)], &[1])
            };
            desired(&lb, config).map_err(|error| error.reason())
        };
        for config in [six("six"), one.clone()] {
            let first = of(&[V4], &config).unwrap();
            for families in [&[V6][..], &[V6, V4], &[V4, V6]] {
                let Ok(other) = of(families, &config) else { continue };
                assert_eq!((&other.vips, &other.address), (&first.vips, &first.address), "{families:?}");
                assert!(!other.is_address_requested);
                assert_eq!(other.listeners[0].pool.members.len(), 1, "{families:?}");
            }
        }
        assert_eq!(of(&[V6], &one).unwrap_err(), "SubnetFamilyDiffers");
        assert!(of(&[V6], &six("six")).is_ok());
        assert_eq!(of(&[V4], &six("subnet")).unwrap_err(), "SubnetFamilyDiffers");
        let only = of(&[V6], &six("subnet")).unwrap();
        assert!(only.vips.iter().all(|vip| vip.family == V6) && !only.is_address_requested);
    }

    #[test]
    fn wrong_value_in_the_file_is_named() {
        for (text, part) in [
            (FILE.replace("true", "yes"), "value `yes`"),
            (
                FILE.replace(
                    "service.beta.kubernetes.io/openstack-internal-load-balancer",
                    crate::annotations::PROXY_PROTOCOL,
                ),
                "set it on Services",
            ),
        ] {
            let problem = read(&text, &config("amphora")).unwrap_err();
            assert!(problem.contains("web: ") && problem.contains(part), "{problem}");
        }
    }
}
