// SPDX-License-Identifier: Apache-2.0
//! Events about a Service.

use steerage_model::Service;
use steerage_watch::events::{Notice, Recorder, Severity, Subject};

use crate::status::Why;

/// Tells users about one Service.
pub(crate) struct Tell<'a> {
    pub(crate) recorder: &'a Recorder,
    pub(crate) service: &'a Service,
}

impl Tell<'_> {
    /// All is well.
    pub(crate) fn normal(&self, action: &'static str, why: &Why) {
        self.publish(Severity::Normal, action, why);
    }

    /// Somebody should look.
    pub(crate) fn warning(&self, action: &'static str, why: &Why) {
        self.publish(Severity::Warning, action, why);
    }

    fn publish(&self, severity: Severity, action: &'static str, (reason, note): &Why) {
        tracing::info!(service = %self.service.key, reason, note, "event");
        let subject = Subject::service(self.service);
        self.recorder.publish(Notice { subject, severity, reason, action, note: note.clone() });
    }
}
