// SPDX-License-Identifier: Apache-2.0
//! The flags that all binaries share, to be flattened into their own `Args`.

use std::net::SocketAddr;
use std::time::Duration;

use clap::{Args, ValueEnum};

use crate::duration;

/// The format of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// One line of key=value text
    Text,
    /// One JSON object per line
    Json,
}

/// Flags of logging.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Logging")]
pub struct LogArgs {
    /// Set the minimum log level, or a list of TARGET=LEVEL
    #[arg(long, env = "STEERAGE_LOG_LEVEL", default_value = "info", value_name = "FILTER")]
    pub log_level: String,
    /// Write log lines in this format
    #[arg(long, env = "STEERAGE_LOG_FORMAT", value_enum, default_value_t = LogFormat::Text, value_name = "FORMAT")]
    pub log_format: LogFormat,
}

/// Flags of the administration server and of the shutdown.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Administration")]
pub struct AdminArgs {
    /// Serve /metrics, /livez and /readyz at this address [default: all addresses, port 9580 of the controller, 10358 of the agent,
    /// 10359 of the edge]
    #[arg(long, env = "STEERAGE_ADMIN_ADDRESS", value_name = "IP:PORT")]
    pub admin_address: Option<SocketAddr>,
    /// Let running work end for this long after SIGTERM or a fatal error, then exit
    #[arg(long, env = "STEERAGE_SHUTDOWN_GRACE_PERIOD", value_name = "DURATION", default_value = "20s",
          value_parser = duration::parse)]
    pub shutdown_grace_period: Duration,
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
    fn flags_have_defaults() {
        let ProcessArgs { log, admin } = Cli::parse_from(["program"]).process;
        assert_eq!((log.log_level.as_str(), log.log_format), ("info", LogFormat::Text));
        assert_eq!((admin.admin_address, admin.shutdown_grace_period), (None, Duration::from_secs(20)));
    }

    #[test]
    fn flags_are_parsed() {
        let line = "program --log-level debug --log-format json --admin-address [::1]:99 --shutdown-grace-period 500ms";
        let ProcessArgs { log, admin } = Cli::parse_from(line.split(' ')).process;
        assert_eq!((log.log_level.as_str(), log.log_format), ("debug", LogFormat::Json));
        assert_eq!(admin.admin_address, Some("[::1]:99".parse().expect("address")));
        assert_eq!(admin.shutdown_grace_period, Duration::from_millis(500));
    }

    #[test]
    fn grace_period_needs_a_duration() {
        for grace in ["-1s", "20", "soon", "NaN", "1e300"] {
            assert!(
                Cli::try_parse_from(["program", &format!("--shutdown-grace-period={grace}")]).is_err(),
                "{grace}"
            );
        }
    }
}
