// SPDX-License-Identifier: Apache-2.0
//! Start and shutdown of a real process: this test binary starts itself as a child that calls [`steerage_process::run`], and
//! sends it signals.

#![allow(clippy::expect_used, reason = "helpers of a test")]

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::Duration;

use clap::Parser;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use steerage_process::{Component, EXIT_FAILED, EXIT_FORCED, EXIT_USAGE, Process, ProcessArgs, run};

const CASE: &str = "STEERAGE_TEST_CASE";

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    process: ProcessArgs,
}

/// The child of the other tests, configured by the environment. Without that it does nothing.
#[test]
fn child() {
    let Ok(case) = std::env::var(CASE) else { return };
    let grace = if ["stuck", "fails-and-hangs", "panics-and-hangs"].contains(&case.as_str()) {
        "200ms"
    } else {
        "20s"
    };
    let level = std::env::var("STEERAGE_TEST_LOG_LEVEL").unwrap_or_else(|_| "info".to_owned());
    let cli = Cli::parse_from(["child", "--shutdown-grace-period", grace, "--log-level", &level]);
    let admin = std::env::var("STEERAGE_TEST_ADMIN").unwrap_or_else(|_| "127.0.0.1:0".to_owned());
    let component = Component { name: "child", version: "0", admin: admin.parse().expect("address") };
    let code = run(component, &cli.process, |process| body(process, case));
    let codes = [0, EXIT_FAILED, EXIT_USAGE, EXIT_FORCED];
    let code = codes.into_iter().find(|known| ExitCode::from(*known) == code).unwrap_or(99);
    std::process::exit(i32::from(code));
}

async fn body(process: Process, case: String) -> anyhow::Result<()> {
    let task = process.readiness().task("body");
    match case.as_str() {
        "graceful" | "busy-port" => {
            let shutdown = process.shutdown().clone();
            process.spawn("writer", async move {
                shutdown.cancelled().await;
                tokio::time::sleep(Duration::from_millis(100)).await;
                eprintln!("writer finished");
                Ok(())
            });
            task.done();
            process.shutdown().cancelled().await;
            Ok(())
        }
        "stuck" | "impatient" => {
            task.done();
            std::future::pending().await
        }
        // Its other task never ends.
        "fails-and-hangs" | "panics-and-hangs" => {
            process.spawn("writer", std::future::pending());
            assert_ne!(case, "panics-and-hangs", "deliberate");
            anyhow::bail!("no such pool")
        }
        "fails" => anyhow::bail!("no such pool"),
        "task-fails" | "task-panics" => {
            process.spawn("watcher", async move {
                assert_ne!(case, "task-panics", "deliberate");
                anyhow::bail!("lost the lease")
            });
            process.shutdown().cancelled().await;
            Ok(())
        }
        "thread-panics" | "unnoticed-task-panics" => {
            process.end_on_panic();
            let thread = std::thread::Builder::new().name("monitor".to_owned());
            if case == "thread-panics" {
                drop(thread.spawn(move || assert_ne!(case, "thread-panics", "deliberate"))?);
            } else {
                drop(tokio::spawn(async move { assert_ne!(case, "unnoticed-task-panics", "deliberate") }));
            }
            process.shutdown().cancelled().await;
            Ok(())
        }
        "body-panics" => {
            process.end_on_panic();
            tokio::task::yield_now().await;
            assert_ne!(case, "body-panics", "deliberate");
            Ok(())
        }
        "returns" => Ok(()),
        other => anyhow::bail!("unknown case {other}"),
    }
}

struct Started {
    child: Child,
    lines: BufReader<std::process::ChildStderr>,
}

impl Started {
    fn new(case: &str, more: &[(&str, &str)]) -> Self {
        let mut child = Command::new(std::env::current_exe().expect("this binary"))
            .args(["--exact", "child", "--nocapture"])
            .env(CASE, case)
            .envs(more.iter().copied())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("start");
        let lines = BufReader::new(child.stderr.take().expect("piped"));
        Self { child, lines }
    }

    fn wait_for(&mut self, wanted: &str) {
        let mut line = String::new();
        while !line.contains(wanted) {
            line.clear();
            assert_ne!(self.lines.read_line(&mut line).expect("read"), 0, "ended before it said {wanted}");
        }
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(i32::try_from(self.child.id()).expect("pid")), signal).expect("signal");
    }

    /// The exit code, and what was still said.
    fn end(mut self) -> (Option<i32>, String) {
        let mut rest = String::new();
        self.lines.read_to_string(&mut rest).expect("read");
        (self.child.wait().expect("wait").code(), rest)
    }
}

#[test]
fn sigterm_lets_running_work_end() {
    let mut started = Started::new("graceful", &[]);
    started.wait_for("ready");
    started.signal(Signal::SIGTERM);
    let (code, said) = started.end();
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("SIGTERM") && said.contains("writer finished"), "{said}");
}

#[test]
fn shutdown_is_forced_after_the_grace_period() {
    let mut started = Started::new("stuck", &[]);
    started.wait_for("ready");
    started.signal(Signal::SIGINT);
    let (code, said) = started.end();
    assert_eq!(code, Some(i32::from(EXIT_FORCED)), "{said}");
}

#[test]
fn second_signal_forces_the_shutdown() {
    let mut started = Started::new("impatient", &[]);
    started.wait_for("ready");
    started.signal(Signal::SIGTERM);
    started.wait_for("shutting down");
    started.signal(Signal::SIGTERM);
    let (code, said) = started.end();
    assert_eq!(code, Some(i32::from(EXIT_FORCED)), "{said}");
    assert!(said.contains("second"), "{said}");
}

#[test]
fn errors_fail_the_process_and_are_logged() {
    for (case, words) in [
        ("fails", vec!["no such pool"]),
        ("fails-and-hangs", vec!["no such pool"]),
        ("panics-and-hangs", vec!["the program panicked"]),
        ("task-fails", vec!["watcher", "lost the lease"]),
        ("task-panics", vec!["watcher", "panic"]),
        ("thread-panics", vec!["thread monitor", "panicked at", "life.rs", "deliberate"]),
        ("unnoticed-task-panics", vec!["panicked at", "life.rs", "deliberate"]),
        ("body-panics", vec!["thread", "panicked at", "life.rs", "deliberate"]),
    ] {
        let (code, said) = Started::new(case, &[]).end();
        assert_eq!(code, Some(i32::from(EXIT_FAILED)), "{case}: {said}");
        let last = said.lines().last().unwrap_or_default();
        assert!(words.iter().all(|word| last.contains(word)), "{case}: {said}");
    }
}

#[test]
fn fatal_error_is_printed_when_logging_is_off_or_invalid() {
    for (level, reason, expected) in [
        ("off", "no such pool", EXIT_FAILED),
        ("steerage_watch=debug", "no such pool", EXIT_FAILED),
        ("loud", "`loud` is not a level", EXIT_USAGE),
    ] {
        let (code, said) = Started::new("fails", &[("STEERAGE_TEST_LOG_LEVEL", level)]).end();
        assert_eq!(code, Some(i32::from(expected)), "{level}: {said}");
        assert_eq!(said.matches(reason).count(), 1, "{level}: {said}");
    }
}

#[test]
fn process_succeeds_when_the_body_returns() {
    let (code, said) = Started::new("returns", &[]).end();
    assert_eq!(code, Some(0), "{said}");
}

#[test]
fn busy_administration_port_fails_the_start_and_names_the_flag() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("bind");
    let address = taken.local_addr().expect("address").to_string();
    let (code, said) = Started::new("busy-port", &[("STEERAGE_TEST_ADMIN", &address)]).end();
    assert_eq!(code, Some(i32::from(EXIT_FAILED)), "{said}");
    assert!(said.contains(&address) && said.contains("--admin-address"), "{said}");
}
