// SPDX-License-Identifier: Apache-2.0
//! The requests to Octavia and Neutron: the trait through which all of this crate makes them, and HTTP behind it.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use async_trait::async_trait;
use bytes::Bytes;
use http::{Method, StatusCode, header};
use serde::de::DeserializeOwned;
use serde_json::Value;
use steerage_provider_cloud::ApiMetrics;
use steerage_provider_cloud::http::{Http, result};

use crate::credentials::{Credentials, CredentialsError};
use crate::error::{CallError, Result};
use crate::keystone::{Session, Token, json};

/// An API with endpoints in the catalog.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Api {
    /// Octavia.
    LoadBalancer,
    /// Neutron.
    Network,
}

impl Api {
    fn name(self) -> &'static str {
        match self {
            Self::LoadBalancer => OCTAVIA.name,
            Self::Network => NEUTRON.name,
        }
    }
}

pub(crate) const LOGIN: &str = "POST tokens";
pub(crate) const KEYSTONE: steerage_provider_cloud::Api =
    steerage_provider_cloud::Api { name: "Keystone", actions: &[LOGIN] };
const OCTAVIA: steerage_provider_cloud::Api = steerage_provider_cloud::Api {
    name: "Octavia",
    actions: &[
        "DELETE healthmonitors",
        "DELETE listeners",
        "DELETE loadbalancers",
        "DELETE pools",
        "GET healthmonitors",
        "GET listeners",
        "GET loadbalancers",
        "GET members",
        "GET pools",
        "GET status",
        "GET versions",
        "POST healthmonitors",
        "POST listeners",
        "POST loadbalancers",
        "POST pools",
        "PUT healthmonitors",
        "PUT listeners",
        "PUT loadbalancers",
        "PUT members",
        "PUT pools",
    ],
};
const NEUTRON: steerage_provider_cloud::Api = steerage_provider_cloud::Api {
    name: "Neutron",
    actions: &[
        "DELETE floatingips",
        "DELETE security-group-rules",
        "GET floatingips",
        "GET security-group-rules",
        "GET subnets",
        "POST floatingips",
        "POST security-group-rules",
        "PUT floatingips",
    ],
};
/// Every action that this crate requests.
pub(crate) const APIS: [steerage_provider_cloud::Api; 3] = [KEYSTONE, OCTAVIA, NEUTRON];

/// A request.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Call {
    pub(crate) api: Api,
    /// One of [`APIS`].
    pub(crate) action: &'static str,
    pub(crate) method: Method,
    /// Path and query, after the endpoint.
    pub(crate) path: String,
    pub(crate) body: Option<Value>,
    /// Neutron's number of the object's revision that was read: if there is a newer one, the change is refused.
    pub(crate) if_match: Option<u64>,
}

impl Call {
    pub(crate) fn octavia(method: Method, action: &'static str, path: &str, body: Option<Value>) -> Self {
        Self {
            api: Api::LoadBalancer,
            action,
            method,
            path: format!("/v2.0/lbaas/{path}"),
            body,
            if_match: None,
        }
    }

    pub(crate) fn neutron(method: Method, action: &'static str, path: &str, body: Option<Value>) -> Self {
        Self { api: Api::Network, action, method, path: format!("/v2.0/{path}"), body, if_match: None }
    }

    /// How messages call it.
    pub(crate) fn name(&self) -> String {
        format!("{} {}", self.api.name(), self.action)
    }
}

/// Makes requests. None is retried, except with a new token.
#[async_trait]
pub(crate) trait Calls: Send + Sync {
    /// Sends a request and returns the answer's JSON; null if it is empty.
    async fn send(&self, call: Call) -> Result<Value>;

    /// The project of the credentials. Those of an administrator see all projects.
    async fn project(&self) -> Result<Option<String>>;
}

/// Requests over HTTP.
#[derive(Debug)]
pub(crate) struct Client {
    http: Http,
    session: Session,
    metrics: ApiMetrics,
}

impl Client {
    pub(crate) fn new(credentials: Credentials, metrics: ApiMetrics) -> Result<Self, CredentialsError> {
        let http = Http::new(credentials.ca_file.as_deref())?;
        Ok(Self { session: Session::new(http.clone(), credentials, metrics.clone()), http, metrics })
    }

    async fn once(&self, call: &Call, token: &Token) -> Result<Value> {
        let endpoint = token.endpoint(call.api).ok_or_else(|| {
            let problem = "Keystone's catalog has no endpoint of it for the region and interface";
            CallError::unusable(call.name(), problem)
        })?;
        let url = format!("{endpoint}{}", call.path);
        let mut request = http::Request::builder()
            .method(call.method.clone())
            .uri(&url)
            .header("x-auth-token", token.value())
            .header(header::ACCEPT, "application/json");
        if call.body.is_some() {
            request = request.header(header::CONTENT_TYPE, "application/json");
        }
        if let Some(revision) = call.if_match {
            request = request.header(header::IF_MATCH, format!("revision_number={revision}"));
        }
        let body = call.body.as_ref().map_or_else(Bytes::new, |body| body.to_string().into());
        let request = request
            .body(body)
            .map_err(|_| CallError::unusable(call.name(), format!("the URL {url} is not valid")))?;
        let began = Instant::now();
        let answer = self.http.send(request).await;
        self.metrics.requested(call.api.name(), call.action, result(&answer), began.elapsed());
        let answer = answer.map_err(|why| CallError::unanswered(call.name(), &why))?;
        // 300 is Octavia's list of versions.
        if !answer.status().is_success() && answer.status() != StatusCode::MULTIPLE_CHOICES {
            return Err(CallError::answered(call.name(), &answer));
        }
        json(&call.name(), answer.body())
    }
}

#[async_trait]
impl Calls for Client {
    async fn send(&self, call: Call) -> Result<Value> {
        let token: Arc<Token> = self.session.token(None).await?;
        match self.once(&call, &token).await {
            // Nothing was done: the token is older than the cloud lets it become, or was revoked.
            Err(failure) if failure.status() == Some(StatusCode::UNAUTHORIZED) => {
                let token = self.session.token(Some(&token)).await?;
                self.once(&call, &token).await
            }
            other => other,
        }
    }

    async fn project(&self) -> Result<Option<String>> {
        Ok(self.session.token(None).await?.project().map(str::to_owned))
    }
}

/// The object in an answer under this key.
pub(crate) fn object<T: DeserializeOwned>(call: &str, mut answer: Value, key: &str) -> Result<T> {
    let found = answer.get_mut(key).map(Value::take).unwrap_or_default();
    serde_json::from_value(found)
        .map_err(|error| CallError::unusable(call.to_owned(), format!("{key}: {error}")))
}

/// All objects of the project in a list.
pub(crate) async fn list_of_project<T: DeserializeOwned>(
    calls: &dyn Calls,
    first: Call,
    key: &str,
    query: &[(&str, &str)],
) -> Result<Vec<T>> {
    let project = calls.project().await?;
    let mut query = query.to_vec();
    query.extend(project.as_deref().map(|project| ("project_id", project)));
    list(calls, first, key, &query).await
}

/// All objects of a list: the pages of an answer, as many as the cloud makes of it. `query` filters it.
pub(crate) async fn list<T: DeserializeOwned>(
    calls: &dyn Calls,
    first: Call,
    key: &str,
    query: &[(&str, &str)],
) -> Result<Vec<T>> {
    let path = first.path.clone();
    let mut call = first;
    let encoded = |pairs: &[(String, String)]| {
        let query = form_urlencoded::Serializer::new(String::new()).extend_pairs(pairs).finish();
        if query.is_empty() { path.clone() } else { format!("{path}?{query}") }
    };
    let filter: Vec<(String, String)> =
        query.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    call.path = encoded(&filter);
    let (mut all, mut seen) = (Vec::new(), BTreeSet::new());
    loop {
        let name = call.name();
        let answer = calls.send(call.clone()).await.map_err(|failure| {
            // Members are those of a pool, which may be gone.
            if call.action == "GET members" { failure } else { failure.of_list() }
        })?;
        let next = next_page(&answer, key);
        let page: Vec<T> = object(&name, answer, key)?;
        all.extend(page);
        // Pages that follow each other in a circle would never end.
        let Some(next) = next.filter(|next| seen.insert(next.clone())) else { return Ok(all) };
        // Octavia's link does not have the filter.
        let missing = filter.iter().filter(|(key, _)| next.iter().all(|(known, _)| known != key));
        let whole: Vec<(String, String)> = missing.chain(&next).cloned().collect();
        call.path = encoded(&whole);
    }
}

/// The query of the next page. Only that: the host in a link is the one that the cloud believes to have.
fn next_page(answer: &Value, key: &str) -> Option<Vec<(String, String)>> {
    let links = answer.get(format!("{key}_links"))?.as_array()?;
    let next = links.iter().find(|link| link.get("rel").and_then(Value::as_str) == Some("next"))?;
    let query = next.get("href")?.as_str()?.split_once('?')?.1;
    Some(form_urlencoded::parse(query.as_bytes()).into_owned().collect())
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use serde_json::json;

    use super::*;

    struct Pages(Mutex<Vec<String>>);

    /// Three pages, the last of which says that the second one follows.
    #[async_trait]
    impl Calls for Pages {
        async fn send(&self, call: Call) -> Result<Value> {
            let mut seen = self.0.lock().unwrap();
            seen.push(call.path);
            assert!(seen.len() < 10, "it never ends");
            let marker = ["a", "b"][(seen.len() - 1) % 2];
            let href = format!("http://inside/v2.0/lbaas/pools?limit=1&marker={marker}");
            Ok(json!({ "pools": [seen.len()], "pools_links": [{ "rel": "next", "href": href }] }))
        }

        async fn project(&self) -> Result<Option<String>> {
            Ok(None)
        }
    }

    #[tokio::test]
    async fn lists_are_read_to_their_last_page_with_their_filter() {
        let pages = Pages(Mutex::default());
        let call = Call::octavia(Method::GET, "GET pools", "pools", None);
        let found: Vec<usize> = list(&pages, call, "pools", &[("tags", "a=b,c")]).await.unwrap();
        assert_eq!(found, [1, 2, 3]);
        let paths = pages.0.into_inner().unwrap();
        let of = |rest: &str| format!("/v2.0/lbaas/pools?tags=a%3Db%2Cc{rest}");
        assert_eq!(paths, [of(""), of("&limit=1&marker=a"), of("&limit=1&marker=b")]);
    }
}
