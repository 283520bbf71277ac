// SPDX-License-Identifier: Apache-2.0
//! An API server that stores the objects of both kinds by name, in pages of two, and notes the requests.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use http::{Method, Request, Response};
use kube::client::Body;
use serde_json::{Value, json};

#[derive(Default)]
struct State {
    objects: BTreeMap<String, Value>,
    /// Of a list whose pages are being read.
    snapshot: Vec<Value>,
    writes: Vec<String>,
    requests: usize,
    /// Answers every request with this; zero breaks the connection.
    failure: Option<u16>,
    forbids_lists: bool,
    /// Answers writes of names that contain the text with the code.
    refusal: Option<(&'static str, u16)>,
}

#[derive(Clone, Default)]
pub(super) struct ApiServer(Arc<Mutex<State>>);

impl ApiServer {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("not poisoned")
    }

    pub(super) fn client(&self) -> kube::Client {
        let server = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let server = server.clone();
            async move { server.answer(request).await }
        });
        kube::Client::new(service, "default")
    }

    pub(super) fn names(&self) -> Vec<String> {
        self.lock().objects.keys().cloned().collect()
    }

    pub(super) fn object(&self, name: &str) -> Value {
        self.lock().objects.get(name).cloned().unwrap_or_default()
    }

    pub(super) fn put(&self, name: &str, object: Value) {
        self.lock().objects.insert(name.to_owned(), object);
    }

    pub(super) fn change(&self, name: &str, change: impl FnOnce(&mut Value)) {
        change(self.lock().objects.get_mut(name).expect("an object"));
    }

    pub(super) fn remove(&self, name: &str) {
        self.lock().objects.remove(name);
    }

    /// The writes since the last call, in order.
    pub(super) fn take_writes(&self) -> Vec<String> {
        std::mem::take(&mut self.lock().writes)
    }

    /// The number of requests since the last call.
    pub(super) fn take_requests(&self) -> usize {
        std::mem::take(&mut self.lock().requests)
    }

    pub(super) fn fail(&self, status: u16) {
        let mut state = self.lock();
        (state.failure, state.requests) = (Some(status), 0);
    }

    pub(super) fn work(&self) {
        self.lock().failure = None;
    }

    pub(super) fn forbid_lists(&self) {
        self.lock().forbids_lists = true;
    }

    pub(super) fn refuse(&self, names: &'static str, code: u16) {
        self.lock().refusal = Some((names, code));
    }

    pub(super) fn accept(&self) {
        self.lock().refusal = None;
    }

    async fn answer(&self, request: Request<Body>) -> io::Result<Response<Body>> {
        let (head, body) = request.into_parts();
        let body = body.collect_bytes().await.map_err(io::Error::other)?;
        let mut state = self.lock();
        state.requests += 1;
        match state.failure {
            Some(0) => return Err(io::Error::other("connection reset")),
            Some(code) => return Ok(failure(code)),
            None => {}
        }
        let name = head.uri.path().rsplit('/').next().unwrap_or_default().to_owned();
        let refusal = state.refusal.filter(|(names, _)| head.method == Method::PATCH && name.contains(names));
        if let Some((_, code)) = refusal {
            return Ok(failure(code));
        }
        match head.method {
            Method::GET if state.forbids_lists => Ok(failure(403)),
            Method::GET => Ok(response(&state.page(head.uri.query().unwrap_or_default()))),
            Method::PATCH => {
                state.writes.push(format!("PATCH {name}"));
                let mut object: Value = serde_json::from_slice(&body)?;
                object["metadata"]["managedFields"] = json!([{"manager": "edge"}]);
                state.objects.insert(name, object.clone());
                Ok(response(&object))
            }
            Method::DELETE => {
                state.writes.push(format!("DELETE {name}"));
                let object = state.objects.remove(&name);
                Ok(object.map_or_else(|| failure(404), |object| response(&object)))
            }
            _ => Ok(failure(405)),
        }
    }
}

impl State {
    fn page(&mut self, query: &str) -> Value {
        let value = |name: &str| {
            let mut pairs = query.split('&').filter_map(|pair| pair.split_once('='));
            pairs.find(|(found, _)| *found == name).map(|(_, value)| value.to_owned())
        };
        let from = value("continue").map_or(0, |token| token.parse().expect("a position"));
        if from == 0 {
            let selector =
                value("labelSelector").expect("a selector").replace("%2F", "/").replace("%3D", "=");
            let (label, host) = selector.split_once('=').expect("a label and a value");
            let objects = self.objects.values();
            self.snapshot =
                objects.filter(|object| object["metadata"]["labels"][label] == host).cloned().collect();
        }
        let items: Vec<_> = self.snapshot.iter().skip(from).take(2).cloned().collect();
        let next = from + items.len();
        let token = if next < self.snapshot.len() { next.to_string() } else { String::new() };
        json!({"kind": "EdgeTargetHealthList", "metadata": {"resourceVersion": "7", "continue": token}, "items": items})
    }
}

fn response(value: &Value) -> Response<Body> {
    Response::new(Body::from(value.to_string().into_bytes()))
}

fn failure(code: u16) -> Response<Body> {
    let status =
        json!({"kind": "Status", "status": "Failure", "reason": "Failed", "message": "no", "code": code});
    let body = Body::from(status.to_string().into_bytes());
    Response::builder().status(code).body(body).expect("a response")
}
