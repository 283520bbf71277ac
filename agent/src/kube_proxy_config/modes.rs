// SPDX-License-Identifier: Apache-2.0
//! kube-proxy's modes, and the sections of the file that belong to them.

use std::time::Duration;

use super::fields::{Ipvs, KubeProxyConfiguration};
use super::report::{Report, duration, invalid};
use super::{ConfigError, Treatment};

/// How often kube-proxy writes everything again, after failures and for its health.
const SYNC_PERIOD: Duration = Duration::from_secs(30);

/// kube-proxy's way to serve Services.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    IpTables,
    Ipvs,
    NfTables,
}

impl Mode {
    pub(super) fn of(config: &KubeProxyConfiguration) -> Result<Self, ConfigError> {
        match config.mode.as_deref().unwrap_or_default() {
            "" | "iptables" => Ok(Self::IpTables),
            "ipvs" => Ok(Self::Ipvs),
            "nftables" => Ok(Self::NfTables),
            other => Err(invalid("mode", other, "not a mode of kube-proxy on Linux")),
        }
    }
}

/// Reports the mode itself.
pub(super) fn report_mode(mode: Mode, config: &KubeProxyConfiguration, report: &mut Report) {
    let given = config.mode.as_deref().unwrap_or_default();
    match mode {
        Mode::NfTables => report.add(Treatment::Same, "mode", given, "tables of nftables"),
        Mode::IpTables => report.add(
            Treatment::Differs,
            "mode",
            given,
            "the agent serves as in mode nftables: no node ports on 127.0.0.1, and iptables rules that expect KUBE- chains find none",
        ),
        Mode::Ipvs => report.add(
            Treatment::Differs,
            "mode",
            given,
            "the agent serves as in mode nftables: no kube-ipvs0 has the cluster IPs, so they do not answer pings",
        ),
    }
}

/// Why a field of another mode's section does nothing.
const OTHER_MODE: &str = "it is of another mode";

/// The sections of kube-proxy's modes. Returns whether everything is masqueraded.
pub(super) fn sections(
    mode: Mode,
    config: &KubeProxyConfiguration,
    report: &mut Report,
) -> Result<bool, ConfigError> {
    let iptables = config.iptables.clone().unwrap_or_default();
    let ipvs = config.ipvs.clone().unwrap_or_default();
    let nftables = config.nftables.clone().unwrap_or_default();
    // IPVS takes its masquerading from the section of iptables, and its periods from its own.
    let of_iptables = (iptables.masquerade_all, iptables.masquerade_bit);
    let of_nftables = (nftables.masquerade_all, nftables.masquerade_bit);
    let masquerade_all = masquerading("iptables", mode != Mode::NfTables, of_iptables, report)
        | masquerading("nftables", mode == Mode::NfTables, of_nftables, report);
    if iptables.localhost_node_ports.unwrap_or(true) && mode == Mode::IpTables {
        let instead = "node ports are not served on 127.0.0.1";
        report.add(Treatment::Differs, "iptables.localhostNodePorts", true, instead);
    }
    let fields = ["iptables.syncPeriod", "iptables.minSyncPeriod"];
    let values = [iptables.sync_period, iptables.min_sync_period];
    periods(mode == Mode::IpTables, fields, values, report)?;
    let values = [ipvs.sync_period.clone(), ipvs.min_sync_period.clone()];
    periods(mode == Mode::Ipvs, ["ipvs.syncPeriod", "ipvs.minSyncPeriod"], values, report)?;
    let fields = ["nftables.syncPeriod", "nftables.minSyncPeriod"];
    periods(mode == Mode::NfTables, fields, [nftables.sync_period, nftables.min_sync_period], report)?;
    report_ipvs(mode == Mode::Ipvs, &ipvs, report);
    Ok(masquerade_all)
}

/// Returns whether the section has everything masqueraded.
fn masquerading(
    section: &str,
    in_use: bool,
    (all, bit): (Option<bool>, Option<u32>),
    report: &mut Report,
) -> bool {
    report.unused(&format!("{section}.masqueradeBit"), bit, "the agent marks no packets");
    if all != Some(true) {
        return false;
    }
    let field = format!("{section}.masqueradeAll");
    if in_use {
        report.add(Treatment::Applied, field, true, "as --masquerade-all");
    } else {
        report.add(Treatment::Unused, field, true, OTHER_MODE);
    }
    in_use
}

fn periods(
    in_use: bool,
    [sync_field, min_field]: [&'static str; 2],
    [sync, min]: [Option<String>; 2],
    report: &mut Report,
) -> Result<(), ConfigError> {
    if !in_use {
        report.unused(sync_field, sync, OTHER_MODE);
        report.unused(min_field, min, OTHER_MODE);
        return Ok(());
    }
    if let Some(text) = sync {
        let period = duration(sync_field, &text)?;
        if period == SYNC_PERIOD {
            let same = "health fails when a write has been due for 60s";
            report.add(Treatment::Same, sync_field, text, same);
        } else if !period.is_zero() {
            let instead = "the agent writes at once, retries within 10s, and its health fails when a write has been due for 60s";
            report.add(Treatment::Differs, sync_field, text, instead);
        }
    }
    if let Some(text) = min {
        duration(min_field, &text)?;
        let instead = "the agent writes at once; what changes during a write is the next one";
        report.differs(min_field, Some(text), instead);
    }
    Ok(())
}

fn report_ipvs(in_use: bool, ipvs: &Ipvs, report: &mut Report) {
    let mut of_ipvs = |field: &str, value: Option<&str>, instead: &str| {
        if in_use {
            report.differs(field, value, instead);
        } else {
            report.unused(field, value, OTHER_MODE);
        }
    };
    let evenly = "endpoints are chosen evenly, by a hash of the connection";
    of_ipvs("ipvs.scheduler", ipvs.scheduler.as_deref(), evenly);
    for (field, value) in ipvs.timeouts() {
        of_ipvs(field, value, "connections belong to conntrack, with its time-outs");
    }
    let excluded = ipvs.exclude_cidrs.as_ref().filter(|list| !list.is_empty()).map(|list| list.join(","));
    let others = "the agent has no virtual servers of IPVS, and leaves others alone";
    report.unused("ipvs.excludeCIDRs", excluded, others);
    let no_arp = "no interface has the addresses of Services, so ARP needs no setting";
    report.unused("ipvs.strictARP", ipvs.strict_arp, no_arp);
}
