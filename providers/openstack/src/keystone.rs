// SPDX-License-Identifier: Apache-2.0
//! Tokens of Keystone, and the endpoints in its catalog. One login serves all requests until its token is refused.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use http::{Method, Request, header};
use serde::Deserialize;
use serde_json::Value;
use steerage_provider_cloud::ApiMetrics;
use steerage_provider_cloud::http::{Http, result};
use tokio::sync::Mutex;

use crate::client::{Api, KEYSTONE, LOGIN};
use crate::credentials::Credentials;
use crate::error::{CallError, Result};

/// What a login gives.
#[derive(Debug)]
pub(crate) struct Token {
    /// The value of `X-Auth-Token`: a secret.
    value: header::HeaderValue,
    project: Option<String>,
    load_balancer: Option<String>,
    network: Option<String>,
}

impl Token {
    pub(crate) fn value(&self) -> &header::HeaderValue {
        &self.value
    }

    /// The ID of the project that it is for.
    pub(crate) fn project(&self) -> Option<&str> {
        self.project.as_deref()
    }

    /// The URL of an API, without a slash at the end.
    pub(crate) fn endpoint(&self, api: Api) -> Option<&str> {
        match api {
            Api::LoadBalancer => self.load_balancer.as_deref(),
            Api::Network => self.network.as_deref(),
        }
    }
}

/// Logs in, and remembers the token.
#[derive(Debug)]
pub(crate) struct Session {
    http: Http,
    credentials: Credentials,
    metrics: ApiMetrics,
    token: Mutex<Option<Arc<Token>>>,
}

#[derive(Deserialize)]
struct Answer {
    token: Catalog,
}

#[derive(Deserialize)]
struct Catalog {
    #[serde(default)]
    project: Option<Project>,
    #[serde(default)]
    catalog: Vec<CatalogService>,
}

#[derive(Deserialize)]
struct Project {
    id: String,
}

#[derive(Deserialize)]
struct CatalogService {
    r#type: String,
    #[serde(default)]
    endpoints: Vec<Endpoint>,
}

#[derive(Deserialize)]
struct Endpoint {
    interface: String,
    #[serde(default)]
    region_id: Option<String>,
    url: String,
}

impl Session {
    pub(crate) fn new(http: Http, credentials: Credentials, metrics: ApiMetrics) -> Self {
        Self { http, credentials, metrics, token: Mutex::default() }
    }

    /// A token: the last one, unless it is the refused one. Callers that come meanwhile wait for the same login.
    pub(crate) async fn token(&self, refused: Option<&Arc<Token>>) -> Result<Arc<Token>> {
        let mut known = self.token.lock().await;
        if let Some(token) = known.as_ref()
            && refused.is_none_or(|refused| !Arc::ptr_eq(refused, token))
        {
            return Ok(Arc::clone(token));
        }
        *known = None;
        let token = Arc::new(self.log_in().await?);
        *known = Some(Arc::clone(&token));
        Ok(token)
    }

    async fn log_in(&self) -> Result<Token> {
        let call = || format!("{} {LOGIN}", KEYSTONE.name);
        let url = format!("{}/auth/tokens", self.credentials.auth_url);
        let request = Request::builder()
            .method(Method::POST)
            .uri(&url)
            .header(header::CONTENT_TYPE, "application/json")
            .header(header::ACCEPT, "application/json")
            .body(Bytes::from(self.credentials.login().to_string()))
            .map_err(|_| CallError::unusable(call(), format!("the URL {url} is not valid")))?;
        let began = Instant::now();
        let answer = self.http.send(request).await;
        self.metrics.requested(KEYSTONE.name, LOGIN, result(&answer), began.elapsed());
        let answer = answer.map_err(|why| CallError::unanswered(call(), &why))?;
        if !answer.status().is_success() {
            return Err(CallError::answered(call(), &answer));
        }
        let mut value = answer
            .headers()
            .get("x-subject-token")
            .cloned()
            .ok_or_else(|| CallError::unusable(call(), "the answer has no token"))?;
        value.set_sensitive(true);
        let Answer { token: Catalog { project, catalog } } = serde_json::from_slice(answer.body())
            .map_err(|_| CallError::unusable(call(), "the answer cannot be read"))?;
        let credentials = &self.credentials;
        let listed = |kind: &str| endpoint(&catalog, kind, credentials);
        let load_balancer = credentials.load_balancer_endpoint.clone().or_else(|| listed("load-balancer"));
        let network = credentials.network_endpoint.clone().or_else(|| listed("network"));
        let root = |url: String| url.trim_end_matches('/').trim_end_matches("/v2.0").to_owned();
        let project = project.map(|project| project.id);
        Ok(Token { value, project, load_balancer: load_balancer.map(root), network: network.map(root) })
    }
}

fn endpoint(catalog: &[CatalogService], kind: &str, credentials: &Credentials) -> Option<String> {
    let all = catalog.iter().filter(|service| service.r#type == kind).flat_map(|service| &service.endpoints);
    let is_it = |endpoint: &&Endpoint| {
        endpoint.interface == credentials.interface
            && (credentials.region.is_none() || endpoint.region_id == credentials.region)
    };
    all.clone().find(is_it).map(|endpoint| endpoint.url.clone())
}

/// An answer's JSON; null if it is empty.
pub(crate) fn json(call: &str, body: &Bytes) -> Result<Value> {
    if body.is_empty() {
        return Ok(Value::Null);
    }
    let unreadable = |_| CallError::unusable(call.to_owned(), "the answer is not JSON");
    serde_json::from_slice(body).map_err(unreadable)
}
