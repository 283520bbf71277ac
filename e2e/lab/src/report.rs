// SPDX-License-Identifier: Apache-2.0
//! Describes a lab: shell lines for `env`, a table for `status`.

use std::fmt::Write as _;
use std::fs;

use crate::addresses::{Cloud, Host, Plan, Role};
use crate::aws;
use crate::daemon;
use crate::error::{Error, Result};
use crate::netns;
use crate::openstack;
use crate::passthrough;
use crate::state::Lab;

/// Shell lines for `eval`: the kubeconfig, and the hosts' addresses.
pub fn env(lab: &Lab) -> String {
    let Plan { name, service_proxy, cloud, .. } = &lab.plan;
    let [client, client2] = lab.plan.clients();
    let words = |hosts: &[Host]| hosts.iter().map(|host| host.name.as_str()).collect::<Vec<_>>().join(" ");
    let mut lines = vec![
        format!("KUBECONFIG={}", quote(&lab.kubeconfig("admin").display().to_string())),
        format!("LAB_NAME={name}"),
        format!("LAB_SERVICE_PROXY={service_proxy}"),
        format!("LAB_FOLDER={}", quote(&lab.folder().display().to_string())),
        format!("LAB_CLIENT={}", client.netns),
        format!("LAB_CLIENT2={}", client2.netns),
        format!("LAB_ROUTER={}", lab.plan.router()),
        format!("LAB_NODES={}", quote(&words(&lab.plan.nodes()))),
        format!("LAB_EDGES={}", quote(&words(&lab.plan.edges()))),
    ];
    match cloud {
        Some(Cloud::Aws) => {
            lines.push(format!("LAB_AWS_API=http://{}", aws::api(&lab.plan)));
            lines.push(format!("LAB_AWS_HOSTS={}", quote(&aws::hosts(lab).display().to_string())));
        }
        Some(Cloud::OpenStack) => {
            lines.push(format!("LAB_OPENSTACK_API=http://{}", openstack::api(&lab.plan)));
            lines.push(format!("LAB_CLOUDS_YAML={}", quote(&openstack::clouds(lab).display().to_string())));
        }
        Some(Cloud::Azure | Cloud::Gce) => {
            lines.push(format!("LAB_CLOUD_API=http://{}", passthrough::api(&lab.plan)));
        }
        None => {}
    }
    for host in lab.plan.hosts() {
        let prefix = variable(&host);
        lines.push(format!("LAB_{prefix}_NETNS={}", host.netns));
        lines.push(format!("LAB_{prefix}_IP4={}", host.ipv4));
        lines.push(format!("LAB_{prefix}_IP6={}", host.ipv6));
    }
    lines.into_iter().fold(String::new(), |mut text, line| {
        let _ = writeln!(text, "export {line}");
        text
    })
}

/// The first client has no number in its variables.
fn variable(host: &Host) -> String {
    match host.role {
        Role::Client(1) => "CLIENT".to_owned(),
        _ => host.name.to_uppercase(),
    }
}

fn quote(text: &str) -> String {
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// One line per expected process and namespace.
pub fn status(lab: &Lab) -> String {
    let mut text = String::new();
    for (component, process) in daemon::all(lab) {
        let state =
            process.map_or_else(|| "ended".to_owned(), |identity| format!("runs as {}", identity.pid));
        let _ = writeln!(text, "{component:<26} {state}");
    }
    for host in lab.plan.hosts() {
        let state = if netns::exists(&host.netns) { "is on" } else { "is off" };
        let _ = writeln!(text, "{:<26} {state}, {} {}", host.netns, host.ipv4, host.ipv6);
    }
    text
}

/// A component's log. An unknown name is an error that lists the known ones.
pub fn log(lab: &Lab, component: &str) -> Result<String> {
    fs::read_to_string(lab.log(component)).map_err(|_| {
        let entries = fs::read_dir(lab.folder().join("logs")).into_iter().flatten().flatten();
        let mut names: Vec<_> = entries
            .filter_map(|entry| Some(entry.file_name().to_str()?.strip_suffix(".log")?.to_owned()))
            .collect();
        names.sort();
        Error::Refused(format!("there is no log of {component}; there are logs of {}", names.join(", ")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quoting_survives_a_quote() {
        assert_eq!(quote("it's"), r"'it'\''s'");
    }
}
