// SPDX-License-Identifier: Apache-2.0
//! The annotations of a Service that only this provider reads. `docs/reference/annotations.md` lists them.

steerage_model::annotations! {
    /// Scheme of a new load balancer, instead of `--aws-scheme`. AWS cannot change the scheme of an existing one. AWS's own controllers use the same name and values.
    SCHEME = "service.beta.kubernetes.io/aws-load-balancer-scheme", "`internal` or `internet-facing`";
    /// Older form of the scheme. A Service with both must request the same by both.
    INTERNAL = "service.beta.kubernetes.io/aws-load-balancer-internal", "`true` (internal) or `false` (internet-facing)";
    /// Over which IP families clients reach the load balancer; without it, `dualstack` if `spec.ipFamilies` has IPv6. Targets are reached over the first of `spec.ipFamilies`; AWS translates packets of clients over the other, and these targets see an address of the load balancer instead of the client's. `dualstack` needs subnets with IPv6; ports with UDP need IPv6 first too.
    IP_ADDRESS_TYPE = "service.beta.kubernetes.io/aws-load-balancer-ip-address-type", "`ipv4` or `dualstack`";
    /// Whether a `dualstack` load balancer has a prefix of each subnet for source NAT; without it, `on` if a port has UDP or `…-source-nat-ipv6-prefixes` is set. `off` is refused then. AWS's own controller needs `on`.
    SOURCE_NAT = "service.beta.kubernetes.io/aws-load-balancer-enable-prefix-for-ipv6-source-nat", "`on` or `off`";
    /// The prefixes for source NAT of a `dualstack` load balancer, one for each subnet, in the order of `…-subnets`, which a given prefix needs. One of `/80` in the subnet's IPv6 range, or `auto_assigned`, which is the default: AWS chooses.
    SOURCE_NAT_PREFIXES = "service.beta.kubernetes.io/aws-load-balancer-source-nat-ipv6-prefixes", "prefixes or `auto_assigned`, separated by commas";
    /// Attributes of the load balancer. Only those that an annotation names are set, and repaired. One that is no longer named returns to AWS's default, unlike with AWS's own controllers. Not taken: `ipv6.deny_all_igw_traffic` and `secondary_ips.auto_assigned.per_subnet`.
    ATTRIBUTES = "service.beta.kubernetes.io/aws-load-balancer-attributes", "`key=value`, separated by commas";
    /// The attribute `load_balancing.cross_zone.enabled`. A contradiction to `…-attributes` is refused.
    CROSS_ZONE = "service.beta.kubernetes.io/aws-load-balancer-cross-zone-load-balancing-enabled", "`true` or `false`";
    /// The attribute `access_logs.s3.enabled`, which needs a bucket.
    ACCESS_LOG_ENABLED = "service.beta.kubernetes.io/aws-load-balancer-access-log-enabled", "`true` or `false`";
    /// The attribute `access_logs.s3.bucket`.
    ACCESS_LOG_BUCKET = "service.beta.kubernetes.io/aws-load-balancer-access-log-s3-bucket-name", "name of an S3 bucket";
    /// The attribute `access_logs.s3.prefix`.
    ACCESS_LOG_PREFIX = "service.beta.kubernetes.io/aws-load-balancer-access-log-s3-bucket-prefix", "prefix in the bucket";
    /// Attributes of all target groups, instead of Steerage's values. One that is no longer named returns to Steerage's or AWS's value. Not taken: `stickiness.*`, which `spec.sessionAffinity` decides, and keys with a port, `key.port`.
    GROUP_ATTRIBUTES = "service.beta.kubernetes.io/aws-load-balancer-target-group-attributes", "`key=value`, separated by commas";
    /// PROXY protocol version 2 on all ports. Refused while the health check asks for this Service, because no service proxy reads the header; otherwise the check of nodes becomes a TCP check. Pods must read the header on their health-check port too.
    PROXY_PROTOCOL = "service.beta.kubernetes.io/aws-load-balancer-proxy-protocol", "`*`";
    /// What the targets are: `instance`, the nodes on their node ports, or `ip`, the pods. Pods need addresses in the VPC, as those of the Amazon VPC CNI. Their Service needs no node ports, its `externalTrafficPolicy` means nothing to clients from outside, and `steerage.dev/steering: health-check` is refused. Unlike with AWS's own controllers, pods too see the client's address, unless `preserve_client_ip.enabled=false` in `…-target-group-attributes`.
    TARGET_TYPE = "service.beta.kubernetes.io/aws-load-balancer-nlb-target-type", "`instance` (default) or `ip`";
    /// As `steerage.dev/target-node-labels`. Unlike with the AWS Load Balancer Controller, the Service keeps targets if no node has the labels.
    TARGET_NODE_LABELS = "service.beta.kubernetes.io/aws-load-balancer-target-node-labels", "`key=value`, separated by commas";
    /// Protocol of the health check of pods; without it, `tcp`. Nodes are asked by HTTP for `/healthz` of their service proxy: other values are refused.
    CHECK_PROTOCOL = "service.beta.kubernetes.io/aws-load-balancer-healthcheck-protocol", "`tcp` or `http`";
    /// Path of an HTTP health check of pods; without it, `/`. Only status 200 is healthy. Of nodes, only `/healthz` is accepted.
    CHECK_PATH = "service.beta.kubernetes.io/aws-load-balancer-healthcheck-path", "path that begins with `/`";
    /// Port of the health check of pods; without it, `traffic-port`, on which each pod receives packets. Needed for ports with UDP alone. Refused for nodes.
    CHECK_PORT = "service.beta.kubernetes.io/aws-load-balancer-healthcheck-port", "`traffic-port` or a number";
    /// Time between two health checks, as `steerage.dev/health-check-interval`, but without a unit. A contradiction of the two is refused.
    CHECK_INTERVAL = "service.beta.kubernetes.io/aws-load-balancer-healthcheck-interval", "seconds, 5 to 300";
    /// Time after which a health check fails, as `steerage.dev/health-check-timeout`; at most the interval.
    CHECK_TIMEOUT = "service.beta.kubernetes.io/aws-load-balancer-healthcheck-timeout", "seconds, 2 to 120";
    /// As `steerage.dev/health-check-healthy-threshold`.
    CHECK_HEALTHY = "service.beta.kubernetes.io/aws-load-balancer-healthcheck-healthy-threshold", "2 to 10";
    /// As `steerage.dev/health-check-unhealthy-threshold`.
    CHECK_UNHEALTHY = "service.beta.kubernetes.io/aws-load-balancer-healthcheck-unhealthy-threshold", "2 to 10";
    /// Certificates of TLS listeners: the first is the default, clients choose the others by name. At most 25.
    SSL_CERT = "service.beta.kubernetes.io/aws-load-balancer-ssl-cert", "ARNs of ACM or IAM, separated by commas";
    /// The ports with TLS; without it, all with TCP alone. A port with UDP is refused.
    SSL_PORTS = "service.beta.kubernetes.io/aws-load-balancer-ssl-ports", "names or numbers of ports, separated by commas, or `*`";
    /// Security policy of TLS listeners; without it, `ELBSecurityPolicy-2016-08`.
    SSL_POLICY = "service.beta.kubernetes.io/aws-load-balancer-ssl-negotiation-policy", "name of a policy of AWS";
    /// Protocol to the targets of TLS listeners; without it, `tcp`. `ssl` needs a certificate in `…-ssl-cert`, and excludes `sessionAffinity: ClientIP`.
    BACKEND_PROTOCOL = "service.beta.kubernetes.io/aws-load-balancer-backend-protocol", "`tcp` or `ssl`";
    /// ALPN policy of TLS listeners; without it, `None`, also after it was set.
    ALPN_POLICY = "service.beta.kubernetes.io/aws-load-balancer-alpn-policy", "`HTTP1Only`, `HTTP2Only`, `HTTP2Optional`, `HTTP2Preferred` or `None`";
    /// Subnets of the load balancer, instead of `--aws-subnets` or those that tags offer, one for each availability zone. A name is that of the tag `Name`. A later change adds and removes zones. Another subnet in a zone that the load balancer has is refused.
    SUBNETS = "service.beta.kubernetes.io/aws-load-balancer-subnets", "IDs or names of subnets, separated by commas";
    /// Elastic IP addresses of a new internet-facing load balancer, one for each subnet, in the order of the subnets. Another one for a subnet that stays is refused.
    EIP_ALLOCATIONS = "service.beta.kubernetes.io/aws-load-balancer-eip-allocations", "allocation IDs, separated by commas";
    /// Addresses of a new internal load balancer, one for each subnet, in the order of the subnets: the AWS Load Balancer Controller finds the subnet of each address instead. Another one for a subnet that stays is refused.
    PRIVATE_ADDRESSES = "service.beta.kubernetes.io/aws-load-balancer-private-ipv4-addresses", "IPv4 addresses, separated by commas";
    /// Security groups of the load balancer, exactly these, instead of one of Steerage's. Their rules decide who may connect: source ranges, prefix lists and `…-enable-icmp-for-path-mtu-discovery` beside them are refused. A name is that of the tag `Name`. Refused if the load balancer was created without a group.
    SECURITY_GROUPS = "service.beta.kubernetes.io/aws-load-balancer-security-groups", "IDs or names of security groups, separated by commas";
    /// `true`: the load balancer has the group of `--aws-backend-security-group` also beside those of `…-security-groups`. Without these it always has. Refused without the flag: Steerage changes no security group of nodes.
    MANAGE_BACKEND_RULES = "service.beta.kubernetes.io/aws-load-balancer-manage-backend-security-group-rules", "`true` or `false`";
    /// `true`: a new load balancer gets no security group, so every client that reaches it may connect. Decided when it is created: later, `true` is refused if it has a group, and source ranges if it has none.
    DISABLE_SECURITY_GROUP = "service.beta.kubernetes.io/aws-load-balancer-disable-nlb-sg", "`true` or `false`";
    /// `on`: the security group also admits ICMP messages that a packet is too big for a link, from the sources of the Service.
    ICMP_FOR_PATH_MTU = "service.beta.kubernetes.io/aws-load-balancer-enable-icmp-for-path-mtu-discovery", "`on` or `off`";
    /// Prefix lists whose clients may connect, beside those of the source ranges; without ranges, these alone.
    PREFIX_LISTS = "service.beta.kubernetes.io/aws-load-balancer-security-group-prefix-lists", "IDs of prefix lists, separated by commas";
    /// As `spec.loadBalancerSourceRanges`, which wins if a Service has both. IPv6 ranges matter only where clients may use IPv6.
    SOURCE_RANGES = "service.beta.kubernetes.io/load-balancer-source-ranges", "ranges such as `192.0.2.0/24` or `2001:db8::/32`, separated by commas";
    /// Further tags of the load balancer, its listeners and target groups, at most 36. One that is no longer named is removed; tags of others stay.
    TAGS = "service.beta.kubernetes.io/aws-load-balancer-additional-resource-tags", "`key=value`, separated by commas";
}
