// SPDX-License-Identifier: Apache-2.0
//! Events about one Service, logged as well.

use steerage_model::{Service, printable};

use super::{Notice, Recorder, Severity, Subject};

/// Publishes events about one Service.
#[derive(Clone, Copy, Debug)]
pub struct ServiceRecorder<'a> {
    recorder: &'a Recorder,
    service: &'a Service,
}

impl<'a> ServiceRecorder<'a> {
    /// A recorder of events about `service`.
    pub fn new(recorder: &'a Recorder, service: &'a Service) -> Self {
        Self { recorder, service }
    }

    /// Publishes an event of type `Normal`.
    pub fn normal(&self, action: &'static str, reason: &'static str, note: &str) {
        self.publish(Severity::Normal, action, reason, note);
    }

    /// Publishes an event of type `Warning`.
    pub fn warning(&self, action: &'static str, reason: &'static str, note: &str) {
        self.publish(Severity::Warning, action, reason, note);
    }

    fn publish(&self, severity: Severity, action: &'static str, reason: &'static str, note: &str) {
        let note = printable(note);
        tracing::info!(service = %self.service.key, reason, note = &*note, "event");
        let subject = Subject::service(self.service);
        self.recorder.publish(Notice { subject, severity, reason, action, note: note.into_owned() });
    }
}
