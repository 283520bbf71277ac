// SPDX-License-Identifier: Apache-2.0
//! Reports what is not served as a Service requests it: in the log, and by events on the Service. Called by the loop after each write.

use std::time::Duration;

use steerage_model::{Key, Service};
use steerage_watch::Index;
use steerage_watch::events::{NamespaceLimits, Notice, Recorder, Severity, Subject};
use tokio::time::Instant;

use super::log_lines::LogLines;
use crate::plan::{Frontend, Reduced, ReducedService, RefusedExternalIp, Shadowed};
use crate::rules::Ruleset;

/// Nodes publish within this time, and not all in one second.
const SPREAD: Duration = Duration::from_secs(30);

/// Limits the events and the lines in the log.
#[derive(Debug, Default)]
pub(super) struct UnservedReports {
    limits: NamespaceLimits,
    lines: LogLines,
}

impl UnservedReports {
    /// Reports what the last update of `ruleset` left unserved.
    pub(super) fn report(&mut self, ruleset: &mut Ruleset, index: &Index, node: &str, recorder: &Recorder) {
        for Shadowed { service, by, frontend } in ruleset.take_shadowed() {
            if self.lines.may_write(service.namespace()) {
                tracing::warn!(%service, %by, %frontend, "another Service is served at a frontend of this Service");
            }
            let service = index.service(&service);
            if let Some(note) = service.and_then(|service| shadowed_note(node, service, &by, frontend)) {
                self.publish(recorder, service, "ExternalIPNotServed", note);
            }
        }
        for RefusedExternalIp { service, addr, refusal } in ruleset.take_refused() {
            if self.lines.may_write(service.namespace()) {
                tracing::warn!(
                    %service, %addr, reason = %refusal,
                    "external IP not served at one port of its Service or more; remove it from the Service, or run steerage-agent explain"
                );
            }
            let note = format!("Node {node} does not serve the external IP {addr}: {refusal}.");
            self.publish(recorder, index.service(&service), "ExternalIPNotServed", note);
        }
        for ReducedService { service, reduced } in ruleset.take_reduced() {
            let Reduced { needs, limit, endpoints, sources, frontends } = reduced;
            if self.lines.may_write(service.namespace()) {
                tracing::warn!(
                    %service, needs, limit, endpoints, source_ranges_left_out = sources, frontends_left_out = frontends,
                    "Service needs more elements than it may have, or more endpoints than a list has; serving a part of its endpoints"
                );
            }
            self.publish(recorder, index.service(&service), "ServiceTooLarge", note(node, &service, reduced));
        }
    }

    fn publish(
        &mut self,
        recorder: &Recorder,
        service: Option<&Service>,
        reason: &'static str,
        note: String,
    ) {
        let may = |service: &&Service| self.limits.take(service.key.namespace(), Instant::now());
        let Some(service) = service.filter(may) else { return };
        let (subject, recorder) = (Subject::service(service), recorder.clone());
        tokio::spawn(async move {
            tokio::time::sleep(SPREAD.mul_f64(fastrand::f64())).await;
            recorder.publish(Notice { subject, severity: Severity::Warning, reason, action: "Serve", note });
        });
    }
}

/// The note of an external IP at which another Service is served. A tenant learns no name of another namespace by trying addresses.
fn shadowed_note(node: &str, service: &Service, by: &Key, frontend: Frontend) -> Option<String> {
    let Frontend { addr, protocol, port } = frontend;
    let is_external = service.external_ips.contains(&addr) && service.ports.iter().any(|of| of.port == port);
    let is_own = by.namespace() == service.key.namespace();
    let by =
        if is_own { format!("Service {}", by.name()) } else { "a Service of another namespace".to_owned() };
    is_external.then(|| {
        format!(
            "Node {node} does not serve the external IP {addr} at port {port}/{protocol}: {by} was assigned it, or has the same external IP and is older. Use another address or port."
        )
    })
}

fn note(node: &str, service: &Key, reduced: Reduced) -> String {
    let Reduced { needs, limit, endpoints, sources, frontends } = reduced;
    if needs <= limit {
        return format!(
            "Node {node} serves {endpoints} endpoints of a port: a list has no more. Other nodes serve other ones. Use several Services."
        );
    }
    let mut left_out = match frontends {
        0 => String::new(),
        frontends => format!(", and {frontends} of its addresses and ports not at all"),
    };
    if sources > 0 {
        left_out = format!("{left_out}, and drops clients in {sources} of its source ranges");
    }
    format!(
        "Node {node} serves at most {endpoints} endpoint(s) of each port{left_out}: the Service needs {needs} elements of \
         nftables, and may have {limit}: --max-service-elements of the agent, or its share of the --max-namespace-elements of namespace {}. \
         Use fewer ports, endpoints or source ranges, or raise them.",
        service.namespace()
    )
}

#[cfg(test)]
mod tests {
    use steerage_model::{Protocol, ServicePort};

    use super::*;

    #[test]
    fn external_ip_of_another_service_is_told_without_names_of_other_namespaces() {
        let addr = "192.0.2.1".parse().expect("address");
        let ports = vec![ServicePort::new("web", Protocol::Tcp, 80, Some(81))];
        let service = Service { external_ips: vec![addr], ports, ..Service::new(Key::new("shop", "web")) };
        let note =
            |by, port| shadowed_note("a", &service, &by, Frontend { addr, protocol: Protocol::Tcp, port });
        let start = "Node a does not serve the external IP 192.0.2.1 at port 80/TCP: ";
        let same = note(Key::new("shop", "old"), 80).expect("an external IP");
        assert_eq!(
            same,
            format!(
                "{start}Service old was assigned it, or has the same external IP and is older. Use another address or port."
            )
        );
        let other = note(Key::new("bank", "vault"), 80).expect("an external IP");
        assert_eq!(
            other,
            format!(
                "{start}a Service of another namespace was assigned it, or has the same external IP and is older. Use another address or port."
            )
        );
        assert_eq!(note(Key::new("shop", "old"), 81), None, "its node port");
        let assigned = Service { external_ips: Vec::new(), ..service.clone() };
        let frontend = Frontend { addr, protocol: Protocol::Tcp, port: 80 };
        assert_eq!(shadowed_note("a", &assigned, &Key::new("shop", "old"), frontend), None, "its own VIP");
    }

    #[test]
    fn note_says_what_is_left_out() {
        let reduced = Reduced { needs: 129_000, limit: 100_000, endpoints: 95, sources: 0, frontends: 0 };
        let note = |reduced| note("a", &Key::new("shop", "web"), reduced);
        assert!(
            note(reduced).starts_with("Node a serves at most 95 endpoint(s) of each port: the Service needs")
        );
        let too_long = Reduced { needs: 16_500, endpoints: 16_384, ..reduced };
        assert!(note(too_long).starts_with("Node a serves 16384 endpoints of a port: a list has no more."));
        let reduced = Reduced { endpoints: 1, frontends: 12, ..reduced };
        assert!(note(reduced).contains("each port, and 12 of its addresses and ports not at all: "));
        let reduced = Reduced { sources: 7, ..reduced };
        assert!(note(reduced).contains("not at all, and drops clients in 7 of its source ranges: "));
    }
}
