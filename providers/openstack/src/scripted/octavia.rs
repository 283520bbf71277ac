// SPDX-License-Identifier: Apache-2.0
//! What Octavia does not do at once, and what it refuses: one change of a load balancer at a time, none of one that is gone, and no two
//! listeners on a port. For the controller's simulation.

use std::collections::BTreeMap;
use std::time::Duration;

use http::Method;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{Objects, Scripted};
use crate::client::{Api, Call};

impl Scripted {
    /// One that refuses what Octavia refuses, and takes its time.
    pub(crate) fn strict() -> Self {
        let cloud = Self::new();
        cloud.0.lock().unwrap().pending = Some(BTreeMap::new());
        cloud
    }

    /// Whether nothing is being changed.
    pub(crate) fn is_settled(&self) -> bool {
        let mut objects = self.0.lock().unwrap();
        objects.settle();
        objects.pending.as_ref().is_none_or(BTreeMap::is_empty)
    }
}

impl Objects {
    /// The answer of an Octavia that takes its time, or of one that does not.
    pub(super) fn checked_answer(&mut self, call: &Call) -> Result<Value, (u16, String)> {
        if self.pending.is_none() {
            return self.answer(call);
        }
        self.settle();
        if call.api != Api::LoadBalancer || call.method == Method::GET {
            return self.answer(call);
        }
        let path = call.path.trim_start_matches("/v2.0/lbaas/");
        let path = path.split_once('?').map_or(path, |(path, _)| path);
        let parts: Vec<&str> = path.split('/').collect();
        let body = call.body.as_ref().and_then(Value::as_object).and_then(|body| body.values().next());
        let balancer = match (&call.method, parts.as_slice()) {
            (&Method::POST, ["loadbalancers"]) => None,
            (&Method::POST, [kind]) => Some(self.parent(kind, body.unwrap_or(&Value::Null))?),
            (_, [kind, id, ..]) => Some(self.balancer_of(kind, id)?),
            _ => None,
        };
        if let Some(id) = &balancer {
            let state = self.find("loadbalancers", id).map(|found| found["provisioning_status"].clone());
            if state.is_some_and(|state| state != "ACTIVE") {
                return Err((409, format!("Load Balancer {id} is immutable and cannot be updated.")));
            }
        }
        if let (&Method::DELETE, ["loadbalancers", id]) = (&call.method, parts.as_slice()) {
            self.change(id, "PENDING_DELETE");
            return Ok(Value::Null);
        }
        let mut answer = self.answer(call)?;
        if let (&Method::DELETE, [kind, id]) = (&call.method, parts.as_slice()) {
            self.forget(kind, id);
        }
        match (balancer, answer["loadbalancer"]["id"].as_str().map(ToOwned::to_owned)) {
            (Some(id), _) => self.change(&id, "PENDING_UPDATE"),
            (None, Some(id)) => {
                self.change(&id, "PENDING_CREATE");
                answer["loadbalancer"]["provisioning_status"] = "PENDING_CREATE".into();
            }
            (None, None) => {}
        }
        Ok(answer)
    }

    /// Completes what is due.
    fn settle(&mut self) {
        let now = Instant::now();
        let Some(pending) = &mut self.pending else { return };
        let due: Vec<String> =
            pending.iter().filter(|(_, at)| **at <= now).map(|(id, _)| id.clone()).collect();
        pending.retain(|_, at| *at > now);
        for id in due {
            let Some(found) = self.find("loadbalancers", &id) else { continue };
            if found["provisioning_status"] == "PENDING_DELETE" {
                self.delete("loadbalancers", &id);
            } else {
                found.insert("provisioning_status".to_owned(), "ACTIVE".into());
            }
        }
        let pools: Vec<Value> =
            self.all.iter().filter(|(of, _)| of == "pools").map(|(_, it)| it["id"].clone()).collect();
        self.all.retain(|(of, found)| of != "healthmonitors" || pools.contains(&found["pool_id"]));
    }

    /// Octavia begins to change a load balancer.
    fn change(&mut self, id: &str, state: &str) {
        // Some changes take longer than others, in an order that repeats.
        self.next += 1;
        let takes = Duration::from_millis(200 + 300 * u64::try_from(self.next % 7).unwrap());
        if let Some(found) = self.find("loadbalancers", id) {
            found.insert("provisioning_status".to_owned(), state.into());
        }
        self.pending.get_or_insert_default().insert(id.to_owned(), Instant::now() + takes);
    }

    /// The load balancer that an object is in.
    fn balancer_of(&mut self, kind: &str, id: &str) -> Result<String, (u16, String)> {
        let missing = || (404, format!("{} {id} not found.", shown(kind)));
        let found = self.find(kind, id).ok_or_else(missing)?.clone();
        let of = match kind {
            "loadbalancers" => return Ok(id.to_owned()),
            "healthmonitors" => {
                let pool = found["pool_id"].as_str().unwrap_or_default().to_owned();
                self.find("pools", &pool).ok_or_else(missing)?["loadbalancer_id"].clone()
            }
            _ => found["loadbalancer_id"].clone(),
        };
        of.as_str().map(ToOwned::to_owned).ok_or_else(missing)
    }

    /// The load balancer of an object that is to be created there.
    fn parent(&mut self, kind: &str, body: &Value) -> Result<String, (u16, String)> {
        if kind == "healthmonitors" {
            let pool = body["pool_id"].as_str().unwrap_or_default();
            if self
                .find("pools", pool)
                .is_some_and(|found| found.get("healthmonitor_id").is_some_and(|id| !id.is_null()))
            {
                return Err((409, "This pool already has a health monitor".to_owned()));
            }
            return self.balancer_of("pools", pool);
        }
        let id = body["loadbalancer_id"].as_str().unwrap_or_default().to_owned();
        self.find("loadbalancers", &id).ok_or_else(|| (404, format!("Load Balancer {id} not found.")))?;
        let is_beside = |(of, found): &(String, serde_json::Map<String, Value>)| {
            let same = |key: &str| found.get(key) == body.get(key);
            of == "listeners" && same("loadbalancer_id") && same("protocol_port") && same("protocol")
        };
        if kind == "listeners" && self.all.iter().any(is_beside) {
            return Err((
                409,
                format!(
                    "Another Listener on this Load Balancer is already using protocol_port {}",
                    body["protocol_port"]
                ),
            ));
        }
        Ok(id)
    }

    /// What referred to a pool or health monitor does not any more.
    fn forget(&mut self, kind: &str, id: &str) {
        let (of, field) = match kind {
            "pools" => ("listeners", "default_pool_id"),
            "healthmonitors" => ("pools", "healthmonitor_id"),
            _ => return,
        };
        for (_, found) in
            self.all.iter_mut().filter(|(kind, found)| kind == of && found.get(field) == Some(&json!(id)))
        {
            found.insert(field.to_owned(), Value::Null);
        }
    }
}

fn shown(kind: &str) -> &'static str {
    match kind {
        "loadbalancers" => "Load Balancer",
        "listeners" => "Listener",
        "pools" => "Pool",
        _ => "Health Monitor",
    }
}
