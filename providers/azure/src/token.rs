// SPDX-License-Identifier: Apache-2.0
//! Tokens for Azure Resource Manager. One login at a time; a token is used until shortly before its end.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Method, Request, Response, header};
use serde_json::Value;
use steerage_provider_cloud::http::{Http, result};
use steerage_provider_cloud::{Api, ApiMetrics};
use tokio::sync::Mutex;

use crate::credentials::{Credentials, Login};
use crate::error::{CallError, Result};

const OF_IDENTITY: &str = "GET identity";
const OF_TENANT: &str = "POST token";
/// The services that give tokens.
pub(crate) const TOKENS: Api = Api { name: "Login", actions: &[OF_IDENTITY, OF_TENANT] };

/// A token is not used for this long before its end: requests and clocks take time.
const MARGIN: Duration = Duration::from_mins(5);
/// A token of which no end is known.
const SHORTEST: Duration = Duration::from_mins(1);

#[derive(Debug)]
struct Token {
    value: Arc<str>,
    until: Instant,
}

/// Logs in when a token is needed.
pub(crate) struct Session {
    http: Http,
    /// For which API tokens are: its endpoint.
    resource: String,
    credentials: Credentials,
    metrics: ApiMetrics,
    token: Mutex<Option<Token>>,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "session with {:?}", self.credentials)
    }
}

impl Session {
    pub(crate) fn new(http: Http, endpoint: &str, credentials: Credentials, metrics: ApiMetrics) -> Self {
        Self { http, resource: endpoint.to_owned(), credentials, metrics, token: Mutex::default() }
    }

    /// A token, another one than `refused`.
    pub(crate) async fn token(&self, refused: Option<&str>) -> Result<Arc<str>> {
        let mut known = self.token.lock().await;
        if let Some(token) = known.as_ref()
            && token.until > Instant::now()
            && refused != Some(&*token.value)
        {
            return Ok(Arc::clone(&token.value));
        }
        let token = self.log_in().await?;
        let value = Arc::clone(&token.value);
        *known = Some(token);
        Ok(value)
    }

    async fn log_in(&self) -> Result<Token> {
        let (action, request) = request(&self.credentials.0, &self.resource)?;
        let began = Instant::now();
        let answer = self.http.send(request).await;
        self.metrics.requested(TOKENS.name, action, result(&answer), began.elapsed());
        let answer = answer.map_err(|why| CallError::without_credentials(action, why.to_string()))?;
        read(action, &answer, began)
    }
}

/// The request for a token. The token of Kubernetes is a small file in memory.
fn request(login: &Login, resource: &str) -> Result<(&'static str, Request<Bytes>)> {
    let form =
        |pairs: &[(&str, &str)]| form_urlencoded::Serializer::new(String::new()).extend_pairs(pairs).finish();
    let scope = format!("{resource}/.default");
    let (action, method, url, body) = match login {
        Login::Managed { client_id, url } => {
            let mut query = vec![("api-version", "2018-02-01"), ("resource", resource)];
            query.extend(client_id.as_deref().map(|id| ("client_id", id)));
            (
                OF_IDENTITY,
                Method::GET,
                format!("{url}/metadata/identity/oauth2/token?{}", form(&query)),
                String::new(),
            )
        }
        Login::Federated { tenant, file } => {
            let assertion = std::fs::read_to_string(file).map_err(|error| {
                CallError::without_credentials(OF_TENANT, format!("{}: {error}", file.display()))
            })?;
            let body = form(&[
                ("grant_type", "client_credentials"),
                ("client_id", &tenant.client_id),
                ("scope", &scope),
                ("client_assertion_type", "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"),
                ("client_assertion", assertion.trim()),
            ]);
            (OF_TENANT, Method::POST, format!("{}/{}/oauth2/v2.0/token", tenant.authority, tenant.id), body)
        }
        Login::Secret { tenant, secret } => {
            let body = form(&[
                ("grant_type", "client_credentials"),
                ("client_id", &tenant.client_id),
                ("scope", &scope),
                ("client_secret", secret),
            ]);
            (OF_TENANT, Method::POST, format!("{}/{}/oauth2/v2.0/token", tenant.authority, tenant.id), body)
        }
    };
    let mut request = Request::builder().method(method).uri(url).header(header::ACCEPT, "application/json");
    request = if action == OF_IDENTITY {
        request.header("metadata", "true")
    } else {
        request.header(header::CONTENT_TYPE, "application/x-www-form-urlencoded")
    };
    let request = request.body(body.into());
    request.map(|request| (action, request)).map_err(|_| CallError::unusable(action, "the URL is not valid"))
}

/// The token in an answer. Nothing of an error but its code is shown: its text may quote the request.
fn read(action: &'static str, answer: &Response<Bytes>, began: Instant) -> Result<Token> {
    let body: Value = serde_json::from_slice(answer.body()).unwrap_or_default();
    if !answer.status().is_success() {
        let code = body.get("error").and_then(Value::as_str).unwrap_or_default();
        let is_code = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let code: String = code.chars().filter(|c| is_code(*c)).take(64).collect();
        let status = answer.status().as_u16();
        let code = if code.is_empty() { status.to_string() } else { code };
        return Err(match status {
            400 | 401 | 403 => CallError::bad_credentials(action, code),
            429 => CallError::answered(action, &answer.clone().map(|_| Bytes::new())),
            _ => CallError::without_credentials(action, format!("status {status}, {code}")),
        });
    }
    let seconds = body.get("expires_in").and_then(|value| match value {
        // The metadata service writes a string.
        Value::String(text) => text.parse().ok(),
        other => other.as_u64(),
    });
    let valid = seconds.map_or(SHORTEST, Duration::from_secs);
    let valid = valid.saturating_sub(MARGIN).max(valid.min(SHORTEST) / 2);
    match body.get("access_token").and_then(Value::as_str) {
        Some(token) if !token.is_empty() => Ok(Token { value: token.into(), until: began + valid }),
        _ => Err(CallError::without_credentials(action, "the answer has no token")),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;
    use crate::credentials::Tenant;

    fn tenant() -> Tenant {
        Tenant { authority: "https://login".to_owned(), id: "t".to_owned(), client_id: "c".to_owned() }
    }

    #[tokio::test]
    async fn requests_for_tokens_are_those_of_the_three_identities() {
        let resource = "https://management.azure.com";
        let url = "http://metadata".to_owned();
        let managed = Login::Managed { client_id: Some("mine".to_owned()), url };
        let (_, asked) = request(&managed, resource).unwrap();
        assert_eq!(asked.headers()["metadata"], "true");
        assert_eq!(
            asked.uri().to_string(),
            "http://metadata/metadata/identity/oauth2/token?api-version=2018-02-01&resource=https%3A%2F%2Fmanagement.azure.com&client_id=mine"
        );
        let secret = Login::Secret { tenant: tenant(), secret: "a&b".to_owned() };
        let (_, asked) = request(&secret, resource).unwrap();
        assert_eq!(asked.uri().to_string(), "https://login/t/oauth2/v2.0/token");
        let body = String::from_utf8(asked.body().to_vec()).unwrap();
        assert!(
            body.ends_with("scope=https%3A%2F%2Fmanagement.azure.com%2F.default&client_secret=a%26b"),
            "{body}"
        );

        let path = std::env::temp_dir().join(format!("steerage-azure-token-{}", std::process::id()));
        let federated = Login::Federated { tenant: tenant(), file: path.clone() };
        assert!(
            Err::<(), _>(request(&federated, resource).unwrap_err())
                .is_err_and(|error| format!("{error:?}").contains("steerage-azure-token"))
        );
        for token in ["first", "second"] {
            std::fs::File::create(&path).unwrap().write_all(token.as_bytes()).unwrap();
            let (_, asked) = request(&federated, resource).unwrap();
            assert!(
                asked.body().ends_with(format!("client_assertion={token}").as_bytes()),
                "read anew each time"
            );
        }
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn tokens_end_early_and_refusals_show_no_text() {
        let began = Instant::now();
        let read = |status: u16, body: &str| {
            read(OF_TENANT, &Response::builder().status(status).body(body.to_owned().into()).unwrap(), began)
        };
        let left = |body: &str| (read(200, body).unwrap().until - began).as_secs();
        assert_eq!(left(r#"{"access_token":"a","expires_in":3599}"#), 3299);
        assert_eq!(left(r#"{"access_token":"a","expires_in":"3600"}"#), 3300);
        assert_eq!(left(r#"{"access_token":"a","expires_in":60}"#), 30);
        assert_eq!(left(r#"{"access_token":"a"}"#), 30);
        let refused = read(400, r#"{"error":"invalid_client","error_description":"SECRET"}"#).unwrap_err();
        let told = steerage_provider_api::Error::from(refused);
        assert!(told.reason() == "ProviderDenied" && told.to_string().contains("invalid_client"), "{told}");
        assert!(!told.to_string().contains("SECRET"));
        for (status, body) in [(500, "SECRET"), (200, "{}"), (200, "SECRET")] {
            let told = steerage_provider_api::Error::from(read(status, body).unwrap_err());
            assert!(told.reason() == "ProviderUnavailable" && !told.to_string().contains("SECRET"), "{told}");
        }
    }
}
