// SPDX-License-Identifier: Apache-2.0
//! Kubernetes events about an object, for assertions and messages.

use std::time::Duration;

use anyhow::Result;
use k8s_openapi::api::events::v1::Event;
use kube::Api;
use kube::api::ListParams;

use crate::wait::{TIMEOUT, until};

/// The parts of an event that cases look at.
#[derive(Clone, Debug)]
pub struct EventSummary {
    /// `Normal` or `Warning`.
    pub kind: String,
    /// The machine-readable reason.
    pub reason: String,
    /// The message.
    pub note: String,
}

/// All events about an object of this name.
pub async fn of(client: &kube::Client, namespace: &str, name: &str) -> Result<Vec<EventSummary>> {
    let events: Api<Event> = Api::namespaced(client.clone(), namespace);
    let all = events.list(&ListParams::default()).await?;
    let about = all.into_iter().filter(|event| {
        event.regarding.as_ref().is_some_and(|regarding| regarding.name.as_deref() == Some(name))
    });
    Ok(about
        .map(|event| EventSummary {
            kind: event.type_.unwrap_or_default(),
            reason: event.reason.unwrap_or_default(),
            note: event.note.unwrap_or_default(),
        })
        .collect())
}

/// Waits for an event that fits.
pub async fn wait(
    client: &kube::Client,
    namespace: &str,
    name: &str,
    what: &str,
    fits: impl Fn(&EventSummary) -> bool,
) -> Result<EventSummary> {
    wait_within(client, namespace, name, what, TIMEOUT, fits).await
}

async fn wait_within(
    client: &kube::Client,
    namespace: &str,
    name: &str,
    what: &str,
    limit: Duration,
    fits: impl Fn(&EventSummary) -> bool,
) -> Result<EventSummary> {
    until(format!("an event of {name}: {what}"), limit, async || {
        let seen = of(client, namespace, name).await.map_err(|error| format!("{error:#}"))?;
        seen.iter().find(|event| fits(event)).cloned().ok_or_else(|| format!("{seen:?}"))
    })
    .await
}

/// Every event of a namespace as a line of text.
pub async fn all(client: &kube::Client, namespace: &str) -> Result<Vec<String>> {
    let events: Api<Event> = Api::namespaced(client.clone(), namespace);
    let all = events.list(&ListParams::default()).await?;
    Ok(all
        .into_iter()
        .map(|event| {
            let about = event.regarding.unwrap_or_default();
            format!(
                "{:?} {} {} {}/{}: {}",
                event.event_time.map(|time| time.0),
                event.type_.unwrap_or_default(),
                event.reason.unwrap_or_default(),
                about.kind.unwrap_or_default(),
                about.name.unwrap_or_default(),
                event.note.unwrap_or_default()
            )
        })
        .collect())
}
