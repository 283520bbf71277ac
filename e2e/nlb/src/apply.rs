// SPDX-License-Identifier: Apache-2.0
//! Writes the rules, and ends flows, in the network namespace of the calling thread. Decides nothing.

use std::io::Write as _;
use std::net::SocketAddr;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use steerage_nft::{Conntrack, ConntrackEntry, Family};

use crate::cloud::Ended;

/// Replaces the rules, all or none.
pub fn write(ruleset: &str) -> Result<()> {
    let mut nft = Command::new("nft");
    nft.args(["-f", "-"]).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut nft = nft.spawn().context("running nft")?;
    if let Some(mut input) = nft.stdin.take() {
        input.write_all(ruleset.as_bytes()).context("writing to nft")?;
    }
    let output = nft.wait_with_output().context("waiting for nft")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "nft refuses the rules: {said}\n{ruleset}");
    Ok(())
}

/// Ends flows. Returns how many there were.
pub fn end(ended: &[Ended]) -> Result<usize> {
    if ended.is_empty() {
        return Ok(0);
    }
    let mut conntrack = Conntrack::open()?;
    let entries = conntrack.entries(Family::Ip, |entry| ended.iter().any(|ended| is_of(entry, *ended)))?;
    Ok(conntrack.delete(&entries)?)
}

fn is_of(entry: &ConntrackEntry, ended: Ended) -> bool {
    let is = |protocol: u8, end: SocketAddr, expected: SocketAddr| {
        entry.original.protocol == protocol && end == expected
    };
    match ended {
        Ended::Listener(address, port, transport) => {
            is(transport.number(), entry.original.destination, (address, port).into())
        }
        Ended::Target(target, transport) => {
            is(transport.number(), entry.reply.source, target.into())
                // The load balancer's own checks of the target are not translated.
                && entry.original.destination != entry.reply.source
        }
    }
}
