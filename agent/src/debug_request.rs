// SPDX-License-Identifier: Apache-2.0
//! Requests to a running agent, and their encoding on the debug socket.

use tokio::sync::oneshot;

use crate::explain::PacketQuery;
use crate::kernel::WrittenRules;
use crate::rules::Ruleset;

/// A command of `steerage-agent explain` or `dump`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DebugCommand {
    /// What happens to a packet.
    Explain(PacketQuery),
    /// The wanted tables beside the kernel's.
    Dump {
        /// List elements that do not differ, too.
        all: bool,
    },
}

/// The loop's reply.
#[derive(Debug)]
pub enum DebugReply {
    /// Text to print.
    Text(String),
    /// A ruleset and its rules, still to be compared with the kernel. Not in the loop, which has changes to write.
    Ruleset(Box<Ruleset>, WrittenRules),
}

/// A command, and the channel of its reply.
#[derive(Debug)]
pub struct DebugRequest {
    /// The command.
    pub command: DebugCommand,
    /// Where the reply goes.
    pub reply: oneshot::Sender<DebugReply>,
}

impl DebugCommand {
    /// The command as a line of text.
    pub fn to_line(&self) -> String {
        match self {
            Self::Dump { all: false } => "dump".to_owned(),
            Self::Dump { all: true } => "dump all".to_owned(),
            Self::Explain(PacketQuery { frontend, from: None }) => format!("explain {frontend}"),
            Self::Explain(PacketQuery { frontend, from: Some(from) }) => format!("explain {frontend} {from}"),
        }
    }

    /// Reads such a line.
    pub fn parse(line: &str) -> Result<Self, String> {
        let words: Vec<_> = line.split(' ').collect();
        let (frontend, from) = match words.as_slice() {
            ["dump"] => return Ok(Self::Dump { all: false }),
            ["dump", "all"] => return Ok(Self::Dump { all: true }),
            ["explain", frontend] => (frontend, None),
            ["explain", frontend, from] => (frontend, Some(from)),
            _ => {
                return Err(format!(
                    "unknown command `{line}`: run the command from the same version as the agent"
                ));
            }
        };
        let from = from
            .map(|from| from.parse().map_err(|_| format!("`{from}` is not an IP address")))
            .transpose()?;
        PacketQuery::new(frontend.parse()?, from).map(Self::Explain)
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;

    #[test]
    fn commands_survive_the_socket() {
        let from: IpAddr = "fd00::2".parse().unwrap();
        for from in [None, Some(from)] {
            let query = PacketQuery::new("[fd00::1]:53/UDP".parse().unwrap(), from).unwrap();
            let command = DebugCommand::Explain(query);
            assert_eq!(DebugCommand::parse(&command.to_line()), Ok(command));
        }
        for all in [false, true] {
            let command = DebugCommand::Dump { all };
            assert_eq!(DebugCommand::parse(&command.to_line()), Ok(command));
        }
        for line in
            ["", "explain", "explain x", "explain 10.0.0.1:80/TCP y", "explain 10.0.0.1:80/TCP fd00::1"]
        {
            DebugCommand::parse(line).expect_err(line);
        }
    }
}
