// SPDX-License-Identifier: Apache-2.0
//! A change that Azure has accepted and not completed. Nobody waits for it: later calls ask.

use std::time::Duration;

use serde_json::Value;
use tokio::time::Instant;

use crate::client::{ApiAnswer, Call, Calls};
use crate::error::{CallError, Result};

/// The longest time between two questions.
const LONGEST_POLL: Duration = Duration::from_secs(10);
/// Nothing of this crate takes longer in Azure.
pub(crate) const STUCK: Duration = Duration::from_mins(10);
/// Since the first answer that cannot be used, until the resource is read instead.
const PATIENCE: Duration = Duration::from_mins(1);

/// A change that runs.
#[derive(Clone, Debug)]
pub(crate) struct Operation {
    /// Where to ask; `None` if the resource itself has to be read.
    path: Option<String>,
    /// What was requested.
    action: &'static str,
    began: Instant,
    next: Instant,
    /// Since when the answers cannot be used.
    failing: Option<Instant>,
}

/// How far a change is.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Running {
    /// Ask again after this time.
    For(Duration),
    /// It ended: the resource has to be read.
    Succeeded,
    Failed(CallError),
    /// Nobody can say: the resource has to be read.
    Lost,
}

impl Operation {
    /// The change that an answer began.
    pub(crate) fn begun(action: &'static str, answer: &ApiAnswer, poll: Duration) -> Self {
        let now = Instant::now();
        let next = now + answer.after.unwrap_or(poll);
        Self { path: answer.operation.clone(), action, began: now, next, failing: None }
    }

    /// A change of somebody else, or one whose answer was lost, known to run since then.
    pub(crate) fn unknown(action: &'static str, since: Instant, poll: Duration) -> Self {
        let now = Instant::now();
        let wait = ((now - since) / 4).clamp(poll, LONGEST_POLL.max(poll));
        Self { path: None, action, began: since, next: now + wait, failing: None }
    }

    /// Asks how far it is, if it is time.
    pub(crate) async fn ask(&mut self, calls: &dyn Calls, poll: Duration) -> Result<Running> {
        let now = Instant::now();
        if now < self.next {
            return Ok(Running::For(self.next - now));
        }
        let Some(path) = &self.path else { return Ok(Running::Lost) };
        let passed = (now - self.began) / 4;
        let wait = passed.clamp(poll, LONGEST_POLL.max(poll));
        self.next = now + wait;
        let answer = match calls.send(Call::get("GET operations", path.clone())).await {
            Ok(answer) => answer,
            // Azure forgets operations after a while.
            Err(failure) if failure.is_gone() => return Ok(Running::Lost),
            Err(failure) => {
                let since = *self.failing.get_or_insert(now);
                return if now - since >= PATIENCE { Ok(Running::Lost) } else { Err(failure) };
            }
        };
        self.failing = None;
        let status = answer.body.get("status").and_then(Value::as_str);
        Ok(match status {
            Some("Succeeded") => Running::Succeeded,
            Some("Failed" | "Canceled") => {
                Running::Failed(CallError::of_operation(self.action, &answer.body))
            }
            // A place without a status answers 202 until the change is complete.
            None if !answer.is_accepted => Running::Succeeded,
            _ if self.is_stuck() => Running::Lost,
            _ => {
                let wait = answer.after.unwrap_or(wait);
                self.next = now + wait;
                Running::For(wait)
            }
        })
    }

    /// What was requested.
    pub(crate) fn action(&self) -> &'static str {
        self.action
    }

    pub(crate) fn began(&self) -> Instant {
        self.began
    }

    pub(crate) fn is_stuck(&self) -> bool {
        self.began.elapsed() >= STUCK
    }
}
