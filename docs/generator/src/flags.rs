// SPDX-License-Identifier: Apache-2.0
//! A program's flags as Markdown tables, one for each heading of its help, and the same for its subcommands.

use std::fmt::Write as _;

use clap::{Arg, ArgAction, Command};

use crate::{code, table};

/// The flags and subcommands of `command`, with headings of the second and third level.
pub fn flags(command: &Command) -> String {
    let mut text = String::from("## Flags\n");
    groups(command, &mut text);
    for subcommand in command.get_subcommands() {
        let _ = write!(
            text,
            "\n## `{} {}`\n\n{}.\n",
            command.get_name(),
            subcommand.get_name(),
            about(subcommand)
        );
        groups(subcommand, &mut text);
    }
    text
}

/// A table for each help heading; flags without one come first.
fn groups(command: &Command, text: &mut String) {
    let mut headings = vec![None];
    for arg in command.get_arguments() {
        if !headings.contains(&arg.get_help_heading()) {
            headings.push(arg.get_help_heading());
        }
    }
    for heading in headings {
        let rows: Vec<_> = command
            .get_arguments()
            .filter(|arg| arg.get_help_heading() == heading && !arg.is_hide_set())
            .map(row)
            .collect();
        if rows.is_empty() {
            continue;
        }
        if let Some(heading) = heading {
            let _ = write!(text, "\n### {heading}\n");
        }
        text.push('\n');
        text.push_str(&table(["flag", "environment variable", "default", "meaning"], rows));
    }
}

fn row(arg: &Arg) -> [String; 4] {
    let value = arg.get_value_names().unwrap_or_default().join(" ");
    let name = match (arg.get_long(), matches!(arg.get_action(), ArgAction::SetTrue)) {
        (None, _) => value,
        (Some(long), true) => format!("--{long}"),
        (Some(long), false) => format!("--{long} {value}"),
    };
    let environment = arg.get_env().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let defaults: Vec<_> = arg.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
    let default = match (defaults.is_empty(), arg.is_required_set()) {
        (true, true) => "required".to_owned(),
        _ if matches!(arg.get_action(), ArgAction::SetTrue) => "off".to_owned(),
        _ => code(&defaults.join(",")),
    };
    let (meaning, written) = split_default(&meaning(arg));
    [code(&name), code(&environment), written.unwrap_or(default), meaning]
}

/// Help without the `[default: …]` that states a default in words, and that default.
fn split_default(help: &str) -> (String, Option<String>) {
    let Some((before, rest)) = help.split_once(" [default: ") else { return (help.to_owned(), None) };
    let Some((default, after)) = rest.rsplit_once(']') else { return (help.to_owned(), None) };
    (format!("{before}{after}"), Some(default.to_owned()))
}

fn meaning(arg: &Arg) -> String {
    let help = arg.get_long_help().or(arg.get_help()).map(ToString::to_string).unwrap_or_default();
    let mut meaning = help.trim().trim_end_matches('.').to_owned();
    if matches!(arg.get_action(), ArgAction::SetTrue) {
        return meaning;
    }
    let values = arg.get_possible_values();
    for (index, value) in values.iter().filter(|value| !value.is_hide_set()).enumerate() {
        let name = value.get_name();
        let separator = if index == 0 { ". Values:" } else { "," };
        let _ = match value.get_help() {
            Some(help) => {
                write!(meaning, "{separator} `{name}` ({})", help.to_string().trim_end_matches('.'))
            }
            None => write!(meaning, "{separator} `{name}`"),
        };
    }
    meaning
}

fn about(command: &Command) -> String {
    let about = command.get_long_about().or(command.get_about());
    about.map(|about| about.to_string().trim_end_matches('.').to_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_listed_by_heading_with_default_and_values() {
        let modes = clap::builder::PossibleValuesParser::new(["fast", "slow"]);
        let command = Command::new("program")
            .arg(Arg::new("dry").long("dry-run").action(ArgAction::SetTrue).help("Write nothing"))
            .arg(Arg::new("at").long("at").value_name("AT").help("Listen here [default: [::]:1, on all]"))
            .arg(
                Arg::new("mode")
                    .long("mode")
                    .value_name("MODE")
                    .help("Run so")
                    .default_value("fast")
                    .value_parser(modes),
            )
            .next_help_heading("Other")
            .arg(Arg::new("port").long("port").value_name("PORT").help("Listen here").required(true))
            .subcommand(
                Command::new("clean")
                    .about("Remove a|b")
                    .arg(Arg::new("to").value_name("TO").help("Address")),
            );
        let text = flags(&command);
        for expected in [
            "| `--dry-run` |  | off | Write nothing |\n",
            "| `--at AT` |  | [::]:1, on all | Listen here |\n",
            "| `--mode MODE` |  | `fast` | Run so. Values: `fast`, `slow` |\n",
            "### Other\n\n| flag",
            "| `--port PORT` |  | required | Listen here |\n",
            "## `program clean`\n\nRemove a|b.\n",
            "| `TO` |  |  | Address |\n",
        ] {
            assert!(text.contains(expected), "{expected} is missing in:\n{text}");
        }
    }
}
