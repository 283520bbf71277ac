// SPDX-License-Identifier: Apache-2.0
//! Which log lines about a Service are news. What is tried again and again, for a thousand Services, is logged once in a while.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use steerage_model::Key;
use tokio::time::{Duration, Instant};

/// The same line about a Service is logged once in this time.
const EVERY: Duration = Duration::from_mins(1);

/// When each line was last logged, by Service and reason.
#[derive(Debug, Default)]
pub(crate) struct RepeatedLogs(Mutex<BTreeMap<(Key, &'static str), Instant>>);

impl RepeatedLogs {
    /// Whether to log it now.
    pub(crate) fn is_news(&self, service: &Key, reason: &'static str) -> bool {
        let mut logged = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let line = (service.clone(), reason);
        let is_news = logged.get(&line).is_none_or(|at| at.elapsed() >= EVERY);
        if is_news {
            // Not each time: that would take as long as there are lines.
            if logged.len().is_power_of_two() {
                logged.retain(|_, at| at.elapsed() < EVERY);
            }
            logged.insert(line, Instant::now());
        }
        is_news
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_line_about_a_service_is_logged_once_in_a_minute() {
        let logs = RepeatedLogs::default();
        let of = |name: &str, reason| logs.is_news(&Key::new("default", name), reason);
        assert!(of("web", "NoFreeAddress") && !of("web", "NoFreeAddress"));
        assert!(of("web", "AddressInUse") && of("other", "NoFreeAddress"), "another reason, another Service");
        tokio::time::advance(Duration::from_secs(59)).await;
        assert!(!of("web", "NoFreeAddress"));
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(of("web", "NoFreeAddress") && !of("web", "NoFreeAddress"));
    }
}
