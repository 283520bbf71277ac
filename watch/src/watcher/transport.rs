// SPDX-License-Identifier: Apache-2.0
//! The client of one watch: every wait has a deadline, everything that arrives counts for [`crate::Staleness`], and failures are
//! followed by delays.
//!
//! `kube_runtime::watcher` sees no bookmark pass, has no deadline for lists, and reopens a watch that ended at once, also one
//! that never brought data. [`Arriving`] is the response's body.

use http::{Request, Response};
use kube::Client;
use kube::client::Body;
use tokio::time::{sleep_until, timeout};

use super::arriving::{Answer, Arriving};
use super::connection::{ConnectionState, TransportError};

/// A client whose requests are those of this watch.
pub(super) fn wrap(client: &Client, state: &ConnectionState) -> Client {
    let (state, client) = (state.clone(), client.clone());
    let service = tower::service_fn(move |request| send(state.clone(), client.clone(), request));
    Client::new(service, "default")
}

async fn send(
    state: ConnectionState,
    client: Client,
    request: Request<Body>,
) -> Result<Response<Arriving>, TransportError> {
    let query = request.uri().query().unwrap_or_default();
    let is_watch = query.split('&').any(|part| part == "watch=true");
    let is_listing = query.split('&').any(|part| part == "sendInitialEvents=true");
    if let Some(at) = state.on_request(is_listing) {
        sleep_until(at).await;
    }
    let limit = state.timing().call;
    let response =
        timeout(limit, client.send(request)).await.map_err(|_| TransportError::NoResponse(limit))??;
    let answer = match (response.status().is_success(), is_watch) {
        (false, _) => Answer::Error,
        (true, false) => Answer::List,
        (true, true) => Answer::Watch,
    };
    if answer == Answer::Watch {
        state.on_watch();
    }
    Ok(response.map(|body| Arriving::new(body, state, answer)))
}
