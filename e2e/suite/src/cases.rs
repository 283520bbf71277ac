// SPDX-License-Identifier: Apache-2.0
//! The list of all tests, each with its boots and its place, and how one of them is run.

mod bad_input;
mod compatibility;
mod faults;
mod health_check;
mod interoperation;
mod life_cycle;
mod meter;
pub(crate) mod moves;
mod source_address;
mod steering;

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use futures::future::LocalBoxFuture;
use libtest_mimic::{Failed, Trial};
use tokio::runtime::Runtime;
use tokio::time::timeout;

use crate::boot::Boot;
use crate::dump;
use crate::scene::Scene;
use crate::suite::{COMMON, Suite};

/// No test may hang the run.
const LIMIT: Duration = Duration::from_mins(5);

/// In which clusters a test makes sense.
#[derive(Clone, Copy, PartialEq, Eq)]
enum In {
    Both,
    KubeProxy,
}

/// Where a test works.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Beside the shared backends, which it leaves alone.
    Common,
    /// In a namespace of its own.
    Own,
}

struct Case {
    name: &'static str,
    boots: In,
    place: Place,
    run: fn(Arc<Scene>) -> LocalBoxFuture<'static, Result<()>>,
}

macro_rules! cases {
    ($($boots:ident $place:ident $module:ident::$test:ident,)*) => {
        [$(Case {
            name: concat!(stringify!($module), "::", stringify!($test)),
            boots: In::$boots,
            place: Place::$place,
            run: |scene| Box::pin($module::$test(scene)),
        }),*]
    };
}

/// In the order in which they run: what others rely on first, what disturbs the cluster last.
fn all() -> Vec<Case> {
    cases![
        Both Common meter::reports_each_injected_fault_and_nothing_else,
        Both Common source_address::local_tcp_ipv4_keeps_the_clients_address_and_port,
        Both Common source_address::local_tcp_ipv6_keeps_the_clients_address_and_port,
        Both Common source_address::local_udp_ipv4_keeps_the_clients_address_and_port,
        Both Common source_address::local_udp_ipv6_keeps_the_clients_address_and_port,
        Both Common source_address::cluster_shows_a_nodes_address,
        Both Common source_address::pods_and_nodes_inside_are_seen_as_documented,
        Both Own health_check::status_weight_and_body_follow_the_endpoints,
        Both Own health_check::a_terminating_endpoint_serves_while_its_check_fails,
        Both Common health_check::the_port_closes_with_the_policy,
        KubeProxy Own steering::api_targets_are_exactly_the_members,
        KubeProxy Own steering::health_check_keeps_all_nodes_and_writes_nothing,
        KubeProxy Common steering::an_excluded_node_leaves_both_modes,
        KubeProxy Common interoperation::inside_traffic_is_unharmed_side_by_side,
        KubeProxy Common interoperation::a_change_of_policy_reaches_a_live_service,
        KubeProxy Common interoperation::client_ip_affinity_keeps_the_backend,
        Both Common interoperation::an_address_that_no_service_has_is_silent,
        KubeProxy Common compatibility::an_old_annotation_is_answered_with_the_patch_to_make,
        KubeProxy Common compatibility::the_migration_flag_moves_old_services_once,
        KubeProxy Common bad_input::an_address_outside_all_pools,
        KubeProxy Common bad_input::an_address_that_is_taken,
        KubeProxy Common bad_input::no_free_address,
        KubeProxy Common bad_input::an_unknown_steering,
        KubeProxy Common bad_input::a_busy_health_check_port,
        KubeProxy Common bad_input::no_selector,
        KubeProxy Common bad_input::a_target_off_the_link,
        Both Common life_cycle::created_changed_and_deleted,
        Both Common life_cycle::deleted_while_the_controller_is_down,
        Both Common life_cycle::a_stripped_finalizer_leaks_nothing,
        Both Common life_cycle::the_second_controller_takes_over_from_a_killed_leader,
        KubeProxy Own moves::api,
        KubeProxy Own moves::health_check,
        KubeProxy Common faults::a_killed_controller_costs_no_connection,
        Both Common faults::a_killed_agent_costs_no_connection,
        KubeProxy Common faults::a_killed_edge_costs_no_connection,
        KubeProxy Own faults::rolling_update,
        KubeProxy Own faults::scale_down,
        KubeProxy Own faults::policy_flip,
        KubeProxy Own faults::mode_flip,
        KubeProxy Own faults::node_drain,
        KubeProxy Own faults::node_death,
        KubeProxy Common faults::an_absent_api_server_costs_no_connection,
        Both Common life_cycle::nothing_is_left,
    ]
    .into()
}

/// The tests of a boot, for `--list`.
pub(crate) fn names(boot: Boot) -> Vec<Trial> {
    chosen(boot).map(|case| Trial::test(case.name, || Ok(()))).collect()
}

/// The tests of a boot, ready to run.
pub(crate) fn trials(suite: &Arc<Suite>, runtime: &Runtime) -> Vec<Trial> {
    let cases = chosen(suite.boot);
    cases
        .map(|case| {
            let (suite, handle) = (Arc::clone(suite), runtime.handle().clone());
            Trial::test(case.name, move || {
                handle.block_on(run(&case, suite)).map_err(|error| Failed::from(format!("{error:#}")))
            })
        })
        .collect()
}

fn chosen(boot: Boot) -> impl Iterator<Item = Case> {
    all().into_iter().filter(move |case| case.boots == In::Both || boot == Boot::KubeProxy)
}

async fn run(case: &Case, suite: Arc<Suite>) -> Result<()> {
    let namespace = match case.place {
        Place::Common => COMMON.to_owned(),
        Place::Own => {
            let (_, test) = case.name.split_once("::").unwrap_or_default();
            format!("e2e-{}", test.replace('_', "-"))
        }
    };
    match case.place {
        Place::Common => suite.backends().await.map(drop)?,
        Place::Own => suite.make_namespace(&namespace).await?,
    }
    let start = Instant::now();
    let scene = Arc::new(Scene { suite, namespace });
    let outcome = timeout(LIMIT, (case.run)(Arc::clone(&scene))).await.context("the test hangs").flatten();
    if outcome.is_err() {
        dump::write(&scene, case.name).await;
    }
    let cleared = scene.clear().await;
    let seconds = format!("{:.1}", start.elapsed().as_secs_f64());
    scene.suite.report.row("Time of each test", &["test", "s"], vec![case.name.to_owned(), seconds]);
    outcome.and(cleared)
}
