// SPDX-License-Identifier: Apache-2.0
//! The flags that all binaries share, to be flattened into their own `Args`.

use std::net::SocketAddr;
use std::time::Duration;

use clap::{Args, ValueEnum};

/// How log lines are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// What is logged, and how.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Logging")]
pub struct LogArgs {
    /// Least level to log, or a list of TARGET=LEVEL
    #[arg(long, env = "STEERAGE_LOG", default_value = "info", value_name = "FILTER")]
    pub log_level: String,
    /// How log lines are written
    #[arg(long, env = "STEERAGE_LOG_FORMAT", value_enum, default_value_t = LogFormat::Text)]
    pub log_format: LogFormat,
}

/// The administration server.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Administration")]
pub struct AdminArgs {
    /// Address and port of /metrics, /livez and /readyz; each program has its own default port, on all addresses
    #[arg(long, env = "STEERAGE_ADMIN_ADDRESS", value_name = "IP:PORT")]
    pub admin_address: Option<SocketAddr>,
    /// Seconds that work in hand may take to end after SIGTERM
    #[arg(long, env = "STEERAGE_SHUTDOWN_GRACE", value_name = "SECONDS", default_value = "20", value_parser = seconds)]
    pub shutdown_grace: Duration,
}

/// All flags that [`crate::run`] needs.
#[derive(Args, Clone, Debug)]
pub struct ProcessArgs {
    #[command(flatten)]
    #[allow(missing_docs, reason = "clap would print it as help")]
    pub log: LogArgs,
    #[command(flatten)]
    #[allow(missing_docs, reason = "clap would print it as help")]
    pub admin: AdminArgs,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("`{text}` is not a number of seconds"))?;
    Duration::try_from_secs_f64(seconds).map_err(|_| format!("`{text}` is not a usable number of seconds"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        process: ProcessArgs,
    }

    #[test]
    fn defaults_need_no_flag() {
        let ProcessArgs { log, admin } = Cli::parse_from(["program"]).process;
        assert_eq!((log.log_level.as_str(), log.log_format), ("info", LogFormat::Text));
        assert_eq!((admin.admin_address, admin.shutdown_grace), (None, Duration::from_secs(20)));
    }

    #[test]
    fn flags_are_taken() {
        let line =
            "program --log-level debug --log-format json --admin-address [::1]:99 --shutdown-grace 0.5";
        let ProcessArgs { log, admin } = Cli::parse_from(line.split(' ')).process;
        assert_eq!((log.log_level.as_str(), log.log_format), ("debug", LogFormat::Json));
        assert_eq!(admin.admin_address, Some("[::1]:99".parse().expect("address")));
        assert_eq!(admin.shutdown_grace, Duration::from_millis(500));
    }

    #[test]
    fn a_grace_that_is_no_time_is_refused() {
        for grace in ["-1", "soon", "NaN", "1e300"] {
            assert!(
                Cli::try_parse_from(["program", &format!("--shutdown-grace={grace}")]).is_err(),
                "{grace}"
            );
        }
    }
}
