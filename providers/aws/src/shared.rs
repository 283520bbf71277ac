// SPDX-License-Identifier: Apache-2.0
//! What of load balancers that several Services share is AWS's: the annotations of the whole, and who may connect. Pure.

use steerage_model::Family;
use steerage_model::annotations::SHARED_LOAD_BALANCER;
use steerage_provider_api::{Error, LoadBalancer};
use steerage_provider_cloud::annotation;
use steerage_provider_cloud::shared::{self, SharedLoadBalancer};
pub(crate) use steerage_provider_cloud::shared::{LoadBalancerUse, SharedLoadBalancers, port_in_use};

use crate::annotations::{
    ACCESS_LOG_BUCKET, ACCESS_LOG_ENABLED, ACCESS_LOG_PREFIX, ATTRIBUTES, CROSS_ZONE, DISABLE_SECURITY_GROUP,
    EIP_ALLOCATIONS, ICMP_FOR_PATH_MTU, INTERNAL, IP_ADDRESS_TYPE, MANAGE_BACKEND_RULES, PRIVATE_ADDRESSES,
    SCHEME, SECURITY_GROUPS, SOURCE_NAT, SOURCE_NAT_PREFIXES, SUBNETS, TAGS,
};
use crate::config::Config;
use crate::desired;
use crate::ip_address_type::IpAddressType;
use crate::reasons;
use crate::security_group::requested_of;

/// The annotations that concern a load balancer as a whole.
const OF_THE_WHOLE: &[&str] = &[
    SCHEME,
    INTERNAL,
    IP_ADDRESS_TYPE,
    SOURCE_NAT,
    SOURCE_NAT_PREFIXES,
    ATTRIBUTES,
    CROSS_ZONE,
    ACCESS_LOG_ENABLED,
    ACCESS_LOG_BUCKET,
    ACCESS_LOG_PREFIX,
    SUBNETS,
    EIP_ALLOCATIONS,
    PRIVATE_ADDRESSES,
    SECURITY_GROUPS,
    MANAGE_BACKEND_RULES,
    DISABLE_SECURITY_GROUP,
    ICMP_FOR_PATH_MTU,
    TAGS,
];
/// The operator's file.
const FLAG: &str = "--aws-shared-load-balancers";
/// What clients know of a load balancer.
const KNOWN: &str = "hostname";

/// Reads the file of `--aws-shared-load-balancers`. `config` has the other settings.
pub(crate) fn read(text: &str, config: &Config) -> Result<SharedLoadBalancers, String> {
    shared::read(text, OF_THE_WHOLE, |shared| check(shared, config))
}

fn check(shared: &SharedLoadBalancer, config: &Config) -> Result<(), String> {
    // A wrong value is not a missing one.
    desired::own(config, &shared.example()).map_err(|error| error.to_string())?;
    let annotations = shared.annotations();
    let is_open = annotations.get(DISABLE_SECURITY_GROUP).is_some_and(|value| value.trim() == "true");
    if !is_open && !annotations.contains_key(SECURITY_GROUPS) {
        return Err(format!(
            "who may connect is undecided: name security groups in {SECURITY_GROUPS}, or set {DISABLE_SECURITY_GROUP} to true"
        ));
    }
    Ok(())
}

/// The shared load balancer that the Service names, and the Service's request with the annotations of the whole. `None` if it names none.
pub(crate) fn merged(config: &Config, lb: &LoadBalancer) -> Result<Option<(String, LoadBalancer)>, Error> {
    let Some((name, merged)) = shared::merged(&config.shared_load_balancers, OF_THE_WHOLE, FLAG, lb)? else {
        return Ok(None);
    };
    if requested_of(lb).is_ok_and(|requested| !requested.sources.is_empty()) {
        let problem = format!(
            "The Service has source ranges or prefix lists, but who may connect to the shared load balancer {name} is decided for all its \
             Services together. They would have no effect."
        );
        let advice = "Remove them from the Service. Ask the operator of Steerage to restrict the shared load balancer, or let the Service \
                      have a load balancer of its own.";
        return Err(annotation::conflict(&problem, advice));
    }
    Ok(Some((name, merged)))
}

/// Says that a Service publishes a load balancer that may be another controller's, which nobody would follow any more.
pub(crate) fn publishes_another(hostname: &str) -> Error {
    let message = format!(
        "The Service publishes the load balancer {hostname}, and requests a shared one. Load balancers of other controllers cannot be \
         shared, and while --aws-adopt is set none is given up. Remove the annotation {SHARED_LOAD_BALANCER}, or create the Service \
         again without the other load balancer."
    );
    Error::invalid(reasons::ADOPTION_REFUSED, message)
}

/// Says that a Service cannot change whether it shares a load balancer, and which.
pub(crate) fn immutable(now: &LoadBalancerUse, wanted: &LoadBalancerUse) -> Error {
    shared::immutable(now, wanted, KNOWN)
}

/// Refuses a Service with IPv6 where the operator gave the load balancer none: no Service decides that for the others. `merged` has the
/// operator's annotations.
pub(crate) fn check_families(merged: &LoadBalancer) -> Result<(), Error> {
    let kind = merged.annotations.get(IP_ADDRESS_TYPE).map(|text| text.trim());
    if !merged.families.contains(&Family::V6) || kind == Some(IpAddressType::DualStack.as_str()) {
        return Ok(());
    }
    Err(annotation::conflict(
        "spec.ipFamilies has IPv6, but the shared load balancer has IPv4 alone.",
        "Remove IPv6 from spec.ipFamilies, or ask the operator of Steerage for a shared load balancer with IPv6.",
    ))
}

#[cfg(test)]
mod tests {
    use steerage_model::Key;
    use steerage_provider_api::Owner;

    use super::*;
    use crate::annotations::PREFIX_LISTS;
    use crate::desired::tests::config;

    fn with(text: &str) -> Result<Config, String> {
        Ok(Config { shared_load_balancers: read(text, &config())?, ..config() })
    }

    const WEB: &str = r#"{"web": {"namespaces": ["shop", "blog"], "annotations": {
        "service.beta.kubernetes.io/aws-load-balancer-scheme": "internet-facing",
        "service.beta.kubernetes.io/aws-load-balancer-security-groups": "sg-1"}}}"#;

    fn lb(namespace: &str, annotations: &[(&str, &str)]) -> LoadBalancer {
        let shared: SharedLoadBalancers = serde_json::from_str(WEB).unwrap();
        let annotations = annotations.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
        let owner = Owner { service: Key::new(namespace, "a"), uid: "u".to_owned() };
        LoadBalancer { owner, annotations: annotations.collect(), ..shared["web"].example() }
    }

    #[test]
    fn settings_of_the_whole_come_from_the_file_alone() {
        let config = with(WEB).unwrap();
        let shared = desired::desired(&config, &lb("shop", &[(SHARED_LOAD_BALANCER, " web ")])).unwrap();
        let other = desired::desired(&config, &lb("blog", &[(SHARED_LOAD_BALANCER, "web")])).unwrap();
        let own = desired::desired(&config, &lb("shop", &[])).unwrap();
        assert_eq!((shared.shared.as_deref(), own.shared.as_deref()), (Some("web"), None));
        assert_eq!(shared.scheme, crate::Scheme::InternetFacing);
        assert_eq!(shared.name, other.name);
        assert_ne!(shared.name, own.name);
        assert_ne!(shared.groups[0].name, other.groups[0].name);
        for name in OF_THE_WHOLE {
            let refused =
                desired::desired(&config, &lb("shop", &[(SHARED_LOAD_BALANCER, "web"), (name, "true")]));
            assert_eq!(refused.unwrap_err().reason(), reasons::CONFLICTING_ANNOTATIONS, "{name}");
        }
    }

    /// A namespace learns nothing of load balancers that it may not use.
    #[test]
    fn other_namespaces_and_unknown_names_get_the_same_answer() {
        let config = with(WEB).unwrap();
        let refused = |namespace: &str, name: &str| {
            let refused =
                desired::desired(&config, &lb(namespace, &[(SHARED_LOAD_BALANCER, name)])).unwrap_err();
            assert_eq!(refused.reason(), reasons::SHARED_LOAD_BALANCER_NOT_PERMITTED);
            refused.to_string().replace(&format!("`{name}`"), "NAME")
        };
        assert_eq!(refused("other", "web"), refused("other", "api"));
        assert!(refused("shop", "").contains("shop"));
        let all = with(
            r#"{"web": {"namespaces": ["*"], "annotations": {"service.beta.kubernetes.io/aws-load-balancer-disable-nlb-sg": "true"}}}"#,
        );
        assert!(desired::desired(&all.unwrap(), &lb("other", &[(SHARED_LOAD_BALANCER, "web")])).is_ok());
    }

    #[test]
    fn security_groups_in_the_file_exclude_source_ranges_of_services() {
        let ranges = vec!["192.0.2.0/24".parse().unwrap()];
        let restricted =
            LoadBalancer { source_ranges: ranges, ..lb("shop", &[(SHARED_LOAD_BALANCER, "web")]) };
        let by_annotation = lb("shop", &[(SHARED_LOAD_BALANCER, "web"), (PREFIX_LISTS, "pl-1")]);
        for restricted in [restricted, by_annotation] {
            let refused = desired::desired(&with(WEB).unwrap(), &restricted).unwrap_err();
            assert_eq!(refused.reason(), reasons::CONFLICTING_ANNOTATIONS);
            // The tenant cannot set the operator's annotation.
            let told = refused.to_string();
            assert!(!told.contains(SECURITY_GROUPS) && told.contains("Ask the operator"), "{told}");
        }
    }

    #[test]
    fn wrong_file_is_refused_with_the_name_and_the_problem() {
        let open =
            r#""annotations": {"service.beta.kubernetes.io/aws-load-balancer-disable-nlb-sg": "true"}"#;
        for (text, parts) in [
            ("", vec!["EOF"]),
            (r#"{"web": {}}"#, vec!["namespaces"]),
            (r#"{"web": {"namespaces": ["a"], "annotation": {}}}"#, vec!["annotation"]),
            (r#"{"web": {"namespaces": ["a"]}}"#, vec!["web", "undecided", SECURITY_GROUPS]),
            (&format!(r#"{{"web": {{"namespaces": [], {open}}}}}"#), vec!["web", "no namespace"]),
            (&format!(r#"{{"web": {{"namespaces": ["A b"], {open}}}}}"#), vec!["web", "`A b`"]),
            (&format!(r#"{{"-web": {{"namespaces": ["a"], {open}}}}}"#), vec!["-web", "hyphens"]),
            (
                r#"{"web": {"namespaces": ["a"], "annotations": {"service.beta.kubernetes.io/aws-load-balancer-ssl-cert": "arn"}}}"#,
                vec!["web", "ssl-cert", "set it on Services"],
            ),
            (
                r#"{"web": {"namespaces": ["a"], "annotations": {"service.beta.kubernetes.io/aws-load-balancer-disable-nlb-sg": "yes"}}}"#,
                vec!["web", DISABLE_SECURITY_GROUP, "value `yes`", "true or false"],
            ),
            (
                r#"{"web": {"namespaces": ["a"], "annotations": {"service.beta.kubernetes.io/aws-load-balancer-disable-nlb-sg": "true",
                    "service.beta.kubernetes.io/aws-load-balancer-scheme": "outside"}}}"#,
                vec!["web", "outside"],
            ),
        ] {
            let problem = with(text).unwrap_err();
            assert!(parts.iter().all(|part| problem.contains(part)), "{text}: {problem}");
        }
    }
}
