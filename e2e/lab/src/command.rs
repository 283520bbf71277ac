// SPDX-License-Identifier: Apache-2.0
//! Runs a command to its end. The error shows the end of its output.

use std::io::Write;
use std::process::{Command, Output, Stdio};

use crate::error::{Doing, Error, Result};

/// Maximum length of a failed command's output in an error.
const SHOWN: usize = 2000;

/// Runs a command and returns its standard output.
pub fn run(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).output().doing(|| format!("running {}", line(command)))?;
    check(command, &output)
}

/// Runs a command with `input` on its standard input.
pub fn run_with(command: &mut Command, input: &str) -> Result<String> {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().doing(|| format!("running {}", line(command)))?;
    if let Some(mut stdin) = child.stdin.take() {
        // A command that ends early closes its input; its exit status is the error to report.
        let _ = stdin.write_all(input.as_bytes());
    }
    let output = child.wait_with_output().doing(|| format!("running {}", line(command)))?;
    check(command, &output)
}

fn check(command: &Command, output: &Output) -> Result<String> {
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let mut said = String::from_utf8_lossy(&output.stderr).into_owned();
    said.push_str(&String::from_utf8_lossy(&output.stdout));
    Err(Error::Command {
        command: line(command),
        outcome: output.status.to_string(),
        output: tail(said.trim(), SHOWN).to_owned(),
    })
}

/// The last `most` bytes of a text, cut at a character.
pub fn tail(text: &str, most: usize) -> &str {
    let mut from = text.len().saturating_sub(most);
    while !text.is_char_boundary(from) {
        from += 1;
    }
    &text[from..]
}

fn line(command: &Command) -> String {
    let mut words = vec![command.get_program().to_string_lossy().into_owned()];
    words.extend(command.get_args().map(|word| word.to_string_lossy().into_owned()));
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_and_errors_come_back() {
        assert_eq!(run(Command::new("sh").args(["-c", "echo hi"])).unwrap(), "hi\n");
        assert_eq!(run_with(&mut Command::new("cat"), "in").unwrap(), "in");
        let error = run(Command::new("sh").args(["-c", "echo why >&2; exit 3"])).unwrap_err().to_string();
        assert!(error.contains("why") && error.contains('3'), "{error}");
    }

    #[test]
    fn a_tail_is_cut_at_a_character() {
        assert_eq!(tail("aé", 1), "");
        assert_eq!(tail("aé", 2), "é");
        assert_eq!(tail("ab", 9), "ab");
    }
}
