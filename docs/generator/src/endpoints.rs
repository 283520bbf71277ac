// SPDX-License-Identifier: Apache-2.0
//! What a program serves over HTTP, what `/readyz` waits for, and how the program ends.

use crate::{code, table};

/// The section on a program's HTTP servers. `tasks` are the names that `/readyz` prints, each with what it waits for; `others`
/// are address, path and meaning of what the program serves beside its administration server at `admin`.
pub fn endpoints(admin: &str, tasks: &[(&str, &str)], others: &[(&str, &str, &str)]) -> String {
    let admin = format!("`{admin}`, or `--admin-address`");
    let row = |address: &str, path: &str, meaning: &str| [address.to_owned(), code(path), meaning.to_owned()];
    let mut rows = vec![
        row(&admin, "/metrics", "The metrics below, as `OpenMetrics` text"),
        row(&admin, "/livez", "200 while the process runs"),
        row(&admin, "/readyz", "200 when no task below is pending; otherwise 503 and `pending: TASK, …`"),
    ];
    rows.extend(others.iter().map(|(address, path, meaning)| row(address, path, meaning)));
    let own = [
        ("start", "the process has registered its tasks"),
        ("shutdown", "never: the process ends after SIGTERM, SIGINT or a fatal error"),
    ];
    let tasks = tasks.iter().chain(&own).map(|(name, meaning)| [code(name), (*meaning).to_owned()]);
    format!(
        "## Endpoints\n\nAll are read-only and without authentication.\n\n{}\n{}",
        table(["address", "path", "serves"], rows),
        table(["task of `/readyz`", "is done when"], tasks)
    )
}

/// The section on exit codes. `forced` is the code of a forced shutdown; `others` are those that only this program has.
pub fn exit_codes(failed: u8, forced: u8, others: &[(u8, &str)]) -> String {
    let shared = [
        ("0".to_owned(), "The program or subcommand succeeded, or was shut down"),
        (failed.to_string(), "It failed; the last line of the log, or of standard error, says why"),
        ("2".to_owned(), "A flag or its value is invalid"),
        (forced.to_string(), "The shutdown was forced: the grace period ended, or a second signal came"),
    ];
    let others = others.iter().map(|(code, meaning)| (code.to_string(), *meaning));
    let rows = shared.into_iter().chain(others).map(|(code, meaning)| [code, meaning.to_owned()]);
    format!("## Exit codes\n\n{}", table(["code", "meaning"], rows))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_name_ports_paths_and_tasks() {
        let text =
            endpoints("[::]:1", &[("rules", "all are written")], &[("`[::]:2`", "/healthz", "health")]);
        for expected in [
            "| `[::]:1`, or `--admin-address` | `/metrics` |",
            "| `[::]:2` | `/healthz` | health |\n",
            "| `rules` | all are written |\n",
            "| `shutdown` |",
        ] {
            assert!(text.contains(expected), "{expected} is missing in:\n{text}");
        }
    }
}
