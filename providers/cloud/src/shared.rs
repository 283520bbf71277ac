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

use crate::{annotation, reasons};

/// In place of the namespaces: all of them.
const ALL_NAMESPACES: &str = "*";

/// Where the resources of a Service are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum LoadBalancerUse {
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

/// Reads a file of shared load balancers. `of_the_whole` are the annotations that may be in it, `check` looks at each one further.
///
/// # Errors
///
/// With the name of the load balancer and the problem.
pub fn read(
    text: &str,
    of_the_whole: &[&str],
    check: impl Fn(&SharedLoadBalancer) -> Result<(), String>,
) -> Result<SharedLoadBalancers, String> {
    let all: SharedLoadBalancers = serde_json::from_str(text).map_err(|error| error.to_string())?;
    for (name, shared) in &all {
        shared
            .check(name, of_the_whole)
            .and_then(|()| check(shared))
            .map_err(|problem| format!("{name}: {problem}"))?;
    }
    Ok(all)
}

fn is_label(text: &str) -> bool {
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    (1..=63).contains(&text.len())
        && text.chars().all(inner)
        && !text.starts_with('-')
        && !text.ends_with('-')
}

impl SharedLoadBalancer {
    fn check(&self, name: &str, of_the_whole: &[&str]) -> Result<(), String> {
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
        match self.annotations.keys().find(|found| !of_the_whole.contains(&found.as_str())) {
            Some(other) => {
                Err(format!("{other} does not concern the load balancer as a whole; set it on Services"))
            }
            None => Ok(()),
        }
    }

    /// The annotations of the load balancer as a whole.
    pub fn annotations(&self) -> &BTreeMap<String, String> {
        &self.annotations
    }

    fn permits(&self, namespace: &str) -> bool {
        self.namespaces.contains(namespace) || self.namespaces.contains(ALL_NAMESPACES)
    }

    /// The load balancer of some Service that uses it.
    pub fn example(&self) -> LoadBalancer {
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
            labels: std::sync::Arc::default(),
            source_ranges: Vec::new(),
            annotations: self.annotations.clone(),
        }
    }
}

/// The shared load balancer that the Service names, and the Service's request with the annotations of the whole. `None` if it names none.
/// `flag` names the operator's file.
///
/// # Errors
///
/// If the Service may not use it, or has an annotation of the whole itself.
pub fn merged(
    all: &SharedLoadBalancers,
    of_the_whole: &[&str],
    flag: &str,
    lb: &LoadBalancer,
) -> Result<Option<(String, LoadBalancer)>, Error> {
    let Some(name) = lb.annotations.get(SHARED_LOAD_BALANCER).map(|name| name.trim()) else {
        return Ok(None);
    };
    let namespace = lb.owner.service.namespace();
    let Some(shared) = all.get(name).filter(|shared| shared.permits(namespace)) else {
        // Not told: a tenant must not learn which names exist.
        let name = shown(name);
        let message = format!(
            "The namespace {namespace} may not use a shared load balancer `{name}`, or none of this name exists. Nothing of this Service is \
             created or changed but its targets. Ask the operator of Steerage to permit it ({flag}), or remove the annotation \
             {SHARED_LOAD_BALANCER}."
        );
        return Err(Error::invalid(reasons::SHARED_LOAD_BALANCER_NOT_PERMITTED, message));
    };
    if let Some(own) = of_the_whole.iter().find(|of_whole| lb.annotations.contains_key(**of_whole)) {
        let problem = format!(
            "Annotation {own} concerns a load balancer as a whole, but the Service shares the load balancer {name} with others."
        );
        let advice = "Remove the annotation, or ask the operator of Steerage to set it for all.";
        return Err(annotation::conflict(&problem, advice));
    }
    let mut merged = lb.clone();
    merged.annotations.extend(shared.annotations.clone());
    Ok(Some((name.to_owned(), merged)))
}

/// Says that a port of the load balancer is another Service's. Not told whose: a tenant must not learn the names of other Services.
pub fn port_in_use(shared: &str, port: u16) -> Error {
    let message = format!(
        "Port {port} of the shared load balancer {shared} is another Service's, which requested it first. No port of this Service is \
         created or changed. Steerage tries again when the port becomes free. Or use another port, or another load balancer."
    );
    Error::invalid(reasons::PORT_IN_USE, message)
}

/// Says that a Service cannot change whether it shares a load balancer, and which. `what` its clients know of the present one, such as the
/// hostname.
pub fn immutable(now: &LoadBalancerUse, wanted: &LoadBalancerUse, what: &str) -> Error {
    let shown = |usage: &LoadBalancerUse| match usage {
        LoadBalancerUse::Own => "a load balancer of its own".to_owned(),
        LoadBalancerUse::Shared(name) => format!("the shared load balancer {name}"),
    };
    let back = match now {
        LoadBalancerUse::Own => format!("Remove the annotation {SHARED_LOAD_BALANCER}"),
        LoadBalancerUse::Shared(name) => format!("Set annotation {SHARED_LOAD_BALANCER} to {name}"),
    };
    let message = format!(
        "The Service has {} and requests {}. Its clients know the present {what}, so it is kept, and other changes of the Service wait. \
         {back}, or create the Service again, which changes its {what}.",
        shown(now),
        shown(wanted)
    );
    Error::invalid(reasons::SHARED_LOAD_BALANCER_IMMUTABLE, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_file_is_refused_with_the_name_and_the_problem() {
        let of_the_whole = ["example.com/scheme"];
        for (text, parts) in [
            ("", vec!["EOF"]),
            (r#"{"web": {}}"#, vec!["namespaces"]),
            (r#"{"web": {"namespaces": ["a"], "annotation": {}}}"#, vec!["annotation"]),
            (r#"{"web": {"namespaces": []}}"#, vec!["web", "no namespace"]),
            (r#"{"web": {"namespaces": ["A b"]}}"#, vec!["web", "`A b`"]),
            (r#"{"-web": {"namespaces": ["a"]}}"#, vec!["-web", "hyphens"]),
            (
                r#"{"web": {"namespaces": ["a"], "annotations": {"example.com/x": ""}}}"#,
                vec!["set it on Services"],
            ),
            (r#"{"bad": {"namespaces": ["a"]}}"#, vec!["bad: no"]),
        ] {
            let no_bad = |shared: &SharedLoadBalancer| {
                if text.contains("bad") { Err("no".to_owned()) } else { shared.check("x", &of_the_whole) }
            };
            let problem = read(text, &of_the_whole, no_bad).unwrap_err();
            assert!(parts.iter().all(|part| problem.contains(part)), "{text}: {problem}");
        }
        let text = r#"{"web": {"namespaces": ["*"], "annotations": {"example.com/scheme": "x"}}}"#;
        assert!(read(text, &of_the_whole, |_| Ok(())).is_ok());
    }
}
