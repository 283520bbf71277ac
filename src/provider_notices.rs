// SPDX-License-Identifier: Apache-2.0
//! Writes what the provider tells users as events, while this process holds the Lease.

use futures::StreamExt as _;
use futures::stream::BoxStream;
use steerage_provider_api::{NoticeSubject, ProviderNotice};
use steerage_watch::events::{Notice, Recorder, Severity, Subject};

/// Passes the notices on until they end.
pub(crate) async fn publish(mut notices: BoxStream<'static, ProviderNotice>, recorder: Recorder) {
    while let Some(notice) = notices.next().await {
        recorder.publish(event(notice));
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
