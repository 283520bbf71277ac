// SPDX-License-Identifier: Apache-2.0
//! Makes changes and follows their operations. Nothing waits: an operation that has not ended is asked for by a later call. After a crash
//! nothing is known of operations; comparing what exists finds what they did.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures::future::join_all;
use serde_json::Value;
use steerage_provider_api::{Error, Owner};

use crate::error::{CallError, Result};
use crate::firewall_command::command;
use crate::marks;
use crate::object::{Id, Kind};
use crate::operations::Progress;
use crate::provider::Gce;
use crate::state::{Pending, ServiceState};
use crate::step::{Endpoint, Step};
use crate::{object, reasons};
use steerage_provider_cloud::marks::{CLUSTER_UID, UID};

/// Changes that are sent together.
const AT_ONCE: usize = 10;

/// How a change went.
enum Sent {
    Done,
    Pending(String),
}

impl Gce {
    /// Makes changes that do not depend on each other. False if some have not ended.
    pub(crate) async fn send_all(
        &self,
        owner: &Owner,
        steps: &[Step],
        entry: &mut ServiceState,
    ) -> Result<bool, Error> {
        // A resource whose change is stuck is left alone.
        let steps: Vec<&Step> = steps.iter().filter(|step| !entry.is_changing(step.id())).collect();
        if steps.is_empty() {
            return Ok(false);
        }
        let was_verified = entry.is_verified;
        entry.begin();
        self.is_new.store(false, Ordering::Relaxed);
        let mut failed = None;
        for steps in steps.chunks(AT_ONCE) {
            let expected = self.unknown.expect_answers();
            let answers = join_all(steps.iter().map(|step| self.send(step))).await;
            expected.received();
            for (step, answer) in steps.iter().zip(answers) {
                let noted = self.note(owner, step, answer, entry).await;
                failed = failed.or(noted.err());
            }
            if failed.is_some() {
                break;
            }
        }
        match failed {
            None => {
                entry.is_verified = was_verified && entry.tree.is_some();
                Ok(entry.may_continue())
            }
            // Nothing was changed by what was refused.
            Some(error)
                if matches!(error, Error::Throttled { .. }) || error.reason() == reasons::QUOTA_EXCEEDED =>
            {
                entry.is_verified = was_verified && entry.tree.is_some();
                Err(error)
            }
            Some(error) => Err(error),
        }
    }

    async fn send(&self, step: &Step) -> Result<Sent> {
        let call = step.call(&self.config);
        let action = call.action;
        let answer = self.calls.send(call).await.inspect_err(|failure| {
            if failure.may_have_effect() {
                self.unknown.note();
            }
        })?;
        self.outcome(action, step.id(), &answer)
    }

    fn outcome(&self, action: &'static str, id: &Id, operation: &Value) -> Result<Sent> {
        if operation.get("status").and_then(Value::as_str) == Some("DONE") {
            return CallError::of_operation(action, operation).map_or(Ok(Sent::Done), Err);
        }
        let name = operation.get("name").and_then(Value::as_str).unwrap_or_default();
        let collection = id.collection(&self.config);
        let scope = collection.rsplit_once('/').map_or("", |(scope, _)| scope);
        Ok(Sent::Pending(format!("{scope}/operations/{name}")))
    }

    /// Notes how a change went.
    async fn note(
        &self,
        owner: &Owner,
        step: &Step,
        answer: Result<Sent>,
        entry: &mut ServiceState,
    ) -> Result<(), Error> {
        let is_shared = self.is_of_shared(step, entry, owner);
        match answer {
            Ok(Sent::Done) => {
                if let Step::Attach { .. } = step {
                    entry.note_looked(tokio::time::Instant::now());
                }
                self.note_done(owner, step, is_shared, entry).await
            }
            Ok(Sent::Pending(operation)) => {
                self.operations.begin(&operation, step.call(&self.config).action);
                entry.note_pending(Pending {
                    owner: owner.clone(),
                    step: step.clone(),
                    is_shared,
                    operation,
                    since: tokio::time::Instant::now(),
                });
                Ok(())
            }
            Err(failure) => self.note_failed(owner, step, failure, is_shared, entry).await,
        }
    }

    fn is_of_shared(&self, step: &Step, entry: &mut ServiceState, owner: &Owner) -> bool {
        match step {
            Step::Insert { body, .. } => marks::is_shared(&self.config.cluster, body),
            other => entry.tree_of(owner).is_some_and(|tree| tree.shared.contains_key(other.id())),
        }
    }

    async fn note_done(
        &self,
        owner: &Owner,
        step: &Step,
        is_shared: bool,
        entry: &mut ServiceState,
    ) -> Result<(), Error> {
        tracing::info!(service = %owner.service, change = %step, "load balancer changed");
        entry.denied.forget(step.id());
        match step {
            Step::Insert { id, .. } if id.kind == Kind::ForwardingRule => {
                self.rule_quota().note_inserted(&owner.service, id);
            }
            Step::Delete { id } => self.rule_quota().note_gone(&owner.service, id),
            _ => {}
        }
        if let Step::Attach { endpoints, .. } = step {
            entry.refused.retain(|name| !endpoints.iter().any(|endpoint| endpoint.instance == *name));
        }
        let Some(tree) = entry.tree_of(owner) else {
            // What came of it is not known here, and the others wait for it no longer.
            if is_shared {
                self.shared.forget_known(step.id());
            }
            return Ok(());
        };
        if tree.note(step, is_shared) {
            if is_shared {
                self.shared.note_known(step.id(), tree.shared.get(step.id()).cloned());
            }
            return Ok(());
        }
        let found = self.read_joined(step.id()).await;
        let Ok(Some(found)) = found else {
            entry.forget();
            return found.map(drop).map_err(Error::from);
        };
        if let Some(tree) = entry.tree_of(owner) {
            let all = if is_shared { &mut tree.shared } else { &mut tree.own };
            all.insert(step.id().clone(), found);
        }
        Ok(())
    }

    async fn note_failed(
        &self,
        owner: &Owner,
        step: &Step,
        failure: CallError,
        is_shared: bool,
        entry: &mut ServiceState,
    ) -> Result<(), Error> {
        let id = step.id();
        if is_shared {
            self.shared.forget_known(id);
        }
        match step {
            Step::Delete { .. } if failure.is_not_found() => {
                return self.note_done(owner, step, is_shared, entry).await;
            }
            _ if id.kind == Kind::Firewall && failure.is_denied() => {
                entry.denied.note(step, command(step, &self.config));
                return Ok(());
            }
            Step::Attach { endpoints, .. } if failure.is_rejected() => {
                // What was read of the VMs is not so any more.
                self.forget_instances(id.zone.as_deref());
                let refused = refused(endpoints, &failure);
                for endpoint in &refused {
                    let why = format!("GCE refuses its VM: {}", failure.message());
                    entry.refused.add(endpoint.instance.clone(), &why);
                }
                if !refused.is_empty() {
                    return Ok(());
                }
                // Google does not say which one it refuses. A group that is gone takes none.
                if !failure.is_not_found() {
                    return self.attach_halves(owner, id, endpoints, entry).await;
                }
            }
            Step::Insert { .. } if failure.is_existing() => {
                // A change of an earlier process, or somebody else's resource.
                let found = self.read(id).await?;
                let is_ours = found.as_ref().is_none_or(|found| {
                    self.owner(found).is_some_and(|of| of.service == owner.service)
                        || marks::is_shared(&self.config.cluster, found)
                });
                entry.forget();
                if !is_ours {
                    return Err(not_owned(id, &self.config.project));
                }
                return Err(failure.into());
            }
            Step::Insert { .. } if failure.is_beyond_quota() && id.kind == Kind::ForwardingRule => {
                self.rule_quota().note_refused();
            }
            _ => {}
        }
        if !failure.is_unmade() && !failure.is_beyond_quota() {
            entry.forget();
        }
        let is_lost = self.rule_quota().retry_in(&owner.service).is_some();
        Err(if is_lost { failure.error_of_loss() } else { failure.into() })
    }

    /// Attaches the endpoints of a request that was refused in two requests, so that one endpoint does not keep the others out.
    async fn attach_halves(
        &self,
        owner: &Owner,
        id: &Id,
        endpoints: &BTreeSet<Endpoint>,
        entry: &mut ServiceState,
    ) -> Result<(), Error> {
        let all: Vec<&Endpoint> = endpoints.iter().collect();
        let mut failed = None;
        for half in all.chunks(all.len().div_ceil(2).max(1)) {
            let endpoints = half.iter().map(|endpoint| (*endpoint).clone()).collect();
            let step = Step::Attach { id: id.clone(), endpoints };
            let sent = self.send(&step).await;
            let noted = Box::pin(self.note(owner, &step, sent, entry)).await;
            failed = failed.or(noted.err());
        }
        failed.map_or(Ok(()), Err)
    }

    /// Asks for the operations that have not ended. False if one still has not and others wait for it.
    pub(crate) async fn settle(&self, entry: &mut ServiceState) -> Result<bool, Error> {
        Ok(self.settle_unknown().await? && self.settle_known(entry).await?)
    }

    /// The same without operations of which nothing is remembered.
    pub(crate) async fn settle_known(&self, entry: &mut ServiceState) -> Result<bool, Error> {
        if entry.pending.is_empty() {
            return Ok(true);
        }
        let asked = entry.pending.clone();
        let asked_count = asked.len();
        let paths: Vec<String> = asked.iter().map(|pending| pending.operation.clone()).collect();
        let mut answers = self.operations.ask(&*self.calls, &paths).await;
        let (mut failed, mut left) = (None, Vec::new());
        // A call that is abandoned here leaves what it does not know.
        let was_verified = std::mem::replace(&mut entry.is_verified, false);
        for pending in asked {
            let Pending { owner, step, is_shared, operation, .. } = &pending;
            let noted = match answers.remove(operation) {
                None | Some(Ok(Progress::Running)) => {
                    left.push(pending);
                    continue;
                }
                Some(Err(failure)) => {
                    left.push(pending);
                    failed = failed.or(Some(failure.into()));
                    continue;
                }
                Some(Ok(Progress::Unknown)) => {
                    // It may run all the same.
                    self.unknown.note();
                    if *is_shared {
                        self.shared.forget_known(step.id());
                    }
                    entry.forget();
                    Ok(())
                }
                Some(Ok(Progress::Ended(ended))) => {
                    match CallError::of_operation(step.call(&self.config).action, &ended) {
                        None => {
                            if let Step::Attach { .. } = step {
                                entry.note_looked(pending.since);
                            }
                            self.note_done(owner, step, *is_shared, entry).await
                        }
                        Some(failure) => self.note_failed(owner, step, failure, *is_shared, entry).await,
                    }
                }
            };
            self.operations.forget(operation);
            failed = failed.or(noted.err());
        }
        // Those that were started meanwhile.
        left.extend(entry.pending.drain(asked_count..));
        entry.pending = left;
        entry.is_verified = was_verified && entry.tree.is_some();
        failed.map_or(Ok(entry.may_continue()), Err)
    }

    /// When to ask for the changes of an entry that have not ended.
    pub(crate) fn poll(&self, entry: &ServiceState) -> Duration {
        self.operations.due_in(entry.pending.iter().map(|pending| &pending.operation))
    }
}

/// The endpoints that a refusal names; the only one, if there is one.
fn refused<'a>(endpoints: &'a BTreeSet<Endpoint>, failure: &CallError) -> Vec<&'a Endpoint> {
    // Google's sentences end with a full stop.
    let is_in_name = |letter: char| letter.is_ascii_alphanumeric() || letter == '-';
    let words: BTreeSet<&str> = failure.message().split(|letter| !is_in_name(letter)).collect();
    let is_refused = |endpoint: &&Endpoint| {
        words.contains(endpoint.instance.as_str()) || (endpoints.len() == 1 && !failure.is_not_found())
    };
    endpoints.iter().filter(is_refused).collect()
}

fn not_owned(id: &object::Id, project: &str) -> Error {
    let message = format!(
        "The {id} exists in the project {project}, and its description is not that of this Service. Steerage does not change it. If another \
         cluster serves traffic with it, set another --gce-cluster-name here. If this cluster replaces that one, correct the UIDs in its \
         description, {CLUSTER_UID} and {UID}; where GCE changes no description (forwarding rules, addresses), set another \
         --gce-cluster-name. Delete it only if nothing uses it. Steerage continues at the next resync."
    );
    Error::invalid(reasons::OBJECT_NOT_OWNED, message)
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use async_trait::async_trait;
    use http::Response;
    use serde_json::json;
    use steerage_model::Key;

    use super::*;
    use crate::client::{Call, Calls};
    use crate::config::Config;
    use crate::config::tests::config;
    use crate::unended::check_unended;

    /// Refuses requests with the VM `bad`, and says so or not.
    struct Refusing {
        message: &'static str,
        attached: Mutex<BTreeSet<String>>,
    }

    #[async_trait]
    impl Calls for Refusing {
        async fn send(&self, call: Call) -> Result<Value> {
            let names = |body: &Value| -> Vec<String> {
                let all = body["networkEndpoints"].as_array().into_iter().flatten();
                all.filter_map(|endpoint| Some(endpoint["instance"].as_str()?.to_owned())).collect()
            };
            let names = call.body.as_ref().map(names).unwrap_or_default();
            if names.contains(&"bad".to_owned()) {
                let body = json!({ "error": { "message": self.message } }).to_string();
                let answer = Response::builder().status(400).body(body).unwrap();
                return Err(CallError::answered(call.action, &answer));
            }
            self.attached.lock().unwrap().extend(names);
            Ok(json!({ "status": "DONE" }))
        }
    }

    /// A cluster that was set up again meets what the one before left, which may serve.
    #[test]
    fn nobody_is_told_to_delete_what_another_cluster_uses() {
        let told = not_owned(&Id::new(Kind::ForwardingRule, "rule"), "p").to_string();
        for part in [
            "forwarding rule rule exists in the project p",
            "set another --gce-cluster-name",
            "steerage.dev/cluster-uid",
            "Delete it only if nothing uses it.",
        ] {
            assert!(told.contains(part), "{part}: {told}");
        }
    }

    #[tokio::test]
    async fn refused_endpoint_does_not_keep_others_out() {
        let endpoint = |name: &str| Endpoint { instance: name.to_owned(), address: String::new() };
        let endpoints: BTreeSet<Endpoint> = ["a", "b", "bad", "c", "d"].map(endpoint).into();
        let owner = Owner { service: Key::new("shop", "web"), uid: "u1".to_owned() };
        for (message, attached) in [
            // The others are attached by the next comparison.
            ("Invalid value: zones/r-a/instances/bad.", &[][..]),
            ("Invalid value for field 'resource.networkEndpoints'.", &["a", "b", "c", "d"]),
        ] {
            let calls = Arc::new(Refusing { message, attached: Mutex::default() });
            let gce = Gce::over(config(), calls.clone());
            let mut entry = ServiceState::default();
            let step = Step::Attach { id: Id::zonal(Kind::Group, "r-a", "g"), endpoints: endpoints.clone() };
            gce.send_all(&owner, &[step], &mut entry).await.unwrap();
            let refused: Vec<&Endpoint> =
                endpoints.iter().filter(|endpoint| entry.refused.must_wait(&endpoint.instance)).collect();
            assert_eq!(refused, [&endpoint("bad")], "{message}");
            let now: Vec<String> = calls.attached.lock().unwrap().iter().cloned().collect();
            assert_eq!(now, attached, "{message}");
        }
    }

    /// An API whose operations do not end, except deletions.
    #[derive(Default)]
    struct Stuck(Mutex<Vec<String>>);

    #[async_trait]
    impl Calls for Stuck {
        async fn send(&self, call: Call) -> Result<Value> {
            if call.method == http::Method::GET {
                return Ok(json!({ "status": "RUNNING", "name": "o" }));
            }
            self.0.lock().unwrap().push(call.path.clone());
            let status = if call.method == http::Method::DELETE { "DONE" } else { "RUNNING" };
            Ok(json!({ "status": status, "name": "o" }))
        }
    }

    #[tokio::test(start_paused = true)]
    async fn operation_that_does_not_end_keeps_only_its_own_resource() {
        let calls = Arc::new(Stuck::default());
        let gce = Gce::over(config(), calls.clone());
        let owner = Owner { service: Key::new("shop", "web"), uid: "u1".to_owned() };
        let mut entry = ServiceState::default();
        let [stuck, other] = ["stuck", "other"].map(|name| Id::new(Kind::Address, name));
        let insert = Step::Insert { id: stuck.clone(), body: json!({ "name": "stuck" }) };
        assert!(!gce.send_all(&owner, &[insert], &mut entry).await.unwrap());
        assert!(!gce.settle(&mut entry).await.unwrap(), "all wait at first");
        tokio::time::advance(std::time::Duration::from_mins(6)).await;
        assert!(gce.settle(&mut entry).await.unwrap());
        calls.0.lock().unwrap().clear();
        let steps = [stuck, other.clone()].map(|id| Step::Delete { id });
        assert!(gce.send_all(&owner, &steps, &mut entry).await.unwrap());
        assert_eq!(*calls.0.lock().unwrap(), [other.path(&config())]);
        // It is not reported before it is long.
        assert_eq!(gce.again(&entry).incomplete, None);
        assert!(check_unended(gce.again(&entry).progress, &entry, &config()).is_ok());
        tokio::time::advance(std::time::Duration::from_mins(5)).await;
        let waiting = gce.again(&entry);
        let (reason, text) = waiting.incomplete.unwrap();
        assert_eq!(reason, "ProviderUnavailable");
        let operation = "--filter=name=o";
        assert!(text.contains("address stuck") && text.contains(operation), "{text}");
        let told = check_unended(waiting.progress, &entry, &config()).unwrap_err();
        assert_eq!(told.to_string(), text);
        assert!(check_unended(steerage_provider_api::Progress::Done, &entry, &config()).is_ok());
    }

    /// With a Shared VPC, operations of firewall rules are the host project's.
    #[tokio::test(start_paused = true)]
    async fn unended_operation_is_looked_for_in_its_own_project() {
        for (kind, project) in [(Kind::Address, "p"), (Kind::Firewall, "host")] {
            let config = Config { network: "projects/host/global/networks/n".to_owned(), ..config() };
            let gce = Gce::over(config, Arc::new(Stuck::default()));
            let owner = Owner { service: Key::new("shop", "web"), uid: "u1".to_owned() };
            let mut entry = ServiceState::default();
            let insert = Step::Insert { id: Id::new(kind, "stuck"), body: json!({ "name": "stuck" }) };
            gce.send_all(&owner, &[insert], &mut entry).await.unwrap();
            tokio::time::advance(Duration::from_mins(11)).await;
            let (_, text) = gce.again(&entry).incomplete.unwrap();
            let command = format!("`gcloud compute operations list --project={project} --filter=name=o`");
            assert!(text.contains(&command), "{text}");
        }
    }
}
