// SPDX-License-Identifier: Apache-2.0
//! Renders the controller's pages of `docs/reference`: flags and metrics, annotations, conditions and events.

use std::fmt::Write as _;
use std::time::Duration;

use clap::CommandFactory as _;
use steerage_model::annotations::{self, Annotation};
use steerage_model::{AgentMode, names};
use steerage_process::{EXIT_FAILED, EXIT_FORCED, Metrics};
use steerage_provider_api::Error;
use steerage_provider_cloud::PeerAnnotation;
use steerage_provider_edge::spec;
use steerage_reference::{table, wrap};

use crate::args::{ADMIN, Args};
use crate::reasons;

/// Reasons of the agent's events, each with its meaning and what to do. The agent's crate has them where it publishes them.
const AGENT_EVENTS: &[(&str, &str, &str)] = &[
    (
        "FailedToStartServiceHealthcheck",
        "The agent cannot listen on a health-check node port. The reason is kube-proxy's",
        "Find the other listener with `ss -ltnp` on the node, and end it. The agent tries again by itself",
    ),
    (
        "ExternalIPNotServed",
        "The agent does not serve an external IP, because it is reserved or denied, or because another Service was assigned it or is older",
        "[Use another address](../troubleshooting.md#an-external-ip-is-not-served)",
    ),
    (
        "ServiceTooLarge",
        "The agent serves a part of a Service, because it needs more elements of nftables than it may have, or a port has more endpoints than a list",
        "[Use fewer ports, endpoints or source ranges, or raise the limits](../troubleshooting.md#a-service-is-served-in-part)",
    ),
    (
        "TablesChanged",
        "Another program changed the agent's tables, or an agent was killed while it repaired lists of endpoints; the agent repairs them. The event names the table and, if the agent saw the change, the process",
        "[Keep that program from them](../troubleshooting.md#traffic-stops-after-another-program-changed-nftables)",
    ),
    (
        "ForeignTable",
        "A table of another program drops by default, or kube-proxy left it",
        "[Have it accept traffic to pods and node ports](../troubleshooting.md#traffic-stops-after-another-program-changed-nftables), or delete it",
    ),
];

#[test]
fn reference_page_of_the_controller_is_current() -> anyhow::Result<()> {
    let metrics = Metrics::new("controller", env!("CARGO_PKG_VERSION"));
    let ours = metrics.register("controller", crate::metrics::Metrics::new);
    metrics.register("controller", steerage_watch::events::register_metrics);
    metrics.register("controller", steerage_provider_edge::register_sample_metrics);
    metrics.register("controller", steerage_provider_aws::api_metrics);
    metrics.register("controller", steerage_provider_azure::api_metrics);
    metrics.register("controller", steerage_provider_gce::api_metrics);
    metrics.register("controller", steerage_provider_openstack::api_metrics);
    metrics.register("controller_watch", steerage_watch::register_sample_metrics);
    ours.conditions.begin("edge");
    ours.called("ensure", "ok", Duration::ZERO);
    steerage_reference::check(
        "controller.md",
        "The controller: `steerage`",
        "Flags, environment variables, endpoints, exit codes and metrics. The chart sets the flags from its [values](chart-values.md).",
        &[
            steerage_reference::flags(&Args::command()),
            steerage_reference::endpoints(
                &ADMIN.to_string(),
                &[
                    ("services", "Services are listed"),
                    ("endpointslices", "EndpointSlices are listed"),
                    ("nodes", "Nodes are listed"),
                    ("pods", "with `--pod-readiness-gates`: the pods with the label are listed"),
                    ("edge objects", "with the provider `edge`: the edge's objects are listed"),
                ],
                &[],
            ),
            steerage_reference::exit_codes(EXIT_FAILED, EXIT_FORCED, &[]),
            steerage_reference::metrics(&metrics.text()?),
        ],
    )
}

#[test]
fn reference_page_of_annotations_is_current() -> anyhow::Result<()> {
    let of_services = annotations_read("Annotations on a Service", annotations::ALL);
    let [of_aws, of_peers] = annotations_of_aws();
    let [of_azure, of_azure_peers] = annotations_of_azure();
    let [of_gce, of_gce_peers] = annotations_of_gce();
    let [of_openstack, of_openstack_peers] = annotations_of_openstack();
    let modes = [AgentMode::Labelled, AgentMode::KubeProxyReplacement].map(|mode| code(mode.name()));
    let rows = [
        (names::AGENT_MODE, modes.join(" or "), "Written by the agent: which Services it serves on the node"),
        (names::AGENT_VERSION, "version".to_owned(), "Written by the agent: its version"),
    ]
    .map(|(name, value, meaning)| [code(name), value, meaning.to_owned()]);
    let of_nodes = format!("## Annotations on a Node\n\n{}", table(["annotation", "value", "meaning"], rows));
    let marks = [
        (
            names::FINALIZER,
            "finalizer on a Service",
            "Set on Services with a class, the controller's own or one of `--serve-classes`, before anything is created, and removed after all is deleted",
        ),
        (
            names::UPSTREAM_FINALIZER,
            "finalizer on a Service",
            "The same on Services without a class, with the chart's `controller.serveUnsetClass`",
        ),
        (
            names::PROXY_NAME_LABEL,
            "label of a Service",
            "With the value `steerage`, the agent serves the Service instead of kube-proxy",
        ),
        (
            names::EXCLUDE_LABEL,
            "label of a Node",
            "Keeps the node out of every load balancer, unless the value parses as false",
        ),
        (
            names::AUTOSCALER_TAINT,
            "taint of a Node",
            "The cluster autoscaler is about to delete the node: it drains",
        ),
        (
            names::DRAIN,
            "annotation of a Node",
            "With the value `true` the node drains: load balancers send it no new connections",
        ),
        (
            names::POD_GATE_LABEL,
            "label of a Pod",
            "With the value `true` and `--pod-readiness-gates`, the controller looks at the pod's readiness gate",
        ),
        (
            names::POD_GATE,
            "readiness gate and condition of a Pod",
            "The pod is healthy in every load balancer that has it as a target",
        ),
        (
            spec::MANAGED_BY,
            "label of the edge's objects",
            "With the value `steerage`: Steerage writes the object",
        ),
        (spec::SERVICE_UID, "label of an EdgeLoadBalancer", "UID of its Service"),
        (spec::SERVICE_NAMESPACE, "label of an EdgeLoadBalancer", "Namespace of its Service"),
        (spec::SERVICE_NAME, "label of an EdgeLoadBalancer", "Name of its Service"),
    ];
    let rows = marks.map(|(name, kind, meaning)| [code(name), kind.to_owned(), meaning.to_owned()]);
    let others = format!("## Labels, taints and finalizers\n\n{}", table(["name", "kind", "meaning"], rows));
    steerage_reference::check(
        "annotations.md",
        "Annotations, labels and finalizers",
        "[The guide](../annotations.md) explains how they work together.",
        &[
            of_services,
            of_aws,
            of_peers,
            of_azure,
            of_azure_peers,
            of_gce,
            of_gce_peers,
            of_openstack,
            of_openstack_peers,
            of_nodes,
            others,
        ],
    )
}

/// A section of the annotations that are read.
fn annotations_read(title: &str, all: &[Annotation]) -> String {
    let rows = all.iter().map(|annotation| {
        let meaning = annotation.meaning.trim().trim_end_matches('.').to_owned();
        [code(annotation.name), annotation.value.to_owned(), meaning]
    });
    format!("## {title}\n\n{}", table(["annotation", "value", "meaning"], rows))
}

/// A section of the annotations of a cloud's other controllers, which are not read.
fn annotations_unread(title: &str, text: &str, peers: &[(&str, &[PeerAnnotation])]) -> String {
    let rows = peers.iter().flat_map(|(prefix, peers)| peers.iter().map(move |peer| (prefix, peer)));
    let rows = rows.map(|(prefix, peer)| {
        let more = if peer.suffix.ends_with('.') { "…" } else { "" };
        let accepted: Vec<_> = peer.accepted.iter().map(|value| code(value)).collect();
        let accepted = if accepted.is_empty() { "none".to_owned() } else { accepted.join(", ") };
        let name = code(&format!("{prefix}{}{more}", peer.suffix));
        [name, accepted, peer.why.trim_end_matches('.').to_owned()]
    });
    format!(
        "## {title}\n\n{}\n\n{}",
        wrap(text),
        table(["annotation", "accepted values", "why, or what to use"], rows)
    )
}

/// What the provider `aws` reads, and what it refuses.
fn annotations_of_aws() -> [String; 2] {
    use steerage_provider_aws::{annotations, peers};
    let text = "The provider `aws` obeys those in the table above, where a meaning says how it differs from theirs. Of the others it accepts a value that requests what Steerage does anyway, and refuses the Service otherwise              (`AnnotationNotSupported`). It refuses other names that begin with              `service.beta.kubernetes.io/aws-load-balancer-` too, and names under `service.beta.kubernetes.io/` of which at most two letters differ from a known one (`UnknownAnnotation`).";
    [
        annotations_read("Annotations on a Service of the provider `aws`", annotations::ALL),
        annotations_unread(
            "Annotations of AWS's own controllers",
            text,
            &[(peers::PREFIX, peers::PEER_ANNOTATIONS)],
        ),
    ]
}

/// What the provider `azure` reads, and what it refuses.
fn annotations_of_azure() -> [String; 2] {
    use steerage_provider_azure::{annotations, peers};
    let text = "The provider `azure` obeys those in the table above. Of the others it accepts a value that requests what Steerage does \
             anyway, and refuses the Service otherwise (`AnnotationNotSupported`). So it does with `service.beta.kubernetes.io/port_…`. It \
             refuses other names that begin with `service.beta.kubernetes.io/azure-` too (`UnknownAnnotation`).";
    [
        annotations_read("Annotations on a Service of the provider `azure`", annotations::ALL),
        annotations_unread(
            "Annotations of cloud-provider-azure",
            text,
            &[(peers::PREFIX, peers::PEER_ANNOTATIONS)],
        ),
    ]
}

/// What the provider `gce` reads, and what it refuses.
fn annotations_of_gce() -> [String; 2] {
    use steerage_provider_gce::{annotations, peers};
    let text = "The provider `gce` obeys those in the table above. Of the others it accepts a value that requests what Steerage does anyway, \
             and refuses the Service otherwise (`AnnotationNotSupported`). It refuses names under these prefixes, and under \
             `service.beta.kubernetes.io/`, of which at most two letters differ from a known one (`UnknownAnnotation`). It ignores all \
             others, because they may be about Ingresses and Gateways.";
    [
        annotations_read("Annotations on a Service of the provider `gce`", annotations::ALL),
        annotations_unread("Annotations of Google's own controllers", text, &peers::PEER_ANNOTATIONS),
    ]
}

/// What the provider `openstack` reads, and what it refuses.
fn annotations_of_openstack() -> [String; 2] {
    use steerage_provider_openstack::{annotations, peers};
    let text = "The provider `openstack` obeys those in the table above. Of the others it accepts a value that requests what Steerage does \
             anyway, and refuses the Service otherwise (`AnnotationNotSupported`). It refuses other names that begin with \
             `loadbalancer.openstack.org/` or `service.beta.kubernetes.io/openstack-` too (`UnknownAnnotation`).";
    [
        annotations_read("Annotations on a Service of the provider `openstack`", annotations::ALL),
        annotations_unread(
            "Annotations of cloud-provider-openstack",
            text,
            &[(peers::PREFIX, peers::PEER_ANNOTATIONS)],
        ),
    ]
}

#[test]
fn reference_page_of_conditions_is_current() -> anyhow::Result<()> {
    let mut sections = Vec::new();
    for (group, reasons) in reasons::ALL {
        let title = match *group {
            "Normal" => "Events: Normal".to_owned(),
            "Warning" => "Events: Warning".to_owned(),
            condition => format!("Condition `{condition}`"),
        };
        sections.push(format!("## {title}\n\n{}", reason_table(reasons)));
    }
    sections.push(format!(
        "## Events of the agent: Warning\n\n{}\n\n{}",
        wrap(
            "The first three are events of a Service, the others of the agent's Node. Of `ExternalIPNotServed` and `ServiceTooLarge` \
             together an agent publishes for each namespace ten at once and one more each minute, in all 100 and ten more each minute; nodes \
             publish within 30 s, not all at once. Its log has at most 20 lines a minute about them for each namespace, and 200 in all. Of `TablesChanged` and `ForeignTable` \
             together it publishes ten at once and one a minute."
        ),
        error_table(AGENT_EVENTS)
    ));
    let mut provider = String::from(
        "## Errors of the provider\n\nReasons of the condition `steerage.dev/Programmed` and of Warning events. Of every \
         provider:\n\n",
    );
    let text = String::new;
    let errors = [
        (
            Error::Conflict(text()),
            "Each change has met another change of the same resource for 10 s; or, as an event, one deletion has",
            "Nothing if it passes: Steerage retries. Otherwise look for a change that does not end, or for another program that changes the resource: the message names it",
        ),
        (
            Error::Busy(text()),
            "A change that the provider still makes has held up the next one for 10 s; or, as an event, one deletion",
            "Nothing if it passes: Steerage retries. Otherwise look at the resource that the message names in the provider: it is stuck",
        ),
        (
            Error::Throttled { after: None, message: text() },
            "The provider limits calls; or Steerage sends few at a time, because the cloud answers slowly or not at all (AWS: changes; OpenStack: requests). The message says which of the two",
            "Nothing if it passes: Steerage retries. Otherwise find out whether the cloud throttles or is slow: `steerage_controller_CLOUD_api_budget_rate`, `steerage_controller_CLOUD_api_request_duration_seconds`",
        ),
        (
            Error::Denied(text()),
            "The credentials lack a right, or the provider does not accept them",
            "Grant the rights that the message names; or check the source of the credentials and the clock",
        ),
        (
            Error::Unavailable(text()),
            "The provider failed, did not answer or does not end a change, or no credentials were found",
            "Nothing if it passes: Steerage retries. Otherwise do what the message says, or check the connection to the provider",
        ),
    ];
    let rows: Vec<_> =
        errors.iter().map(|(error, meaning, advice)| (error.reason(), *meaning, *advice)).collect();
    let _ = write!(
        provider,
        "{}\nOf the provider `edge`:\n\n{}\nOf the provider `aws`:\n\n{}\nOf the provider `azure`:\n\n{}\nOf the provider `gce`:\n\n{}\nOf the provider `openstack`:\n\n{}",
        error_table(&rows),
        error_table(steerage_provider_edge::REASONS),
        error_table(steerage_provider_aws::REASONS),
        error_table(steerage_provider_azure::REASONS),
        error_table(steerage_provider_gce::REASONS),
        error_table(steerage_provider_openstack::REASONS)
    );
    sections.push(provider);
    sections.push(format!(
        "## Events of the provider `edge`\n\nWarning, but `Drained`, which is Normal.\n\n{}",
        error_table(steerage_provider_edge::EVENTS)
    ));
    steerage_reference::check(
        "conditions.md",
        "Conditions, reasons and events",
        "A reason of `steerage.dev/Programmed` that is a problem, the first reason of `steerage.dev/Degraded`, and \
         `NoEndpoints` after 5 s are also Warning events when they appear. A restart of the controller does not repeat them.\n\n\
         If several problems apply, the reason of `steerage.dev/Degraded` is the worst one, and its message names all. \
         `UnsupportedChange` only repeats that a request was refused: `steerage.dev/Programmed` says why. [Troubleshooting](../troubleshooting.md) \
         says what to do.",
        &sections,
    )
}

fn reason_table(reasons: &[(&str, &str)]) -> String {
    let rows = reasons
        .iter()
        .map(|(reason, meaning)| [code(reason), meaning.trim().trim_end_matches('.').to_owned()]);
    table(["reason", "meaning"], rows)
}

fn error_table(reasons: &[(&str, &str, &str)]) -> String {
    let text = |text: &str| text.trim_end_matches('.').to_owned();
    let rows = reasons.iter().map(|(reason, meaning, advice)| [code(reason), text(meaning), text(advice)]);
    table(["reason", "meaning", "what to do"], rows)
}

fn code(text: &str) -> String {
    format!("`{text}`")
}
