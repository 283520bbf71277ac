// SPDX-License-Identifier: Apache-2.0
//! From `main` to the exit code: starts the process, runs its body and shuts it down.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::num::NonZero;
use std::panic::AssertUnwindSafe;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use futures::FutureExt as _;
use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::admin::{Admin, AdminPages};
use crate::logging::LoggingError;
use crate::{Metrics, ProcessArgs, Readiness, duration, logging, termination};

/// Exit code of a process that failed.
pub const EXIT_FAILED: u8 = 1;
/// Exit code of a process with an invalid flag; clap's.
pub const EXIT_USAGE: u8 = 2;
/// Exit code of a process whose shutdown was forced: the grace period ended, or a second signal came.
pub const EXIT_FORCED: u8 = 3;

/// Maximum number of the runtime's threads.
const THREADS: usize = 4;

/// The program.
#[derive(Clone, Copy, Debug)]
pub struct Component {
    /// `controller`, `agent` or `edge`.
    pub name: &'static str,
    /// Its version.
    pub version: &'static str,
    /// The default address of its administration server.
    pub admin: SocketAddr,
}

/// The handle that the body of a process uses. Clones share the process.
#[derive(Clone, Debug)]
pub struct Process {
    component: Component,
    pages: AdminPages,
    shutdown: CancellationToken,
    tasks: TaskTracker,
    failed: mpsc::UnboundedSender<anyhow::Error>,
}

impl Process {
    /// A process without logs, signals and an administration server, for a caller that supervises it: also the errors of its tasks.
    pub fn unsupervised(component: Component) -> (Self, mpsc::UnboundedReceiver<anyhow::Error>) {
        let (failed, failures) = mpsc::unbounded_channel();
        let process = Self {
            component,
            pages: AdminPages::new(Metrics::new(component.name, component.version), Readiness::default()),
            shutdown: CancellationToken::new(),
            tasks: TaskTracker::new(),
            failed,
        };
        (process, failures)
    }

    /// The program.
    pub fn component(&self) -> Component {
        self.component
    }

    /// The tasks that `/readyz` waits for.
    pub fn readiness(&self) -> &Readiness {
        &self.pages.readiness
    }

    /// The metrics of `/metrics`.
    pub fn metrics(&self) -> &Metrics {
        &self.pages.metrics
    }

    /// What the administration server answers.
    pub fn admin_pages(&self) -> &AdminPages {
        &self.pages
    }

    /// Cancelled on a signal and on failure. Running work may end within the grace period.
    pub fn shutdown(&self) -> &CancellationToken {
        &self.shutdown
    }

    /// Starts a task of the process. Its error or panic ends the process as failed, and the shutdown waits for it. The task must
    /// return `Ok` once [`Process::shutdown`] is cancelled.
    pub fn spawn<F>(&self, name: &'static str, task: F)
    where
        F: Future<Output = anyhow::Result<()>> + Send + 'static,
    {
        let failed = self.failed.clone();
        self.tasks.spawn(async move {
            // In a task of its own, so that a panic becomes an error here.
            let error = match tokio::spawn(task).await {
                Ok(Ok(())) => return,
                Ok(Err(error)) => error,
                Err(error) => error.into(),
            };
            // The receiver is gone only when the process already ends.
            let _ = failed.send(error.context(name));
        });
    }

    /// From now on a panic of any thread or task ends the process as failed: for a program whose next process takes over what it did,
    /// and in which a part that has ended silently does more harm.
    pub fn end_on_panic(&self) {
        let failed = self.failed.clone();
        std::panic::set_hook(Box::new(move |panic| {
            let current = std::thread::current();
            let thread = current.name().unwrap_or("without a name");
            // The receiver is gone only when the process already ends.
            let _ = failed.send(anyhow::anyhow!("thread {thread}: {panic}"));
        }));
    }
}

/// Runs a process: logs, administration server, signals, then `body`. Returns when the process may exit.
///
/// It succeeds when `body` returns `Ok`, with or without a signal before. It fails when `body` or a task of [`Process::spawn`]
/// fails; the error is then logged and written as the container's termination message.
pub fn run<B, F>(component: Component, args: &ProcessArgs, body: B) -> ExitCode
where
    B: FnOnce(Process) -> F,
    F: Future<Output = anyhow::Result<()>>,
{
    match try_run(component, args, body) {
        Ok(code) => code,
        Err(error) => {
            // Where logs are off or not set up yet, standard error is the only place.
            let message = steerage_model::chain(error.as_ref());
            if tracing::enabled!(tracing::Level::ERROR) {
                tracing::error!(error = message, "process failed; exiting");
            } else {
                eprintln!("steerage {}: {message}", component.name);
            }
            termination::write(&message);
            ExitCode::from(if error.is::<LoggingError>() { EXIT_USAGE } else { EXIT_FAILED })
        }
    }
}

/// One thread per processor, up to a few: more would only cost memory on a large machine.
fn runtime() -> io::Result<Runtime> {
    let processors = std::thread::available_parallelism().map_or(1, NonZero::get);
    Builder::new_multi_thread().worker_threads(processors.min(THREADS)).enable_all().build()
}

fn try_run<B, F>(component: Component, args: &ProcessArgs, body: B) -> anyhow::Result<ExitCode>
where
    B: FnOnce(Process) -> F,
    F: Future<Output = anyhow::Result<()>>,
{
    let ProcessArgs { log, admin } = args;
    logging::init(log)?;
    let runtime = runtime().context("cannot start the runtime")?;
    let code = runtime.block_on(async {
        // First, so that a signal during the start is not lost.
        let signals = Signals::new().context("cannot listen to signals")?;
        let admin_server = Admin::bind(admin.admin_address.unwrap_or(component.admin)).await?;
        tracing::info!(
            component = component.name,
            version = component.version,
            admin = %admin_server.address(),
            "starting"
        );
        let (process, failures) = Process::unsupervised(component);
        let served = tokio::spawn(admin_server.serve(process.pages.clone()));
        let code =
            supervise(process.clone(), signals, failures, admin.shutdown_grace_period, body(process)).await;
        served.abort();
        code
    });
    // Blocking work, such as name resolution, must not delay the exit.
    runtime.shutdown_background();
    code
}

async fn supervise(
    process: Process,
    mut signals: Signals,
    mut failures: mpsc::UnboundedReceiver<anyhow::Error>,
    grace: Duration,
    body: impl Future<Output = anyhow::Result<()>>,
) -> anyhow::Result<ExitCode> {
    // A panic of it is told as one of a task is, and not by the exit code alone.
    let body = AssertUnwindSafe(body).catch_unwind();
    let mut whole = std::pin::pin!(async {
        let result = body.await.unwrap_or_else(|_| Err(anyhow::anyhow!("the program panicked")));
        if let Err(error) = result {
            // As a task's: the others have the grace period to end, and no longer. The receiver waits for it.
            let _ = process.failed.send(error);
        }
        process.shutdown.cancel();
        process.tasks.close();
        process.tasks.wait().await;
    });
    // `process` itself holds a sender, so `recv` never returns `None`.
    let first_error = tokio::select! {
        () = &mut whole => return failures.try_recv().map_or(Ok(ExitCode::SUCCESS), Err),
        error = failures.recv() => error,
        name = signals.recv() => {
            tracing::info!(signal = name, grace_period = %duration::display(grace), "shutting down");
            None
        }
    };
    let _not_ready = process.pages.readiness.task("shutdown");
    process.shutdown.cancel();
    let forced = tokio::select! {
        () = &mut whole => {
            if let Some(error) = first_error.or_else(|| failures.try_recv().ok()) { return Err(error); }
            tracing::info!("shutdown complete");
            return Ok(ExitCode::SUCCESS);
        }
        () = tokio::time::sleep(grace) => "grace period ended",
        _ = signals.recv() => "second signal",
    };
    if let Some(error) = first_error {
        return Err(error);
    }
    tracing::warn!(reason = forced, "shutdown forced; work in progress is lost");
    Ok(ExitCode::from(EXIT_FORCED))
}

/// The signals that end a process.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    async fn recv(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}
