// SPDX-License-Identifier: Apache-2.0
//! From the file to the agent's settings, and a report of every field. Pure.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use super::fields::{ClientConnection, KubeProxyConfiguration, Logging, Winkernel};
use super::modes::{Mode, report_mode, sections};
use super::report::{Report, invalid};
use super::traffic::{detect_local, node_port_addresses};
use super::{ConfigError, Difference, FileSettings, HostSettings, Treatment, conntrack};
use crate::health::HealthAddress;

/// kube-proxy's ports.
const HEALTHZ_PORT: u16 = 10256;
const METRICS_PORT: u16 = 10249;

/// What the file means for the agent, and a report of each field that says something or whose default the agent does not share.
pub fn translate(
    config: &KubeProxyConfiguration,
    host: &HostSettings,
) -> Result<(FileSettings, Vec<Difference>), ConfigError> {
    let mut report = Report::default();
    let mode = Mode::of(config)?;
    let deny_external_ips = feature_gates(config, &mut report);
    let connection = config.client_connection.clone().unwrap_or_default();
    let kubeconfig = client_connection(&connection, &mut report);
    logging(&config.logging.clone().unwrap_or_default(), &mut report);
    let node_name = given(config.hostname_override.as_deref()).map(|name| name.trim().to_lowercase());
    if let Some(name) = &node_name {
        report.add(Treatment::Applied, "hostnameOverride", name, "as --node-name");
    }
    let bind_address = bind_address(config, &mut report)?;
    let (healthz, metrics_bind_address) = servers(config, &mut report)?;
    report_mode(mode, config, &mut report);
    let masquerade_all = sections(mode, config, &mut report)?;
    windows(config, &mut report);
    let detect_local = detect_local(config, &mut report)?;
    let node_port_addresses = node_port_addresses(mode, config, &mut report)?;
    report.differs(
        "oomScoreAdj",
        config.oom_score_adj,
        "the agent leaves it to kubelet, which gives pods of the priority class system-node-critical -997",
    );
    conntrack::report(&config.conntrack.clone().unwrap_or_default(), host, &mut report)?;
    let resync = "the agent follows its watches, and lists again where one fails";
    report.unused("configSyncPeriod", config.config_sync_period.as_deref(), resync);
    report.unused("portRange", config.port_range.as_deref(), "kube-proxy ignores it, too");
    let settings = FileSettings {
        node_name,
        kubeconfig,
        bind_address,
        healthz,
        metrics_bind_address,
        node_port_addresses,
        detect_local,
        masquerade_all,
        deny_external_ips,
    };
    Ok((settings, report.0))
}

/// Fields that nobody set are empty.
pub(super) fn given(text: Option<&str>) -> Option<&str> {
    text.filter(|text| !text.is_empty())
}

/// Whether external IPs are denied.
fn feature_gates(config: &KubeProxyConfiguration, report: &mut Report) -> bool {
    let mut denied = false;
    for (name, on) in config.feature_gates.iter().flatten() {
        let field = format!("featureGates.{name}");
        match (name.as_str(), on) {
            ("AllowServiceExternalIPs", false) => {
                denied = true;
                report.add(Treatment::Applied, field, on, "as --deny-service-external-ips");
            }
            ("AllowServiceExternalIPs", true) => report.add(
                Treatment::Same,
                field,
                on,
                "external IPs are served, except reserved ones (--deny-service-external-ips)",
            ),
            _ => report.add(Treatment::Differs, field, on, "the agent has no feature gates"),
        }
    }
    denied
}

fn client_connection(connection: &ClientConnection, report: &mut Report) -> Option<std::path::PathBuf> {
    let kubeconfig = given(connection.kubeconfig.as_deref());
    if let Some(path) = kubeconfig {
        report.add(
            Treatment::Applied,
            "clientConnection.kubeconfig",
            path,
            "as --kubeconfig, unless --api-server is given",
        );
    }
    let json = "the agent asks for JSON";
    report.unused("clientConnection.acceptContentTypes", connection.accept_content_types.as_deref(), json);
    report.unused("clientConnection.contentType", connection.content_type.as_deref(), json);
    let rare = "the agent has one watch for each kind, and no rate limit";
    report.unused("clientConnection.qps", connection.qps, rare);
    report.unused("clientConnection.burst", connection.burst, rare);
    kubeconfig.map(Into::into)
}

fn logging(logging: &Logging, report: &mut Report) {
    match given(logging.format.as_deref()) {
        Some("text") => report.add(Treatment::Same, "logging.format", "text", "--log-format text"),
        Some(format) => report.add(
            Treatment::Differs,
            "logging.format",
            format,
            "log lines are text, unless --log-format says otherwise",
        ),
        None => {}
    }
    let klog = "the agent's log lines are not klog's: use --log-level";
    report.unused("logging.flushFrequency", logging.flush_frequency.as_ref(), "lines are written at once");
    report.differs("logging.verbosity", logging.verbosity, klog);
    if logging.vmodule.as_ref().is_some_and(|list| !list.is_empty()) {
        report.add(Treatment::Differs, "logging.vmodule", "(set)", klog);
    }
    if logging.options.is_some() {
        report.add(Treatment::Unused, "logging.options", "(set)", "all lines go to standard error");
    }
}

fn bind_address(config: &KubeProxyConfiguration, report: &mut Report) -> Result<Option<IpAddr>, ConfigError> {
    let Some(text) = given(config.bind_address.as_deref()) else { return Ok(None) };
    let address: IpAddr = text.parse().map_err(|_| invalid("bindAddress", text, "not an IP address"))?;
    if address.is_unspecified() {
        report.add(Treatment::Same, "bindAddress", text, "the Node's status has the node's addresses");
        return Ok(None);
    }
    report.add(Treatment::Applied, "bindAddress", text, "as --bind-address");
    Ok(Some(address))
}

/// An address of the form IP or IP:PORT.
fn socket(field: &'static str, text: &str, port: u16) -> Result<SocketAddr, ConfigError> {
    let bare = text.trim_start_matches('[').trim_end_matches(']').parse().map(|ip| SocketAddr::new(ip, port));
    bare.or_else(|_| text.parse()).map_err(|_| invalid(field, text, "neither IP nor IP:PORT"))
}

/// Where health and metrics are served.
fn servers(
    config: &KubeProxyConfiguration,
    report: &mut Report,
) -> Result<(HealthAddress, SocketAddr), ConfigError> {
    let healthz = match given(config.healthz_bind_address.as_deref()) {
        None => HealthAddress::all(HEALTHZ_PORT),
        Some(text) => {
            let socket = socket("healthzBindAddress", text, HEALTHZ_PORT)?;
            let ip = Some(socket.ip()).filter(|ip| !ip.is_unspecified());
            report.add(
                Treatment::Applied,
                "healthzBindAddress",
                text,
                "as --healthz-port, beside port 10356",
            );
            HealthAddress { ip, port: socket.port() }
        }
    };
    // With an IPv6 bindAddress kube-proxy takes ::1; both are this host only.
    let metrics = match given(config.metrics_bind_address.as_deref()) {
        None => SocketAddr::from((Ipv4Addr::LOCALHOST, METRICS_PORT)),
        Some(text) => {
            let socket = socket("metricsBindAddress", text, METRICS_PORT)?;
            report.add(Treatment::Applied, "metricsBindAddress", text, "as --metrics-bind-address");
            socket
        }
    };
    report.differs(
        "bindAddressHardFail",
        config.bind_address_hard_fail,
        "the agent tries an address that is in use again; only --admin-address in use ends it",
    );
    report.differs("enableProfiling", config.enable_profiling, "the agent has no profiler");
    report.unused(
        "showHiddenMetricsForVersion",
        config.show_hidden_metrics_for_version.as_deref(),
        "the agent hides no metrics",
    );
    Ok((healthz, metrics))
}

fn windows(config: &KubeProxyConfiguration, report: &mut Report) {
    let why = "it is for Windows only";
    let winkernel = config.winkernel.clone().unwrap_or_default();
    let Winkernel { network_name, source_vip, enable_dsr, root_hns_endpoint_name, forward_health_check_vip } =
        winkernel;
    report.unused("winkernel.networkName", network_name, why);
    report.unused("winkernel.sourceVip", source_vip, why);
    report.unused("winkernel.enableDSR", enable_dsr, why);
    report.unused("winkernel.rootHnsEndpointName", root_hns_endpoint_name, why);
    report.unused("winkernel.forwardHealthCheckVip", forward_health_check_vip, why);
    report.unused("windowsRunAsService", config.windows_run_as_service, why);
}
