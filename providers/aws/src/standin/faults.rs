// SPDX-License-Identifier: Apache-2.0
//! What goes wrong with calls: nothing, something at random, or what the conformance suite injects.

use std::sync::Arc;

use bytes::Bytes;
use steerage_provider_conformance::{Call, CutPoint, Fault as Injected, Proxy};

use super::Kind;

/// What happens to a call.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fault {
    /// The connection is lost before AWS gets the call.
    Before,
    /// The same after half a minute.
    Hang,
    /// AWS handles the call, and the answer is lost.
    After,
    /// AWS answers with an error.
    Code(&'static str),
}

pub(crate) enum Faults {
    None,
    /// Each call fails with this probability.
    Random(f64),
    /// The next call of this name fails, and no other.
    Once(&'static str, Fault),
    /// Each call of this name fails whose content ends so.
    Each(&'static str, &'static str, Fault),
    /// Each call of these names fails.
    Every(&'static [&'static str], Fault),
    /// The call of this number fails, counted from 0, and no other.
    Nth(usize, Fault),
    /// As the suite says, which also counts the calls.
    Suite(Arc<Proxy>),
}

impl Faults {
    pub(super) fn next(
        &mut self,
        random: &mut fastrand::Rng,
        name: &'static str,
        kind: Kind,
        body: String,
    ) -> Option<Fault> {
        match self {
            Self::Once(of, fault) if *of == name => {
                let fault = *fault;
                *self = Self::None;
                Some(fault)
            }
            Self::Nth(0, fault) => {
                let fault = *fault;
                *self = Self::None;
                Some(fault)
            }
            Self::Nth(number, _) => {
                *number -= 1;
                None
            }
            Self::Each(of, end, fault) => (*of == name && body.ends_with(*end)).then_some(*fault),
            Self::Every(of, fault) => of.contains(&name).then_some(*fault),
            Self::None | Self::Once(..) => None,
            Self::Random(share) => (random.f64() < *share).then(|| {
                let all = [
                    Fault::Before,
                    Fault::After,
                    Fault::Code(kind.throttled()),
                    Fault::Code(kind.internal()),
                ];
                all[random.usize(0..all.len())]
            }),
            Self::Suite(proxy) => {
                let write = kind.is_write();
                let call =
                    Call { name: name.to_owned(), write, target: String::new(), body: Bytes::from(body) };
                proxy.record(call).map(|fault| match fault {
                    Injected::Cut(CutPoint::Before) => Fault::Before,
                    Injected::Cut(CutPoint::After) => Fault::After,
                    Injected::Respond(_) | Injected::Delay(_) => Fault::Code(kind.throttled()),
                })
            }
        }
    }
}
