// SPDX-License-Identifier: Apache-2.0
//! The annotations of a Service that only this provider reads. `docs/reference/annotations.md` lists them.

steerage_model::annotations! {
    /// Whether the load balancer has no floating IP; without it, `false` if `--openstack-floating-network-id` is set. It can change at any time.
    INTERNAL = "service.beta.kubernetes.io/openstack-internal-load-balancer", "`true` or `false`";
    /// The external network from which a floating IP is taken, instead of `--openstack-floating-network-id`.
    FLOATING_NETWORK = "loadbalancer.openstack.org/floating-network-id", "ID of a network";
    /// The subnet of the external network from which a floating IP is taken; without it, Neutron chooses.
    FLOATING_SUBNET = "loadbalancer.openstack.org/floating-subnet-id", "ID of a subnet";
    /// The subnet of the VIP, instead of `--openstack-subnet-id`. It cannot change once the load balancer exists.
    SUBNET = "loadbalancer.openstack.org/subnet-id", "ID of a subnet";
    /// The network of the VIPs: Steerage takes a subnet of it for each family, unless subnet-id names one. It has no effect once the load balancer exists.
    NETWORK = "loadbalancer.openstack.org/network-id", "ID of a network";
    /// The flavor of a new load balancer, such as its size and topology. It cannot change once the load balancer exists. Not with `ovn`.
    FLAVOR = "loadbalancer.openstack.org/flavor-id", "ID of a flavor of Octavia";
    /// The availability zone of Octavia of a new load balancer. It cannot change once the load balancer exists. Not with `ovn`.
    AVAILABILITY_ZONE = "loadbalancer.openstack.org/availability-zone", "name of an availability zone";
    /// The labels that a node must have to be a member, as with `steerage.dev/target-node-labels`. A label needs a value.
    NODE_SELECTOR = "loadbalancer.openstack.org/node-selector", "`key=value`, separated by commas";
    /// Source ranges that are admitted, as in `spec.loadBalancerSourceRanges`, which takes precedence. With `ovn` they need `--openstack-node-security-group-id`.
    SOURCE_RANGES = "service.beta.kubernetes.io/load-balancer-source-ranges", "ranges, separated by commas";
    /// The load balancer of cloud-provider-openstack that is [adopted](../providers/openstack.md#from-cloud-provider-openstack) with `--openstack-adopt`; that controller wrote it. One that does not exist is refused. Without effect once Steerage has a load balancer for the Service; if it names another one, the condition says so.
    LOAD_BALANCER_ID = "loadbalancer.openstack.org/load-balancer-id", "ID of a load balancer";
    /// Without effect: cloud-provider-openstack wrote it.
    LOAD_BALANCER_ADDRESS = "loadbalancer.openstack.org/load-balancer-address", "any";
    /// The subnet through which members are reached, instead of `--openstack-member-subnet-id`.
    MEMBER_SUBNET = "loadbalancer.openstack.org/member-subnet-id", "ID of a subnet";
    /// Whether TCP connections to members begin with a PROXY protocol header, which names the client: `true` and `v1` are version 1. The address is published with `ipMode: Proxy`. Not with the Octavia provider `ovn`. Ports with UDP have none.
    PROXY_PROTOCOL = "loadbalancer.openstack.org/proxy-protocol", "`true`, `false`, `v1` or `v2`";
    /// How connections are distributed; `ROUND_ROBIN` without it. `ovn` has only `SOURCE_IP_PORT`, its default.
    LB_METHOD = "loadbalancer.openstack.org/lb-method", "`ROUND_ROBIN`, `LEAST_CONNECTIONS`, `SOURCE_IP` or `SOURCE_IP_PORT`";
    /// The most connections of each port at a time; `-1` is no limit.
    CONNECTION_LIMIT = "loadbalancer.openstack.org/connection-limit", "a number";
    /// Time in milliseconds without data from the client after which a connection ends; 50000 without it.
    TIMEOUT_CLIENT_DATA = "loadbalancer.openstack.org/timeout-client-data", "a number";
    /// Time in milliseconds for connecting to a member; 5000 without it.
    TIMEOUT_MEMBER_CONNECT = "loadbalancer.openstack.org/timeout-member-connect", "a number";
    /// Time in milliseconds without data from the member after which a connection ends; 50000 without it.
    TIMEOUT_MEMBER_DATA = "loadbalancer.openstack.org/timeout-member-data", "a number";
    /// Time in milliseconds to wait for more packets for content inspection; 0 without it.
    TIMEOUT_TCP_INSPECT = "loadbalancer.openstack.org/timeout-tcp-inspect", "a number";
}
