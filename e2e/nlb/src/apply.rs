// SPDX-License-Identifier: Apache-2.0
//! Writes the rules, and ends flows, in the network namespace of the calling thread. Decides nothing.

use std::fs;
use std::io::Write as _;
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

/// Shortens the time for which connection tracking remembers a flow that the target reset, from 10 s. A client may use its port again at
/// once: its SYN would follow the old flow to a target that is gone. Call it after [`write()`], by which the kernel loads tracking.
pub fn forget_reset_flows() -> Result<()> {
    const FILE: &str = "/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_close";
    fs::write(FILE, "1").with_context(|| format!("writing {FILE}"))
}

/// Ends flows. Returns how many there were.
pub fn end(ended: &[Ended]) -> Result<usize> {
    if ended.is_empty() {
        return Ok(0);
    }
    let mut conntrack = Conntrack::open()?;
    let entries = conntrack.entries(Family::Ip, |entry| ended.iter().any(|ended| is_of(entry, ended)))?;
    Ok(conntrack.delete(&entries)?)
}

fn is_of(entry: &ConntrackEntry, ended: &Ended) -> bool {
    entry.original.protocol == ended.transport.number()
        && entry.original.destination == (ended.address, ended.port).into()
        && ended.target.is_none_or(|target| entry.reply.source == target)
}
