// SPDX-License-Identifier: Apache-2.0
//! TLS listeners by annotations: their ports, certificates and policies. Pure. `desired` uses it.

use std::collections::{BTreeMap, BTreeSet};

use steerage_model::{Protocol, shown};
use steerage_provider_api::{Error, Listener};
use steerage_provider_cloud::annotation;

use crate::annotations::{ALPN_POLICY, BACKEND_PROTOCOL, SSL_CERT, SSL_POLICY, SSL_PORTS};

/// AWS's limit for one load balancer, without the default ones.
const MAX_CERTIFICATES: usize = 25;
/// The policy without an annotation: AWS's own default, and that of its controllers.
const DEFAULT_POLICY: &str = "ELBSecurityPolicy-2016-08";
const ALPN_POLICIES: &[&str] = &["HTTP1Only", "HTTP2Only", "HTTP2Optional", "HTTP2Preferred", "None"];

/// What a TLS listener has beside its target group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tls {
    /// ARN of the default certificate.
    pub(crate) certificate: String,
    /// ARNs of the certificates that clients choose by name.
    pub(crate) others: BTreeSet<String>,
    pub(crate) policy: String,
    pub(crate) alpn: String,
}

/// The changes of the certificates that a TLS listener has beside its default one. AWS's list may contain the default one too, and
/// does not let go of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Recertify {
    /// Removed first, where AWS's limit leaves no room for the others.
    pub(crate) room: BTreeSet<String>,
    /// Added before another certificate becomes the default one, so that clients find the old one all the time.
    pub(crate) added: BTreeSet<String>,
    /// Removed last.
    pub(crate) left: BTreeSet<String>,
    /// Added only then: the default certificates, old and new, hold the room for it.
    pub(crate) late: BTreeSet<String>,
}

impl Tls {
    /// The changes from the certificates of a listener; it has none without TLS.
    pub(crate) fn recertify(&self, seen: Option<&Self>) -> Recertify {
        let Some(seen) = seen else {
            return Recertify { added: self.others.clone(), ..Recertify::default() };
        };
        let added = &self.others - &seen.others;
        let mut left = &seen.others - &self.others;
        left.remove(&self.certificate);
        let over = (seen.others.len() + added.len()).saturating_sub(MAX_CERTIFICATES);
        let room: BTreeSet<String> =
            left.iter().filter(|arn| **arn != seen.certificate).take(over).cloned().collect();
        let left = &left - &room;
        let free = (MAX_CERTIFICATES + room.len()).saturating_sub(seen.others.len());
        let (old_default, new): (BTreeSet<String>, BTreeSet<String>) =
            added.into_iter().partition(|arn| *arn == seen.certificate);
        let mut added = old_default.into_iter().chain(new);
        let early = added.by_ref().take(free).collect();
        Recertify { room, added: early, left, late: added.collect() }
    }

    /// What clients see: AWS's list may contain the default certificate too.
    #[cfg(any(test, feature = "stand-in"))]
    pub(crate) fn without_default(mut self) -> Self {
        self.others.remove(&self.certificate);
        self
    }

    /// Whether a listener has the same, except for the other certificates.
    pub(crate) fn is_set_as(&self, seen: &Self) -> bool {
        (&self.certificate, &self.policy, &self.alpn) == (&seen.certificate, &seen.policy, &seen.alpn)
    }
}

/// What the annotations say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TlsWishes {
    /// `None` without a certificate.
    tls: Option<Tls>,
    /// `None` means all ports with TCP alone.
    ports: Option<BTreeSet<u16>>,
    /// Whether targets are reached by TLS too.
    to_targets: bool,
}

/// The certificates, the default one first.
fn certificates(annotations: &BTreeMap<String, String>) -> Result<Vec<String>, Error> {
    let Some(text) = annotations.get(SSL_CERT) else { return Ok(Vec::new()) };
    let found: Vec<String> = annotation::items(text).map(str::to_owned).collect();
    let is_arn =
        |item: &String| item.starts_with("arn:") && (item.contains(":acm:") || item.contains(":iam:"));
    let problem = if let Some(wrong) = found.iter().find(|item| !is_arn(item)) {
        format!("names the certificate `{}`, which is not an ARN of ACM or IAM", shown(wrong))
    } else if found.is_empty() {
        "is empty".to_owned()
    } else if found.len() > MAX_CERTIFICATES {
        format!("names {} certificates, but AWS supports {MAX_CERTIFICATES}", found.len())
    } else if found.iter().collect::<BTreeSet<_>>().len() < found.len() {
        "names a certificate twice".to_owned()
    } else {
        return Ok(found);
    };
    Err(annotation::invalid(
        SSL_CERT,
        &problem,
        "List the ARNs of the certificates, separated by commas, or remove it.",
    ))
}

/// The ports with these names and numbers; `None` for all.
fn ports(text: &str, listeners: &[Listener]) -> Result<Option<BTreeSet<u16>>, Error> {
    if text.trim() == "*" {
        return Ok(None);
    }
    let mut ports = BTreeSet::new();
    for item in annotation::items(text) {
        let is_it = |port: &&Listener| port.name == item || port.port.to_string() == item;
        let found: Vec<&Listener> = listeners.iter().filter(is_it).collect();
        if found.is_empty() {
            let problem = format!("names the port `{}`, which the Service does not have", shown(item));
            return Err(annotation::invalid(
                SSL_PORTS,
                &problem,
                "Use names or numbers of the Service's ports.",
            ));
        }
        if let Some(udp) = found.iter().find(|port| port.protocol != Protocol::Tcp) {
            return Err(annotation::conflict(
                &format!("Annotation {SSL_PORTS} names the port {}, but UDP cannot have TLS.", udp.port),
                "Remove the port from the annotation.",
            ));
        }
        ports.extend(found.iter().map(|port| port.port));
    }
    if ports.is_empty() {
        return Err(annotation::invalid(
            SSL_PORTS,
            "is empty",
            "Use names or numbers of the Service's ports, or *.",
        ));
    }
    Ok(Some(ports))
}

impl TlsWishes {
    /// Reads the annotations.
    pub(crate) fn read(
        annotations: &BTreeMap<String, String>,
        listeners: &[Listener],
    ) -> Result<Self, Error> {
        let get = |name: &str| annotations.get(name).map(|text| text.trim());
        let one_of = |name: &'static str, default: &'static str, values: &[&str]| {
            let value = get(name).unwrap_or(default);
            let wrong = || {
                let problem = format!("has the wrong value `{}`", shown(value));
                annotation::invalid(name, &problem, &format!("Use {}.", values.join(" or ")))
            };
            if values.contains(&value) { Ok(value.to_owned()) } else { Err(wrong()) }
        };
        let backend = one_of(BACKEND_PROTOCOL, "tcp", &["tcp", "ssl"])?;
        let alpn = one_of(ALPN_POLICY, "None", ALPN_POLICIES)?;
        let policy = get(SSL_POLICY).unwrap_or(DEFAULT_POLICY).to_owned();
        if policy.is_empty() || policy.contains(|c: char| !c.is_ascii_alphanumeric() && c != '-') {
            let problem = format!("has the wrong value `{}`", shown(&policy));
            return Err(annotation::invalid(
                SSL_POLICY,
                &problem,
                "Use the name of a security policy of AWS.",
            ));
        }
        let mut certificates = certificates(annotations)?.into_iter();
        let Some(certificate) = certificates.next() else {
            let of_tls = [
                (SSL_PORTS, true),
                (SSL_POLICY, true),
                (ALPN_POLICY, alpn != "None"),
                (BACKEND_PROTOCOL, backend == "ssl"),
            ];
            let alone = of_tls.iter().find(|(name, matters)| *matters && annotations.contains_key(*name));
            return match alone {
                None => Ok(Self::default()),
                Some((name, _)) => Err(annotation::conflict(
                    &format!("Annotation {name} is for TLS listeners, but the Service names no certificate."),
                    &format!("Name one with {SSL_CERT}, or remove the annotation."),
                )),
            };
        };
        let ports = get(SSL_PORTS).map(|text| ports(text, listeners)).transpose()?.flatten();
        let tls = Tls { certificate, others: certificates.collect(), policy, alpn };
        Ok(Self { tls: Some(tls), ports, to_targets: backend == "ssl" })
    }

    /// What the listener of a port has, and the protocols of listener and target group, from those without TLS.
    pub(crate) fn of(
        &self,
        port: u16,
        protocol: &'static str,
    ) -> Result<(Option<Tls>, &'static str, &'static str), Error> {
        let is_named = self.ports.as_ref().is_none_or(|ports| ports.contains(&port));
        match &self.tls {
            Some(_) if is_named && protocol == "TCP_UDP" => Err(annotation::conflict(
                &format!("Port {port} has TCP and UDP, which share a listener, but UDP cannot have TLS."),
                &format!("Name the ports with TLS in {SSL_PORTS}, or put the UDP port into another Service."),
            )),
            Some(tls) if is_named && protocol == "TCP" => {
                Ok((Some(tls.clone()), "TLS", if self.to_targets { "TLS" } else { "TCP" }))
            }
            _ => Ok((None, protocol, protocol)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CERT: &str = "arn:aws:acm:eu-west-1:1:certificate/a";
    const OTHER: &str = "arn:aws:iam::1:server-certificate/b";

    fn listeners() -> Vec<Listener> {
        let listener = |name: &str, protocol, port| Listener {
            name: name.to_owned(),
            protocol,
            port,
            group: steerage_provider_api::GroupKey::NodePort(30000),
        };
        vec![
            listener("http", Protocol::Tcp, 80),
            listener("https", Protocol::Tcp, 443),
            listener("dns", Protocol::Udp, 53),
        ]
    }

    fn read(pairs: &[(&str, &str)]) -> Result<TlsWishes, (&'static str, String)> {
        let annotations =
            pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        TlsWishes::read(&annotations, &listeners()).map_err(|error| (error.reason(), error.to_string()))
    }

    fn protocols(wishes: &TlsWishes) -> Vec<(&'static str, &'static str)> {
        let of = |(port, protocol)| {
            wishes.of(port, protocol).map(|(_, listener, group)| (listener, group)).unwrap()
        };
        [(80, "TCP"), (443, "TCP"), (53, "UDP")].map(of).into()
    }

    #[test]
    fn certificate_makes_named_or_all_tcp_ports_tls() {
        let plain = [("TCP", "TCP"), ("TCP", "TCP"), ("UDP", "UDP")];
        assert_eq!(protocols(&read(&[]).unwrap()), plain);
        assert_eq!(protocols(&read(&[(BACKEND_PROTOCOL, "tcp"), (ALPN_POLICY, "None")]).unwrap()), plain);
        for all in [&[(SSL_CERT, CERT)][..], &[(SSL_CERT, CERT), (SSL_PORTS, "*")]] {
            assert_eq!(protocols(&read(all).unwrap()), [("TLS", "TCP"), ("TLS", "TCP"), ("UDP", "UDP")]);
        }
        for ports in ["https", "443", " https ,443"] {
            let wishes = read(&[(SSL_CERT, CERT), (SSL_PORTS, ports), (BACKEND_PROTOCOL, "ssl")]).unwrap();
            assert_eq!(protocols(&wishes), [("TCP", "TCP"), ("TLS", "TLS"), ("UDP", "UDP")]);
        }
    }

    #[test]
    fn first_certificate_is_the_default() {
        let wishes =
            read(&[(SSL_CERT, &format!("{OTHER}, {CERT}")), (ALPN_POLICY, "HTTP2Preferred")]).unwrap();
        let tls = wishes.of(443, "TCP").unwrap().0.unwrap();
        assert_eq!((tls.certificate.as_str(), tls.others.len()), (OTHER, 1));
        assert_eq!((tls.policy.as_str(), tls.alpn.as_str()), ("ELBSecurityPolicy-2016-08", "HTTP2Preferred"));
    }

    #[test]
    fn wrong_annotations_are_refused() {
        let twice = format!("{CERT},{CERT}");
        let many = (0..26).map(|i| format!("{CERT}{i}")).collect::<Vec<_>>().join(",");
        let with = |name, value| vec![(SSL_CERT, CERT), (name, value)];
        for (pairs, reason, part) in [
            (vec![(SSL_CERT, "my-cert")], "InvalidAnnotation", "my-cert"),
            (vec![(SSL_CERT, "")], "InvalidAnnotation", "empty"),
            (vec![(SSL_CERT, twice.as_str())], "InvalidAnnotation", "twice"),
            (vec![(SSL_CERT, many.as_str())], "InvalidAnnotation", "25"),
            (with(SSL_PORTS, "8443"), "InvalidAnnotation", "8443"),
            (with(SSL_PORTS, ","), "InvalidAnnotation", "empty"),
            (with(SSL_PORTS, "dns"), "ConflictingAnnotations", "UDP"),
            (with(SSL_POLICY, "a b"), "InvalidAnnotation", "a b"),
            (with(ALPN_POLICY, "HTTP3"), "InvalidAnnotation", "HTTP2Only"),
            (with(BACKEND_PROTOCOL, "http"), "InvalidAnnotation", "tcp or ssl"),
            (vec![(SSL_PORTS, "443")], "ConflictingAnnotations", SSL_CERT),
            (vec![(BACKEND_PROTOCOL, "ssl")], "ConflictingAnnotations", SSL_CERT),
            (vec![(ALPN_POLICY, "HTTP2Only")], "ConflictingAnnotations", SSL_CERT),
        ] {
            let (found, message) = read(&pairs).unwrap_err();
            assert_eq!(found, reason, "{message}");
            assert!(message.contains(part) && message.contains("No load balancer"), "{message}");
        }
        let shared = read(&[(SSL_CERT, CERT)]).unwrap().of(443, "TCP_UDP").unwrap_err();
        assert_eq!(shared.reason(), "ConflictingAnnotations");
    }
}
