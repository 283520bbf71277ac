// SPDX-License-Identifier: Apache-2.0
//! A Service that needs more elements than it may have, as its owner sees it.

use serde_json::json;
use steerage_nft::{Family, Nft, Table};
use steerage_requirements::requires;

use crate::process::scene::{Scene, eventually};
use crate::world::At;

/// A slice with so many endpoints.
fn put_slice(scene: &Scene, service: &str, endpoints: usize) {
    let endpoint = |n| {
        let address = format!("10.244.{}.{}", n / 250, n % 250 + 1);
        json!({ "addresses": [address], "nodeName": "other", "conditions": { "ready": true } })
    };
    let slice = json!({
        "metadata": { "labels": { "kubernetes.io/service-name": service } },
        "addressType": "IPv4",
        "ports": [{ "name": "tcp", "protocol": "TCP", "port": 80 }],
        "endpoints": (0..endpoints).map(endpoint).collect::<Vec<_>>(),
    });
    scene.put("discovery.k8s.io/v1", "EndpointSlice", service, slice);
}

#[test]
fn service_beyond_its_budget_is_told_so_by_an_event() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"), KubeApiserver);
    let scene = Scene::new("budget");
    scene.service("web", "192.0.2.10".parse().unwrap(), &json!({}));
    put_slice(&scene, "web", 600);
    let _agent = scene.started_with("node", &["--max-service-elements=256"]);
    eventually("an event on the Service", || {
        let notes = scene.service_events("ServiceTooLarge");
        notes.iter().any(|note| note.contains("node") && note.contains("256"))
    });
    assert!(scene.nft("list map ip steerage endpoints").contains("10.244."), "it is served in part");
}

/// Resident memory of a process in MiB: the most that it had.
fn peak_mib(process: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).expect("a process");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a peak");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") / 1024
}

/// Memory of the kernel and of the process has a limit, however many endpoints a tenant writes.
#[test]
fn tenant_takes_no_more_memory_than_its_budget() {
    requires!(NetworkNamespace, Program("ip"), Program("nft"), KubeApiserver);
    let scene = Scene::new("tenant");
    let (services, endpoints, budget) = (20, 1_000, 6_000);
    for number in 0..services {
        let name = format!("s{number}");
        scene.service(&name, [192, 0, 2, 10 + number].into(), &json!({}));
        put_slice(&scene, &name, endpoints);
    }
    let flag = format!("--max-namespace-elements={budget}");
    let agent = scene.started_with("node", &[&flag]);
    eventually("an event", || !scene.service_events("ServiceTooLarge").is_empty());
    let elements = scene.world.run(At::Node, || {
        let (mut nft, table) = (Nft::open().unwrap(), Table::new(Family::Ip, "steerage"));
        let sets = nft.sets(&table).unwrap();
        sets.iter().map(|set| nft.elements(&table, set).unwrap().len()).sum::<usize>()
    });
    let peak = peak_mib(agent.process());
    println!("{elements} elements, {peak} MiB");
    assert!((budget / 2..=budget).contains(&elements), "{elements} elements");
    assert!(peak < 128, "{peak} MiB");
}
