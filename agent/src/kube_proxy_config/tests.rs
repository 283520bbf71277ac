// SPDX-License-Identifier: Apache-2.0

use super::*;

/// What kubeadm stores: nearly all fields are there, and nobody set them.
const KUBEADM: &str = r#"
apiVersion: kubeproxy.config.k8s.io/v1alpha1
bindAddress: 0.0.0.0
bindAddressHardFail: false
clientConnection:
  acceptContentTypes: ""
  burst: 0
  contentType: ""
  kubeconfig: /var/lib/kube-proxy/kubeconfig.conf
  qps: 0
clusterCIDR: 10.244.0.0/16
configSyncPeriod: 0s
conntrack:
  maxPerCore: null
  min: null
  tcpBeLiberal: false
  tcpCloseWaitTimeout: null
  tcpEstablishedTimeout: null
  udpStreamTimeout: 0s
  udpTimeout: 0s
detectLocal: {bridgeInterface: "", interfaceNamePrefix: ""}
detectLocalMode: ""
enableProfiling: false
healthzBindAddress: ""
hostnameOverride: ""
iptables: {localhostNodePorts: null, masqueradeAll: false, masqueradeBit: null, minSyncPeriod: 0s, syncPeriod: 0s}
ipvs: {excludeCIDRs: null, minSyncPeriod: 0s, scheduler: "", strictARP: false, syncPeriod: 0s, tcpFinTimeout: 0s, tcpTimeout: 0s, udpTimeout: 0s}
kind: KubeProxyConfiguration
logging:
  flushFrequency: 0
  verbosity: 0
metricsBindAddress: ""
mode: ""
nftables: {masqueradeAll: false, masqueradeBit: null, minSyncPeriod: 0s, syncPeriod: 0s}
nodePortAddresses: null
oomScoreAdj: null
portRange: ""
showHiddenMetricsForVersion: ""
winkernel: {enableDSR: false, forwardHealthCheckVip: false, networkName: "", rootHnsEndpointName: "", sourceVip: ""}
"#;

/// As EKS' add-on: addresses and conntrack are set, and no network of pods.
const EKS: &str = r#"
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
bindAddress: 0.0.0.0
clientConnection: {burst: 10, contentType: application/vnd.kubernetes.protobuf, kubeconfig: /var/lib/kube-proxy/kubeconfig, qps: 5}
clusterCIDR: ""
configSyncPeriod: 15m0s
conntrack: {maxPerCore: 32768, min: 131072, tcpCloseWaitTimeout: 1h0m0s, tcpEstablishedTimeout: 24h0m0s}
healthzBindAddress: 0.0.0.0:10256
hostnameOverride: ip-10-0-0-1.ec2.internal
iptables: {masqueradeAll: false, masqueradeBit: 14, minSyncPeriod: 0s, syncPeriod: 30s}
metricsBindAddress: 0.0.0.0:10249
mode: iptables
nodePortAddresses: null
oomScoreAdj: -998
"#;

/// The arguments that k3s gives its kube-proxy, as a file.
const K3S: &str = r"
apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
clientConnection: {kubeconfig: /var/lib/rancher/k3s/agent/kubeproxy.kubeconfig}
clusterCIDR: 10.42.0.0/16,fd00:42::/56
conntrack: {maxPerCore: 0, tcpCloseWaitTimeout: 0s, tcpEstablishedTimeout: 0s}
healthzBindAddress: 127.0.0.1
hostnameOverride: Server-1
mode: iptables
";

fn header(rest: &str) -> String {
    format!("apiVersion: {API_VERSION}\nkind: KubeProxyConfiguration\n{rest}")
}

fn translated(text: &str) -> (FileSettings, Vec<Difference>) {
    let host = HostSettings {
        processors: 2,
        settings: vec![
            ("net.netfilter.nf_conntrack_max", 262_144),
            ("net.netfilter.nf_conntrack_tcp_timeout_established", 86_400),
        ],
    };
    translate(&parse(text).unwrap(), &host).unwrap()
}

/// Field and value of what is treated so.
fn fields(report: &[Difference], treatment: Treatment) -> Vec<String> {
    let found = report.iter().filter(|difference| difference.treatment == treatment);
    found.map(|difference| format!("{} {}", difference.field, difference.value)).collect()
}

fn settings() -> FileSettings {
    FileSettings {
        node_name: None,
        kubeconfig: None,
        bind_address: None,
        healthz: HealthAddress::all(10256),
        metrics_bind_address: "127.0.0.1:10249".parse().unwrap(),
        node_port_addresses: "0.0.0.0/0,::/0".parse().unwrap(),
        detect_local: DetectLocal::Nothing,
        masquerade_all: false,
        deny_external_ips: false,
    }
}

#[test]
fn file_of_kubeadm_is_read() {
    let (found, report) = translated(KUBEADM);
    let expected = FileSettings {
        kubeconfig: Some("/var/lib/kube-proxy/kubeconfig.conf".into()),
        detect_local: DetectLocal::ClusterCidrs(vec!["10.244.0.0/16".parse().unwrap()]),
        ..settings()
    };
    assert_eq!(found, expected);
    assert_eq!(
        fields(&report, Treatment::Differs),
        ["mode \"\"", "iptables.localhostNodePorts true", "conntrack.tcpCloseWaitTimeout 3600"]
    );
    assert_eq!(fields(&report, Treatment::Unused), Vec::<String>::new());
    assert_eq!(
        fields(&report, Treatment::Same),
        ["bindAddress 0.0.0.0", "conntrack.maxPerCore 131072", "conntrack.tcpEstablishedTimeout 86400"]
    );
    let text = report.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
    for line in [
        "applied clusterCIDR 10.244.0.0/16: as --cluster-cidr",
        "same    conntrack.maxPerCore 131072: this host has net.netfilter.nf_conntrack_max = 262144",
        "differs conntrack.tcpCloseWaitTimeout 3600: the agent changes no kernel setting: sysctl -w \
         net.netfilter.nf_conntrack_tcp_timeout_close_wait=3600",
    ] {
        assert!(text.contains(line), "no {line} in {text}");
    }
}

#[test]
fn file_of_eks_is_read() {
    let (found, report) = translated(EKS);
    let expected = FileSettings {
        node_name: Some("ip-10-0-0-1.ec2.internal".to_owned()),
        kubeconfig: Some("/var/lib/kube-proxy/kubeconfig".into()),
        metrics_bind_address: "0.0.0.0:10249".parse().unwrap(),
        ..settings()
    };
    assert_eq!(found, expected);
    let differs = fields(&report, Treatment::Differs);
    assert!(
        differs.contains(&"oomScoreAdj -998".to_owned()) && differs.contains(&"mode iptables".to_owned())
    );
    assert!(fields(&report, Treatment::Same).contains(&"iptables.syncPeriod 30s".to_owned()));
}

#[test]
fn arguments_of_k3s_are_read() {
    let (found, report) = translated(K3S);
    let cidrs = ["10.42.0.0/16", "fd00:42::/56"].map(|net| net.parse().unwrap());
    let expected = FileSettings {
        node_name: Some("server-1".to_owned()),
        kubeconfig: Some("/var/lib/rancher/k3s/agent/kubeproxy.kubeconfig".into()),
        healthz: HealthAddress { ip: Some([127, 0, 0, 1].into()), port: 10256 },
        detect_local: DetectLocal::ClusterCidrs(cidrs.to_vec()),
        ..settings()
    };
    assert_eq!(found, expected);
    assert_eq!(fields(&report, Treatment::Differs), ["mode iptables", "iptables.localhostNodePorts true"]);
}

#[test]
fn each_field_is_treated() {
    for (text, treatment, field) in [
        ("mode: nftables", Treatment::Same, "mode nftables"),
        ("mode: ipvs", Treatment::Differs, "mode ipvs"),
        ("mode: ipvs\nipvs: {scheduler: wrr}", Treatment::Differs, "ipvs.scheduler wrr"),
        ("ipvs: {scheduler: wrr}", Treatment::Unused, "ipvs.scheduler wrr"),
        ("mode: ipvs\nipvs: {tcpTimeout: 15m0s}", Treatment::Differs, "ipvs.tcpTimeout 15m0s"),
        ("mode: ipvs\nipvs: {strictARP: true}", Treatment::Unused, "ipvs.strictARP true"),
        ("ipvs: {excludeCIDRs: [10.0.0.0/8]}", Treatment::Unused, "ipvs.excludeCIDRs 10.0.0.0/8"),
        ("iptables: {masqueradeAll: true}", Treatment::Applied, "iptables.masqueradeAll true"),
        ("nftables: {masqueradeAll: true}", Treatment::Unused, "nftables.masqueradeAll true"),
        ("nftables: {masqueradeBit: 3}", Treatment::Unused, "nftables.masqueradeBit 3"),
        ("mode: nftables\nnftables: {syncPeriod: 1m0s}", Treatment::Differs, "nftables.syncPeriod 1m0s"),
        ("mode: nftables\nnftables: {minSyncPeriod: 1s}", Treatment::Differs, "nftables.minSyncPeriod 1s"),
        ("nftables: {syncPeriod: 30s}", Treatment::Unused, "nftables.syncPeriod 30s"),
        (
            "featureGates: {AllowServiceExternalIPs: false}",
            Treatment::Applied,
            "featureGates.AllowServiceExternalIPs false",
        ),
        ("featureGates: {Other: true}", Treatment::Differs, "featureGates.Other true"),
        ("clientConnection: {qps: 5}", Treatment::Unused, "clientConnection.qps 5"),
        (
            "clientConnection: {acceptContentTypes: x}",
            Treatment::Unused,
            "clientConnection.acceptContentTypes x",
        ),
        ("logging: {format: json}", Treatment::Differs, "logging.format json"),
        ("logging: {format: text}", Treatment::Same, "logging.format text"),
        ("logging: {verbosity: 4}", Treatment::Differs, "logging.verbosity 4"),
        ("logging: {flushFrequency: 5s}", Treatment::Unused, "logging.flushFrequency \"5s\""),
        ("logging: {vmodule: [{filePattern: a, verbosity: 1}]}", Treatment::Differs, "logging.vmodule (set)"),
        ("logging: {options: {json: {infoBufferSize: \"0\"}}}", Treatment::Unused, "logging.options (set)"),
        ("bindAddress: \"fd00::1\"", Treatment::Applied, "bindAddress fd00::1"),
        ("bindAddressHardFail: true", Treatment::Differs, "bindAddressHardFail true"),
        ("enableProfiling: true", Treatment::Differs, "enableProfiling true"),
        ("showHiddenMetricsForVersion: \"1.35\"", Treatment::Unused, "showHiddenMetricsForVersion 1.35"),
        ("detectLocalMode: NodeCIDR", Treatment::Applied, "detectLocalMode NodeCIDR"),
        ("detectLocalMode: NodeCIDR\nclusterCIDR: 10.0.0.0/8", Treatment::Unused, "clusterCIDR 10.0.0.0/8"),
        (
            "detectLocalMode: BridgeInterface\ndetectLocal: {bridgeInterface: cni0}",
            Treatment::Applied,
            "detectLocal.bridgeInterface cni0",
        ),
        (
            "detectLocalMode: InterfaceNamePrefix\ndetectLocal: {interfaceNamePrefix: veth}",
            Treatment::Applied,
            "detectLocal.interfaceNamePrefix veth",
        ),
        ("nodePortAddresses: [primary]", Treatment::Applied, "nodePortAddresses primary"),
        ("mode: nftables", Treatment::Same, "nodePortAddresses \"\""),
        ("nodePortAddresses: [10.0.0.0/8]", Treatment::Differs, "nodePortAddresses 10.0.0.0/8"),
        (
            "nodePortAddresses: [127.0.0.0/8, \"::/0\"]",
            Treatment::Differs,
            "nodePortAddresses 127.0.0.0/8,::/0",
        ),
        ("conntrack: {tcpBeLiberal: true}", Treatment::Differs, "conntrack.tcpBeLiberal 1"),
        ("conntrack: {udpTimeout: 30s}", Treatment::Differs, "conntrack.udpTimeout 30"),
        ("conntrack: {udpStreamTimeout: 5m0s}", Treatment::Differs, "conntrack.udpStreamTimeout 300"),
        ("configSyncPeriod: 15m0s", Treatment::Unused, "configSyncPeriod 15m0s"),
        ("portRange: 1-2", Treatment::Unused, "portRange 1-2"),
        ("winkernel: {networkName: a}", Treatment::Unused, "winkernel.networkName a"),
        ("windowsRunAsService: true", Treatment::Unused, "windowsRunAsService true"),
    ] {
        let (_, report) = translated(&header(text));
        let found = fields(&report, treatment);
        assert!(found.contains(&field.to_owned()), "{text}: {treatment} {field} is not in {report:?}");
    }
}

#[test]
fn settings_follow_the_mode_in_use() {
    let of = |text: &str| translated(&header(text)).0;
    assert_eq!(of("mode: nftables").node_port_addresses, NodePortAddresses::Primary);
    assert_eq!(of("mode: ipvs").node_port_addresses, settings().node_port_addresses);
    assert!(of("mode: ipvs\niptables: {masqueradeAll: true}").masquerade_all);
    assert!(!of("mode: nftables\niptables: {masqueradeAll: true}").masquerade_all);
    assert_eq!(of("detectLocalMode: NodeCIDR").detect_local, DetectLocal::NodeCidrs);
    assert_eq!(of("healthzBindAddress: \"[::]:1\"").healthz, HealthAddress::all(1));
    assert_eq!(of("metricsBindAddress: \"::1\"").metrics_bind_address, "[::1]:10249".parse().unwrap());
}

#[test]
fn what_kube_proxy_refuses_is_refused() {
    for (text, part) in [
        ("mode: userspace", "mode: `userspace`"),
        ("modes: nftables", "modes"),
        ("nftables: {masqueradeNone: true}", "masqueradeNone"),
        ("bindAddress: host", "bindAddress: `host`"),
        ("healthzBindAddress: \":10256\"", "healthzBindAddress"),
        ("clusterCIDR: ten", "clusterCIDR: `ten`"),
        ("detectLocalMode: Guess", "detectLocalMode: `Guess`"),
        ("detectLocalMode: BridgeInterface", "detectLocal.bridgeInterface"),
        ("nodePortAddresses: [primary, 10.0.0.0/8]", "nodePortAddresses: `primary`"),
        ("iptables: {syncPeriod: often}", "iptables.syncPeriod: `often`"),
        ("conntrack: {udpTimeout: -1s}", "conntrack.udpTimeout"),
        ("oomScoreAdj: low", "oomScoreAdj"),
    ] {
        let found = parse(&header(text)).and_then(|config| translate(&config, &HostSettings::default()));
        let error = found.expect_err(text).to_string();
        assert!(error.contains(part), "{text}: {error}");
    }
    let other = parse("apiVersion: kubelet.config.k8s.io/v1beta1\nkind: KubeletConfiguration\n");
    assert!(other.is_err());
    let other = parse(&format!("apiVersion: {API_VERSION}\nkind: Other\n")).expect_err("another kind");
    assert!(other.to_string().contains("kind Other"), "{other}");
}

#[test]
fn unreadable_file_is_named() {
    let error = read(Path::new("/nonexistent/config.conf")).expect_err("no file");
    assert!(error.to_string().contains("/nonexistent/config.conf"), "{error}");
}
