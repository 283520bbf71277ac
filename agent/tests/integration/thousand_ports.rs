// SPDX-License-Identifier: Apache-2.0
//! Memory of a thousand health-check ports, in a process of its own, so that nothing else is measured.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::process::Command;

use steerage_agent::health::{
    HealthCheckPorts, Listeners, ProxyHealth, allow_many_connections, server_runtime,
};
use steerage_agent::plan::HealthPort;
use steerage_model::Key;

const PORTS: usize = 1000;

/// The process's resident memory, in bytes.
fn resident() -> usize {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() * 1024
}

fn probe(at: SocketAddr) {
    let mut stream = TcpStream::connect(at).unwrap();
    stream.write_all(b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert!(text.starts_with("HTTP/1.1 200 "), "{text}");
}

const TEST: &str = "thousand_ports::thousand_health_check_ports_cost_kilobytes_each";
/// Set in the process that measures.
const MEASURE: &str = "STEERAGE_TEST_MEASURES_ITSELF";

#[test]
fn thousand_health_check_ports_cost_kilobytes_each() {
    if std::env::var_os(MEASURE).is_some() {
        return measure();
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", TEST, "--nocapture"])
        .env(MEASURE, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("bytes each"), "the process measured nothing: {text}");
}

fn measure() {
    allow_many_connections();
    // Nobody else takes these in the meantime: the address is this process's, and the ports are below the range from which the kernel
    // chooses.
    let [_, _, high, low] = std::process::id().to_be_bytes();
    let address = Ipv4Addr::new(127, 77, high, low);
    let free: Vec<u16> =
        (10_000..).filter(|port| TcpListener::bind((address, *port)).is_ok()).take(PORTS + 1).collect();
    let service = |number: usize| {
        let health =
            HealthPort { port: free[number], v4: Some(1), v6: None, vips: std::sync::Arc::default() };
        (Key::new("shop", format!("service-{number}")), health)
    };
    let ports = HealthCheckPorts::default();
    let mut listeners = Listeners::new(ports.clone(), ProxyHealth::default(), server_runtime().unwrap());
    let address = [address.into()];
    // The first one brings what all share.
    ports.publish(&[service(PORTS)].into());
    assert!(listeners.reconcile(&address).is_empty());
    probe(SocketAddr::new(address[0], free[PORTS]));

    let before = resident();
    ports.publish(&(0..PORTS).map(service).collect::<BTreeMap<_, _>>());
    assert!(listeners.reconcile(&address).is_empty());
    for port in &free[..PORTS] {
        probe(SocketAddr::new(address[0], *port));
    }
    let each = resident().saturating_sub(before) / PORTS;
    println!("{each} bytes each");
    assert!(each < 8 * 1024, "{each} bytes each");
}
