// SPDX-License-Identifier: Apache-2.0
//! The flags that all binaries share, to be flattened into their own `Args`.

use std::net::SocketAddr;
use std::time::Duration;

use clap::{Args, ValueEnum};

use crate::duration;

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
    #[arg(long, env = "STEERAGE_LOG_LEVEL", default_value = "info", value_name = "FILTER")]
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
    /// Let running work end for this long after SIGTERM, then exit
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
    fn defaults_need_no_flag() {
        let ProcessArgs { log, admin } = Cli::parse_from(["program"]).process;
        assert_eq!((log.log_level.as_str(), log.log_format), ("info", LogFormat::Text));
        assert_eq!((admin.admin_address, admin.shutdown_grace_period), (None, Duration::from_secs(20)));
    }

    #[test]
    fn flags_are_taken() {
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
