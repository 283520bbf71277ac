// SPDX-License-Identifier: Apache-2.0
//! The requests to Azure Resource Manager: the trait through which all of this crate makes them, and HTTP behind it.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use http::{HeaderMap, Method, StatusCode, header};
use serde::de::DeserializeOwned;
use serde_json::Value;
use steerage_provider_cloud::http::{Http, result};
use steerage_provider_cloud::{Api, ApiMetrics};

use crate::credentials::{Credentials, CredentialsError};
use crate::error::{CallError, Result, retry_after};
use crate::token::{Session, TOKENS};

/// The version of Microsoft.Network's API.
const VERSION: &str = "2024-05-01";

/// Every action that this crate requests of Azure Resource Manager.
pub(crate) const NETWORK: Api = Api {
    name: "ResourceManager",
    actions: &[
        "DELETE loadBalancers",
        "DELETE publicIPAddresses",
        "GET loadBalancers",
        "GET networkSecurityGroups",
        "GET operations",
        "GET publicIPAddresses",
        "PUT loadBalancers",
        "PUT networkSecurityGroups",
        "PUT publicIPAddresses",
    ],
};

pub(crate) const APIS: [Api; 2] = [TOKENS, NETWORK];

/// A request.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Call {
    /// One of [`NETWORK`]'s.
    pub(crate) action: &'static str,
    pub(crate) method: Method,
    /// The path, or what Azure said in an answer: a URL at the same endpoint.
    pub(crate) path: String,
    /// The version that the change is for.
    pub(crate) etag: Option<String>,
    /// Whether there must be no such resource.
    pub(crate) creates: bool,
    pub(crate) body: Option<Value>,
}

impl Call {
    pub(crate) fn get(action: &'static str, path: impl Into<String>) -> Self {
        Self { action, method: Method::GET, path: path.into(), etag: None, creates: false, body: None }
    }

    pub(crate) fn put(
        action: &'static str,
        path: impl Into<String>,
        etag: Option<String>,
        body: Value,
    ) -> Self {
        Self { method: Method::PUT, etag, body: Some(body), ..Self::get(action, path) }
    }

    /// A `PUT` that replaces nothing.
    pub(crate) fn create(action: &'static str, path: impl Into<String>, body: Value) -> Self {
        Self { creates: true, ..Self::put(action, path, None, body) }
    }

    pub(crate) fn delete(action: &'static str, path: impl Into<String>, etag: Option<String>) -> Self {
        Self { method: Method::DELETE, etag, ..Self::get(action, path) }
    }
}

/// An answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct ApiAnswer {
    /// Null if there is none.
    pub(crate) body: Value,
    /// Where to ask whether the change is complete.
    pub(crate) operation: Option<String>,
    /// When to ask.
    pub(crate) after: Option<Duration>,
    /// Whether Azure says that it is not complete.
    pub(crate) is_accepted: bool,
}

/// Makes requests. None is retried, except with a new token.
#[async_trait]
pub(crate) trait Calls: Send + Sync {
    /// Sends a request.
    async fn send(&self, call: Call) -> Result<ApiAnswer>;
}

/// Requests over HTTP.
#[derive(Debug)]
pub(crate) struct Client {
    http: Http,
    endpoint: String,
    /// `None` for a plain endpoint: no token goes over it.
    session: Option<Session>,
    metrics: ApiMetrics,
}

impl Client {
    pub(crate) fn new(
        endpoint: &str,
        credentials: Credentials,
        metrics: ApiMetrics,
    ) -> Result<Self, CredentialsError> {
        let http = Http::new(None).map_err(|error| CredentialsError::Certificates(error.to_string()))?;
        let is_plain = endpoint.starts_with("http://");
        let session = (!is_plain).then(|| Session::new(http.clone(), endpoint, credentials, metrics.clone()));
        Ok(Self { http, endpoint: endpoint.to_owned(), session, metrics })
    }

    /// The URL of a path. A token is for one endpoint: a URL at another one is not used.
    fn url(&self, call: &Call) -> Result<String> {
        let path = match call.path.strip_prefix(&self.endpoint) {
            Some(rest) => rest,
            None => call.path.as_str(),
        };
        if !path.starts_with('/') {
            return Err(CallError::unusable(call.action, "Azure names a URL at another endpoint"));
        }
        let separator = if path.contains('?') { '&' } else { '?' };
        let version = if path.contains("api-version=") {
            String::new()
        } else {
            format!("{separator}api-version={VERSION}")
        };
        Ok(format!("{}{path}{version}", self.endpoint))
    }

    async fn once(&self, call: &Call, token: Option<&str>) -> Result<ApiAnswer> {
        let (action, url) = (call.action, self.url(call)?);
        let mut request = http::Request::builder()
            .method(call.method.clone())
            .uri(&url)
            .header(header::ACCEPT, "application/json");
        if let Some(token) = token {
            let mut value = header::HeaderValue::try_from(format!("Bearer {token}"))
                .map_err(|_| CallError::without_credentials(action, "the token has forbidden characters"))?;
            value.set_sensitive(true);
            request = request.header(header::AUTHORIZATION, value);
        }
        if let Some(etag) = &call.etag {
            request = request.header(header::IF_MATCH, etag);
        }
        if call.creates {
            request = request.header(header::IF_NONE_MATCH, "*");
        }
        if call.body.is_some() {
            request = request.header(header::CONTENT_TYPE, "application/json");
        }
        let body = call.body.as_ref().map_or_else(Bytes::new, |body| body.to_string().into());
        let request = request
            .body(body)
            .map_err(|_| CallError::unusable(action, format!("the URL {url} is not valid")))?;
        let began = Instant::now();
        let answer = self.http.send(request).await;
        self.metrics.requested(NETWORK.name, action, result(&answer), began.elapsed());
        let answer = answer.map_err(|why| CallError::unanswered(action, &why))?;
        if !answer.status().is_success() {
            return Err(CallError::answered(action, &answer));
        }
        let body = if answer.body().is_empty() {
            Value::Null
        } else {
            serde_json::from_slice(answer.body())
                .map_err(|_| CallError::unusable(action, "the answer is not JSON"))?
        };
        let is_accepted = answer.status() == StatusCode::ACCEPTED;
        Ok(ApiAnswer {
            body,
            operation: operation(answer.headers()),
            after: retry_after(&answer),
            is_accepted,
        })
    }
}

/// The URL of the operation that an answer began.
fn operation(headers: &HeaderMap) -> Option<String> {
    let get = |name: &str| headers.get(name)?.to_str().ok().map(str::to_owned);
    get("azure-asyncoperation").or_else(|| get("location"))
}

#[async_trait]
impl Calls for Client {
    async fn send(&self, call: Call) -> Result<ApiAnswer> {
        let Some(session) = &self.session else { return self.once(&call, None).await };
        let token: Arc<str> = session.token(None).await?;
        match self.once(&call, Some(&token)).await {
            // Nothing was done: the token was revoked, or Azure's clock is ahead.
            Err(failure) if failure.is_unauthorized() => {
                let token = session.token(Some(&token)).await?;
                self.once(&call, Some(&token)).await
            }
            other => other,
        }
    }
}

/// Reads a resource; `None` if it does not exist.
pub(crate) async fn read<T: DeserializeOwned>(
    calls: &dyn Calls,
    action: &'static str,
    path: &str,
) -> Result<Option<T>> {
    match calls.send(Call::get(action, path)).await {
        Ok(answer) => object(action, answer.body).map(Some),
        Err(failure) if failure.is_not_found() => Ok(None),
        Err(failure) => Err(failure),
    }
}

/// Reads a list, as many pages as Azure makes of it.
pub(crate) async fn list<T: DeserializeOwned>(
    calls: &dyn Calls,
    action: &'static str,
    path: &str,
) -> Result<Vec<T>> {
    let (mut all, mut seen, mut path) = (Vec::new(), BTreeSet::new(), path.to_owned());
    loop {
        let mut answer = calls.send(Call::get(action, path)).await?;
        let page = answer.body.get_mut("value").map(Value::take).unwrap_or_default();
        if let Value::Array(page) = page {
            for item in page {
                all.push(object(action, item)?);
            }
        }
        let next = answer.body.get("nextLink").and_then(Value::as_str).map(str::to_owned);
        // Pages that follow each other in a circle would never end.
        let Some(next) = next.filter(|next| !next.is_empty() && seen.insert(next.clone())) else {
            return Ok(all);
        };
        path = next;
    }
}

/// The resource in an answer.
pub(crate) fn object<T: DeserializeOwned>(action: &'static str, body: Value) -> Result<T> {
    serde_json::from_value(body).map_err(|error| CallError::unusable(action, error.to_string()))
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
        async fn send(&self, call: Call) -> Result<ApiAnswer> {
            let mut seen = self.0.lock().unwrap();
            seen.push(call.path);
            assert!(seen.len() < 10, "it never ends");
            let next = ["/a?x=1", "/a?x=2"][(seen.len() - 1) % 2];
            Ok(ApiAnswer { body: json!({ "value": [seen.len()], "nextLink": next }), ..ApiAnswer::default() })
        }
    }

    #[tokio::test]
    async fn lists_are_read_to_their_last_page() {
        let pages = Pages(Mutex::default());
        let found: Vec<usize> = list(&pages, "GET publicIPAddresses", "/a").await.unwrap();
        assert_eq!(found, [1, 2, 3]);
        assert_eq!(pages.0.into_inner().unwrap(), ["/a", "/a?x=1", "/a?x=2"]);
    }

    #[test]
    fn actions_are_sorted_and_urls_stay_at_the_endpoint() {
        assert!(NETWORK.actions.is_sorted_by(|a, b| a < b));
        let client =
            Client::new("https://management.azure.com", Credentials::managed(None), ApiMetrics::default())
                .unwrap();
        let url = |path: &str| client.url(&Call::get("GET operations", path)).ok();
        let versioned = |rest: &str| Some(format!("https://management.azure.com{rest}"));
        assert_eq!(url("/a/b"), versioned("/a/b?api-version=2024-05-01"));
        assert_eq!(url("/a?t=1"), versioned("/a?t=1&api-version=2024-05-01"));
        assert_eq!(url("https://management.azure.com/o?api-version=1"), versioned("/o?api-version=1"));
        for other in ["https://management.azure.com.example.org/o", "https://example.org/o", "a/b"] {
            assert_eq!(url(other), None, "{other}");
        }
    }
}
