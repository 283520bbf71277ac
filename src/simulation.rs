// SPDX-License-Identifier: Apache-2.0
//! The whole controller in a simulated world: up to three replicas, the API server and the cloud in one thread with paused time,
//! and everything random from one seed.
//!
//! The replicas run `controller::run` with the real Kubernetes client; only its transport is simulated. A third of the seeds runs the
//! real provider of the edge, the others a simulated cloud. In chaos, Services, endpoints and nodes change while calls are slow,
//! refused, lost before or after their effect, watches lag or are cut, lists are old, networks part, and replicas crash, also right
//! after any call. Then all faults end, and the world must converge.
//!
//! [`invariants`] says what must hold. A failed seed prints how to run it again.

mod api_server;
mod chaos;
mod cloud;
mod invariants;
mod link;
mod objects;
mod process;
mod removals;
mod vendor;
mod watch_stream;
mod world;

use std::ops::Range;

use vendor::Vendor;
use world::{ProviderKind, Report};

/// Seeds in a run without `STEERAGE_SIMULATION_SEEDS`.
const SEEDS: Range<u64> = 0..if cfg!(debug_assertions) { 50 } else { 1000 };
/// The same for each vendor's cloud.
const VENDORS_SEEDS: Range<u64> = 0..if cfg!(debug_assertions) { 12 } else { 50 };
/// `FROM..TO`, or one seed.
const VARIABLE: &str = "STEERAGE_SIMULATION_SEEDS";

fn run(seed: u64) -> Result<Report, String> {
    run_with(seed, ProviderKind::of_seed(seed))
}

fn run_with(seed: u64, provider: ProviderKind) -> Result<Report, String> {
    fastrand::seed(seed);
    let mut builder = tokio::runtime::Builder::new_current_thread();
    let runtime = builder.enable_time().start_paused(true).build().map_err(|error| error.to_string())?;
    runtime.block_on(chaos::run(seed, provider))
}

fn seeds(usual: Range<u64>) -> Range<u64> {
    let Ok(text) = std::env::var(VARIABLE) else { return usual };
    let parse = |text: &str| text.parse::<u64>().unwrap_or_else(|_| panic!("{VARIABLE}: {text} is no seed"));
    match text.split_once("..") {
        Some((from, to)) => parse(from)..parse(to),
        None => parse(&text)..parse(&text) + 1,
    }
}

/// Runs seeds and prints those that failed. Returns how many there were, and what happened in them.
fn run_all(seeds: Range<u64>, test: &str, run: impl Fn(u64) -> Result<Report, String>) -> (u64, Report) {
    let (mut failed, mut sum) = (Vec::new(), Report::default());
    let count = seeds.end - seeds.start;
    for seed in seeds {
        match run(seed) {
            Ok(report) => sum.add(&report),
            Err(why) => {
                failed.push(seed);
                eprintln!(
                    "seed {seed}: {why}\nRun it again: {VARIABLE}={seed} cargo test --workspace --bin steerage -- {test} --nocapture\n"
                );
            }
        }
    }
    eprintln!("{count} seeds: {sum:?}");
    assert!(failed.is_empty(), "{} of {count} seeds failed: {failed:?}", failed.len());
    (count, sum)
}

#[test]
fn every_seed_keeps_the_invariants() {
    let (count, sum) = run_all(seeds(SEEDS), "every_seed", run);
    assert!(count < 100 || sum.shows_every_fault(), "a fault never happened: {sum:?}");
}

/// The real provider of AWS, on the stand-in of its crate.
#[test]
fn aws_keeps_the_invariants() {
    run_vendor(Vendor::Aws, "aws_keeps");
}

/// The real provider of Azure, on the Azure in memory of its crate.
#[cfg(feature = "azure")]
#[test]
fn azure_keeps_the_invariants() {
    run_vendor(Vendor::Azure, "azure_keeps");
}

/// The real provider of GCE, on the Compute Engine in memory of its crate.
#[cfg(feature = "gce")]
#[test]
fn gce_keeps_the_invariants() {
    run_vendor(Vendor::Gce, "gce_keeps");
}

/// The real provider of OpenStack, on the OpenStack in memory of its crate.
#[cfg(feature = "openstack")]
#[test]
fn openstack_keeps_the_invariants() {
    run_vendor(Vendor::OpenStack, "openstack_keeps");
}

fn run_vendor(vendor: Vendor, test: &str) {
    let run = |seed| run_with(seed, ProviderKind::Vendor(vendor));
    let (count, sum) = run_all(seeds(VENDORS_SEEDS), test, run);
    assert!(count < 50 || sum.shows_every_fault_of_a_cloud(), "a fault never happened: {sum:?}");
}

/// Otherwise a failed seed could not be run again.
#[test]
fn equal_seeds_have_equal_histories() {
    for seed in 0..10 {
        let (first, second) = (run(seed).expect("passes"), run(seed).expect("passes"));
        assert_eq!(first, second, "seed {seed}");
    }
    for vendor in Vendor::ALL {
        for seed in 0..2 {
            let run = || run_with(seed, ProviderKind::Vendor(*vendor)).expect("passes");
            assert_eq!(run(), run(), "seed {seed} on {vendor:?}");
        }
    }
}
