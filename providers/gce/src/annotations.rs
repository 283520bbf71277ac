// SPDX-License-Identifier: Apache-2.0
//! The annotations of a Service that only this provider reads. `docs/reference/annotations.md` lists them.

steerage_model::annotations! {
    /// Whether the load balancer has an address of the VPC; without it, the address is external. A change makes another address.
    LOAD_BALANCER_TYPE = "networking.gke.io/load-balancer-type", "`Internal`";
    /// The same, under the older name.
    OLD_LOAD_BALANCER_TYPE = "cloud.google.com/load-balancer-type", "`Internal`";
    /// The network tier of an external IPv4 address; `Premium` without it. A change makes another address.
    NETWORK_TIER = "cloud.google.com/network-tier", "`Premium` or `Standard`";
    /// Whether clients of other regions reach an internal load balancer; `false` without it. It can change at any time.
    GLOBAL_ACCESS = "networking.gke.io/internal-load-balancer-allow-global-access", "`true` or `false`";
    /// The subnet of an internal address or of an external IPv6 address, instead of `--gce-subnetwork`; without effect on an external IPv4 address. A change makes another address.
    SUBNET = "networking.gke.io/load-balancer-subnet", "name of a subnet";
    /// The same for an internal load balancer, under the older name; without effect on an external one.
    INTERNAL_SUBNET = "networking.gke.io/internal-load-balancer-subnet", "name of a subnet";
    /// Reserved addresses to use, one for each IP family. Steerage never releases them.
    ADDRESSES = "networking.gke.io/load-balancer-ip-addresses", "names of addresses, separated by a comma";
    /// Weigh nodes by their numbers of endpoints, which health checks of the Service report: only with `externalTrafficPolicy: Local` and `health-check` steering. Without these, nodes have equal weights, and the Service has `Programmed=False` (`WeightsNotAvailable`) and is `Degraded`.
    WEIGHTED = "networking.gke.io/weighted-load-balancing", "`pods-per-node`";
    /// Source ranges that are admitted, as in `spec.loadBalancerSourceRanges`, which takes precedence.
    SOURCE_RANGES = "service.beta.kubernetes.io/load-balancer-source-ranges", "ranges, separated by commas";
}
