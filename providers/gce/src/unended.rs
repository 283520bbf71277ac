// SPDX-License-Identifier: Apache-2.0
//! What is told of an operation that Google does not end. Called with every outcome that waits. No I/O.

use std::time::Duration;

use steerage_provider_api::{Error, Outcome, Progress};

use crate::config::Config;
use crate::object::last;
use crate::state::{Pending, ServiceState};

/// Most operations end within a minute, and the slowest that a Service needs within a few.
const LONG: Duration = Duration::from_mins(10);

/// What to tell of the operation that runs for longest, if that is long.
pub(crate) fn unended(entry: &ServiceState, config: &Config) -> Option<String> {
    let oldest = entry.pending.iter().min_by_key(|pending| pending.since)?;
    (oldest.since.elapsed() >= LONG).then(|| text(oldest, config))
}

fn text(pending: &Pending, config: &Config) -> String {
    format!(
        "GCE has not ended a change of the {} for more than {} minutes. All else goes on, and Steerage asks again. Look at the operation: \
         gcloud compute operations list --project={} --filter=name={}.",
        pending.step.id(),
        LONG.as_secs() / 60,
        config.project,
        last(&pending.operation)
    )
}

/// An outcome that waits, with what is told of an operation that does not end.
pub(crate) fn told(outcome: Outcome, entry: &ServiceState, config: &Config) -> Outcome {
    let incomplete =
        outcome.incomplete.or_else(|| unended(entry, config).map(|text| (Error::UNAVAILABLE, text)));
    Outcome { incomplete, ..outcome }
}

/// The same for a deletion, which has no other place for it.
pub(crate) fn told_of_deletion(
    progress: Progress,
    entry: &ServiceState,
    config: &Config,
) -> Result<Progress, Error> {
    match unended(entry, config) {
        Some(text) if progress != Progress::Done => Err(Error::Unavailable(text)),
        _ => Ok(progress),
    }
}
