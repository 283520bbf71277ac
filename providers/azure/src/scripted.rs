// SPDX-License-Identifier: Apache-2.0
//! An Azure in memory: versions, changes that take time, references that must exist, and failures at a chosen request. For the
//! controller's simulation, and for tests of what a real one does not do on request.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use http::{Method, Response};
use serde_json::{Value, json};
use steerage_provider_api::{Compare, Error, LoadBalancer, Outcome, Owner, Progress, Provider as _};

use crate::client::{ApiAnswer, Call, Calls};
#[cfg(test)]
use crate::config::Config;
#[cfg(test)]
use crate::config::tests::config;
use crate::error::{CallError, Result};
use crate::provider::Azure;

/// Where the security group of tests is.
pub(crate) const GROUP: &str =
    "/subscriptions/sub/resourceGroups/rg/providers/Microsoft.Network/networkSecurityGroups/nodes";

/// What Azure refuses in a body, if anything: a code and a message.
type Refusal = Box<dyn Fn(&Value) -> Option<(&'static str, String)> + Send>;

#[derive(Default)]
struct Resources {
    /// By path, in lower case.
    all: BTreeMap<String, Value>,
    version: u64,
    /// How often a change is asked for until it is complete.
    delay: u32,
    /// What runs: the resource, how often it is asked for still, and what is wrong with it.
    operations: BTreeMap<String, (String, u32, Option<Value>)>,
    calls: Vec<String>,
    /// The paths of the requests.
    targets: Vec<String>,
    faults: VecDeque<(&'static str, u16, Value, bool)>,
    /// Tags whose names a policy writes so, in lower case, or takes away.
    policy: Option<(&'static str, Option<&'static str>)>,
    /// Whether each operation stays `InProgress`.
    is_endless: bool,
    /// Requests of these actions always fail so.
    blocked: BTreeMap<&'static str, u16>,
    /// Requests for these paths, in lower case, always fail so.
    broken: BTreeMap<String, u16>,
    /// Refused when the request is sent, or, if so, when the change runs.
    refusal: Option<(bool, Refusal)>,
}

/// The cloud.
#[derive(Clone, Default)]
pub(crate) struct Scripted {
    resources: Arc<Mutex<Resources>>,
}

fn failed(status: u16, code: &str, message: &str) -> (u16, Value) {
    (status, json!({ "error": { "code": code, "message": message, "details": [] } }))
}

/// Azure's answer where a public IP of a load balancer is not ready.
fn not_ready(ip: &str, balancer: &str) -> (u16, Value) {
    let message = format!(
        "Cannot proceed with operation because resource {ip} used by resource {balancer} is not in Succeeded state."
    );
    let (status, mut body) = failed(429, "RetryableError", "A retryable error occurred.");
    body["error"]["details"] = json!([{ "code": "ReferencedResourceNotProvisioned", "message": message }]);
    (status, body)
}

impl Scripted {
    /// One with an empty security group, whose changes are asked for once before they are complete.
    pub(crate) fn new() -> Self {
        let cloud = Self::default();
        cloud.resources().delay = 1;
        cloud.put(GROUP, json!({ "location": "westeurope", "properties": { "securityRules": [] } }));
        cloud
    }

    fn resources(&self) -> MutexGuard<'_, Resources> {
        self.resources.lock().unwrap()
    }

    #[cfg(test)]
    pub(crate) fn provider(&self) -> Azure {
        self.provider_with(|_| {})
    }

    /// With the security group.
    #[cfg(test)]
    pub(crate) fn with_group(&self) -> Azure {
        self.provider_with(|config| config.security_group = Some(GROUP.to_owned()))
    }

    #[cfg(test)]
    pub(crate) fn provider_with(&self, change: impl FnOnce(&mut Config)) -> Azure {
        let mut config = config();
        change(&mut config);
        Azure::over(config, Arc::new(self.clone()))
    }

    /// Puts a resource in place, without a request.
    pub(crate) fn put(&self, path: &str, body: Value) {
        self.resources().store(path, body, "Succeeded");
    }

    pub(crate) fn remove(&self, path: &str) {
        self.resources().all.remove(&path.to_ascii_lowercase());
    }

    pub(crate) fn get(&self, path: &str) -> Option<Value> {
        self.resources().all.get(&path.to_ascii_lowercase()).cloned()
    }

    /// All of a kind, such as `publicIPAddresses`.
    pub(crate) fn all(&self, kind: &str) -> Vec<Value> {
        let kind = format!("/{}/", kind.to_ascii_lowercase());
        self.resources()
            .all
            .iter()
            .filter(|(path, _)| path.contains(&kind))
            .map(|(_, body)| body.clone())
            .collect()
    }

    /// Changes a resource as somebody else does.
    pub(crate) fn change(&self, path: &str, change: impl FnOnce(&mut Value)) {
        let mut resources = self.resources();
        let mut body = resources.all[&path.to_ascii_lowercase()].clone();
        change(&mut body);
        resources.store(path, body, "Succeeded");
    }

    /// The next request of this action fails; if `is_done`, it was carried out nevertheless.
    pub(crate) fn fail(&self, action: &'static str, status: u16, code: &str, is_done: bool) {
        let (status, body) = failed(status, code, "as the test says");
        self.resources().faults.push_back((action, status, body, is_done));
    }

    /// The last change of a resource failed.
    pub(crate) fn fail_state(&self, path: &str) {
        let mut resources = self.resources();
        let body = resources.all[&path.to_ascii_lowercase()].clone();
        resources.store(path, body, "Failed");
    }

    /// A policy writes the name of a tag otherwise, or takes the tag away.
    pub(crate) fn rename_tag(&self, tag: &'static str, to: Option<&'static str>) {
        self.resources().policy = Some((tag, to));
    }

    /// No operation says any more that it has ended.
    pub(crate) fn never_end(&self) {
        self.resources().is_endless = true;
    }

    /// All that runs ends, and nobody is told.
    #[cfg(test)]
    pub(crate) fn end_operations(&self) {
        let mut resources = self.resources();
        let names: Vec<String> = resources.operations.keys().cloned().collect();
        for name in names {
            resources.operations.entry(name.clone()).and_modify(|(_, left, _)| *left = 0);
            let _ = resources.ask(&name);
        }
    }

    /// All further requests of this action fail.
    pub(crate) fn block(&self, action: &'static str, status: u16) {
        self.resources().blocked.insert(action, status);
    }

    /// They do not fail any more.
    pub(crate) fn unblock(&self, action: &str) {
        self.resources().blocked.remove(action);
    }

    /// All further requests for this path fail.
    pub(crate) fn break_path(&self, path: &str, status: u16) {
        self.resources().broken.insert(path.to_ascii_lowercase(), status);
    }

    /// They do not fail any more.
    pub(crate) fn fix_path(&self, path: &str) {
        self.resources().broken.remove(&path.to_ascii_lowercase());
    }

    /// Refuses what the function refuses; if `late`, only after the request was accepted.
    pub(crate) fn refuse(
        &self,
        late: bool,
        refusal: impl Fn(&Value) -> Option<(&'static str, String)> + Send + 'static,
    ) {
        self.resources().refusal = Some((late, Box::new(refusal)));
    }

    /// The requests since the last call of this.
    pub(crate) fn calls(&self) -> Vec<String> {
        std::mem::take(&mut self.resources().calls)
    }

    /// Where requests went since the last call of this.
    pub(crate) fn targets(&self) -> Vec<String> {
        std::mem::take(&mut self.resources().targets)
    }

    /// The requests that changed something since the last call of `calls`.
    pub(crate) fn writes(&self) -> Vec<String> {
        self.calls().into_iter().filter(|call| !call.starts_with("GET")).collect()
    }
}

impl Resources {
    fn store(&mut self, path: &str, mut body: Value, state: &str) {
        self.version += 1;
        if let (Some((tag, to)), Some(tags)) = (self.policy, body["tags"].as_object_mut())
            && let Some(value) = tags.remove(tag)
            && let Some(to) = to
        {
            tags.insert(to.to_owned(), value);
        }
        body["etag"] = json!(format!("W/{}", self.version));
        body["id"] = json!(path);
        body["name"] = json!(path.rsplit('/').next());
        body["properties"]["provisioningState"] = json!(state);
        for kind in ["frontendIPConfigurations", "backendAddressPools", "loadBalancingRules", "probes"] {
            for part in body["properties"].get_mut(kind).and_then(Value::as_array_mut).into_iter().flatten() {
                part["id"] = json!(format!("{path}/{kind}/{}", part["name"].as_str().unwrap()));
                part["etag"] = json!(format!("W/{}", self.version));
                part["properties"]["provisioningState"] = json!(state);
            }
        }
        let refs: Vec<(String, String)> = parts(&body, "frontendIPConfigurations")
            .filter_map(|part| {
                let ip = part["properties"]["publicIPAddress"]["id"].as_str()?.to_ascii_lowercase();
                Some((ip, part["id"].as_str()?.to_owned()))
            })
            .collect();
        if path.contains("/loadBalancers/") {
            let prefix = format!("{}/", path.to_ascii_lowercase());
            for ip in self.all.values_mut() {
                let user = ip["properties"]["ipConfiguration"]["id"].as_str().unwrap_or_default();
                if user.to_ascii_lowercase().starts_with(&prefix) {
                    ip["properties"].as_object_mut().unwrap().remove("ipConfiguration");
                }
            }
            for (ip, user) in refs {
                if let Some(ip) = self.all.get_mut(&ip) {
                    ip["properties"]["ipConfiguration"] = json!({ "id": user });
                }
            }
        }
        self.all.insert(path.to_ascii_lowercase(), body);
    }

    /// A free address of a kind.
    fn free(&self, of: impl Fn(u8) -> IpAddr) -> IpAddr {
        let text = Value::from(self.all.values().cloned().collect::<Vec<_>>()).to_string();
        (1..=250).map(of).find(|ip| !text.contains(&format!("\"{ip}\""))).unwrap()
    }

    /// What is wrong with a body.
    fn wrong(&self, path: &str, body: &Value) -> Option<(u16, Value)> {
        let missing =
            |what: &str| Some(failed(400, "InvalidResourceReference", &format!("{what} was not found")));
        let kinds = [
            "frontendIPConfigurations",
            "backendAddressPools",
            "loadBalancingRules",
            "probes",
            "securityRules",
        ];
        for kind in kinds {
            let names: Vec<&str> = parts(body, kind).map(|part| part["name"].as_str().unwrap()).collect();
            if names.iter().collect::<BTreeSet<_>>().len() != names.len() {
                return Some(failed(400, "DuplicateResourceName", &format!("{kind} has a name twice")));
            }
            if let Some(name) = names.iter().find(|name| name.len() > 80) {
                return Some(failed(400, "InvalidResourceName", name));
            }
        }
        for front in parts(body, "frontendIPConfigurations") {
            let of = &front["properties"];
            if let Some(id) = of["publicIPAddress"]["id"].as_str() {
                let Some(ip) = self.all.get(&id.to_ascii_lowercase()) else { return missing(id) };
                if ["Failed", "Updating"].iter().any(|state| ip["properties"]["provisioningState"] == *state)
                {
                    return Some(not_ready(id, path));
                }
                let user = ip["properties"]["ipConfiguration"]["id"].as_str().unwrap_or_default();
                if !user.is_empty() && !user.to_ascii_lowercase().starts_with(&path.to_ascii_lowercase()) {
                    return Some(failed(400, "PublicIPAddressInUse", &format!("{id} is in use")));
                }
            }
        }
        let has = |kind: &str, id: &str| {
            parts(body, kind).any(|part| {
                format!("{path}/{kind}/{}", part["name"].as_str().unwrap()).eq_ignore_ascii_case(id)
            })
        };
        let mut ports = BTreeSet::new();
        for rule in parts(body, "loadBalancingRules") {
            let of = &rule["properties"];
            for (field, kind) in [
                ("frontendIPConfiguration", "frontendIPConfigurations"),
                ("backendAddressPool", "backendAddressPools"),
                ("probe", "probes"),
            ] {
                let id = of[field]["id"].as_str().unwrap_or_default();
                if !has(kind, id) {
                    return missing(id);
                }
            }
            let key = (
                of["frontendIPConfiguration"]["id"].to_string(),
                of["protocol"].to_string(),
                of["frontendPort"].to_string(),
            );
            if !ports.insert(key) {
                return Some(failed(400, "RulesUseSameFrontendPortProtocolAndIPConfig", "twice"));
            }
        }
        for pool in parts(body, "backendAddressPools") {
            let members = pool["properties"]["loadBalancerBackendAddresses"].as_array();
            let names: Vec<String> =
                members.into_iter().flatten().map(|one| one["name"].to_string()).collect();
            if names.iter().collect::<BTreeSet<_>>().len() != names.len() {
                return Some(failed(400, "DuplicateResourceName", "a pool has a name twice"));
            }
        }
        let priorities: Vec<_> = parts(body, "securityRules")
            .map(|rule| {
                (rule["properties"]["direction"].to_string(), rule["properties"]["priority"].as_u64())
            })
            .collect();
        if priorities.iter().collect::<BTreeSet<_>>().len() != priorities.len() {
            return Some(failed(400, "SecurityRuleConflict", "two rules have one priority"));
        }
        None
    }

    fn handle(&mut self, call: &Call) -> Result<ApiAnswer, (u16, Value)> {
        let (path, _) = call.path.split_once('?').unwrap_or((&call.path, ""));
        let key = path.to_ascii_lowercase();
        if let Some(name) = path.strip_prefix("/operations/") {
            if self.is_endless {
                return Ok(ApiAnswer { body: json!({ "status": "InProgress" }), ..ApiAnswer::default() });
            }
            return self.ask(name);
        }
        if let Some(status) = self.broken.get(&key) {
            return Err(failed(*status, "", "as the test says"));
        }
        let present = self.all.get(&key).cloned();
        if call.method == Method::GET {
            let kind = key.rsplit('/').next().unwrap_or_default();
            if ["publicipaddresses", "loadbalancers"].contains(&kind) {
                let all = self.all.iter().filter(|(path, _)| path.starts_with(&format!("{key}/")));
                let all: Vec<Value> = all.map(|(_, body)| body.clone()).collect();
                return Ok(ApiAnswer { body: json!({ "value": all }), ..ApiAnswer::default() });
            }
            // Time passes.
            let running: Vec<String> = self
                .operations
                .iter()
                .filter(|(_, (of, ..))| *of == key)
                .map(|(name, _)| name.clone())
                .collect();
            for name in running {
                let _ = self.ask(&name);
            }
            let body = self.all.get(&key).cloned().ok_or_else(|| failed(404, "ResourceNotFound", path))?;
            return Ok(ApiAnswer { body, ..ApiAnswer::default() });
        }
        if let (Some(wanted), present) = (&call.etag, &present)
            && present.as_ref().is_none_or(|body| body["etag"] != json!(wanted))
        {
            return Err(failed(412, "PreconditionFailed", "The etag differs."));
        }
        if call.creates && present.is_some() {
            return Err(failed(412, "PreconditionFailed", "It exists."));
        }
        if present.as_ref().is_some_and(|body| body["properties"]["provisioningState"] == json!("Updating")) {
            return Err(failed(409, "AnotherOperationInProgress", path));
        }
        let mut wrong = None;
        if let Some(body) = &call.body {
            let mut body = body.clone();
            wrong = self.wrong(path, &body);
            if wrong.is_none()
                && let Some((late, refusal)) = &self.refusal
                && let Some((code, message)) = refusal(&body)
            {
                let status = if code == "LinkedAuthorizationFailed" { 403 } else { 400 };
                let error = failed(status, code, &message);
                if !late {
                    return Err(error);
                }
                wrong = Some(error);
            } else if let Some(error) = wrong {
                return Err(error);
            }
            if let Some(user) = present.as_ref().map(|present| &present["properties"]["ipConfiguration"])
                && !user.is_null()
            {
                // Azure says what uses it, whatever is written.
                body["properties"]["ipConfiguration"] = user.clone();
            }
            self.assign(path, &mut body);
            self.store(path, body, "Updating");
        } else {
            let user = present.as_ref().map(|body| body["properties"]["ipConfiguration"].clone());
            if user.is_some_and(|user| !user.is_null()) {
                return Err(failed(400, "PublicIPAddressCannotBeDeleted", path));
            }
            if present.is_none() {
                return Err(failed(404, "ResourceNotFound", path));
            }
            // What it had is free.
            self.store(
                path,
                json!({ "properties": {}, "tags": present.unwrap_or_default()["tags"] }),
                "Deleting",
            );
        }
        self.version += 1;
        let name = format!("{}", self.version);
        self.operations.insert(name.clone(), (key.clone(), self.delay, wrong.map(|(_, body)| body)));
        let body = if call.method == Method::PUT { self.all[&key].clone() } else { Value::Null };
        let operation = Some(format!("/operations/{name}"));
        Ok(ApiAnswer { body, operation, after: None, is_accepted: true })
    }

    /// Gives addresses.
    fn assign(&self, path: &str, body: &mut Value) {
        if path.contains("/publicIPAddresses/") && body["properties"]["ipAddress"].is_null() {
            let is_v6 = body["properties"]["publicIPAddressVersion"] == json!("IPv6");
            let v4 = |i| IpAddr::V4(Ipv4Addr::new(192, 0, 2, i));
            let v6 = |i| IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, u16::from(i)));
            body["properties"]["ipAddress"] = json!(if is_v6 { self.free(v6) } else { self.free(v4) });
        }
        let private = self.free(|i| IpAddr::V4(Ipv4Addr::new(10, 0, 5, i)));
        for front in body["properties"]
            .get_mut("frontendIPConfigurations")
            .and_then(Value::as_array_mut)
            .into_iter()
            .flatten()
        {
            let of = &mut front["properties"];
            if !of["subnet"].is_null() && of["privateIPAddress"].is_null() {
                of["privateIPAddress"] = json!(private);
            }
        }
    }

    fn ask(&mut self, name: &str) -> Result<ApiAnswer, (u16, Value)> {
        let Some((path, left, wrong)) = self.operations.get_mut(name) else {
            return Err(failed(404, "OperationNotFound", name));
        };
        let answer = |body: Value| Ok(ApiAnswer { body, ..ApiAnswer::default() });
        if *left > 0 {
            *left -= 1;
            return answer(json!({ "status": "InProgress" }));
        }
        let (path, wrong) = (path.clone(), wrong.clone());
        let is_later = |other: &String| other.parse::<u64>().ok() > name.parse::<u64>().ok();
        // What a later change makes of the resource is that one's matter.
        let is_last = !self.operations.iter().any(|(other, (of, ..))| *of == path && is_later(other));
        if self
            .all
            .get(&path)
            .is_some_and(|body| body["properties"]["provisioningState"] == json!("Deleting"))
        {
            self.all.remove(&path);
        } else if let Some(body) = self.all.get(&path).cloned()
            && body["properties"]["provisioningState"] == json!("Updating")
            && is_last
        {
            let state = if wrong.is_some() { "Failed" } else { "Succeeded" };
            let path = body["id"].as_str().unwrap().to_owned();
            self.store(&path, body, state);
        }
        let status = if wrong.is_some() { "Failed" } else { "Succeeded" };
        let mut body = wrong.unwrap_or_else(|| json!({}));
        body["status"] = json!(status);
        answer(body)
    }
}

pub(crate) fn parts<'a>(body: &'a Value, kind: &str) -> impl Iterator<Item = &'a Value> + use<'a> {
    body["properties"].get(kind).and_then(Value::as_array).into_iter().flatten()
}

#[async_trait]
impl Calls for Scripted {
    async fn send(&self, call: Call) -> Result<ApiAnswer> {
        let action = call.action;
        let refused = |status: u16, body: &Value| {
            let answer = Response::builder().status(status).body(body.to_string().into_bytes()).unwrap();
            CallError::answered(action, &answer)
        };
        let answer = {
            let mut resources = self.resources();
            resources.calls.push(action.to_owned());
            resources.targets.push(call.path.clone());
            let own = resources.faults.iter().position(|(of, ..)| *of == action);
            match own.and_then(|at| resources.faults.remove(at)) {
                Some((_, status, body, is_done)) => {
                    if is_done {
                        let _ = resources.handle(&call);
                    }
                    Err((status, body))
                }
                None => match resources.blocked.get(action) {
                    Some(status) => Err(failed(*status, "", "as the test says")),
                    None => resources.handle(&call),
                },
            }
        };
        answer.map_err(|(status, body)| refused(status, &body))
    }
}

/// Calls `apply` until it is done.
pub(crate) async fn settle(provider: &Azure, lb: &LoadBalancer) -> Result<Outcome, Error> {
    for _ in 0..200 {
        match provider.apply(lb, Compare::Remembered).await {
            Ok(outcome) if outcome.progress == Progress::Done => return Ok(outcome),
            Ok(_) | Err(Error::Conflict(_) | Error::Busy(_)) => {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            Err(error) => return Err(error),
        }
    }
    panic!("it is never done")
}

/// Calls `delete` until it is done.
pub(crate) async fn gone(provider: &Azure, owner: &Owner) -> Result<(), Error> {
    for _ in 0..200 {
        match provider.delete(owner).await {
            Ok(Progress::Done) => return Ok(()),
            Ok(Progress::Again(_)) | Err(Error::Conflict(_) | Error::Busy(_)) => {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            Err(error) => return Err(error),
        }
    }
    panic!("it is never gone")
}
