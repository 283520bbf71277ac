// SPDX-License-Identifier: Apache-2.0
//! Operations: what they do when they end, and what they say.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use http::Method;
use jiff::Timestamp;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{Answered, Refusal, Store, expect, not_found};
use crate::client::Call;
use crate::object::url;

/// What an operation does to the resource with this ID when it ends.
#[derive(Clone, Debug)]
pub(super) enum Effect {
    Insert(u64),
    Update(u64),
    Delete(u64),
    /// Addresses by VM.
    Attach(u64, BTreeMap<String, String>),
    Detach(u64, BTreeSet<String>),
}

impl Effect {
    fn id(&self) -> u64 {
        match self {
            Self::Insert(id)
            | Self::Update(id)
            | Self::Delete(id)
            | Self::Attach(id, _)
            | Self::Detach(id, _) => *id,
        }
    }
}

pub(super) struct Operation {
    path: String,
    target: String,
    action: &'static str,
    began: Instant,
    ends: Instant,
    pub(super) effect: Effect,
    pub(super) is_done: bool,
    error: Option<Refusal>,
}

impl Store {
    /// Begins an operation and returns it.
    pub(super) fn begin(
        &mut self,
        action: &'static str,
        target: &str,
        takes: Duration,
        effect: Effect,
    ) -> Value {
        self.number += 1;
        let place = target.rsplitn(3, '/').last().unwrap_or_default();
        let began = Instant::now();
        self.operations.push(Operation {
            path: format!("{place}/operations/operation-{}", self.number),
            target: target.to_owned(),
            action,
            began,
            ends: began + takes,
            effect,
            is_done: false,
            error: None,
        });
        self.operations.last().map(|operation| self.told(operation)).unwrap_or_default()
    }

    /// Ends the operations that are due.
    pub(super) fn settle(&mut self) {
        let now = Instant::now();
        loop {
            let running = self.operations.iter().enumerate();
            let due = running.filter(|(_, operation)| !operation.is_done && operation.ends <= now);
            let Some((index, _)) = due.min_by_key(|(_, operation)| operation.ends) else { return };
            let (target, effect) =
                (self.operations[index].target.clone(), self.operations[index].effect.clone());
            let error = self.end(&target, &effect).err();
            self.operations[index].is_done = true;
            self.operations[index].error = error;
        }
    }

    fn end(&mut self, path: &str, effect: &Effect) -> Answered<()> {
        let is_there = self.resources.get(path).is_some_and(|found| found.id == effect.id());
        if !is_there {
            return Err(not_found(path));
        }
        let check = match effect {
            Effect::Insert(_) | Effect::Detach(..) => Ok(()),
            Effect::Delete(_) => self.refuse_if_used(path),
            Effect::Update(_) => self.refuse_if_lacking(path),
            Effect::Attach(_, endpoints) => endpoints
                .iter()
                .try_for_each(|(name, address)| self.check_endpoint(path, name, Some(address)).map(drop)),
        };
        let found = self.resources.get_mut(path).unwrap();
        match effect {
            Effect::Insert(_) => (found.is_ready, found.is_busy) = (true, false),
            Effect::Update(_) => {
                found.is_busy = false;
                let changed = found.changing.take();
                if let (Some(changed), Ok(())) = (changed, &check) {
                    found.data = changed;
                }
            }
            Effect::Delete(_) if check.is_ok() => drop(self.resources.remove(path)),
            Effect::Delete(_) => (found.is_leaving, found.is_busy) = (false, false),
            Effect::Attach(_, endpoints) if check.is_ok() => found.endpoints.extend(endpoints.clone()),
            Effect::Attach(..) => {}
            Effect::Detach(_, names) => found.endpoints.retain(|name, _| !names.contains(name)),
        }
        check
    }

    /// An operation as clients see it.
    fn told(&self, operation: &Operation) -> Value {
        let now = Instant::now();
        let starts = operation.began + (operation.ends - operation.began) / 5;
        let at = |time: Instant| {
            let began: Timestamp = "2026-01-01T00:00:00Z".parse().unwrap();
            (began + (time - self.began)).to_string()
        };
        let name = operation.path.rsplit('/').next();
        let mut told = json!({
            "kind": "compute#operation", "name": name, "operationType": operation.action, "selfLink": url(&operation.path),
            "targetLink": url(&operation.target), "targetId": operation.effect.id().to_string(), "insertTime": at(operation.began),
            "status": if operation.is_done { "DONE" } else if starts <= now { "RUNNING" } else { "PENDING" },
        });
        if starts <= now {
            told["startTime"] = at(starts).into();
        }
        if operation.is_done {
            told["endTime"] = at(operation.ends).into();
        }
        if let Some(refusal) = &operation.error {
            told["httpErrorStatusCode"] = refusal.status.into();
            let mut code = String::new();
            for letter in refusal.reason.chars() {
                if letter.is_ascii_uppercase() {
                    code.push('_');
                }
                code.push(letter.to_ascii_uppercase());
            }
            told["error"] = json!({ "errors": [{ "code": code, "message": refusal.message }] });
        }
        told
    }

    pub(super) fn operation(&self, call: &Call) -> Answered {
        let action = match call.path.split('/').nth(2) {
            Some("zones") => "zoneOperations.get",
            Some("regions") => "regionOperations.get",
            _ => "globalOperations.get",
        };
        expect(call, action, &Method::GET)?;
        let found = self.operations.iter().find(|operation| operation.path == call.path);
        found.map(|operation| self.told(operation)).ok_or_else(|| not_found(&call.path))
    }

    /// All operations with their places.
    pub(super) fn all_operations(&self) -> impl Iterator<Item = (String, Value)> {
        self.operations.iter().map(move |operation| {
            let place = operation.path.rsplitn(3, '/').last().unwrap_or_default();
            (place.to_owned(), self.told(operation))
        })
    }
}
