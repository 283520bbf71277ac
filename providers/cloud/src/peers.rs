// SPDX-License-Identifier: Apache-2.0
//! The annotations of a cloud's other controllers, and which of them the provider accepts. Pure. A provider checks each Service, so that
//! an annotation is never ignored: a load balancer that looks configured would be more open than its owner believes.

use std::collections::BTreeMap;

use steerage_model::names;
use steerage_provider_api::Error;

use crate::reasons;

/// An annotation that another controller reads, and the provider does not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerAnnotation {
    /// The name after [`PeerAnnotations::prefix`]. If it ends with a dot, more follows in the annotation.
    pub suffix: &'static str,
    /// Values that are accepted, because they request what Steerage does anyway.
    pub accepted: &'static [&'static str],
    /// Why other values are refused, or what to use instead: a sentence.
    pub why: &'static str,
}

/// The annotations of a cloud's other controllers.
#[derive(Clone, Copy, Debug)]
pub struct PeerAnnotations {
    /// All names start with it.
    pub prefix: &'static str,
    /// What follows where an annotation certainly concerns a load balancer of the cloud, so that an unknown name is an error: `""` if all
    /// with the prefix do, `None` if none does.
    pub own: Option<&'static str>,
    /// Those that the provider does not read.
    pub unread: &'static [PeerAnnotation],
}

/// A name is a typing error of a known one if so few letters differ. Names of clouds differ in three at least: `aws-…` and `oci-…`.
const MAX_TYPOS: usize = 2;
/// Names of others that are compared with known ones: whoever writes thousands gets no more attention.
const MAX_COMPARED: usize = 100;

/// The letters and digits of a name: people confuse its separators, and the case.
fn letters(name: &str) -> String {
    name.chars().filter(char::is_ascii_alphanumeric).map(|letter| letter.to_ascii_lowercase()).collect()
}

/// What follows the domain.
fn last(name: &str) -> &str {
    name.rsplit('/').next().unwrap_or_default()
}

/// A name that begins as a known one does, or ends earlier, is close if it has so many letters: one letter begins many names.
const SHORTEST_PART: usize = 3;

/// The known name that is nearest, if it is worth a mention.
pub(crate) fn nearest<T: AsRef<str>>(name: &str, known: impl Iterator<Item = T>) -> Option<T> {
    let distance = |a: &str, b: &str| strsim::levenshtein(&letters(a), &letters(b));
    let nearest = known.min_by_key(|known| {
        let known = known.as_ref();
        (distance(last(name), last(known)), distance(name, known))
    });
    nearest.filter(|known| is_close(last(name), last(known.as_ref())))
}

/// Whether a known name is worth a mention: after the words with which both begin, a third of the letters differs at most. Those words are
/// the same in most names, such as `load-balancer-`.
fn is_close(name: &str, known: &str) -> bool {
    let written = letters(name);
    let heads = known.rmatch_indices('-').filter_map(|(dash, _)| known.get(..dash)).map(letters);
    let same = heads.map(|head| head.len()).find(|same| written.get(..*same) == letters(known).get(..*same));
    let rest = |name: &str| letters(name).get(same.unwrap_or_default()..).unwrap_or_default().to_owned();
    let (name, known) = (rest(name), rest(known));
    strsim::levenshtein(&name, &known) <= MAX_TYPOS.max(name.len() / 3)
        || (name.len().min(known.len()) >= SHORTEST_PART
            && (name.starts_with(&known) || known.starts_with(&name)))
}

impl PeerAnnotations {
    /// Refuses an annotation that another controller would obey, whose name nobody knows, or whose name is almost a known one. `read` are
    /// the names that the provider reads.
    pub fn check(&self, annotations: &BTreeMap<String, String>, read: &[&'static str]) -> Result<(), Error> {
        let mut compared = 0;
        for (name, value) in annotations {
            let Some(suffix) = name.strip_prefix(self.prefix) else {
                if self.is_at_other_domain(name, read) {
                    return Err(self.unknown(name, read));
                }
                continue;
            };
            if read.contains(&name.as_str()) {
                continue;
            }
            let is_it = |peer: &&PeerAnnotation| {
                suffix == peer.suffix || (peer.suffix.ends_with('.') && suffix.starts_with(peer.suffix))
            };
            match self.unread.iter().find(is_it) {
                Some(peer) if peer.accepted.contains(&value.trim()) => {}
                Some(peer) => return Err(refused(name, peer)),
                None if self.own.is_some_and(|own| suffix.starts_with(own)) => {
                    return Err(self.unknown(name, read));
                }
                None if compared >= MAX_COMPARED => {}
                None => {
                    compared += 1;
                    if self.is_typo(suffix, read) {
                        return Err(self.unknown(name, read));
                    }
                }
            }
        }
        Ok(())
    }

    /// Whether the name is a known one at another domain of Kubernetes, such as `service.kubernetes.io/load-balancer-source-ranges`, or
    /// of another stage, such as `alpha.cloud.google.com/network-tier`.
    fn is_at_other_domain(&self, name: &str, read: &[&'static str]) -> bool {
        let is_known = |last: &str| {
            let mut known = read.iter().filter_map(|known| known.strip_prefix(self.prefix));
            known.any(|known| known == last) || self.unread.iter().any(|peer| peer.suffix == last)
        };
        if names::without_stage(name).strip_prefix(self.prefix).is_some_and(is_known) {
            return true;
        }
        let at_kubernetes =
            names::name_at_kubernetes(name).filter(|_| self.prefix.ends_with(".kubernetes.io/"));
        at_kubernetes.is_some_and(|last| self.own.is_some_and(|own| last.starts_with(own)) || is_known(last))
    }

    /// Whether the name is almost a known one: nothing else would tell its author that it has no effect.
    fn is_typo(&self, suffix: &str, read: &[&'static str]) -> bool {
        let written = letters(suffix);
        let is_own = self.own.is_some_and(|own| written.starts_with(&letters(own)));
        let read = read.iter().filter_map(|known| known.strip_prefix(self.prefix));
        // What follows a dot is not known.
        let unread = self.unread.iter().map(|peer| peer.suffix).filter(|suffix| !suffix.ends_with('.'));
        let mut known = read.chain(unread).map(letters);
        let is_near = |known: String| {
            known.len().abs_diff(written.len()) <= MAX_TYPOS
                && strsim::levenshtein(&written, &known) <= MAX_TYPOS
        };
        is_own || known.any(is_near)
    }

    fn unknown(&self, name: &str, read: &[&'static str]) -> Error {
        let known = self.unread.iter().map(|peer| format!("{}{}", self.prefix, peer.suffix));
        let known = known.chain(read.iter().map(|&known| known.to_owned()));
        let nearest = nearest(name, known)
            .map(|known| format!(" The nearest known one is {known}."))
            .unwrap_or_default();
        let message = format!(
            "Annotation {name} is unknown.{nearest} No load balancer is created or changed. Correct or remove the annotation."
        );
        Error::invalid(reasons::UNKNOWN_ANNOTATION, message)
    }
}

fn refused(name: &str, peer: &PeerAnnotation) -> Error {
    let PeerAnnotation { accepted, why, .. } = peer;
    let or =
        if accepted.is_empty() { String::new() } else { format!(", or set it to {}", accepted.join(" or ")) };
    let what = if accepted.is_empty() { "is not supported" } else { "has an unsupported value" };
    let message = format!(
        "Annotation {name} {what}. {why} No load balancer is created or changed. Remove the annotation{or}."
    );
    Error::invalid(reasons::ANNOTATION_NOT_SUPPORTED, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PEERS: PeerAnnotations = PeerAnnotations {
        prefix: "service.beta.kubernetes.io/",
        own: Some("aws-load-balancer-"),
        unread: &[
            PeerAnnotation { suffix: "actions.", accepted: &[], why: "No." },
            PeerAnnotation {
                suffix: "aws-load-balancer-type",
                accepted: &["nlb", "external"],
                why: "Only NLBs.",
            },
        ],
    };
    const READ: &[&str] = &["service.beta.kubernetes.io/aws-load-balancer-scheme"];

    fn checked(suffix: &str, value: &str) -> Result<(), (&'static str, String)> {
        let annotations = BTreeMap::from([(format!("{}{suffix}", PEERS.prefix), value.to_owned())]);
        PEERS.check(&annotations, READ).map_err(|error| (error.reason(), error.to_string()))
    }

    #[test]
    fn annotation_is_read_accepted_refused_unknown_or_of_others() {
        assert_eq!(checked("aws-load-balancer-scheme", "internal"), Ok(()));
        assert_eq!(checked("aws-load-balancer-type", " nlb "), Ok(()));
        let (reason, message) = checked("aws-load-balancer-type", "nlb-ip").unwrap_err();
        assert_eq!(reason, "AnnotationNotSupported");
        assert!(
            message.contains("Only NLBs.") && message.contains("set it to nlb or external."),
            "{message}"
        );
        assert_eq!(checked("actions.web", "{}").unwrap_err().0, "AnnotationNotSupported");
        let (reason, message) = checked("aws-load-balancer-schema", "internal").unwrap_err();
        assert_eq!(reason, "UnknownAnnotation");
        assert!(message.contains(READ[0]), "{message}");
        // No name is close to them.
        for name in ["a-totally-new-thing", "mode", "sources"] {
            let (reason, message) = checked(&format!("aws-load-balancer-{name}"), "true").unwrap_err();
            assert_eq!(reason, "UnknownAnnotation");
            assert!(!message.contains("nearest"), "{message}");
        }
        assert_eq!(checked("azure-load-balancer-internal", "true"), Ok(()));
    }

    #[test]
    fn known_names_at_other_domains_are_refused() {
        let checked = |name: &str| PEERS.check(&BTreeMap::from([(name.to_owned(), String::new())]), READ);
        for name in [
            "service.kubernetes.io/aws-load-balancer-scheme",
            "service.alpha.kubernetes.io/aws-load-balancer-internal",
            "services.beta.kubernetes.io/aws-load-balancer-type",
            "beta.kubernetes.io/aws-load-balancer-scheme",
            "alpha.service.beta.kubernetes.io/aws-load-balancer-type",
        ] {
            let error = checked(name).unwrap_err();
            assert_eq!(error.reason(), "UnknownAnnotation", "{name}");
            assert!(names::is_kept(name), "it is never seen: {name}");
        }
        for name in [
            "service.kubernetes.io/topology-mode",
            "alb.ingress.kubernetes.io/actions.web",
            "alb.ingress.kubernetes.io/load-balancer-attributes",
            "example.org/aws-load-balancer-scheme",
            "kubernetes.io/service-name",
        ] {
            assert!(checked(name).is_ok(), "{name}");
        }
    }
}
