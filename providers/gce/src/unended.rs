// SPDX-License-Identifier: Apache-2.0
//! Reports operations that Google does not end. Called with every outcome that waits. No I/O.

use std::time::Duration;

use steerage_provider_api::{Error, Outcome, Progress};

use crate::config::Config;
use crate::object::last;
use crate::state::{Pending, ServiceState};

/// Most operations end within a minute, and the slowest that a Service needs within a few.
const LONG: Duration = Duration::from_mins(10);

/// The report of the operation that runs for the longest time, if that is long.
pub(crate) fn unended(entry: &ServiceState, config: &Config) -> Option<String> {
    let oldest = entry.pending.iter().min_by_key(|pending| pending.since)?;
    (oldest.since.elapsed() >= LONG).then(|| text(oldest, config))
}

fn text(pending: &Pending, config: &Config) -> String {
    // With a Shared VPC, that of a firewall rule is in the host project.
    let project = pending.operation.split('/').nth(1).unwrap_or(&config.project);
    format!(
        "GCE has not ended a change of the {} for more than {} minutes. Other changes continue, and Steerage asks again. Look at the \
         operation: `gcloud compute operations list --project={project} --filter=name={}`. If it does not end, ask Google's support.",
        pending.step.id(),
        LONG.as_secs() / 60,
        last(&pending.operation)
    )
}

/// The outcome, with the report of an operation that does not end.
pub(crate) fn with_unended(outcome: Outcome, entry: &ServiceState, config: &Config) -> Outcome {
    let incomplete =
        outcome.incomplete.or_else(|| unended(entry, config).map(|text| (Error::UNAVAILABLE, text)));
    Outcome { incomplete, ..outcome }
}

/// Fails a deletion with that report: its progress has no message.
pub(crate) fn check_unended(
    progress: Progress,
    entry: &ServiceState,
    config: &Config,
) -> Result<Progress, Error> {
    match unended(entry, config) {
        Some(text) if progress != Progress::Done => Err(Error::Unavailable(text)),
        _ => Ok(progress),
    }
}
