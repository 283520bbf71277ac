// SPDX-License-Identifier: Apache-2.0
//! Answers by which AWS refused steps of listeners. Where two are equal, AWS would answer the others in the same way: a Service has up to
//! 50 ports, each try costs a call, and each resync tries again. No I/O.

use steerage_provider_api::Error;

use crate::desired::Desired;
use crate::diff::{Step, Tagged};
use crate::put_back::is_refusal;
use crate::reasons;
use crate::tls::Tls;

/// What AWS was asked for.
#[derive(Clone, Debug)]
pub(crate) enum Asked {
    /// A target group.
    Group,
    /// A listener of this protocol.
    Create(&'static str, Option<Tls>),
    /// Another target group, protocol, default certificate or policy for a listener.
    Switch(Option<&'static str>, Option<Tls>),
    /// A further certificate for a listener, by ARN.
    Certificate(String),
    /// Other tags of a listener.
    Tags,
}

impl Asked {
    /// What the step asks for first; `None` if AWS refuses no two such steps for the same cause.
    pub(crate) fn of(step: &Step) -> Option<Self> {
        match step {
            Step::CreateGroup(_) => Some(Self::Group),
            Step::CreateListener { protocol, tls, .. } => Some(Self::Create(protocol, tls.clone())),
            Step::SwitchListener { protocol, tls, .. } => Some(Self::Switch(*protocol, tls.clone())),
            Step::AddTags { of: Tagged::Listener(_), .. }
            | Step::RemoveTags { of: Tagged::Listener(_), .. } => Some(Self::Tags),
            _ => None,
        }
    }

    /// Whether this answer is one to both. A quota or a permission does not depend on certificates.
    fn is_like(&self, other: &Self, answer: &Error) -> bool {
        let is_quota = answer.reason() == reasons::QUOTA_EXCEEDED || matches!(answer, Error::Denied(_));
        let is_same = |one: Option<&Tls>, other: Option<&Tls>| match (one, other) {
            (Some(one), Some(other)) => is_quota || one.is_set_as(other),
            (one, other) => is_quota || one.is_none() && other.is_none(),
        };
        match (self, other) {
            (Self::Create(one, tls), Self::Create(other, of)) => {
                one == other && is_same(tls.as_ref(), of.as_ref())
            }
            (Self::Switch(one, tls), Self::Switch(other, of)) => {
                one == other && is_same(tls.as_ref(), of.as_ref())
            }
            (Self::Certificate(one), Self::Certificate(other)) => is_quota || one == other,
            (Self::Group, Self::Group) | (Self::Tags, Self::Tags) => true,
            _ => false,
        }
    }
}

/// The answers of the tries to make one change.
#[derive(Debug, Default)]
pub(crate) struct RefusedAnswers {
    wanted: Option<Desired>,
    all: Vec<(Asked, Error)>,
}

impl RefusedAnswers {
    /// A try to make this change begins. The answers to another one say nothing of it. Returns whether the last try was for another one.
    pub(crate) fn begin(&mut self, wanted: &Desired) -> bool {
        let is_other = self.wanted.as_ref() != Some(wanted);
        if is_other {
            *self = Self { wanted: Some(wanted.clone()), all: Vec::new() };
        }
        is_other
    }

    /// AWS is asked again: it may answer in another way.
    pub(crate) fn forget(&mut self) {
        self.all.clear();
    }

    /// What AWS would answer: it gave the same answer to two that are alike.
    pub(crate) fn expected(&self, asked: &Asked) -> Option<Error> {
        let alike = self.all.iter().filter(|(other, answer)| asked.is_like(other, answer));
        let text = |answer: &Error| match answer {
            // IAM's text names the resource.
            Error::Denied(_) => String::new(),
            other => other.to_string(),
        };
        let answers: Vec<(&Error, (&str, String))> =
            alike.map(|(_, answer)| (answer, (answer.reason(), text(answer)))).collect();
        let is_repeated = |(_, told): &&(&Error, (&str, String))| {
            answers.iter().filter(|(_, other)| other == told).count() > 1
        };
        answers.iter().find(is_repeated).map(|(answer, _)| (*answer).clone())
    }

    /// Whether the step would remove certificates for others of which AWS would refuse each: they would leave and return at every try.
    pub(crate) fn is_removal_in_vain(&self, step: &Step, steps: &[Step]) -> bool {
        let Step::RemoveCertificates { arn, .. } = step else { return false };
        let next = steps.iter().skip_while(|other| *other != step).find_map(|other| match other {
            Step::AddCertificates { arn: of, certificates } if of == arn => Some(certificates),
            _ => None,
        });
        let is_refused =
            |certificate: &String| self.expected(&Asked::Certificate(certificate.clone())).is_some();
        next.is_some_and(|added| added.iter().all(is_refused))
    }

    /// Keeps an answer, if it is a refusal.
    pub(crate) fn note(&mut self, asked: Asked, error: &Error) {
        if is_refusal(error) {
            self.all.push((asked, error.clone()));
        }
    }
}
