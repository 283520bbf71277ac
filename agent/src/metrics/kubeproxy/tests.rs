// SPDX-License-Identifier: Apache-2.0

use std::collections::BTreeSet;

use steerage_model::Protocol;
use steerage_process::prometheus_client::encoding::text::encode;

use super::*;

const BOTH: [IpFamily; 2] = [IpFamily::V4, IpFamily::V6];

fn text(registry: &Registry) -> String {
    let mut text = String::new();
    encode(&mut text, registry).unwrap();
    text
}

fn registered() -> (KubeProxyMetrics, Registry) {
    let metrics = KubeProxyMetrics::default();
    let mut registry = Registry::with_prefix("kubeproxy");
    metrics.register(&mut registry);
    (metrics, registry)
}

#[test]
fn names_and_values_are_kube_proxys() {
    let (metrics, registry) = registered();
    metrics.show(&BOTH);
    metrics.service_changed();
    metrics.endpoints_changed();
    metrics.endpoints_changed();
    metrics.queued(&BOTH);
    let gap = |family| (family, Protocol::Tcp, 80);
    let gaps = LocalGaps {
        internal: BTreeSet::from([gap(IpFamily::V4)]),
        external: BTreeSet::from([gap(IpFamily::V4), (IpFamily::V4, Protocol::Udp, 80), gap(IpFamily::V6)]),
    };
    metrics.without_local_endpoints(&BOTH, &[(Key::new("shop", "web"), gaps)].into());
    let before = text(&registry);
    let ago = SystemTime::now() - Duration::from_secs(3);
    let ahead = SystemTime::now() + Duration::from_hours(1);
    let write = FamilyWrite {
        family: IpFamily::V4,
        full: false,
        took: Duration::from_millis(3),
        worked: true,
        cleaned_up: true,
    };
    metrics.wrote(&write);
    metrics.wrote(&FamilyWrite { family: IpFamily::V6, full: true, ..write });
    metrics.wrote(&FamilyWrite { family: IpFamily::V6, worked: false, cleaned_up: false, ..write });
    metrics.synced(&BOTH, [(IpFamily::V4, ago), (IpFamily::V4, ahead)]);
    metrics.searched(&FamilyWalk { family: IpFamily::V6, took: Duration::from_millis(11), deleted: 5 });
    metrics.count_healthz(200);
    metrics.count_healthz(503);
    metrics.count_livez(200);
    let after = text(&registry);
    for (text, line) in [
        (&before, r#"sync_proxy_rules_nftables_sync_failures_total{ip_family="IPv4"} 0"#),
        (&before, "sync_proxy_rules_endpoint_changes_pending 2"),
        (&before, "sync_proxy_rules_service_changes_pending 1"),
        (&after, "sync_proxy_rules_endpoint_changes_pending 0"),
        (&after, "sync_proxy_rules_endpoint_changes_total 2"),
        (&after, "sync_proxy_rules_service_changes_total 1"),
        (
            &after,
            r#"sync_proxy_rules_no_local_endpoints_total{traffic_policy="internal",ip_family="IPv4"} 1"#,
        ),
        (
            &after,
            r#"sync_proxy_rules_no_local_endpoints_total{traffic_policy="external",ip_family="IPv4"} 2"#,
        ),
        (
            &after,
            r#"sync_proxy_rules_no_local_endpoints_total{traffic_policy="internal",ip_family="IPv6"} 0"#,
        ),
        (
            &after,
            r#"sync_proxy_rules_no_local_endpoints_total{traffic_policy="external",ip_family="IPv6"} 1"#,
        ),
        (&after, r#"sync_proxy_rules_nftables_sync_failures_total{ip_family="IPv4"} 0"#),
        (&after, r#"sync_proxy_rules_nftables_sync_failures_total{ip_family="IPv6"} 1"#),
        (&after, r#"sync_proxy_rules_nftables_cleanup_failures_total{ip_family="IPv6"} 1"#),
        (&after, r#"sync_proxy_rules_duration_seconds_count{ip_family="IPv4"} 1"#),
        (&after, r#"sync_proxy_rules_duration_seconds_count{ip_family="IPv6"} 1"#),
        (&after, r#"sync_partial_proxy_rules_duration_seconds_count{ip_family="IPv4"} 1"#),
        (&after, r#"sync_full_proxy_rules_duration_seconds_count{ip_family="IPv4"} 0"#),
        (&after, r#"sync_full_proxy_rules_duration_seconds_count{ip_family="IPv6"} 1"#),
        (&after, r#"network_programming_duration_seconds_count{ip_family="IPv4"} 2"#),
        (&after, r#"network_programming_duration_seconds_bucket{le="2.0",ip_family="IPv4"} 1"#),
        (&after, r#"network_programming_duration_seconds_bucket{le="5.0",ip_family="IPv4"} 2"#),
        (&after, r#"conntrack_reconciler_sync_duration_seconds_count{ip_family="IPv6"} 1"#),
        (&after, r#"conntrack_reconciler_deleted_entries_total{ip_family="IPv6"} 5"#),
        (&after, "proxy_healthz_total{code=\"200\"} 1"),
        (&after, "proxy_healthz_total{code=\"503\"} 1"),
        (&after, "proxy_livez_total{code=\"200\"} 1"),
    ] {
        assert!(text.contains(&format!("\nkubeproxy_{line}\n")), "no {line} in {text}");
    }
    let stamp = |name: &str| {
        let name = format!("kubeproxy_{name}{{ip_family=\"IPv6\"}} ");
        let line = after.lines().find_map(|line| line.strip_prefix(&name));
        line.unwrap().parse::<i64>().unwrap()
    };
    assert!(stamp("sync_proxy_rules_last_timestamp_seconds") > 1_700_000_000);
    assert!(stamp("sync_proxy_rules_last_queued_timestamp_seconds") > 1_700_000_000);
}

/// kube-proxy 1.36 in nftables mode (pkg/proxy/metrics): type, name, labels.
const KUBE_PROXY: [(&str, &str, &str); 19] = [
    ("histogram", "sync_proxy_rules_duration_seconds", "ip_family"),
    ("histogram", "sync_full_proxy_rules_duration_seconds", "ip_family"),
    ("histogram", "sync_partial_proxy_rules_duration_seconds", "ip_family"),
    ("gauge", "sync_proxy_rules_last_timestamp_seconds", "ip_family"),
    ("gauge", "sync_proxy_rules_last_queued_timestamp_seconds", "ip_family"),
    ("histogram", "network_programming_duration_seconds", "ip_family"),
    ("gauge", "sync_proxy_rules_endpoint_changes_pending", ""),
    ("counter", "sync_proxy_rules_endpoint_changes_total", ""),
    ("gauge", "sync_proxy_rules_service_changes_pending", ""),
    ("counter", "sync_proxy_rules_service_changes_total", ""),
    ("counter", "sync_proxy_rules_nftables_sync_failures_total", "ip_family"),
    ("counter", "sync_proxy_rules_nftables_cleanup_failures_total", "ip_family"),
    ("gauge", "sync_proxy_rules_no_local_endpoints_total", "traffic_policy,ip_family"),
    ("counter", "proxy_healthz_total", "code"),
    ("counter", "proxy_livez_total", "code"),
    ("histogram", "conntrack_reconciler_sync_duration_seconds", "ip_family"),
    ("counter", "conntrack_reconciler_deleted_entries_total", "ip_family"),
    // The buckets that kube-proxy has, too.
    ("bucket", "sync_proxy_rules_duration_seconds", "0.001,0.002,0.004,1.024,16.384"),
    (
        "bucket",
        "network_programming_duration_seconds",
        "0.25,0.5,1.0,2.0,59.0,60.0,65.0,115.0,120.0,150.0,300.0",
    ),
];

#[test]
fn all_metrics_of_kube_proxy_exist_and_no_others() {
    let (metrics, registry) = registered();
    metrics.show(&[IpFamily::V4]);
    metrics.queued(&[IpFamily::V4]);
    metrics.synced(&[IpFamily::V4], []);
    metrics.without_local_endpoints(&[IpFamily::V4], &BTreeMap::new());
    metrics.count_healthz(200);
    metrics.count_livez(200);
    let text = text(&registry);
    let mut names = BTreeSet::new();
    for (kind, name, expected) in KUBE_PROXY {
        if kind == "bucket" {
            for bound in expected.split(',') {
                assert!(text.contains(&format!("kubeproxy_{name}_bucket{{le=\"{bound}\"")), "{name} {bound}");
            }
            continue;
        }
        let family = if kind == "counter" { name.trim_end_matches("_total") } else { name };
        names.insert(format!("kubeproxy_{family}"));
        assert!(text.contains(&format!("# TYPE kubeproxy_{family} {kind}\n")), "{name} is no {kind}");
        let sample = if kind == "histogram" { format!("{name}_count") } else { name.to_owned() };
        let line = text.lines().find_map(|line| line.strip_prefix(&format!("kubeproxy_{sample}"))).unwrap();
        let labels =
            line.strip_prefix('{').and_then(|rest| rest.split_once('}')).map_or("", |(labels, _)| labels);
        let labels: Vec<_> = labels.split(',').map(|label| label.split('=').next().unwrap()).collect();
        assert_eq!(labels.join(","), expected, "{name}");
    }
    let described = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
    assert_eq!(described.map(str::to_owned).collect::<BTreeSet<_>>(), names);
}
