// SPDX-License-Identifier: Apache-2.0
//! The annotations of a Service that only this provider reads. `docs/reference/annotations.md` lists them. The names are those of
//! cloud-provider-azure.

steerage_model::annotations! {
    /// Whether the load balancer has a private address of a subnet; `false` without it. Can change at any time; the address then changes too.
    INTERNAL = "service.beta.kubernetes.io/azure-load-balancer-internal", "`true` or `false`";
    /// The subnet of a private address, instead of `--azure-subnet`.
    SUBNET = "service.beta.kubernetes.io/azure-load-balancer-internal-subnet", "name of a subnet of `--azure-virtual-network`";
    /// The private IPv4 address, or the address of a public IP of yours. `steerage.dev/addresses` means the same.
    IPV4 = "service.beta.kubernetes.io/azure-load-balancer-ipv4", "an address";
    /// The same for IPv6.
    IPV6 = "service.beta.kubernetes.io/azure-load-balancer-ipv6", "an address";
    /// A public IP of yours for IPv4. Steerage never deletes it.
    PIP_NAME = "service.beta.kubernetes.io/azure-pip-name", "name of a public IP";
    /// The same for IPv6.
    PIP_NAME_IPV6 = "service.beta.kubernetes.io/azure-pip-name-ipv6", "name of a public IP";
    /// Resource group of the public IPs of yours, instead of `--azure-resource-group`.
    RESOURCE_GROUP = "service.beta.kubernetes.io/azure-load-balancer-resource-group", "name of a resource group";
    /// The prefix from which Steerage's public IP for IPv4 is taken. It cannot change while the public IP exists.
    PIP_PREFIX = "service.beta.kubernetes.io/azure-pip-prefix-id", "ID of a public IP prefix";
    /// The same for IPv6.
    PIP_PREFIX_IPV6 = "service.beta.kubernetes.io/azure-pip-prefix-id-ipv6", "ID of a public IP prefix";
    /// Tags that Steerage's public IP has besides Steerage's own.
    PIP_TAGS = "service.beta.kubernetes.io/azure-pip-tags", "`key=value`, separated by commas";
    /// Label of the DNS name `LABEL.REGION.cloudapp.azure.com` of Steerage's public IP.
    DNS_LABEL = "service.beta.kubernetes.io/azure-dns-label-name", "a label";
    /// Time without packets after which Azure forgets a TCP connection; 4 without it.
    IDLE_TIMEOUT = "service.beta.kubernetes.io/azure-load-balancer-tcp-idle-timeout", "4 to 100, in minutes";
    /// Whether Azure ends an idle TCP connection silently; `false` without it: both sides get a reset.
    DISABLE_TCP_RESET = "service.beta.kubernetes.io/azure-load-balancer-disable-tcp-reset", "`true` or `false`";
    /// Service tags whose clients are admitted, besides those of source ranges. Needs `--azure-network-security-group`.
    ALLOWED_SERVICE_TAGS = "service.beta.kubernetes.io/azure-allowed-service-tags", "service tags, separated by commas";
    /// Source ranges that are admitted. Not together with `spec.loadBalancerSourceRanges`, or with `service.beta.kubernetes.io/load-balancer-source-ranges`.
    ALLOWED_IP_RANGES = "service.beta.kubernetes.io/azure-allowed-ip-ranges", "ranges, separated by commas";
    /// Source ranges that are admitted, as in `spec.loadBalancerSourceRanges`, which takes precedence. Not together with `azure-allowed-ip-ranges`.
    SOURCE_RANGES = "service.beta.kubernetes.io/load-balancer-source-ranges", "ranges, separated by commas";
}
