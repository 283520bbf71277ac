// SPDX-License-Identifier: Apache-2.0
//! The list of all cases, each with the clusters it applies to and its namespace, and how a case is run.

mod aws;
mod aws_adoption;
mod aws_pods;
mod aws_shared;
mod bad_input;
mod compatibility;
mod deployments;
mod examples;
mod faults;
mod forwarding;
mod health_check;
mod in_aws;
mod in_cloud;
mod in_openstack;
mod in_passthrough;
mod interoperation;
mod life_cycle;
mod meter;
pub(crate) mod moves;
mod off_link;
mod on_nodes;
mod openstack;
mod passthrough;
mod source_address;
mod steering;
mod tenants;
mod under_load;

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use futures::future::LocalBoxFuture;
use libtest_mimic::{Failed, Trial};
use steerage_lab::Cloud;
use tokio::runtime::Runtime;
use tokio::time::timeout;

use crate::dump;
use crate::service_proxy::ServiceProxy;
use crate::suite::{COMMON, Suite};
use crate::test_context::TestContext;

/// A case that takes longer has failed.
const LIMIT: Duration = Duration::from_mins(5);
/// The same for one that measures many times.
const LONG_LIMIT: Duration = Duration::from_mins(30);

/// The clusters that a case applies to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Applies {
    /// Those with the edge, whatever the service proxy.
    Both,
    /// Those with the edge and kube-proxy.
    KubeProxy,
    /// Those with the edge and the agent in place of kube-proxy.
    Agent,
    /// The same, where the chart's values can be changed.
    ChangeableAgent,
    /// The same as `Agent`, where the measurement of forwarding is requested.
    Forwarding,
    /// Those in AWS.
    Aws,
    /// Those in OpenStack.
    OpenStack,
    /// Those in GCE or Azure.
    Passthrough,
    /// Those in GCE.
    Gce,
}

/// The namespace that a case works in.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Namespace {
    /// The one of the shared backends, which the case leaves alone.
    Shared,
    /// One of its own.
    Own,
}

struct Case {
    name: &'static str,
    applies: Applies,
    namespace: Namespace,
    run: fn(Arc<TestContext>) -> LocalBoxFuture<'static, Result<()>>,
}

macro_rules! cases {
    ($($applies:ident $namespace:ident $module:ident::$test:ident,)*) => {
        [$(Case {
            name: concat!(stringify!($module), "::", stringify!($test)),
            applies: Applies::$applies,
            namespace: Namespace::$namespace,
            run: |test| Box::pin($module::$test(test)),
        }),*]
    };
}

/// In the order in which they run: the meter first, cases that disturb the cluster last.
fn all() -> Vec<Case> {
    cases![
        Both Shared meter::reports_each_injected_fault_and_nothing_else,
        Both Shared source_address::local_tcp_ipv4_keeps_the_clients_address_and_port,
        Both Shared source_address::local_tcp_ipv6_keeps_the_clients_address_and_port,
        Both Shared source_address::local_udp_ipv4_keeps_the_clients_address_and_port,
        Both Shared source_address::local_udp_ipv6_keeps_the_clients_address_and_port,
        Both Shared source_address::cluster_policy_shows_a_node_address,
        Both Shared source_address::clients_inside_the_cluster_have_the_documented_source_address,
        Both Own health_check::status_weight_and_body_follow_the_endpoints,
        Both Own health_check::terminating_endpoint_serves_while_its_check_fails,
        Both Shared health_check::port_closes_under_cluster_policy,
        KubeProxy Own steering::api_targets_are_exactly_the_members,
        KubeProxy Own steering::health_check_keeps_all_nodes_and_writes_nothing,
        KubeProxy Own steering::fused_keeps_all_nodes_and_names_those_with_an_endpoint,
        KubeProxy Shared steering::excluded_node_leaves_the_targets_of_all_steerings,
        KubeProxy Shared steering::labels_choose_the_target_nodes_of_both_steerings,
        KubeProxy Shared interoperation::traffic_inside_the_cluster_works_beside_local_and_cluster_services,
        KubeProxy Shared interoperation::policy_change_reaches_a_running_service,
        KubeProxy Shared interoperation::client_ip_affinity_keeps_the_backend,
        Agent Shared interoperation::address_without_a_service_is_silent,
        Agent Own tenants::external_ips_take_nothing_from_others,
        KubeProxy Shared compatibility::legacy_annotation_gets_an_event_with_the_patch,
        KubeProxy Shared compatibility::migration_flag_migrates_legacy_services_once,
        KubeProxy Shared bad_input::address_outside_all_pools_is_rejected,
        KubeProxy Shared bad_input::address_in_use_is_rejected,
        KubeProxy Shared bad_input::exhausted_pool_is_reported_until_an_address_is_free,
        KubeProxy Shared bad_input::unknown_steering_is_rejected,
        KubeProxy Shared bad_input::busy_health_check_port_is_reported,
        KubeProxy Shared bad_input::service_without_selector_is_reported,
        KubeProxy Shared bad_input::target_off_the_link_is_refused,
        Both Shared examples::every_manifest_is_programmed_and_answers,
        Both Shared life_cycle::load_balancer_follows_its_service_until_deletion,
        Both Shared life_cycle::service_deleted_while_controller_is_down_is_cleaned_up,
        Both Shared life_cycle::stripped_finalizer_leaks_nothing,
        KubeProxy Shared life_cycle::second_controller_takes_over_from_killed_lease_holder,
        KubeProxy Own moves::all_steerings_follow_endpoint_moves,
        KubeProxy Shared faults::killed_controller_loses_no_packet,
        Both Shared faults::killed_agent_loses_no_packet,
        KubeProxy Shared faults::killed_edge_loses_no_packet,
        KubeProxy Own faults::rolling_update_is_measured,
        KubeProxy Own faults::scale_down_is_measured,
        KubeProxy Own faults::policy_change_is_measured,
        KubeProxy Own faults::steering_change_is_measured,
        KubeProxy Own faults::node_drain_is_measured,
        KubeProxy Own faults::node_death_is_measured,
        KubeProxy Shared faults::absent_api_server_loses_no_packet,
        Forwarding Own forwarding::rolling_update_with_and_without_is_measured,
        Forwarding Own forwarding::scale_down_with_and_without_is_measured,
        ChangeableAgent Own off_link::node_off_the_link_is_served_through_the_tunnel,
        ChangeableAgent Shared on_nodes::nodes_serve_the_vips_in_place_of_an_edge_host,
        Both Shared life_cycle::nothing_is_left_after_all_cases,
        Aws Shared aws::clients_address_is_kept_unless_the_service_says_otherwise,
        Aws Own aws::api_targets_follow_the_endpoints,
        Aws Own aws::health_check_keeps_all_nodes_and_writes_nothing,
        Aws Own aws::node_drain_and_rolling_update_are_measured,
        Aws Shared aws_shared::services_of_one_load_balancer_do_not_disturb_each_other,
        Aws Shared aws_pods::clients_address_is_kept_under_both_policies,
        Aws Own aws_pods::targets_follow_scaling_and_a_rolling_update,
        Aws Own aws_pods::rolling_update_of_gated_pods_always_has_a_healthy_target,
        Aws Shared aws_adoption::load_balancers_of_cloud_provider_aws_are_adopted_under_load,
        Aws Shared aws::load_balancer_follows_its_service_and_leaves_nothing,
        OpenStack Own openstack::backends_see_the_amphora_or_by_proxy_protocol_the_client,
        OpenStack Shared openstack::source_ranges_and_affinity_follow_the_service,
        OpenStack Own openstack::api_members_follow_the_endpoints,
        OpenStack Own openstack::health_check_keeps_all_nodes_and_writes_nothing,
        OpenStack Own openstack::node_drain_and_rolling_update_are_measured,
        OpenStack Own openstack::changes_of_a_live_service_lose_nothing,
        OpenStack Own openstack::policy_change_moves_the_checks_of_a_live_service,
        OpenStack Own openstack::traffic_goes_on_without_octavia,
        OpenStack Shared openstack::load_balancer_follows_its_service_and_leaves_nothing,
        Passthrough Shared passthrough::clients_address_is_kept_in_both_families,
        Passthrough Shared passthrough::source_ranges_and_affinity_follow_the_service,
        Passthrough Shared passthrough::address_is_kept_over_recreation,
        Passthrough Shared passthrough::internal_load_balancer_keeps_the_clients_address,
        Passthrough Own passthrough::api_targets_follow_the_endpoints,
        Passthrough Own passthrough::health_check_keeps_all_nodes_and_writes_nothing,
        Gce Own passthrough::weights_follow_the_endpoints,
        Passthrough Own passthrough::node_drain_and_rolling_update_are_measured,
        Passthrough Own passthrough::traffic_goes_on_without_the_api,
        Passthrough Shared passthrough::load_balancer_follows_its_service_and_leaves_nothing,
    ]
    .into()
}

/// The cases that apply to a cluster, for `--list`.
pub(crate) fn names(service_proxy: ServiceProxy, cloud: Option<Cloud>, forwarding: bool) -> Vec<Trial> {
    applicable(service_proxy, cloud, forwarding).map(|case| Trial::test(case.name, || Ok(()))).collect()
}

/// The cases that apply to the suite's cluster, ready to run.
pub(crate) fn trials(suite: &Arc<Suite>, runtime: &Runtime, forwarding: bool) -> Vec<Trial> {
    let cases = applicable(suite.service_proxy, suite.cloud(), forwarding);
    let is_changeable = suite.cluster(|cluster| cluster.is_changeable());
    cases
        .filter(|case| is_changeable || case.applies != Applies::ChangeableAgent)
        .map(|case| {
            let (suite, handle) = (Arc::clone(suite), runtime.handle().clone());
            Trial::test(case.name, move || {
                handle.block_on(run(&case, suite)).map_err(|error| Failed::from(format!("{error:#}")))
            })
        })
        .collect()
}

fn applicable(
    service_proxy: ServiceProxy,
    cloud: Option<Cloud>,
    forwarding: bool,
) -> impl Iterator<Item = Case> {
    let at_edge = cloud.is_none();
    all().into_iter().filter(move |case| match case.applies {
        Applies::Both => at_edge,
        Applies::KubeProxy => at_edge && service_proxy == ServiceProxy::KubeProxy,
        Applies::Agent | Applies::ChangeableAgent => at_edge && service_proxy == ServiceProxy::Agent,
        Applies::Forwarding => forwarding && at_edge && service_proxy == ServiceProxy::Agent,
        Applies::Aws => cloud == Some(Cloud::Aws),
        Applies::OpenStack => cloud == Some(Cloud::OpenStack),
        Applies::Passthrough => cloud.is_some_and(steerage_lab::passthrough::is_of),
        Applies::Gce => cloud == Some(Cloud::Gce),
    })
}

async fn run(case: &Case, suite: Arc<Suite>) -> Result<()> {
    let namespace = match case.namespace {
        Namespace::Shared => COMMON.to_owned(),
        Namespace::Own => {
            let (_, name) = case.name.split_once("::").unwrap_or_default();
            format!("e2e-{}", name.replace('_', "-"))
        }
    };
    match case.namespace {
        Namespace::Shared => suite.backends().await.map(drop)?,
        Namespace::Own => suite.make_namespace(&namespace).await?,
    }
    let start = Instant::now();
    let test = Arc::new(TestContext { suite, namespace });
    let limit = if case.applies == Applies::Forwarding { LONG_LIMIT } else { LIMIT };
    let outcome = timeout(limit, (case.run)(Arc::clone(&test)))
        .await
        .with_context(|| format!("the case did not end within {} minutes", limit.as_secs() / 60))
        .flatten();
    if outcome.is_err() {
        dump::write(&test, case.name).await;
    }
    let cleared = test.clear().await;
    let seconds = format!("{:.1}", start.elapsed().as_secs_f64());
    test.suite.report.row("Duration of each case", &["case", "s"], vec![case.name.to_owned(), seconds]);
    outcome.and(cleared)
}
