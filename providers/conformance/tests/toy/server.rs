// SPDX-License-Identifier: Apache-2.0
//! A toy cloud over HTTP: named objects with `key=value` fields.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};

pub(crate) type Fields = BTreeMap<String, String>;
pub(crate) type Objects = BTreeMap<String, Fields>;

#[derive(Clone)]
pub(crate) struct Server {
    pub(crate) addr: SocketAddr,
    pub(crate) objects: Arc<Mutex<Objects>>,
}

impl Server {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = Self { addr: listener.local_addr().unwrap(), objects: Arc::default() };
        let objects = Arc::clone(&server.objects);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let objects = Arc::clone(&objects);
                tokio::spawn(async move {
                    let service = service_fn(|request| answer(&objects, request));
                    let _ = hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), service)
                        .await;
                });
            }
        });
        server
    }
}

async fn answer(
    objects: &Mutex<Objects>,
    request: Request<Incoming>,
) -> Result<Response<Full<Bytes>>, hyper::Error> {
    let (parts, body) = request.into_parts();
    let body = String::from_utf8(body.collect().await?.to_bytes().to_vec()).unwrap();
    let name = parts.uri.path().trim_start_matches('/').to_owned();
    let mut objects = objects.lock().unwrap();
    let (status, text) = match parts.method {
        Method::GET => (StatusCode::OK, print(&objects)),
        Method::POST if objects.contains_key(&name) => (StatusCode::CONFLICT, String::new()),
        Method::POST if body.contains("addr=bad") => (StatusCode::UNPROCESSABLE_ENTITY, String::new()),
        Method::POST | Method::PUT => {
            objects.insert(name, fields(&body));
            (StatusCode::OK, String::new())
        }
        Method::DELETE if objects.remove(&name).is_some() => (StatusCode::OK, String::new()),
        _ => (StatusCode::NOT_FOUND, String::new()),
    };
    let mut response = Response::new(Full::new(text.into()));
    *response.status_mut() = status;
    Ok(response)
}

pub(crate) fn line(fields: &Fields) -> String {
    fields.iter().map(|(k, v)| format!("{k}={v}")).collect::<Vec<_>>().join(";")
}

fn fields(text: &str) -> Fields {
    text.split(';').filter_map(|f| f.split_once('=')).map(|(k, v)| (k.to_owned(), v.to_owned())).collect()
}

fn print(objects: &Objects) -> String {
    objects.iter().map(|(name, f)| format!("{name}\t{}", line(f))).collect::<Vec<_>>().join("\n")
}

pub(crate) fn parse(text: &str) -> Objects {
    text.lines().filter_map(|l| l.split_once('\t')).map(|(name, f)| (name.to_owned(), fields(f))).collect()
}

/// Makes a call. Returns status and body, or an error if the connection broke.
pub(crate) async fn call(
    addr: SocketAddr,
    method: Method,
    name: &str,
    body: String,
) -> Result<(StatusCode, String), String> {
    let failed = |e: &dyn std::error::Error| format!("{method} {name}: {e}");
    let stream = TcpStream::connect(addr).await.map_err(|e| failed(&e))?;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(|e| failed(&e))?;
    tokio::spawn(connection);
    let request = Request::builder()
        .method(&method)
        .uri(format!("/{name}"))
        .header("host", "toy")
        .body(Full::new(Bytes::from(body)))
        .map_err(|e| failed(&e))?;
    let response = sender.send_request(request).await.map_err(|e| failed(&e))?;
    let status = response.status();
    let body = response.into_body().collect().await.map_err(|e| failed(&e))?.to_bytes();
    Ok((status, String::from_utf8_lossy(&body).into_owned()))
}
