// SPDX-License-Identifier: Apache-2.0
//! What the table of the annotations of a cloud's other controllers must fulfil, for the unit tests of each provider.

use std::collections::BTreeMap;

use anyhow::ensure;
use steerage_model::annotations::Annotation;
use steerage_provider_api::Error;
use steerage_provider_cloud::PeerAnnotation;

/// Fails unless the table is sorted, gives reasons in sentences, and has none of the annotations that the provider reads.
pub fn check_peer_table(prefix: &str, unread: &[PeerAnnotation], read: &[Annotation]) -> anyhow::Result<()> {
    let names: Vec<_> = unread.iter().map(|peer| format!("{prefix}{}", peer.suffix)).collect();
    ensure!(names.is_sorted_by(|a, b| a < b), "not sorted: {names:?}");
    for known in read {
        ensure!(!names.contains(&known.name.to_owned()), "{} is read", known.name);
    }
    for peer in unread {
        ensure!(peer.why.ends_with('.'), "{}: {} is no sentence", peer.suffix, peer.why);
    }
    Ok(())
}

/// Fails unless the provider refuses each annotation of the table by its name, and takes the values that request what it does anyway.
pub fn check_peers_are_refused(
    prefix: &str,
    unread: &[PeerAnnotation],
    check: impl Fn(&BTreeMap<String, String>) -> Result<(), Error>,
) -> anyhow::Result<()> {
    for peer in unread {
        // Something follows a dot.
        let more = if peer.suffix.ends_with('.') { "TCP-80" } else { "" };
        let name = format!("{prefix}{}{more}", peer.suffix);
        let checked = |value: &str| check(&BTreeMap::from([(name.clone(), value.to_owned())]));
        for value in peer.accepted {
            let accepted = checked(value);
            ensure!(accepted.is_ok(), "{name}: {value}: {accepted:?}");
        }
        let refused = checked("surprise");
        let is_named =
            |error: &Error| error.reason() == "AnnotationNotSupported" && error.to_string().contains(&name);
        ensure!(refused.as_ref().is_err_and(is_named), "{name}: {refused:?}");
    }
    Ok(())
}
