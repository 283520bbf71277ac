// SPDX-License-Identifier: Apache-2.0
//! Log lines on standard error. Set up once, by [`crate::run`].

use std::io::{IsTerminal, stderr};

use tracing_subscriber::filter::{LevelFilter, ParseError};
use tracing_subscriber::{EnvFilter, fmt};

use crate::{LogArgs, LogFormat};

/// Why logging could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum LoggingError {
    #[error(
        "--log-level: `{0}` is not a level. Use error, warn, info, debug, trace or off, or TARGET=LEVEL."
    )]
    Level(String),
    #[error("--log-level `{filter}` is neither a level nor a list of TARGET=LEVEL")]
    Filter { filter: String, source: ParseError },
    #[error("logging is already set up")]
    Twice(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// The client logs each failed call as an error, and the watcher each failure as a warning, without the object and without
/// knowing whether it is retried. Callers log both. An unreadable response would be logged whole.
const QUIET: &str = "kube_client::client=error,kube_client::client::builder=off,kube_runtime::watcher=error";

fn filter(level: &str) -> Result<EnvFilter, LoggingError> {
    // `EnvFilter` takes a word that is no level for a target, and then logs nothing else.
    let is_level = |part: &str| !part.is_empty() && part.parse::<LevelFilter>().is_ok();
    let is_known = |part: &&str| part.contains(['=', '[', ']']) || is_level(part.trim());
    if let Some(unknown) = level.split(',').find(|part| !is_known(part)) {
        return Err(LoggingError::Level(unknown.to_owned()));
    }
    let all = format!("{QUIET},{level}");
    EnvFilter::try_new(all).map_err(|source| LoggingError::Filter { filter: level.to_owned(), source })
}

/// Sends all `tracing` events of the process to standard error. [`crate::run`] does so itself.
///
/// # Errors
/// The level is invalid, or this was called before.
pub fn init(args: &LogArgs) -> Result<(), LoggingError> {
    let LogArgs { log_level, log_format } = args;
    // An error of writing would be written to standard error, too, and end the process if that is gone.
    let builder = fmt().with_env_filter(filter(log_level)?).with_writer(stderr).log_internal_errors(false);
    match log_format {
        LogFormat::Text => builder.with_ansi(stderr().is_terminal()).try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    }
    .map_err(LoggingError::Twice)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_and_lists_are_valid_filters() {
        for level in ["info", "debug,hyper=warn", "steerage_watch=trace", "off"] {
            assert!(filter(level).is_ok(), "{level}");
        }
    }

    #[test]
    fn invalid_filter_names_the_flag() {
        for level in ["steerage=loud", "loud", "warning", "", "info,verbose", "info,"] {
            let error = filter(level).expect_err(level);
            assert!(error.to_string().contains("--log-level"), "{level}: {error}");
        }
    }
}
