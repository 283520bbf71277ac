// SPDX-License-Identifier: Apache-2.0
//! The smallest benchmark, with every measurement. It must do the measured work and leave nothing behind.

#![allow(clippy::unwrap_used)] // the helpers of a test may fail it too; the lint knows test functions only

use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;
use steerage_requirements::requires;

#[test]
fn every_measurement_covers_both_programs() {
    requires!(NetworkNamespace, Program("ip"), Program("kube-proxy"), Program("ethtool"), KubeApiserver);
    let bench = Path::new(env!("CARGO_BIN_EXE_steerage-bench"));
    let agent = bench.with_file_name("steerage-agent");
    assert!(agent.exists(), "{} is missing: cargo build --release -p steerage-agent", agent.display());
    let file = std::env::temp_dir().join(format!("stbench-smoke-{}.json", std::process::id()));
    let mut command = Command::new(bench);
    command.args(["agent", "--quick", "--services", "10", "--runs", "1", "--period", "1s", "--changes", "1"]);
    let child = command.arg("--json").arg(&file).spawn().unwrap();
    let pid = child.id();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    let numbers: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    fs::remove_file(&file).unwrap();

    for what in [
        "start,",
        "EndpointSlice change to first",
        "EndpointSlice change to /healthz",
        "new conn",
        "throughput",
        "100 changes",
        "idle",
    ] {
        let (name, found) =
            numbers.as_object().unwrap().iter().find(|(name, _)| name.starts_with(what)).unwrap();
        assert_eq!(found["peer"]["name"], "kube-proxy", "{name}");
        for side in ["ours", "peer"] {
            let [min, median, max] = ["min", "median", "max"].map(|key| found[side][key].as_f64().unwrap());
            assert!(0.0 <= min && min <= median && median <= max, "{name}: {found}");
        }
    }
    let rate = &numbers["new connections, 10 Services, VIP: rate"];
    assert!(rate["ours"]["median"].as_f64().unwrap() > 0.0 && rate["unit"] == "1/s", "{rate}");

    let left: Vec<_> = fs::read_dir("/run/netns")
        .unwrap()
        .filter_map(|entry| entry.unwrap().file_name().into_string().ok())
        .filter(|name| name.starts_with(&format!("stbench{pid}-")))
        .collect();
    assert!(left.is_empty(), "{left:?}");
    assert!(!std::env::temp_dir().join(format!("steerage-bench-{pid}")).exists());
}

#[test]
fn edge_hosts_with_simulated_nodes_are_measured() {
    requires!(NetworkNamespace, Program("ip"), Program("bridge"), Program("nft"), Program("setpriv"));
    let bench = Path::new(env!("CARGO_BIN_EXE_steerage-bench"));
    let edge = bench.with_file_name("steerage-edge");
    assert!(edge.exists(), "{} is missing: cargo build --release -p steerage-edge", edge.display());
    let file = std::env::temp_dir().join(format!("stbench-nodes-{}.json", std::process::id()));
    let mut command = Command::new(bench);
    command.args([
        "edge-nodes",
        "--quick",
        "--services",
        "20",
        "--nodes",
        "10",
        "--period",
        "2s",
        "--moves",
        "2",
    ]);
    let child = command.arg("--json").arg(&file).spawn().unwrap();
    let pid = child.id();
    assert!(child.wait_with_output().unwrap().status.success());
    let numbers: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    fs::remove_file(&file).unwrap();
    let median = |what: &str, who: &str| numbers[what][who]["median"].as_f64().unwrap();
    assert!(median("start: of which complete", "all hosts") >= 20.0, "{numbers}");
    assert!(median("rest: answered requests for statements", "all hosts") > 1.0, "{numbers}");
    for what in [
        "an endpoint moves: time until the table is right",
        "a Service is added: time until the table is right",
        "a node is silent: time until no table has it",
        "a node answers again: time until its tables are right",
        "restart: time until ready, all nodes heard and all tables right",
    ] {
        assert!(median(what, "a host") > 0.0, "{what}: {numbers}");
    }
    assert!(!std::env::temp_dir().join(format!("steerage-bench-{pid}")).exists());
}

/// The short form of the measurement: the meter proves itself, and a killed edge loses nothing.
#[test]
fn killed_edge_loses_nothing() {
    requires!(NetworkNamespace, Program("ip"), Program("ethtool"), Program("nft"), Program("setpriv"));
    let bench = Path::new(env!("CARGO_BIN_EXE_steerage-bench"));
    let edge = bench.with_file_name("steerage-edge");
    assert!(edge.exists(), "{} is missing: cargo build --release -p steerage-edge", edge.display());
    let file = std::env::temp_dir().join(format!("stbench-loss-{}.json", std::process::id()));
    let mut command = Command::new(bench);
    command.args(["edge-loss", "--quick", "--services", "20", "--only", "edge killed (-9) and started"]);
    let child = command.arg("--json").arg(&file).spawn().unwrap();
    let pid = child.id();
    assert!(child.wait_with_output().unwrap().status.success());
    let numbers: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
    fs::remove_file(&file).unwrap();
    let rows = numbers.as_array().unwrap();
    assert_eq!(rows.len(), 4, "two families, before and after slots have moved: {numbers}");
    for row in rows {
        assert!(row["connections"].as_u64().unwrap() > 500 && row["failedConnections"] == 0, "{row}");
    }
    assert!(!std::env::temp_dir().join(format!("steerage-bench-{pid}")).exists());
}
