// SPDX-License-Identifier: Apache-2.0
//! The kernel settings that kube-proxy writes when it starts. The agent writes none: this says which the host lacks.

use std::time::Duration;

use super::fields::Conntrack;
use super::report::{Report, duration};
use super::{ConfigError, HostSettings, Treatment};

/// kube-proxy's defaults.
const MAX_PER_CORE: u64 = 32 * 1024;
const MIN: u64 = 128 * 1024;
const ESTABLISHED: Duration = Duration::from_hours(24);
const CLOSE_WAIT: Duration = Duration::from_hours(1);
/// More entries kube-proxy asks for only if `min` does.
const LIMIT: u64 = 1024 * 1024;

/// The settings that kube-proxy may write, below `net.netfilter.`.
pub const SETTINGS: [&str; 6] = [
    "net.netfilter.nf_conntrack_max",
    "net.netfilter.nf_conntrack_tcp_timeout_established",
    "net.netfilter.nf_conntrack_tcp_timeout_close_wait",
    "net.netfilter.nf_conntrack_tcp_be_liberal",
    "net.netfilter.nf_conntrack_udp_timeout",
    "net.netfilter.nf_conntrack_udp_timeout_stream",
];

/// The size of the table that kube-proxy sets; 0: none.
fn max(conntrack: &Conntrack, processors: usize) -> u64 {
    let per_core = conntrack.max_per_core.unwrap_or(MAX_PER_CORE);
    if per_core == 0 {
        return 0;
    }
    let scaled = per_core.saturating_mul(u64::try_from(processors).unwrap_or(u64::MAX));
    if scaled > LIMIT { LIMIT } else { scaled.max(conntrack.min.unwrap_or(MIN)) }
}

/// Reports each setting that kube-proxy would write.
pub(super) fn report(
    conntrack: &Conntrack,
    host: &HostSettings,
    report: &mut Report,
) -> Result<(), ConfigError> {
    let seconds = |field, text: &Option<String>, default: Duration| {
        let given = text.as_deref().map(|text| duration(field, text)).transpose()?;
        Ok::<_, ConfigError>(given.unwrap_or(default).as_secs())
    };
    let established = ("conntrack.tcpEstablishedTimeout", &conntrack.tcp_established_timeout);
    let close_wait = ("conntrack.tcpCloseWaitTimeout", &conntrack.tcp_close_wait_timeout);
    let udp = ("conntrack.udpTimeout", &conntrack.udp_timeout);
    let udp_stream = ("conntrack.udpStreamTimeout", &conntrack.udp_stream_timeout);
    let values = [
        ("conntrack.maxPerCore", max(conntrack, host.processors)),
        (established.0, seconds(established.0, established.1, ESTABLISHED)?),
        (close_wait.0, seconds(close_wait.0, close_wait.1, CLOSE_WAIT)?),
        ("conntrack.tcpBeLiberal", u64::from(conntrack.tcp_be_liberal.unwrap_or(false))),
        (udp.0, seconds(udp.0, udp.1, Duration::ZERO)?),
        (udp_stream.0, seconds(udp_stream.0, udp_stream.1, Duration::ZERO)?),
    ];
    for ((field, wanted), setting) in values.into_iter().zip(SETTINGS) {
        if wanted == 0 {
            continue;
        }
        let found = host.settings.iter().find(|(name, _)| *name == setting).map(|(_, value)| *value);
        let (treatment, text) = match found {
            // kube-proxy makes a larger table smaller, which nobody needs.
            Some(value) if value == wanted || (setting == SETTINGS[0] && value > wanted) => {
                (Treatment::Same, format!("this host has {setting} = {value}"))
            }
            Some(value) => (
                Treatment::Differs,
                format!(
                    "the agent changes no kernel setting, and this host has {value}: sysctl -w {setting}={wanted}"
                ),
            ),
            None => (
                Treatment::Differs,
                format!("the agent changes no kernel setting: sysctl -w {setting}={wanted}"),
            ),
        };
        report.add(treatment, field, wanted, text);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conntrack_is_sized_as_kube_proxy_does() {
        let conntrack = |max_per_core, min| Conntrack { max_per_core, min, ..Conntrack::default() };
        for (conntrack, processors, expected) in [
            (conntrack(None, None), 2, 131_072),
            (conntrack(None, None), 8, 262_144),
            (conntrack(None, None), 64, 1_048_576),
            (conntrack(Some(0), Some(500_000)), 8, 0),
            (conntrack(Some(1000), Some(0)), 4, 4000),
            (conntrack(Some(1000), Some(2_000_000)), 4, 2_000_000),
        ] {
            assert_eq!(max(&conntrack, processors), expected, "{conntrack:?}");
        }
    }
}
