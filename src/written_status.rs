// SPDX-License-Identifier: Apache-2.0
//! A status that was written, and that the index does not show yet: it is not written a second time. Pure; `applied` keeps it for each
//! Service.
//!
//! The index looks the same when somebody has put the old status back. So a write counts until the index has shown it, for 10s at
//! most.

use steerage_model::{Condition, Ingress, Service};
use tokio::time::{Duration, Instant};

use crate::status::DesiredStatus;

/// The index shows a write of this process sooner than that, unless the API server or the watch is slow. Writing it again changes nothing.
const LONGEST_LAG: Duration = Duration::from_secs(10);

/// The last status of a Service that the index does not show yet, if there is one.
#[derive(Clone, Debug, Default)]
pub(crate) struct WrittenStatus(Option<Written>);

#[derive(Clone, Debug)]
struct Written {
    desired: DesiredStatus,
    replaced: (Vec<Ingress>, Vec<Condition>),
    until: Instant,
}

impl WrittenStatus {
    /// Whether `desired` was written in place of what the Service has.
    pub(crate) fn is_pending(&self, service: &Service, desired: &DesiredStatus, now: Instant) -> bool {
        self.0.as_ref().is_some_and(|written| {
            now < written.until
                && written.desired == *desired
                && written.replaced.0 == service.ingress
                && written.replaced.1 == service.conditions
        })
    }

    /// `desired` takes the place of what the Service has.
    pub(crate) fn set(&mut self, service: &Service, desired: DesiredStatus, now: Instant) {
        let replaced = (service.ingress.clone(), service.conditions.clone());
        self.0 = Some(Written { desired, replaced, until: now + LONGEST_LAG });
    }

    /// The index shows it, or whether it does no longer counts.
    pub(crate) fn forget(&mut self) {
        self.0 = None;
    }

    /// When to look again: an old status that was put back before the index had shown the new one changes nothing in the index.
    pub(crate) fn due_at(&self) -> Option<Instant> {
        self.0.as_ref().map(|written| written.until)
    }
}

#[cfg(test)]
mod tests {
    use steerage_model::Key;

    use super::*;

    fn service(ip: Option<&str>) -> Service {
        let mut service = Service::new(Key::new("default", "web"));
        let ingress = ip.map(|ip| Ingress { ip: ip.parse().ok(), hostname: None, ip_mode: None });
        service.ingress = ingress.into_iter().collect();
        service
    }

    #[test]
    fn write_is_pending_until_the_index_shows_it_or_for_a_moment() {
        let (old, other) = (service(None), service(Some("192.0.2.9")));
        let (now, desired) = (Instant::now(), DesiredStatus { ingress: None, conditions: Vec::new() });
        let mut written = WrittenStatus::default();
        assert!(!written.is_pending(&old, &desired, now) && written.due_at().is_none());
        written.set(&old, desired.clone(), now);
        let late = written.due_at().expect("looked at again");
        assert!(late > now && written.is_pending(&old, &desired, now));
        assert!(!written.is_pending(&other, &desired, now), "somebody has written something else");
        assert!(!written.is_pending(&old, &desired, late), "somebody has put the old one back");
        written.forget();
        assert!(!written.is_pending(&old, &desired, now), "the index has shown it");
    }
}
