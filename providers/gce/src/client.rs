// SPDX-License-Identifier: Apache-2.0
//! The requests to Compute Engine: the trait through which all of this crate makes them, and HTTP behind it.

use std::collections::BTreeSet;
use std::time::Instant;

use async_trait::async_trait;
use bytes::Bytes;
use google_cloud_auth::credentials::{Builder, CacheableResource, Credentials};
use http::{Extensions, Method, header};
use serde_json::Value;
use steerage_model::chain;
use steerage_provider_cloud::ApiMetrics;
use steerage_provider_cloud::http::{Http, result};

use crate::config::ConfigError;
use crate::error::{CallError, Result};

/// Every method that this crate requests. `permissions` says which right each needs.
pub(crate) const COMPUTE: steerage_provider_cloud::Api = steerage_provider_cloud::Api {
    name: "Compute",
    actions: &[
        "addresses.delete",
        "addresses.get",
        "addresses.insert",
        "addresses.list",
        "firewalls.delete",
        "firewalls.get",
        "firewalls.insert",
        "firewalls.list",
        "firewalls.patch",
        "forwardingRules.delete",
        "forwardingRules.get",
        "forwardingRules.insert",
        "forwardingRules.list",
        "forwardingRules.patch",
        "globalOperations.aggregatedList",
        "globalOperations.get",
        "globalOperations.list",
        "instances.get",
        "instances.list",
        "networkEndpointGroups.aggregatedList",
        "networkEndpointGroups.attachNetworkEndpoints",
        "networkEndpointGroups.delete",
        "networkEndpointGroups.detachNetworkEndpoints",
        "networkEndpointGroups.get",
        "networkEndpointGroups.insert",
        "networkEndpointGroups.listNetworkEndpoints",
        "regionBackendServices.delete",
        "regionBackendServices.get",
        "regionBackendServices.getHealth",
        "regionBackendServices.insert",
        "regionBackendServices.list",
        "regionBackendServices.patch",
        "regionHealthChecks.delete",
        "regionHealthChecks.get",
        "regionHealthChecks.insert",
        "regionHealthChecks.list",
        "regionHealthChecks.patch",
        "regionOperations.get",
        "regions.get",
        "zoneOperations.get",
    ],
};

const SCOPE: &str = "https://www.googleapis.com/auth/compute";

/// A request.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Call {
    /// One of [`COMPUTE`].
    pub(crate) action: &'static str,
    pub(crate) method: Method,
    /// After the version of the API.
    pub(crate) path: String,
    pub(crate) query: Vec<(&'static str, String)>,
    pub(crate) body: Option<Value>,
}

impl Call {
    pub(crate) fn new(method: Method, action: &'static str, path: String) -> Self {
        Self { action, method, path, query: Vec::new(), body: None }
    }

    pub(crate) fn get(action: &'static str, path: String) -> Self {
        Self::new(Method::GET, action, path)
    }

    pub(crate) fn with_body(self, body: Value) -> Self {
        Self { body: Some(body), ..self }
    }

    pub(crate) fn with_filter(mut self, filter: String) -> Self {
        self.query.push(("filter", filter));
        self
    }
}

/// Makes requests. None is retried.
#[async_trait]
pub(crate) trait Calls: Send + Sync {
    /// Sends a request and returns the answer's JSON; null if it is empty.
    async fn send(&self, call: Call) -> Result<Value>;
}

/// Requests over HTTP.
#[derive(Debug)]
pub(crate) struct Client {
    http: Http,
    /// With the version of the API, and without a slash at the end.
    endpoint: String,
    /// `None` on a plain HTTP endpoint, which gets no token.
    credentials: Option<Credentials>,
    metrics: ApiMetrics,
}

impl Client {
    /// A client with the credentials that Google's own clients would use: application default credentials.
    pub(crate) fn new(endpoint: &str, metrics: ApiMetrics) -> Result<Self, ConfigError> {
        let is_plain = endpoint.starts_with("http://");
        let credentials = (!is_plain).then(|| Builder::default().with_scopes([SCOPE]).build()).transpose();
        let credentials = credentials.map_err(|error| ConfigError::Credentials(chain(&error)))?;
        Self::with_credentials(endpoint, credentials, metrics)
    }

    fn with_credentials(
        endpoint: &str,
        credentials: Option<Credentials>,
        metrics: ApiMetrics,
    ) -> Result<Self, ConfigError> {
        let http = Http::new(None).map_err(|error| ConfigError::Credentials(error.to_string()))?;
        let endpoint = format!("{}/compute/v1", endpoint.trim_end_matches('/'));
        Ok(Self { http, endpoint, credentials, metrics })
    }

    async fn request(&self, call: &Call) -> Result<http::Request<Bytes>> {
        let action = call.action;
        let query = form_urlencoded::Serializer::new(String::new()).extend_pairs(&call.query).finish();
        let separator = if query.is_empty() { "" } else { "?" };
        let url = format!("{}/{}{separator}{query}", self.endpoint, call.path);
        let body = call.body.as_ref().map_or_else(Bytes::new, |body| body.to_string().into());
        let mut request = http::Request::builder()
            .method(call.method.clone())
            .uri(&url)
            .header(header::ACCEPT, "application/json")
            .header(header::CONTENT_TYPE, "application/json")
            .body(body)
            .map_err(|_| CallError::unusable(action, format!("the URL {url} is not valid")))?;
        if let Some(credentials) = &self.credentials {
            let refused = |error| CallError::without_credentials(action, chain(&error));
            let headers = credentials.headers(Extensions::new()).await.map_err(refused)?;
            if let CacheableResource::New { data, .. } = headers {
                request.headers_mut().extend(data);
            }
        }
        Ok(request)
    }
}

#[async_trait]
impl Calls for Client {
    async fn send(&self, call: Call) -> Result<Value> {
        let request = self.request(&call).await?;
        let began = Instant::now();
        let answer = self.http.send(request).await;
        self.metrics.requested(COMPUTE.name, call.action, result(&answer), began.elapsed());
        let answer = answer.map_err(|why| CallError::unanswered(call.action, &why))?;
        if !answer.status().is_success() {
            return Err(CallError::answered(call.action, &answer));
        }
        if answer.body().is_empty() {
            return Ok(Value::Null);
        }
        let unreadable = |_| CallError::unusable(call.action, "the answer is not JSON");
        serde_json::from_slice(answer.body()).map_err(unreadable)
    }
}

/// All items of a list: the pages of an answer, as many as Google makes of it. `of_page` takes those of a page.
pub(crate) async fn list<T>(
    calls: &dyn Calls,
    first: Call,
    of_page: impl Fn(Value) -> Result<Vec<T>>,
) -> Result<Vec<T>> {
    let (mut all, mut seen, mut call) = (Vec::new(), BTreeSet::new(), first.clone());
    loop {
        let answer = calls.send(call).await?;
        let next = answer.get("nextPageToken").and_then(Value::as_str).map(str::to_owned);
        all.extend(of_page(answer)?);
        // Pages that follow each other in a circle would never end.
        let Some(next) = next.filter(|next| !next.is_empty() && seen.insert(next.clone())) else {
            return Ok(all);
        };
        call = first.clone();
        call.query.push(("pageToken", next));
    }
}

/// The items of an ordinary list.
#[allow(clippy::unnecessary_wraps, reason = "an aggregated list can fail")]
pub(crate) fn items(mut answer: Value) -> Result<Vec<Value>> {
    Ok(match answer.get_mut("items").map(Value::take) {
        Some(Value::Array(items)) => items,
        _ => Vec::new(),
    })
}

/// A page of a list of all places.
pub(crate) struct ByScope {
    /// The items, each with its place, such as `zones/ZONE`.
    pub(crate) found: Vec<(String, Value)>,
    /// The places that GCE could not read.
    pub(crate) unreachable: Vec<String>,
}

/// The items of an aggregated list, which are in `field` of each place.
pub(crate) fn by_scope(mut answer: Value, field: &str) -> ByScope {
    let (mut found, mut unreachable) = (Vec::new(), Vec::new());
    let text = |value: &Value| value.as_str().map(str::to_owned);
    let listed = answer.get("unreachables").and_then(Value::as_array).into_iter().flatten();
    unreachable.extend(listed.filter_map(text));
    if let Some(Value::Object(scopes)) = answer.get_mut("items").map(Value::take) {
        for (scope, mut of_scope) in scopes {
            if of_scope.pointer("/warning/code").and_then(Value::as_str) == Some("UNREACHABLE") {
                unreachable.push(scope.clone());
            }
            if let Some(Value::Array(items)) = of_scope.get_mut(field).map(Value::take) {
                found.extend(items.into_iter().map(|item| (scope.clone(), item)));
            }
        }
    }
    ByScope { found, unreachable }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use serde_json::json;

    use super::*;

    struct Pages(Mutex<Vec<Vec<(&'static str, String)>>>);

    /// Three pages, the last of which says that the second one follows.
    #[async_trait]
    impl Calls for Pages {
        async fn send(&self, call: Call) -> Result<Value> {
            let mut seen = self.0.lock().unwrap();
            seen.push(call.query);
            assert!(seen.len() < 10, "it never ends");
            let token = ["a", "b"][(seen.len() - 1) % 2];
            Ok(json!({ "items": [seen.len()], "nextPageToken": token }))
        }
    }

    #[tokio::test]
    async fn lists_are_read_to_their_last_page_with_their_filter() {
        let pages = Pages(Mutex::default());
        let call = Call::get("addresses.list", "projects/p".to_owned()).with_filter("f".to_owned());
        let found = list(&pages, call, items).await.unwrap();
        assert_eq!(found, [json!(1), json!(2), json!(3)]);
        let queries = pages.0.into_inner().unwrap();
        let page = |token: &str| vec![("filter", "f".to_owned()), ("pageToken", token.to_owned())];
        assert_eq!(queries, [vec![("filter", "f".to_owned())], page("a"), page("b")]);
    }

    /// Tokens are those of Google's own library; here of the metadata server.
    #[tokio::test(flavor = "multi_thread")]
    async fn requests_have_a_token_and_nothing_is_sent_without_one() {
        steerage_requirements::requires!(Clouds);
        let server = steerage_testclouds::Server::start(steerage_testclouds::Cloud::Gce, &json!({})).unwrap();
        let read = |credentials| {
            let client = Client::with_credentials(server.url(), credentials, ApiMetrics::default()).unwrap();
            let path = "projects/test-project/regions/us-central1".to_owned();
            async move { client.send(Call::get("regions.get", path)).await }
        };
        let metadata = |url: &str| {
            google_cloud_auth::credentials::mds::Builder::default().with_endpoint(url).build().unwrap()
        };
        assert_eq!(read(Some(metadata(server.url()))).await.unwrap()["name"], "us-central1");
        let refused = steerage_provider_api::Error::from(read(None).await.unwrap_err());
        assert_eq!(refused.reason(), "ProviderDenied", "{refused}");
        assert!(refused.to_string().contains("does not accept the credentials"), "{refused}");
        server.clear_calls().unwrap();
        server
            .inject(&json!({ "call": "metadata.token", "times": 0, "status": 404, "message": "no identity" }))
            .unwrap();
        let missing =
            steerage_provider_api::Error::from(read(Some(metadata(server.url()))).await.unwrap_err());
        assert!(missing.to_string().starts_with("No credentials for GCE"), "{missing}");
        assert!(!server.calls().unwrap().contains_key("compute.regions.get"));
    }

    /// Claims of a ServiceAccount for the stand-in's pool, until 2100. Nobody checks the signature.
    const SERVICE_ACCOUNT_TOKEN: &str = "e30.eyJhdWQiOiIvL2lhbS5nb29nbGVhcGlzLmNvbS9wcm9qZWN0cy8xMjM0NTY3ODkwMTIvbG9jYXRpb25zL2dsb2JhbC93b3JrbG9hZElkZW50aXR5UG9vbHMvdGVzdC9wcm92aWRlcnMvdGVzdCIsInN1YiI6InN5c3RlbTpzZXJ2aWNlYWNjb3VudDpzdGVlcmFnZS1zeXN0ZW06c3RlZXJhZ2UtY29udHJvbGxlciIsImV4cCI6NDEwMjQ0NDgwMH0.c2ln";

    /// A projected token of the controller's ServiceAccount is exchanged, and a service account impersonated with the result.
    #[tokio::test(flavor = "multi_thread")]
    async fn workload_identity_federation_gives_a_token() {
        steerage_requirements::requires!(Clouds);
        let server = steerage_testclouds::Server::start(steerage_testclouds::Cloud::Gce, &json!({})).unwrap();
        let file = std::env::temp_dir().join(format!("steerage-gce-token-{}", std::process::id()));
        std::fs::write(&file, SERVICE_ACCOUNT_TOKEN).unwrap();
        let (url, account) = (server.url(), server.setting("service_account"));
        let configuration = json!({
            "type": "external_account",
            "audience": format!("//iam.googleapis.com/{}", server.setting("pool")),
            "subject_token_type": "urn:ietf:params:oauth:token-type:jwt",
            "token_url": format!("{url}/v1/token"),
            "credential_source": { "file": file },
            "service_account_impersonation_url":
                format!("{url}/v1/projects/-/serviceAccounts/{account}:generateAccessToken"),
        });
        let credentials = google_cloud_auth::credentials::external_account::Builder::new(configuration);
        let client = Client::with_credentials(url, Some(credentials.build().unwrap()), ApiMetrics::default());
        let call = Call::get("regions.get", "projects/test-project/regions/us-central1".to_owned());
        let answer = client.unwrap().send(call).await;
        std::fs::remove_file(&file).unwrap();
        assert_eq!(answer.unwrap()["name"], "us-central1");
        let calls = server.calls().unwrap();
        assert!(
            calls.contains_key("sts.token") && calls.contains_key("iamcredentials.generateAccessToken"),
            "{calls:?}"
        );
    }

    #[test]
    fn places_that_cannot_be_read_are_told() {
        let answer = json!({
            "unreachables": ["projects/p/zones/r-a"],
            "items": {
                "zones/r-b": { "groups": [{ "name": "g" }] },
                "zones/r-c": { "warning": { "code": "UNREACHABLE" } },
                "zones/r-d": { "warning": { "code": "NO_RESULTS_ON_PAGE" } },
            }
        });
        let page = by_scope(answer, "groups");
        assert_eq!(page.found, [("zones/r-b".to_owned(), json!({ "name": "g" }))]);
        assert_eq!(page.unreachable, ["projects/p/zones/r-a", "zones/r-c"]);
    }

    #[test]
    fn methods_are_sorted() {
        assert!(COMPUTE.actions.is_sorted_by(|a, b| a < b));
    }
}
