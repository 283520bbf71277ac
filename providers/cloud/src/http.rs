// SPDX-License-Identifier: Apache-2.0
//! Sends one request and reads its answer. No retries: the controller's queue makes them. For clouds whose client is Steerage's own.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper_rustls::{ConfigBuilderExt as _, HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use rustls::{ClientConfig, RootCertStore};
use steerage_model::chain;

use crate::RequestResult;

/// Octavia creates the VIP's port before it answers: the slowest request of any cloud.
const TIMEOUT: Duration = Duration::from_secs(30);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The most that an answer may have: a list of ten thousand load balancers is smaller.
const LONGEST_ANSWER: usize = 64 << 20;

/// A file with certificates that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {problem}", file.display())]
pub struct CertificatesError {
    /// The file.
    pub file: PathBuf,
    /// What is wrong with it.
    pub problem: String,
}

/// Why a request has no answer. Nothing of the request is in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TransportError {
    /// No answer came in time.
    Timeout,
    /// No connection, or one that broke.
    Connection(String),
}

impl fmt::Display for TransportError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Timeout => "no answer in time",
            Self::Connection(text) => text,
        })
    }
}

/// An HTTP client. Copies share connections.
#[derive(Clone, Debug)]
pub struct Http {
    client: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
}

impl Http {
    /// A client that trusts the certificates of this file, or else the system's.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, or has no certificate.
    pub fn new(ca_file: Option<&Path>) -> Result<Self, CertificatesError> {
        let mut connector = HttpConnector::new();
        connector.enforce_http(false);
        connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
        connector.set_nodelay(true);
        let connector = HttpsConnectorBuilder::new()
            .with_tls_config(tls(ca_file)?)
            .https_or_http()
            .enable_http1()
            .wrap_connector(connector);
        Ok(Self { client: Client::builder(TokioExecutor::new()).build(connector) })
    }

    /// Sends a request, and reads its whole answer.
    ///
    /// # Errors
    ///
    /// If there is no answer.
    pub async fn send(&self, request: Request<Bytes>) -> Result<Response<Bytes>, TransportError> {
        let exchange = async {
            let answer = self.client.request(request.map(Full::new)).await;
            let answer = answer.map_err(|error| TransportError::Connection(chain(&error)))?;
            let (parts, body) = answer.into_parts();
            let body = Limited::new(body, LONGEST_ANSWER).collect().await;
            let body = body.map_err(|error| TransportError::Connection(chain(&*error)))?;
            Ok(Response::from_parts(parts, body.to_bytes()))
        };
        tokio::time::timeout(TIMEOUT, exchange).await.unwrap_or(Err(TransportError::Timeout))
    }
}

fn tls(ca_file: Option<&Path>) -> Result<ClientConfig, CertificatesError> {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let problem = |file: &Path, problem: String| CertificatesError { file: file.to_owned(), problem };
    let builder = || {
        ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(|error| problem(Path::new("TLS"), error.to_string()))
    };
    let mut roots = RootCertStore::empty();
    if let Some(file) = ca_file {
        let read = CertificateDer::pem_file_iter(file).map_err(|error| problem(file, error.to_string()))?;
        for certificate in read {
            let certificate = certificate.map_err(|error| problem(file, error.to_string()))?;
            roots.add(certificate).map_err(|error| problem(file, error.to_string()))?;
        }
        if roots.is_empty() {
            return Err(problem(file, "it has no certificate in PEM".to_owned()));
        }
    } else if let Ok(builder) = builder()?.with_native_roots() {
        return Ok(builder.with_no_client_auth());
    }
    // Without any, only http:// works, as in tests.
    Ok(builder()?.with_root_certificates(roots).with_no_client_auth())
}

/// How a request ended, for the metrics.
pub fn result(answer: &Result<Response<Bytes>, TransportError>) -> RequestResult<'static> {
    match answer {
        Ok(answer) if answer.status().is_success() => RequestResult::Done,
        Ok(answer) => RequestResult::Refused(None, answer.status().as_u16()),
        Err(TransportError::Timeout) => RequestResult::Timeout,
        Err(TransportError::Connection(_)) => RequestResult::Connection,
    }
}
