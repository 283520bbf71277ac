// SPDX-License-Identifier: Apache-2.0
//! A Service's address goes from the vendor's controller to Steerage, and back, by the steps of the guides of the providers: with both
//! controllers, an API server, kubectl, and the stand-in of the cloud. `hack/test cloud-peers` builds the vendors' controllers.

#![allow(clippy::unwrap_used, reason = "a test")]

mod azure;
mod gce;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::Result;
use serde_json::Value;
use steerage_bench::clouds::handover::{Handover, until};

/// Longest wait for one step: on a busy machine a controller may be late.
const PATIENCE: Duration = Duration::from_mins(3);
/// Longest wait for what the vendor's controllers remove some time later: glbc its endpoint groups every two minutes, and
/// cloud-provider-azure what it could not delete after up to five minutes.
const LATER: Duration = Duration::from_mins(8);
/// For so long the vendor's controller does nothing to what Steerage serves.
const WATCHED: Duration = Duration::from_secs(20);

type Resources = BTreeMap<String, Value>;

/// Steerage's program, which is beside that of the benchmarks.
fn controller() -> PathBuf {
    Path::new(env!("CARGO_BIN_EXE_steerage-bench")).with_file_name("steerage")
}

/// Waits until nothing has the address, acts, and waits until something serves it. Prints the time, with the writes of both controllers
/// meanwhile.
fn gap(
    bed: &Handover,
    is_used: impl Fn() -> Result<bool>,
    serves: impl Fn() -> Result<bool>,
    act: impl FnOnce() -> Result<()>,
) -> Result<()> {
    until("a free address", PATIENCE, || Ok((!is_used()?).then_some(())))?;
    bed.reset_calls();
    let begun = Instant::now();
    act()?;
    until("an address that is served again", PATIENCE, || Ok(serves()?.then_some(())))?;
    eprintln!("nothing served the free address for {:?}; writes: {:?}", begun.elapsed(), bed.writes());
    Ok(())
}

/// Waits until a Service publishes this address.
fn published(bed: &Handover, service: &str, address: &str) -> Result<()> {
    until(&format!("{address} of {service}"), PATIENCE, || {
        Ok((bed.address(service, PATIENCE)? == address).then_some(()))
    })
}

/// The vendor's controller sees changes of nodes and starts again, and nothing changes in what `look` shows.
fn leaves_alone(bed: &mut Handover, look: impl Fn(&Handover) -> Result<Value>) -> Result<()> {
    let before = look(bed)?;
    bed.exclude_node(true)?;
    bed.exclude_node(false)?;
    bed.restart_peer()?;
    let begun = Instant::now();
    while begun.elapsed() < WATCHED {
        assert_eq!(look(bed)?, before);
        sleep(Duration::from_millis(200));
    }
    Ok(())
}
