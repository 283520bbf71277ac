// SPDX-License-Identifier: Apache-2.0
//! Renders the controller's pages of `docs/reference`: flags and metrics, annotations, conditions and events.

use std::fmt::Write as _;
use std::time::Duration;

use clap::CommandFactory as _;
use steerage_model::{annotations, names};
use steerage_process::Metrics;
use steerage_provider_api::Error;
use steerage_reference::table;

use crate::args::Args;
use crate::reasons;

#[test]
fn reference_page_of_the_controller_is_current() -> anyhow::Result<()> {
    let metrics = Metrics::new("controller", env!("CARGO_PKG_VERSION"));
    let ours = metrics.register("controller", crate::metrics::Metrics::new);
    ours.reconciled("done");
    ours.called("ensure", "ok", Duration::ZERO);
    steerage_reference::check(
        "controller.md",
        "The controller: `steerage`",
        "Flags, environment variables and metrics. The chart sets the flags from its [values](chart-values.md).",
        &[steerage_reference::flags(&Args::command()), steerage_reference::metrics(&metrics.text()?)],
    )
}

#[test]
fn reference_page_of_annotations_is_current() -> anyhow::Result<()> {
    let rows = annotations::ALL.iter().map(|annotation| {
        let meaning = annotation.meaning.trim().trim_end_matches('.').to_owned();
        [code(annotation.name), annotation.value.to_owned(), meaning]
    });
    let of_services =
        format!("## Annotations on a Service\n\n{}", table(["annotation", "value", "meaning"], rows));
    let marks = [
        (
            names::FINALIZER,
            "finalizer on a Service",
            "Set on Services of Steerage's class before anything is created, and removed after all is deleted",
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
            "The cluster autoscaler is about to delete the node: it is no longer a target",
        ),
    ];
    let rows = marks.map(|(name, kind, meaning)| [code(name), kind.to_owned(), meaning.to_owned()]);
    let others = format!("## Labels, taints and finalizers\n\n{}", table(["name", "kind", "meaning"], rows));
    steerage_reference::check(
        "annotations.md",
        "Annotations, labels and finalizers",
        "[The guide](../annotations.md) explains how they work together. Annotations of the provider `aws` are on \
         [its page](../providers/aws.md), those that the agent sets on its Node on [the agent's](../agent.md).",
        &[of_services, others],
    )
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
    let mut provider = String::from(
        "## Errors of the provider\n\nReasons of the condition `steerage.dev/Programmed` and of Warning events. Of every \
         provider:\n\n",
    );
    let text = String::new;
    let errors = [
        (Error::Throttled { after: None, message: text() }, "The provider limits calls; Steerage retries"),
        (Error::Denied(text()), "The credentials lack a right"),
        (Error::Conflict(text()), "Something else changed the same resource; Steerage retries"),
        (Error::Unavailable(text()), "The provider failed or did not answer; Steerage retries"),
    ];
    let rows: Vec<_> = errors.iter().map(|(error, meaning)| (error.reason(), *meaning)).collect();
    let _ = write!(
        provider,
        "{}\nOf the provider `edge`:\n\n{}",
        reason_table(&rows),
        reason_table(steerage_provider_edge::REASONS)
    );
    sections.push(provider);
    steerage_reference::check(
        "conditions.md",
        "Conditions, reasons and events of a Service",
        "A reason of `steerage.dev/Programmed` or `steerage.dev/Degraded` that is a problem is also a Warning event when it \
         appears, and so is `NoEndpoints`. The agent adds the Warning event `FailedToStartServiceHealthcheck`, kube-proxy's \
         reason, when it cannot listen on a health-check node port.",
        &sections,
    )
}

fn reason_table(reasons: &[(&str, &str)]) -> String {
    let rows = reasons
        .iter()
        .map(|(reason, meaning)| [code(reason), meaning.trim().trim_end_matches('.').to_owned()]);
    table(["reason", "meaning"], rows)
}

fn code(text: &str) -> String {
    format!("`{text}`")
}
