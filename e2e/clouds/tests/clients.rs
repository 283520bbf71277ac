// SPDX-License-Identifier: Apache-2.0
//! The stand-ins under the clouds' own clients: Python's unittest modules of `validate/`, and a Go program of `validate-go/`.

#![allow(clippy::unwrap_used)] // test code; the lint's own exception does not see helpers outside of test functions

use std::process::Command;

use serde_json::json;
use steerage_requirements::requires;
use steerage_testclouds::{Cloud, Server, gce};

/// Runs one module of `validate/`.
fn module(name: &str) {
    let mut command = Command::new(steerage_requirements::clouds_python().unwrap());
    command.args(["-W", "error::ResourceWarning", "-m", "unittest", "--failfast", name]);
    command.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/validate"));
    command.env("PYTHONDONTWRITEBYTECODE", "1");
    run(&mut command);
}

fn run(command: &mut Command) {
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
}

#[test]
fn google_cloud_compute_for_python_works() {
    requires!(Clouds);
    module("test_gce_compute");
}

#[test]
fn google_api_python_client_works() {
    requires!(Clouds);
    module("test_gce_discovery");
}

#[test]
fn gce_is_strict_and_injects_faults() {
    requires!(Clouds);
    module("test_gce_api");
}

#[test]
fn google_api_for_go_works() {
    requires!(Clouds, Program("validate-clouds"));
    let server = Server::start(Cloud::Gce, &json!({ "anonymous": true, "delay": 0.02 })).unwrap();
    let node = gce::instance("go-node", "us-central1-a", "10.128.0.2".parse().unwrap(), &[]);
    server.add_instances(&[node]).unwrap();
    run(Command::new("validate-clouds").args(["gce", server.url()]));
}

#[test]
fn armnetwork_for_go_works() {
    requires!(Clouds, Program("validate-clouds"));
    let server = Server::start(Cloud::Azure, &json!({ "delay": 0.02, "retry_after": 0 })).unwrap();
    run(Command::new("validate-clouds").args(["azure", server.url()]));
}

#[test]
fn azure_mgmt_network_for_python_works() {
    requires!(Clouds);
    module("test_azure_network");
}

#[test]
fn azure_is_strict_and_gives_tokens() {
    requires!(Clouds);
    module("test_azure_api");
}

#[test]
fn azure_is_controlled_from_rust() {
    requires!(Clouds);
    let server = Server::start(Cloud::Azure, &json!({ "delay": 0.01 })).unwrap();
    let prefix = json!({ "ipPrefix": "198.19.200.0/31", "prefixLength": 31 });
    server.add_resource("publicIPPrefixes", "few", &prefix).unwrap();
    let properties = json!({ "publicIPAllocationMethod": "Static", "publicIPPrefix": { "id": server.azure_id("publicIPPrefixes/few") } });
    let body = json!({ "location": "westeurope", "sku": { "name": "Standard" }, "properties": properties });
    let address = server.network("PUT", "publicIPAddresses/a", Some(&body)).unwrap();
    assert_eq!(address["properties"]["ipAddress"], "198.19.200.0");
    assert_eq!(server.calls().unwrap()["publicIPAddresses.createOrUpdate"], 1);
    assert!(server.snapshot().unwrap().contains_key("publicIPAddresses/a"));
    assert_eq!(server.network("DELETE", "publicIPAddresses/a", None).unwrap(), json!(null));
    assert!(server.network("DELETE", "routeTables/a", None).is_err());
}

#[test]
fn server_is_controlled_from_rust() {
    requires!(Clouds);
    let server = Server::start(Cloud::Gce, &json!({ "delay": 0.01 })).unwrap();
    let node = gce::instance("node", "us-central1-a", "10.128.0.2".parse().unwrap(), &["node"]);
    server.add_instances(&[node]).unwrap();
    server.compute("POST", "regions/us-central1/addresses", Some(&json!({ "name": "a" }))).unwrap();
    let address = server.compute("GET", "regions/us-central1/addresses/a", None).unwrap();
    assert_eq!(address["status"], "RESERVED");
    assert_eq!(server.calls().unwrap()["compute.addresses.insert"], 1);
    let made: Vec<_> = server.snapshot().unwrap().into_keys().collect();
    assert_eq!(made, ["projects/test-project/regions/us-central1/addresses/a"]);

    server.inject(&json!({ "call": "compute.addresses.get", "status": 503 })).unwrap();
    assert!(server.compute("GET", "regions/us-central1/addresses/a", None).is_err());
    server.inject(&json!({ "call": "compute.zones.list", "times": 0, "status": 503 })).unwrap();
    server.clear_faults().unwrap();
    server.throttle(2, 0.001).unwrap();
    // The token counts too.
    assert!(server.compute("GET", "zones", None).is_ok());
    assert!(server.compute("GET", "zones", None).is_err());
    server.unthrottle().unwrap();
    assert!(server.compute("GET", "zones", None).is_ok());
    server.set_gce_health("us-central1-a", "node", "UNHEALTHY", Some(0)).unwrap();
    server.skip(std::time::Duration::from_hours(1)).unwrap();
    server.revoke_tokens().unwrap();
    server.remove_instance("us-central1-a", "node").unwrap();
    assert!(server.compute("GET", "zones/us-central1-a/instances/node", None).is_err());
}
