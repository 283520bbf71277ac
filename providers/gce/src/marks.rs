// SPDX-License-Identifier: Apache-2.0
//! Whose a resource is: the marks of all clouds as JSON in its description, the one field that all kinds have. Pure.

use std::collections::BTreeMap;

use serde_json::Value;
use steerage_model::Key;
use steerage_provider_api::Owner;
use steerage_provider_cloud::ClusterId;
use steerage_provider_cloud::marks::{self, Ownership};

/// What all Services of a cluster share: health checks of nodes, and the firewall rules for them.
const SHARED: &str = "health-checks";

fn text(marks: &BTreeMap<String, String>) -> String {
    Value::from_iter(marks.clone()).to_string()
}

/// The description of a Service's resource.
pub(crate) fn of_owner(cluster: &ClusterId, owner: &Owner) -> String {
    text(&marks::of_owner(cluster, owner))
}

/// The description of a resource that Services share.
pub(crate) fn of_shared(cluster: &ClusterId) -> String {
    text(&marks::of_shared(cluster, SHARED))
}

fn read(resource: &Value) -> BTreeMap<String, String> {
    let description = resource.get("description").and_then(Value::as_str).unwrap_or_default();
    serde_json::from_str(description).unwrap_or_default()
}

/// The owner of a resource; `None` if it is not a Service's of this cluster.
pub(crate) fn owner(cluster: &ClusterId, resource: &Value) -> Option<Owner> {
    marks::owner(cluster, &read(resource))
}

/// Whether Services of this cluster share the resource.
pub(crate) fn is_shared(cluster: &ClusterId, resource: &Value) -> bool {
    marks::ownership(cluster, &read(resource)) == Ownership::Shared(SHARED.to_owned())
}

/// Whether Steerage made the resource, for whichever cluster.
pub(crate) fn is_of_steerage(resource: &Value) -> bool {
    let marks = read(resource);
    [marks::CLUSTER, marks::CLUSTER_UID].iter().any(|key| marks.contains_key(*key))
}

/// A filter of lists for what the cluster has, or a Service of it. RE2, in which a dot is any character: what is found is compared exactly.
pub(crate) fn filter(cluster: &ClusterId, service: Option<&Key>) -> String {
    match service {
        Some(service) => format!("description eq '.*{}.*{service}.*'", cluster.uid),
        None => format!("description eq '.*{}.*'", cluster.uid),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn owner_is_read_from_the_description_alone() {
        let cluster = ClusterId { name: "prod".to_owned(), uid: "c1".to_owned() };
        let owner = Owner { service: Key::new("shop", "web"), uid: "u1".to_owned() };
        let mine = json!({ "name": "any", "description": of_owner(&cluster, &owner) });
        assert_eq!(super::owner(&cluster, &mine), Some(owner.clone()));
        assert!(!is_shared(&cluster, &mine));
        let shared = json!({ "description": of_shared(&cluster) });
        assert!(is_shared(&cluster, &shared) && super::owner(&cluster, &shared).is_none());
        let copy = ClusterId { uid: "c2".to_owned(), ..cluster.clone() };
        assert!(super::owner(&copy, &mine).is_none() && !is_shared(&copy, &shared));
        for other in [json!({}), json!({ "description": "{\"kubernetes.io/service-name\":\"shop/web\"}" })] {
            assert!(super::owner(&cluster, &other).is_none() && !is_shared(&cluster, &other), "{other}");
        }
        assert_eq!(filter(&cluster, Some(&owner.service)), "description eq '.*c1.*shop/web.*'");
    }
}
