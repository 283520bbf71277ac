// SPDX-License-Identifier: Apache-2.0
//! Addresses that no Service may publish: those of nodes and their pods, of API servers, and cluster IPs. Service proxies take what all nodes
//! and pods send to a published address, so a tenant who publishes an API server's gets what the cluster sends to it.

use std::fmt;
use std::net::IpAddr;

use steerage_model::{Key, Service};
use steerage_watch::Index;

/// API servers publish where they listen as the endpoints of this Service, in a slice of the same name; other slices may be of anybody who
/// may write there.
const API_SERVERS: (&str, &str) = ("default", "kubernetes");

/// To whom such an address belongs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum AddressHolder {
    Node(String),
    PodsOf(String),
    ApiServer,
    ClusterIpOf(Key),
}

impl fmt::Display for AddressHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node(name) => write!(f, "the node {name}"),
            Self::PodsOf(name) => write!(f, "the pods of the node {name}"),
            Self::ApiServer => f.write_str("an API server"),
            Self::ClusterIpOf(service) => write!(f, "the Service {service}, as its cluster IP"),
        }
    }
}

/// Who of the cluster has the address; `None` if a Service may publish it.
pub(crate) fn address_holder(address: IpAddr, index: &Index) -> Option<AddressHolder> {
    // Service proxies read `::ffff:10.0.0.1` as the IPv4 address in it.
    let address = address.to_canonical();
    let api_servers = Key::new(API_SERVERS.0, API_SERVERS.1);
    let mut slices = index.slices(&api_servers).filter(|slice| slice.key == api_servers);
    if slices.any(|slice| slice.endpoints.iter().any(|endpoint| endpoint.addr == address)) {
        return Some(AddressHolder::ApiServer);
    }
    for node in index.nodes() {
        if node.addresses.contains(&address) || node.external_addresses.contains(&address) {
            return Some(AddressHolder::Node(node.name.clone()));
        }
        if node.pod_cidrs.iter().any(|range| range.contains(&address)) {
            return Some(AddressHolder::PodsOf(node.name.clone()));
        }
    }
    let has_it = |service: &&Service| service.cluster_ips.contains(&address);
    index.services().find(has_it).map(|service| AddressHolder::ClusterIpOf(service.key.clone()))
}

#[cfg(test)]
mod tests {
    use steerage_model::{Endpoint, EndpointSlice, Family, Node};
    use steerage_watch::Event;

    use super::*;
    use crate::cluster_index::tests::service;

    fn slice(name: &str, address: &str) -> EndpointSlice {
        let endpoint = Endpoint::ready(address.parse().unwrap(), "cp");
        let slice =
            EndpointSlice::new(Key::new("default", name), Key::new("default", "kubernetes"), Family::V4);
        EndpointSlice { endpoints: vec![endpoint], ..slice }
    }

    #[test]
    fn addresses_of_the_cluster_are_known() {
        let mut index = Index::default();
        index.apply_slice(Event::Apply(slice("kubernetes", "10.77.0.2")));
        index.apply_slice(Event::Apply(slice("made-by-a-user", "10.77.0.3")));
        index.apply_node(Event::Apply(Node {
            name: "node1".to_owned(),
            addresses: vec!["10.77.1.1".parse().unwrap()],
            external_addresses: vec!["2001:db8::1".parse().unwrap()],
            pod_cidrs: vec!["10.244.1.0/24".parse().unwrap()],
            ..Node::default()
        }));
        let cluster_ips = vec!["10.96.0.10".parse().unwrap()];
        index.apply_service(Event::Apply(Service { cluster_ips, ..service() }));
        let holder =
            |address: &str| address_holder(address.parse().unwrap(), &index).map(|holder| holder.to_string());
        assert_eq!(holder("10.77.0.2").as_deref(), Some("an API server"));
        assert_eq!(holder("::ffff:10.77.0.2").as_deref(), Some("an API server"));
        assert_eq!(holder("10.77.1.1").as_deref(), Some("the node node1"));
        assert_eq!(holder("2001:db8::1").as_deref(), Some("the node node1"));
        assert_eq!(holder("10.244.1.9").as_deref(), Some("the pods of the node node1"));
        assert_eq!(holder("10.96.0.10"), Some(format!("the Service {}, as its cluster IP", service().key)));
        assert_eq!((holder("10.77.0.3"), holder("10.77.0.9")), (None, None));
    }
}
