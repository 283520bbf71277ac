// SPDX-License-Identifier: Apache-2.0
//! Writes what the provider tells users as events, while this process holds the Lease.

use std::sync::Arc;

use futures::StreamExt as _;
use futures::stream::BoxStream;
use steerage_provider_api::{NoticeSubject, ProviderNotice};
use steerage_watch::events::{Notice, Recorder, Severity, Subject};

use crate::cluster_index::ClusterIndex;

/// Passes the notices on until they end.
pub(crate) async fn publish(
    mut notices: BoxStream<'static, ProviderNotice>,
    cluster: Arc<ClusterIndex>,
    recorder: Recorder,
) {
    while let Some(notice) = notices.next().await {
        if is_current(&notice, |node| cluster.nodes().drains(node)) {
            recorder.publish(event(notice));
        }
    }
}

/// Whether it still holds: hosts that do not hear of the cluster may report of a drain that is over.
fn is_current(notice: &ProviderNotice, drains: impl Fn(&str) -> bool) -> bool {
    match &notice.subject {
        NoticeSubject::Node(node) => drains(node),
        NoticeSubject::Service(_) | NoticeSubject::Object { .. } => true,
    }
}

fn event(ProviderNotice { subject, is_warning, action, reason, note }: ProviderNotice) -> Notice {
    let subject = match subject {
        NoticeSubject::Service(owner) => Subject {
            api_version: "v1".to_owned(),
            kind: "Service".to_owned(),
            namespace: owner.service.namespace().to_owned(),
            name: owner.service.name().to_owned(),
            uid: owner.uid,
        },
        NoticeSubject::Node(name) => Subject::node_named(name),
        NoticeSubject::Object { api_version, kind, namespace, name, uid } => {
            Subject { api_version: api_version.to_owned(), kind: kind.to_owned(), namespace, name, uid }
        }
    };
    let severity = if is_warning { Severity::Warning } else { Severity::Normal };
    Notice { subject, severity, reason, action, note }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_that_do_not_drain_get_no_event_of_a_drain() {
        let notice = |subject| ProviderNotice {
            subject,
            is_warning: false,
            action: "DrainNode",
            reason: "Drained",
            note: String::new(),
        };
        let drains = |node: &str| node == "a";
        assert!(is_current(&notice(NoticeSubject::Node("a".to_owned())), drains));
        assert!(!is_current(&notice(NoticeSubject::Node("b".to_owned())), drains));
        let object = NoticeSubject::Object {
            api_version: "v1",
            kind: "Pod",
            namespace: "b".to_owned(),
            name: "b".to_owned(),
            uid: String::new(),
        };
        assert!(is_current(&notice(object), drains));
    }
}
