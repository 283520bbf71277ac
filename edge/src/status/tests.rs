// SPDX-License-Identifier: Apache-2.0
//! What is written to an API server that stores objects, and what is not.

use std::sync::Arc;

use steerage_edge_api::{IpFamily, SharedTargets, TargetState, TargetStatus, TargetUse};

use super::*;
use crate::plan::{GroupReport, LoadBalancerStatus, SharedGroup, TrackedTarget, UntrackedCounts};
use crate::shards::Shard;

mod api;
mod real_server;

use api::ApiServer;

const HOST: &str = "edge-1.example";

fn targets(family: IpFamily, number: u32, state: TargetState) -> Vec<TrackedTarget> {
    let target = |number: u32| {
        let address = match family {
            IpFamily::V4 => IpAddr::from((0x0a00_0000 + number).to_be_bytes()),
            IpFamily::V6 => IpAddr::from((0xfd << 120 | u128::from(number)).to_be_bytes()),
        };
        let is_healthy = state == TargetState::Healthy;
        let status = TargetStatus {
            node: format!(
                "ip-10-20-{}-{}.worker-pool-general.region-1.compute.internal",
                number / 256,
                number % 256
            ),
            address,
            state,
            reason: if is_healthy { "" } else { "no response within 800ms" }.to_owned(),
            weight: 1,
            usage: Some(if is_healthy { TargetUse::Active } else { TargetUse::Inactive }),
            use_reason: if is_healthy { "" } else { "not healthy" }.to_owned(),
        };
        TrackedTarget { status, lacks_endpoint: false }
    };
    (0..number).map(target).collect()
}

fn shared_group() -> Arc<SharedGroup> {
    group_with_panic_threshold(None)
}

fn group_with_panic_threshold(panic_threshold_percent: Option<u32>) -> Arc<SharedGroup> {
    let check = r#"{"protocol": "HTTP", "port": 10256, "path": "/healthz", "intervalMilliseconds": 1000,
        "timeoutMilliseconds": 800, "healthyThreshold": 1, "unhealthyThreshold": 3}"#;
    let targets = SharedTargets {
        node_set: "eligible".to_owned(),
        health_check: serde_json::from_str(check).expect("a check"),
        panic_threshold_percent,
        slow_start_milliseconds: None,
    };
    Arc::new(SharedGroup::new(targets, IpFamily::V4))
}

/// A report with so many healthy targets.
fn report(shared: Option<Arc<SharedGroup>>, healthy: u32) -> Arc<GroupReport> {
    let held = targets(IpFamily::V4, healthy, TargetState::Healthy);
    Arc::new(GroupReport::new(
        shared,
        IpFamily::V4,
        held,
        UntrackedCounts { without_endpoint: 5, untried: 0 },
    ))
}

fn load_balancer(number: u8, report: &Arc<GroupReport>) -> LoadBalancerStatus {
    let vip = IpAddr::from([10, 9, 0, number]);
    LoadBalancerStatus {
        uid: format!("uid-{number}"),
        generation: 1,
        problem: String::new(),
        vips: vec![vip],
        served: vec![vip],
        targets: vec![Arc::clone(report)],
        node_set_uid: report.shared.is_some().then(|| "set-uid".into()),
    }
}

/// Load balancers with own targets, and as many that share theirs.
fn host_status(own: u8, sharing: u8) -> HostStatus {
    let (own_report, shared_report) = (report(None, 3), report(Some(shared_group()), 300));
    let own = (0..own).map(|number| (format!("lb-own-{number}"), load_balancer(number, &own_report)));
    let sharing = (100..100 + sharing)
        .map(|number| (format!("lb-shared-{number}"), load_balancer(number, &shared_report)));
    HostStatus {
        interface: "eth0".to_owned(),
        addresses: vec![IpAddr::from([10, 0, 1, 1])],
        active: Shards::ALL,
        draining: Vec::new(),
        load_balancers: own.chain(sharing).collect(),
    }
}

fn objects(status: &HostStatus) -> WantedObjects {
    Wanted::new(status.clone()).objects
}

/// A process that writes to this API server.
struct Process {
    writer: StatusWriter,
    wanted: Wanted,
}

impl Process {
    fn start(api: &ApiServer) -> Self {
        let sink = StatusSink::Api { client: Box::new(api.client()), namespace: "system".to_owned() };
        let writer = StatusWriter::new(sink, HOST.to_owned(), Metrics::default());
        Self { writer, wanted: Wanted::default() }
    }

    /// Steps for so long.
    async fn run(&mut self, status: &HostStatus, time: Duration) {
        let end = Instant::now() + time;
        self.writer.note(self.wanted.update(status.clone()));
        assert_eq!(self.wanted.objects, objects(status));
        while Instant::now() < end {
            let next = self.writer.step(&self.wanted.objects).await;
            tokio::time::sleep_until(next.min(end).max(Instant::now() + COMPARE_INTERVAL)).await;
        }
    }
}

const A_WHILE: Duration = Duration::from_secs(30);

#[tokio::test(start_paused = true)]
async fn shared_targets_are_one_object_and_the_next_process_writes_only_its_host() {
    let api = ApiServer::default();
    let status = host_status(3, 20);
    Process::start(&api).run(&status, A_WHILE).await;
    let names = api.names();
    let shared = ObjectKey::Shared(shared_group().name.clone()).object_name(HOST);
    assert_eq!(names.len(), 1 + 3 + 20 + 1, "{names:?}");
    assert_eq!(api.take_writes().len(), names.len(), "each once");
    let referring = api.object("lb-shared-107.edge-1.example");
    assert_eq!(referring["spec"]["sharedReports"][0], shared.as_str());
    assert_eq!(referring["spec"].get("counts"), None);
    assert_eq!(referring["spec"]["shards"][0], Shard::of(IpAddr::from([10, 9, 0, 107])).index());
    let object = api.object(&shared);
    assert_eq!(object["spec"]["counts"][0]["total"], 305);
    assert_eq!(object["metadata"]["ownerReferences"][0]["uid"], "set-uid");
    assert_eq!(object["spec"]["shared"]["healthCheck"]["port"], 10256);

    // One node fails: all 20 see it in the shared report.
    let mut changed = status.clone();
    let failed = report(Some(shared_group()), 299);
    for (name, _) in status.load_balancers.iter().filter(|(name, _)| name.starts_with("lb-shared")) {
        changed.load_balancers.change(name, |status| status.targets = vec![Arc::clone(&failed)]);
    }
    let mut process = Process::start(&api);
    process.run(&status, A_WHILE).await;
    assert_eq!(api.take_writes(), [format!("PATCH {HOST}")], "the rest is there");
    process.run(&changed, A_WHILE).await;
    assert_eq!(api.take_writes(), [format!("PATCH {shared}")]);

    // Another client changes one object and deletes another one.
    api.change("lb-own-1.edge-1.example", |object| object["spec"]["problem"] = "nonsense".into());
    api.remove("lb-own-2.edge-1.example");
    process.run(&changed, RESYNC_PERIOD + A_WHILE).await;
    let mut writes = api.take_writes();
    writes.sort();
    let expected = [HOST, "lb-own-1.edge-1.example", "lb-own-2.edge-1.example"];
    assert_eq!(writes, expected.map(|name| format!("PATCH {name}")));
}

#[tokio::test(start_paused = true)]
async fn takeover_writes_one_object() {
    let api = ApiServer::default();
    let mut status = host_status(10, 10);
    let mut process = Process::start(&api);
    process.run(&status, A_WHILE).await;
    api.take_writes();
    assert_eq!(api.object(HOST)["spec"]["activeShards"], "0-127");
    status.active = Shard::all().filter(|shard| shard.index() % 64 == 3).collect();
    process.run(&status, A_WHILE).await;
    assert_eq!(api.take_writes(), [format!("PATCH {HOST}")]);
    assert_eq!(api.object(HOST)["spec"]["activeShards"], "3,67");
}

#[tokio::test(start_paused = true)]
async fn stale_objects_are_deleted_and_those_of_others_stay() {
    let api = ApiServer::default();
    let other = |name: &str, label: &str| serde_json::json!({"metadata": {"name": name, "labels": {"steerage.dev/edge-host": label}}, "spec": {"host": label}});
    api.put(
        "eligible.0123456789abcdef.edge-1.example",
        other("eligible.0123456789abcdef.edge-1.example", HOST),
    );
    api.put("lb-gone.edge-2", other("lb-gone.edge-2", "edge-2"));
    let shared = ObjectKey::Shared(shared_group().name.clone()).object_name(HOST);
    let mut process = Process::start(&api);
    process.run(&host_status(1, 2), A_WHILE).await;
    let names = [HOST, &shared, "lb-gone.edge-2", "lb-own-0.edge-1.example", "lb-shared-100.edge-1.example"];
    assert_eq!(api.names()[..5], names, "{:?}", api.names());
    api.take_writes();

    // One alone has its targets in its own report. The garbage collector deletes the other one's.
    process.run(&host_status(1, 1), A_WHILE).await;
    assert_eq!(
        api.take_writes(),
        ["PATCH lb-shared-100.edge-1.example".to_owned(), format!("DELETE {shared}")]
    );
    assert_eq!(api.object("lb-shared-100.edge-1.example")["spec"]["counts"][0]["healthy"], 300);
}

#[tokio::test(start_paused = true)]
async fn writes_are_paced_and_what_matters_comes_first() {
    let api = ApiServer::default();
    let mut status = host_status(90, 90);
    let problem = "lb-own-77";
    status.load_balancers.change(problem, |status| status.problem = "in use".to_owned());
    let dead = targets(IpFamily::V4, 2, TargetState::Unhealthy);
    let unserved = Arc::new(GroupReport::new(None, IpFamily::V4, dead, UntrackedCounts::default()));
    status.load_balancers.change("lb-own-88", |status| status.targets = vec![unserved]);
    let mut process = Process::start(&api);
    process.run(&status, Duration::from_secs(1)).await;
    let writes = api.take_writes();
    assert!((40..=50).contains(&writes.len()), "{}", writes.len());
    let shared = ObjectKey::Shared(shared_group().name.clone()).object_name(HOST);
    let first = [HOST, &shared, "lb-own-77.edge-1.example", "lb-own-88.edge-1.example"];
    assert_eq!(writes[..4], first.map(|name| format!("PATCH {name}")));
    process.run(&status, Duration::from_secs(4)).await;
    assert_eq!(api.names().len(), 182);
}

/// One tenant's checks flap, and more of them than there are writes.
#[tokio::test(start_paused = true)]
async fn shared_reports_that_flap_do_not_keep_others_from_being_written() {
    let api = ApiServer::default();
    let mut status = host_status(3, 0);
    let groups: Vec<_> = (1..=60).map(|percent| group_with_panic_threshold(Some(percent))).collect();
    let flap = |status: &mut HostStatus, healthy| {
        for (group, number) in groups.iter().zip(100..) {
            let report = report(Some(Arc::clone(group)), healthy);
            for copy in ["a", "b"] {
                let name = format!("lb-flap-{number}-{copy}");
                status.load_balancers.set(&name, Some(load_balancer(number, &report)));
            }
        }
    };
    flap(&mut status, 1);
    let mut process = Process::start(&api);
    process.run(&status, A_WHILE).await;
    assert_eq!(api.names().len(), 1 + 3 + 60 + 120);
    api.take_writes();
    status.load_balancers.change("lb-own-0", |status| status.generation = 2);
    for second in 0..40 {
        flap(&mut status, second % 2);
        process.run(&status, Duration::from_secs(1)).await;
    }
    let writes = api.take_writes();
    assert!(writes.iter().any(|write| write == "PATCH lb-own-0.edge-1.example"), "{}", writes.len());
}

/// A report that is not written yet still refers to the shared one.
#[tokio::test(start_paused = true)]
async fn shared_report_stays_until_what_refers_to_it_is_written() {
    let api = ApiServer::default();
    let shared = ObjectKey::Shared(shared_group().name.clone()).object_name(HOST);
    let mut process = Process::start(&api);
    process.run(&host_status(0, 2), A_WHILE).await;
    api.refuse("lb-shared", 500);
    process.run(&host_status(0, 1), A_WHILE).await;
    assert!(api.names().contains(&shared), "of a process that wrote it");
    let mut process = Process::start(&api);
    process.run(&host_status(0, 1), A_WHILE).await;
    assert!(api.names().contains(&shared), "of one that found it");
    api.accept();
    process.run(&host_status(0, 1), A_WHILE).await;
    assert!(!api.names().contains(&shared));
}

#[tokio::test(start_paused = true)]
async fn takeover_is_written_while_reports_fail() {
    let api = ApiServer::default();
    let mut status = host_status(30, 0);
    let mut process = Process::start(&api);
    api.refuse("lb-own", 500);
    process.run(&status, A_WHILE).await;
    status.active = Shards::NONE;
    process.run(&status, Duration::from_secs(1)).await;
    assert_eq!(api.object(HOST)["spec"]["activeShards"], "");
}

#[tokio::test(start_paused = true)]
async fn one_report_that_fails_delays_no_other() {
    let api = ApiServer::default();
    let mut status = host_status(5, 0);
    let mut process = Process::start(&api);
    api.refuse("lb-own-0", 500);
    process.run(&status, A_WHILE).await;
    for generation in 2..100 {
        status.load_balancers.change("lb-own-1", |status| status.generation = generation);
        process.run(&status, Duration::from_millis(1100)).await;
        let object = api.object("lb-own-1.edge-1.example");
        assert_eq!(object["spec"]["observedGeneration"], generation);
    }
}

/// The definitions or the rights are those of an earlier version.
#[tokio::test(start_paused = true)]
async fn refused_writes_are_few() {
    for answer in [403, 422] {
        let api = ApiServer::default();
        api.refuse("", answer);
        let mut process = Process::start(&api);
        process.run(&host_status(50, 20), Duration::from_mins(1)).await;
        assert_eq!(process.writer.metrics.status_objects_waiting(), 72);
        let requests = api.take_requests();
        assert!((5..=150).contains(&requests), "{answer}: {requests}");
        api.accept();
        process.run(&host_status(50, 20), A_WHILE).await;
        assert_eq!((api.names().len(), process.writer.metrics.status_objects_waiting()), (72, 0));
    }
}

/// The name is a hash of numbers that a user chooses.
#[test]
fn group_with_the_name_of_another_one_is_not_shared() {
    let all = group_with_panic_threshold(None);
    let other = group_with_panic_threshold(Some(50));
    let same_name = Arc::new(SharedGroup { name: all.name.clone(), ..SharedGroup::clone(&other) });
    let (all, same_name) = (report(Some(all), 3), report(Some(same_name), 0));
    let load_balancers = [
        ("lb-1", 1, &same_name),
        ("lb-2", 2, &same_name),
        ("lb-3", 3, &all),
        ("lb-4", 4, &all),
        ("lb-5", 5, &all),
    ];
    let load_balancers =
        load_balancers.map(|(name, number, report)| (name.to_owned(), load_balancer(number, report)));
    let status = HostStatus { load_balancers: load_balancers.into_iter().collect(), ..host_status(0, 0) };
    let wanted = objects(&status);
    let spec = |name: &str| {
        wanted[&ObjectKey::LoadBalancer(name.to_owned())].target_health(HOST).expect("a report").spec
    };
    assert_eq!((spec("lb-1").shared_reports.len(), spec("lb-1").counts[0].healthy), (0, 0));
    assert_eq!((spec("lb-4").shared_reports.len(), spec("lb-4").counts.len()), (1, 0));
    let shared =
        wanted[&ObjectKey::Shared(shared_group().name.clone())].target_health(HOST).expect("a report").spec;
    assert_eq!(
        (shared.counts[0].healthy, shared.shared.expect("targets").panic_threshold_percent),
        (3, None)
    );
}

/// The API server comes back, and then has everything.
#[tokio::test(start_paused = true)]
async fn absent_api_server_gets_few_requests_and_everything_later() {
    let api = ApiServer::default();
    let mut process = Process::start(&api);
    for answer in [500, 429, 0] {
        api.fail(answer);
        process.run(&host_status(50, 0), Duration::from_mins(1)).await;
        let requests = api.take_requests();
        assert!((5..=60).contains(&requests), "{answer}: {requests}");
    }
    api.work();
    process.run(&host_status(50, 0), A_WHILE).await;
    assert_eq!(api.names().len(), 51);
    assert_eq!(api.take_writes().len(), 51);
    api.fail(500);
    process.run(&host_status(60, 0), Duration::from_mins(1)).await;
    assert!(api.take_requests() < 100);
    api.work();
    process.run(&host_status(60, 0), A_WHILE).await;
    assert_eq!(api.names().len(), 61);
}

/// The chart of an earlier version permits no list.
#[tokio::test(start_paused = true)]
async fn without_permission_to_list_everything_is_written() {
    let api = ApiServer::default();
    api.forbid_lists();
    Process::start(&api).run(&host_status(5, 0), A_WHILE).await;
    assert_eq!(api.take_writes().len(), 6);
}

#[tokio::test]
async fn directory_has_what_the_api_server_would_have() {
    let directory = std::env::temp_dir().join(format!("steerage-edge-status-{}", std::process::id()));
    std::fs::create_dir_all(&directory).expect("directory");
    let sink = StatusSink::Directory(directory.clone());
    let mut writer = StatusWriter::new(sink, HOST.to_owned(), Metrics::default());
    let names = || {
        let files = std::fs::read_dir(&directory).expect("list").flatten();
        let mut names: Vec<_> = files.map(|file| file.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    };
    writer.step(&objects(&host_status(0, 2))).await;
    let shared = format!("EdgeTargetHealth.{}.{HOST}.json", shared_group().name);
    assert_eq!(names().len(), 4);
    assert!(names().contains(&shared) && names().contains(&format!("EdgeHost.{HOST}.json")));
    writer.note(ChangedKeys::All);
    writer.step(&objects(&host_status(0, 0))).await;
    assert!(!names().contains(&shared));
    std::fs::remove_dir_all(&directory).expect("remove");
}

/// All of 5,000 nodes in both families, with long names and reasons.
#[test]
fn object_has_a_limit_at_any_number_of_targets() {
    for state in [TargetState::Healthy, TargetState::Unhealthy, TargetState::Initial] {
        let of_family = |family| {
            Arc::new(GroupReport::new(None, family, targets(family, 5000, state), UntrackedCounts::default()))
        };
        let mut status = load_balancer(1, &of_family(IpFamily::V4));
        status.targets.push(of_family(IpFamily::V6));
        let status = HostStatus {
            load_balancers: [("lb".to_owned(), status)].into_iter().collect(),
            ..host_status(0, 0)
        };
        let wanted = objects(&status);
        let object = wanted[&ObjectKey::LoadBalancer("lb".to_owned())].target_health(HOST).expect("a report");
        let size = serde_json::to_vec(&object).expect("JSON").len();
        println!("{state:?}: {size} bytes");
        assert!(size < 64 * 1024, "{size}");
        let counts = &object.spec.counts;
        assert_eq!(
            counts.iter().map(|counts| (counts.total, counts.omitted)).collect::<Vec<_>>(),
            [(5000, 4900); 2]
        );
    }
}

#[tokio::test(start_paused = true)]
async fn last_change_is_written_when_the_engine_ends() {
    let api = ApiServer::default();
    let mut status = host_status(200, 0);
    let (sender, receiver) = watch::channel(HostStatus::default());
    let writer = tokio::spawn(Process::start(&api).writer.run(receiver));
    tokio::time::sleep(A_WHILE).await;
    assert_eq!(api.names().len(), 0, "nothing is planned");
    sender.send_replace(status.clone());
    tokio::time::sleep(A_WHILE).await;
    assert_eq!(api.names().len(), 201);
    api.take_writes();
    for (name, _) in status.clone().load_balancers.iter() {
        status.load_balancers.change(name, |status| status.generation = 2);
    }
    status.active = Shards::NONE;
    sender.send_replace(status);
    drop(sender);
    tokio::time::sleep(A_WHILE).await;
    assert!(writer.await.expect("no panic").is_ok());
    let writes = api.take_writes();
    assert_eq!(
        (api.object(HOST)["spec"]["activeShards"].as_str(), writes[0].as_str()),
        (Some(""), "PATCH edge-1.example")
    );
    assert!(writes.len() <= 20, "{}", writes.len());
}

proptest::proptest! {
    /// Objects that follow changes are those of the last status.
    #[test]
    fn objects_follow_the_status(
        steps in proptest::collection::vec(
            proptest::collection::vec((0..12_u8, proptest::option::of((0..4_u32, 0..3_u32))), 0..4), 1..12),
    ) {
        let mut collision = SharedGroup::clone(&group_with_panic_threshold(Some(7)));
        collision.name.clone_from(&shared_group().name);
        let groups = [None, Some(shared_group()), Some(group_with_panic_threshold(Some(50))), Some(Arc::new(collision))];
        let mut status = host_status(20, 3);
        let mut wanted = Wanted::new(status.clone());
        for step in steps {
            // All load balancers that share targets have the same report of them.
            for (number, change) in step {
                let status_of = |(group, healthy): (u32, u32)| {
                    let group = groups[usize::try_from(group).expect("small")].clone();
                    let healthy = if group.is_some() { 300 } else { healthy };
                    load_balancer(number, &report(group, healthy))
                };
                status.load_balancers.set(&format!("lb-{number}"), change.map(status_of));
            }
            let before = wanted.objects.clone();
            let changed = wanted.update(status.clone());
            let expected = objects(&status);
            proptest::prop_assert_eq!(&wanted.objects, &expected);
            if let ChangedKeys::These(changed) = changed {
                for key in before.keys().chain(expected.keys()).filter(|key| before.get(*key) != expected.get(*key)) {
                    proptest::prop_assert!(changed.contains(key), "{key:?}");
                }
            }
        }
    }
}
