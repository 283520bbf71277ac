// SPDX-License-Identifier: Apache-2.0
//! What clients lose while something happens to the cluster, judged by the meter, and held against what the event may cost. Every
//! measurement is reported.

use std::fmt::Write as _;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use tokio::task::block_in_place;
use tokio::time::sleep;

use crate::client::Client;
use crate::report::fine_ms;
use crate::self_test;
use crate::test_context::TestContext;
use steerage_meter::capture::now;
use steerage_meter::load::{AFTER, BEFORE, Load, Shape};
use steerage_meter::loss::{Loss, LossKind, Measurement};

/// What an event may cost.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Promise {
    /// Not one packet. Slow answers are reported and allowed.
    NothingLost,
    /// Nothing but what is on its way when a flow ends: requests that come while an exiting backend closes its connections, and answers
    /// by datagram on a flow that the load balancer ends. That of the lab passes such an answer on untranslated.
    ExceptInFlight,
    /// The same at an amphora: answers are sent to it, and it drops those of a flow that it has ended, at most one for each of the
    /// client's sockets.
    ExceptInFlightAtAmphora,
    /// No connection. The agent ends the flows of datagrams to an endpoint that goes: it passes an answer on its way on untranslated, and
    /// drops what comes before the edge has followed, at most one datagram of each of the client's sockets.
    ExceptDatagramsInFlight,
    /// Anything: it is only reported.
    None,
}

impl Promise {
    /// Whether it was kept.
    fn is_kept(self, measured: &Measurement) -> bool {
        let unanswered = measured.counts().get(&LossKind::DatagramUnanswered).copied().unwrap_or(0);
        let may_be = matches!(self, Self::ExceptInFlightAtAmphora | Self::ExceptDatagramsInFlight);
        let in_flight = may_be && unanswered <= Shape::default().askers as usize;
        let excused = |kind| kind == LossKind::DatagramUnanswered && in_flight;
        measured.losses.iter().all(|loss| self.allows(loss.kind) || excused(loss.kind))
    }

    /// Whether a loss breaks no promise. What is only slow never does.
    fn allows(self, kind: LossKind) -> bool {
        match self {
            Self::NothingLost => kind.is_slow(),
            Self::ExceptInFlight | Self::ExceptInFlightAtAmphora => {
                use LossKind::{BytesMissing, UnexpectedReset, WrongSource};
                kind.is_slow() || matches!(kind, UnexpectedReset | BytesMissing | WrongSource)
            }
            Self::ExceptDatagramsInFlight => kind.is_slow() || kind == LossKind::WrongSource,
            Self::None => true,
        }
    }
}

/// Fails when the event cost any client more than the promise allows. No measurement counts unless the meter has passed its own test.
pub(super) async fn under_load(
    test: &TestContext,
    event: &str,
    promise: Promise,
    clients: Vec<Client>,
    happen: impl AsyncFnOnce() -> Result<()>,
) -> Result<()> {
    let clients = clients.into_iter().map(|client| (client, promise)).collect();
    each_under_load(test, event, clients, happen).await
}

/// The same with a promise for each client.
pub(super) async fn each_under_load(
    test: &TestContext,
    event: &str,
    clients: Vec<(Client, Promise)>,
    happen: impl AsyncFnOnce() -> Result<()>,
) -> Result<()> {
    let (clients, promises): (Vec<_>, Vec<_>) = clients.into_iter().unzip();
    observe(test, event, clients, promises, happen).await.map(drop)
}

/// Without a promise; what each client lived through.
pub(super) async fn measured_under_load(
    test: &TestContext,
    event: &str,
    clients: Vec<Client>,
    happen: impl AsyncFnOnce() -> Result<()>,
) -> Result<Vec<(String, Measurement)>> {
    let promises = vec![Promise::None; clients.len()];
    observe(test, event, clients, promises, happen).await
}

async fn observe(
    test: &TestContext,
    event: &str,
    clients: Vec<Client>,
    promises: Vec<Promise>,
    happen: impl AsyncFnOnce() -> Result<()>,
) -> Result<Vec<(String, Measurement)>> {
    self_test::run(test, &clients).await.context("the loss meter does not work")?;
    let load = Load::start(clients.into_iter().map(Into::into).collect(), Shape::default());
    sleep(BEFORE).await;
    let at = now();
    let happened = happen().await;
    sleep(AFTER).await;
    let measurements = block_in_place(|| load.end())?;
    happened.with_context(|| event.to_owned())?;
    let mut broken = String::new();
    for ((what, measured), promise) in measurements.iter().zip(promises) {
        record(test, event, at, what, measured);
        if !promise.is_kept(measured) {
            let times = times(at, &measured.losses);
            let _ = write!(
                broken,
                "\n{what}: {} failed; lost: {}; {times}",
                measured.failed.len(),
                measured.kinds()
            );
            if measured.losses.iter().any(|loss| loss.kind.is_slow()) {
                broken.push_str("; what is slow was lost on the way back, or waited for a core");
            }
        }
        let ran = measured.connections > 0 && measured.exchanges > 0 && measured.datagrams > 0;
        ensure!(ran, "{what}: the load did not run: {measured:?}");
    }
    ensure!(broken.is_empty(), "{event}:{broken}");
    Ok(measurements)
}

fn record(test: &TestContext, event: &str, at: Duration, what: &str, measured: &Measurement) {
    let columns = [
        "event",
        "client",
        "connections",
        "requests",
        "datagrams",
        "lost",
        "when",
        "failed connections",
        "closed by server",
        "port collisions",
        "slowest handshake ms",
        "slowest answer ms",
        "slowest datagram ms",
        "retransmissions (needed / spurious / FIN / by server)",
    ];
    let again = measured.retransmissions;
    let row = vec![
        event.to_owned(),
        what.to_owned(),
        measured.connections.to_string(),
        measured.exchanges.to_string(),
        measured.datagrams.to_string(),
        measured.kinds(),
        times(at, &measured.losses),
        measured.failed.len().to_string(),
        measured.closed_by_server.to_string(),
        measured.port_collisions.to_string(),
        fine_ms(measured.slowest_handshake),
        fine_ms(measured.slowest_answer),
        fine_ms(measured.slowest_datagram),
        format!("{} / {} / {} / {}", again.needed, again.spurious, again.fins, again.by_server),
    ];
    test.suite.report.row("Loss while something happens, by packets", &columns, row);
}

/// The times of the first and the last loss relative to the event.
fn times(event: Duration, losses: &[Loss]) -> String {
    let offset = |loss: &Loss| format!("{:+.2} s", loss.at.as_secs_f64() - event.as_secs_f64());
    match losses {
        [] => "–".to_owned(),
        [only] => offset(only),
        [first, .., last] => format!("{} … {}", offset(first), offset(last)),
    }
}
