// SPDX-License-Identifier: Apache-2.0
//! Load balancers that several Services share: their names, who may use them, and what each is like as a whole. Pure.
//!
//! The operator of Steerage decides that, in a file. A Service brings its ports, and what concerns these and its targets alone. So no tenant
//! changes the load balancer of another.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use steerage_model::annotations::SHARED_LOAD_BALANCER;
use steerage_model::{Family, Key, Protocol, shown};
use steerage_provider_api::{
    Error, GroupKey, HealthCheck, HealthProtocol, Listener, LoadBalancer, Owner, TargetGroup, TargetSet,
    Targets,
};
use steerage_provider_cloud::annotation;

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
/// In place of the namespaces: all of them.
const ALL_NAMESPACES: &str = "*";

/// Where the resources of a Service are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum LoadBalancerUse {
    /// At a load balancer of its own.
    #[default]
    Own,
    /// At the load balancer that several Services share under this name.
    Shared(String),
}

/// One shared load balancer.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SharedLoadBalancer {
    /// The namespaces whose Services may use it; `*` stands for all.
    namespaces: BTreeSet<String>,
    /// Annotations, as a Service would have them, that concern the load balancer as a whole.
    #[serde(default)]
    annotations: BTreeMap<String, String>,
}

/// All shared load balancers by name.
pub type SharedLoadBalancers = BTreeMap<String, SharedLoadBalancer>;

/// Reads the file of `--aws-shared-load-balancers`. `config` has the other settings.
pub(crate) fn read(text: &str, config: &Config) -> Result<SharedLoadBalancers, String> {
    let all: SharedLoadBalancers = serde_json::from_str(text).map_err(|error| error.to_string())?;
    for (name, shared) in &all {
        shared.check(name, config).map_err(|problem| format!("{name}: {problem}"))?;
    }
    Ok(all)
}

impl SharedLoadBalancer {
    fn check(&self, name: &str, config: &Config) -> Result<(), String> {
        let is_label = |text: &str| {
            let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
            !text.is_empty()
                && text.len() <= 63
                && text.chars().all(inner)
                && !text.starts_with('-')
                && !text.ends_with('-')
        };
        if !is_label(name) {
            return Err("a name has at most 63 lower-case letters, digits and inner hyphens".to_owned());
        }
        if let Some(wrong) = self.namespaces.iter().find(|found| *found != ALL_NAMESPACES && !is_label(found))
        {
            return Err(format!("`{wrong}` is no namespace; write names, or {ALL_NAMESPACES} for all"));
        }
        if self.namespaces.is_empty() {
            return Err("no namespace may use it; list them, or write * for all".to_owned());
        }
        if let Some(other) = self.annotations.keys().find(|found| !OF_THE_WHOLE.contains(&found.as_str())) {
            return Err(format!("{other} does not concern the load balancer as a whole; set it on Services"));
        }
        // A wrong value is not a missing one.
        desired::own(config, &self.example()).map_err(|error| error.to_string())?;
        let is_open =
            self.annotations.get(DISABLE_SECURITY_GROUP).is_some_and(|value| value.trim() == "true");
        if !is_open && !self.annotations.contains_key(SECURITY_GROUPS) {
            return Err(format!(
                "who may connect is undecided: name security groups in {SECURITY_GROUPS}, or set {DISABLE_SECURITY_GROUP} to true"
            ));
        }
        Ok(())
    }

    fn permits(&self, namespace: &str) -> bool {
        self.namespaces.contains(namespace) || self.namespaces.contains(ALL_NAMESPACES)
    }

    /// The load balancer of some Service that uses it.
    fn example(&self) -> LoadBalancer {
        let key = GroupKey::NodePort(30_000);
        let seconds = std::time::Duration::from_secs;
        let health_check = HealthCheck {
            protocol: HealthProtocol::Tcp,
            port: None,
            is_of_service: false,
            interval: seconds(10),
            timeout: seconds(5),
            healthy_threshold: 2,
            unhealthy_threshold: 2,
        };
        let targets = Targets::Nodes(TargetSet::default());
        LoadBalancer {
            owner: Owner { service: Key::new("default", "example"), uid: String::new() },
            families: vec![Family::V4],
            listeners: vec![Listener {
                name: String::new(),
                protocol: Protocol::Tcp,
                port: 80,
                group: key.clone(),
            }],
            groups: vec![TargetGroup { key, health_check, affinity: None, targets }],
            requested_addresses: Vec::new(),
            pool: None,
            published: Vec::new(),
            published_hostnames: Vec::new(),
            source_ranges: Vec::new(),
            annotations: self.annotations.clone(),
        }
    }
}

/// The shared load balancer that the Service names, and the Service's request with the annotations of the whole. `None` if it names none.
pub(crate) fn merged(config: &Config, lb: &LoadBalancer) -> Result<Option<(String, LoadBalancer)>, Error> {
    let Some(name) = lb.annotations.get(SHARED_LOAD_BALANCER).map(|name| name.trim()) else {
        return Ok(None);
    };
    let namespace = lb.owner.service.namespace();
    let shared = config.shared_load_balancers.get(name).filter(|shared| shared.permits(namespace));
    let Some(shared) = shared else {
        // Not told: a tenant must not learn which names exist.
        let name = shown(name);
        let message = format!(
            "The namespace {namespace} may not use a shared load balancer `{name}`, or none of this name exists. Nothing of this Service is \
             created or changed but its targets. Ask the operator of Steerage to permit it (--aws-shared-load-balancers), or remove the \
             annotation {SHARED_LOAD_BALANCER}."
        );
        return Err(Error::invalid(reasons::SHARED_LOAD_BALANCER_NOT_PERMITTED, message));
    };
    if let Some(own) = OF_THE_WHOLE.iter().find(|of_whole| lb.annotations.contains_key(**of_whole)) {
        let problem = format!(
            "Annotation {own} concerns a load balancer as a whole, but the Service shares the load balancer {name} with others."
        );
        let advice = "Remove the annotation, or ask the operator of Steerage to set it for all.";
        return Err(annotation::conflict(&problem, advice));
    }
    if requested_of(lb).is_ok_and(|requested| !requested.sources.is_empty()) {
        let problem = format!(
            "The Service has source ranges or prefix lists, but who may connect to the shared load balancer {name} is decided for all its \
             Services together. They would have no effect."
        );
        let advice = "Remove them from the Service. Ask the operator of Steerage to restrict the shared load balancer, or let the Service \
                      have a load balancer of its own.";
        return Err(annotation::conflict(&problem, advice));
    }
    let mut merged = lb.clone();
    merged.annotations.extend(shared.annotations.clone());
    Ok(Some((name.to_owned(), merged)))
}

/// Says that a port of the load balancer is another Service's. Not told whose: a tenant must not learn the names of other Services.
pub(crate) fn port_in_use(shared: &str, port: u16) -> Error {
    let message = format!(
        "Port {port} of the shared load balancer {shared} is another Service's, which requested it first. No port of this Service is \
         created or changed. Use another port, or another load balancer."
    );
    Error::invalid(reasons::PORT_IN_USE, message)
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
    let shown = |usage: &LoadBalancerUse| match usage {
        LoadBalancerUse::Own => "a load balancer of its own".to_owned(),
        LoadBalancerUse::Shared(name) => format!("the shared load balancer {name}"),
    };
    let back = match now {
        LoadBalancerUse::Own => format!("Remove the annotation {SHARED_LOAD_BALANCER}"),
        LoadBalancerUse::Shared(name) => format!("Set annotation {SHARED_LOAD_BALANCER} to {name}"),
    };
    let message = format!(
        "The Service has {} and requests {}. Its clients know the present hostname, so it is kept, and other changes of the Service \
         wait. {back}, or create the Service again, which changes its hostname.",
        shown(now),
        shown(wanted)
    );
    Error::invalid(reasons::SHARED_LOAD_BALANCER_IMMUTABLE, message)
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
