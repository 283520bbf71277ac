// SPDX-License-Identifier: Apache-2.0
//! Tests the role of `docs/providers/azure.md`: it has what the requests of `client` need, and nothing else.

use std::collections::BTreeSet;

use crate::client::NETWORK;

/// The actions of Azure that each request needs: its own, and those of what its body refers to.
const NEEDED: &[(&str, &[&str])] = &[
    ("DELETE loadBalancers", &["loadBalancers/delete"]),
    ("DELETE publicIPAddresses", &["publicIPAddresses/delete"]),
    ("GET loadBalancers", &["loadBalancers/read"]),
    ("GET networkSecurityGroups", &["networkSecurityGroups/read"]),
    ("GET operations", &["locations/operations/read"]),
    ("GET publicIPAddresses", &["publicIPAddresses/read"]),
    (
        "PUT loadBalancers",
        &[
            "loadBalancers/write",
            "publicIPAddresses/join/action",
            "virtualNetworks/join/action",
            "virtualNetworks/subnets/join/action",
        ],
    ),
    ("PUT networkSecurityGroups", &["networkSecurityGroups/write"]),
    ("PUT publicIPAddresses", &["publicIPAddresses/write", "publicIPPrefixes/join/action"]),
];

#[test]
fn every_request_has_its_permissions_and_the_guide_lists_all() {
    let requests: Vec<&str> = NEEDED.iter().map(|(request, _)| *request).collect();
    assert_eq!(requests, NETWORK.actions);
    let needed: BTreeSet<&str> = NEEDED.iter().flat_map(|(_, all)| all.iter().copied()).collect();
    let guide = include_str!("../../../docs/providers/azure.md");
    let listed: BTreeSet<&str> =
        guide.lines().filter_map(|line| line.trim().strip_prefix("- Microsoft.Network/")).collect();
    assert_eq!(listed, needed);
}
