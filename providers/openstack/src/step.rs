// SPDX-License-Identifier: Apache-2.0
//! One change of a load balancer: the request that makes it, and what it is called. Octavia takes one at a time. Pure.

use std::fmt;

use http::Method;
use serde_json::{Value, json};

use crate::client::Call;
use crate::desired::{Desired, Members};
use crate::types::Member;

/// A change.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Step {
    UpdateBalancer {
        id: String,
        changes: Value,
    },
    CreatePool {
        name: String,
        body: Value,
    },
    UpdatePool {
        id: String,
        name: String,
        changes: Value,
    },
    DeletePool {
        id: String,
        name: String,
    },
    /// All members of a pool, also those that stay.
    SetMembers {
        pool: String,
        name: String,
        members: Vec<Member>,
    },
    CreateMonitor {
        pool: String,
        body: Value,
    },
    UpdateMonitor {
        id: String,
        pool: String,
        changes: Value,
    },
    DeleteMonitor {
        id: String,
        pool: String,
    },
    CreateListener {
        port: String,
        body: Value,
    },
    UpdateListener {
        id: String,
        port: String,
        changes: Value,
    },
    DeleteListener {
        id: String,
        port: String,
    },
}

impl Step {
    /// A change of members without those that are not wanted, which would come along until the others serve.
    pub(crate) fn without_others(mut self, wanted: &Members) -> Self {
        if let Self::SetMembers { members, .. } = &mut self {
            members.retain(|member| wanted.contains_key(&member.key()));
        }
        self
    }

    /// The same with all that is wanted of the load balancer.
    pub(crate) fn of_final_members(self, wanted: &Desired) -> Self {
        let Self::SetMembers { name, .. } = &self else { return self };
        match wanted.listeners.iter().find(|listener| listener.pool.name == *name) {
            Some(listener) => self.without_others(&listener.pool.members),
            None => self,
        }
    }

    /// The request.
    pub(crate) fn call(&self) -> Call {
        let put = |action, path: String, key: &str, changes: &Value| {
            Call::octavia(Method::PUT, action, &path, Some(json!({ key: changes })))
        };
        let post = |action, path: &str, key: &str, body: &Value| {
            Call::octavia(Method::POST, action, path, Some(json!({ key: body })))
        };
        let delete = |action, path: String| Call::octavia(Method::DELETE, action, &path, None);
        match self {
            Self::UpdateBalancer { id, changes } => {
                put("PUT loadbalancers", format!("loadbalancers/{id}"), "loadbalancer", changes)
            }
            Self::CreatePool { body, .. } => post("POST pools", "pools", "pool", body),
            Self::UpdatePool { id, changes, .. } => put("PUT pools", format!("pools/{id}"), "pool", changes),
            Self::DeletePool { id, .. } => delete("DELETE pools", format!("pools/{id}")),
            Self::SetMembers { pool, members, .. } => {
                let body = json!({ "members": members.iter().map(Member::body).collect::<Vec<_>>() });
                Call::octavia(Method::PUT, "PUT members", &format!("pools/{pool}/members"), Some(body))
            }
            Self::CreateMonitor { body, .. } => {
                post("POST healthmonitors", "healthmonitors", "healthmonitor", body)
            }
            Self::UpdateMonitor { id, changes, .. } => {
                put("PUT healthmonitors", format!("healthmonitors/{id}"), "healthmonitor", changes)
            }
            Self::DeleteMonitor { id, .. } => delete("DELETE healthmonitors", format!("healthmonitors/{id}")),
            Self::CreateListener { body, .. } => post("POST listeners", "listeners", "listener", body),
            Self::UpdateListener { id, changes, .. } => {
                put("PUT listeners", format!("listeners/{id}"), "listener", changes)
            }
            Self::DeleteListener { id, .. } => delete("DELETE listeners", format!("listeners/{id}")),
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fields = |changes: &Value| {
            let names = changes.as_object().map(|all| all.keys().cloned().collect::<Vec<_>>());
            names.unwrap_or_default().join(", ")
        };
        match self {
            Self::UpdateBalancer { changes, .. } => write!(f, "load balancer: {} changes", fields(changes)),
            Self::CreatePool { name, .. } => write!(f, "pool {name}: created"),
            Self::UpdatePool { name, changes, .. } => write!(f, "pool {name}: {} changes", fields(changes)),
            Self::DeletePool { name, .. } => write!(f, "pool {name}: deleted"),
            Self::SetMembers { name, members, .. } if members.is_empty() => {
                write!(f, "pool {name}: members become none")
            }
            Self::SetMembers { name, members, .. } => {
                let nodes: Vec<&str> = members.iter().map(|member| member.name.as_str()).collect();
                write!(f, "pool {name}: members become {}", nodes.join(", "))
            }
            Self::CreateMonitor { pool, .. } => write!(f, "pool {pool}: health monitor created"),
            Self::UpdateMonitor { pool, changes, .. } => {
                write!(f, "pool {pool}: health monitor: {} changes", fields(changes))
            }
            Self::DeleteMonitor { pool, .. } => write!(f, "pool {pool}: health monitor deleted"),
            Self::CreateListener { port, .. } => write!(f, "listener {port}: created"),
            Self::UpdateListener { port, changes, .. } => {
                write!(f, "listener {port}: {} changes", fields(changes))
            }
            Self::DeleteListener { port, .. } => write!(f, "listener {port}: deleted"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn step_without_members_says_so() {
        let step = Step::SetMembers { pool: String::new(), name: "web".to_owned(), members: Vec::new() };
        assert_eq!(step.to_string(), "pool web: members become none");
    }
}
