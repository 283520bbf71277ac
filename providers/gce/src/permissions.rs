// SPDX-License-Identifier: Apache-2.0
//! The rights that the controller needs: for each method that it requests, what Google's reference says. Pure.

/// A method of the API, and the permissions that it needs. Making a resource that refers to another needs the right to use that.
pub const PERMISSIONS: &[(&str, &[&str])] = &[
    ("addresses.delete", &["compute.addresses.delete", "compute.addresses.deleteInternal"]),
    ("addresses.get", &["compute.addresses.get"]),
    (
        "addresses.insert",
        &["compute.addresses.create", "compute.addresses.createInternal", "compute.subnetworks.use"],
    ),
    ("addresses.list", &["compute.addresses.list"]),
    ("firewalls.delete", &["compute.firewalls.delete", "compute.networks.updatePolicy"]),
    ("firewalls.get", &["compute.firewalls.get"]),
    ("firewalls.insert", &["compute.firewalls.create", "compute.networks.updatePolicy"]),
    ("firewalls.list", &["compute.firewalls.list"]),
    ("firewalls.patch", &["compute.firewalls.update", "compute.networks.updatePolicy"]),
    ("forwardingRules.delete", &["compute.forwardingRules.delete"]),
    ("forwardingRules.get", &["compute.forwardingRules.get"]),
    (
        "forwardingRules.insert",
        &[
            "compute.forwardingRules.create",
            "compute.addresses.use",
            "compute.addresses.useInternal",
            "compute.regionBackendServices.use",
            "compute.subnetworks.use",
        ],
    ),
    ("forwardingRules.list", &["compute.forwardingRules.list"]),
    ("forwardingRules.patch", &["compute.forwardingRules.update"]),
    (
        "globalOperations.aggregatedList",
        &["compute.globalOperations.list", "compute.regionOperations.list", "compute.zoneOperations.list"],
    ),
    ("globalOperations.get", &["compute.globalOperations.get"]),
    ("globalOperations.list", &["compute.globalOperations.list"]),
    ("instances.get", &["compute.instances.get"]),
    ("instances.list", &["compute.instances.list"]),
    ("networkEndpointGroups.aggregatedList", &["compute.networkEndpointGroups.list"]),
    (
        "networkEndpointGroups.attachNetworkEndpoints",
        &["compute.networkEndpointGroups.attachNetworkEndpoints", "compute.instances.use"],
    ),
    ("networkEndpointGroups.delete", &["compute.networkEndpointGroups.delete"]),
    (
        "networkEndpointGroups.detachNetworkEndpoints",
        &["compute.networkEndpointGroups.detachNetworkEndpoints", "compute.instances.use"],
    ),
    ("networkEndpointGroups.get", &["compute.networkEndpointGroups.get"]),
    (
        "networkEndpointGroups.insert",
        &["compute.networkEndpointGroups.create", "compute.networks.use", "compute.subnetworks.use"],
    ),
    ("networkEndpointGroups.listNetworkEndpoints", &["compute.networkEndpointGroups.get"]),
    ("regionBackendServices.delete", &["compute.regionBackendServices.delete"]),
    ("regionBackendServices.get", &["compute.regionBackendServices.get"]),
    ("regionBackendServices.getHealth", &["compute.regionBackendServices.get"]),
    (
        "regionBackendServices.insert",
        &[
            "compute.regionBackendServices.create",
            "compute.networkEndpointGroups.use",
            "compute.regionHealthChecks.useReadOnly",
        ],
    ),
    ("regionBackendServices.list", &["compute.regionBackendServices.list"]),
    (
        "regionBackendServices.patch",
        &[
            "compute.regionBackendServices.update",
            "compute.networkEndpointGroups.use",
            "compute.regionHealthChecks.useReadOnly",
        ],
    ),
    ("regionHealthChecks.delete", &["compute.regionHealthChecks.delete"]),
    ("regionHealthChecks.get", &["compute.regionHealthChecks.get"]),
    ("regionHealthChecks.insert", &["compute.regionHealthChecks.create"]),
    ("regionHealthChecks.list", &["compute.regionHealthChecks.list"]),
    ("regionHealthChecks.patch", &["compute.regionHealthChecks.update"]),
    ("regionOperations.get", &["compute.regionOperations.get"]),
    ("regions.get", &["compute.regions.get"]),
    ("zoneOperations.get", &["compute.zoneOperations.get"]),
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::client::COMPUTE;

    #[test]
    fn every_method_has_its_permissions_and_the_guide_lists_all() {
        let methods: Vec<&str> = PERMISSIONS.iter().map(|(method, _)| *method).collect();
        assert_eq!(methods, COMPUTE.actions);
        let needed: BTreeSet<&str> = PERMISSIONS.iter().flat_map(|(_, all)| all.iter().copied()).collect();
        let guide = include_str!("../../../docs/providers/gce.md");
        let listed: BTreeSet<&str> = guide
            .lines()
            .filter_map(|line| line.trim().strip_prefix("- "))
            .filter(|line| line.starts_with("compute."))
            .collect();
        assert_eq!(listed, needed);
    }
}
