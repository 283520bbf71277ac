// SPDX-License-Identifier: Apache-2.0
//! Which load balancers may have one address: those whose Services ask for it by one key, and whose listeners differ. Pure.
//!
//! The edge asks the same of the objects, without the namespaces: see `edge/src/plan/accept.rs`.

use std::collections::BTreeSet;

use serde_json::Value;
use steerage_edge_api::{EdgeLoadBalancerSpec, ListenerProtocol};
use steerage_model::annotations::ADDRESS_SHARING_KEY;
use steerage_model::{Protocol, shown};
use steerage_provider_api::{Error, LoadBalancer};
use steerage_provider_cloud::reasons::INVALID_ANNOTATION;

use crate::entry::Entry;
use crate::objects::LoadBalancerContent;

/// As long as the value of a label.
const LONGEST_KEY: usize = 63;

/// A port of a load balancer.
pub(crate) type Port = (ListenerProtocol, u16);

/// By which key a load balancer shares its addresses, and what others must not have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Sharing {
    pub(crate) namespace: String,
    pub(crate) key: String,
    ports: BTreeSet<Port>,
}

/// Who may share an address of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Services of one namespace.
    Namespace,
    /// Services of all namespaces.
    Cluster,
}

/// Why two load balancers cannot have one address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Conflict {
    /// One of them does not share it with the other.
    Address,
    /// Both have this port.
    Port(ListenerProtocol, u16),
}

/// The key of a Service.
pub(crate) fn key(lb: &LoadBalancer) -> Result<Option<String>, Error> {
    let Some(text) = lb.annotations.get(ADDRESS_SHARING_KEY) else { return Ok(None) };
    let key = text.trim();
    let is_valid = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    if key.is_empty() || key.len() > LONGEST_KEY || !key.chars().all(is_valid) {
        let message = format!(
            "Annotation {ADDRESS_SHARING_KEY} has the invalid value `{}`. No load balancer is created or changed. Use at most \
             {LONGEST_KEY} letters, digits, dots, hyphens and underscores.",
            shown(text)
        );
        return Err(Error::invalid(INVALID_ANNOTATION, message));
    }
    Ok(Some(key.to_owned()))
}

impl Sharing {
    /// What a Service asks for.
    pub(crate) fn wanted(lb: &LoadBalancer) -> Result<Option<Self>, Error> {
        let Some(key) = key(lb)? else { return Ok(None) };
        let port = |listener: &steerage_provider_api::Listener| match listener.protocol {
            Protocol::Tcp => Some((ListenerProtocol::Tcp, listener.port)),
            Protocol::Udp => Some((ListenerProtocol::Udp, listener.port)),
            Protocol::Sctp => None,
        };
        let ports = lb.listeners.iter().filter_map(port).collect();
        Ok(Some(Self { namespace: lb.owner.service.namespace().to_owned(), key, ports }))
    }

    /// What an object has, also one that this version cannot fully read.
    pub(crate) fn of(entry: &Entry<LoadBalancerContent>) -> Option<Self> {
        let sharing = match &entry.content {
            Ok(content) => Self::of_spec(&content.spec),
            Err(raw) => Self::of_raw(raw),
        };
        match &entry.owner {
            Some(owner) => sharing.map(|own| Self { namespace: owner.service.namespace().to_owned(), ..own }),
            None => sharing,
        }
    }

    fn of_spec(spec: &EdgeLoadBalancerSpec) -> Option<Self> {
        let ports = spec.listeners.iter().map(|listener| (listener.protocol, listener.port)).collect();
        Some(Self { namespace: spec.service.namespace.clone(), key: spec.sharing_key.clone()?, ports })
    }

    fn of_raw(raw: &Value) -> Option<Self> {
        let text = |path: &str| raw.pointer(path).and_then(Value::as_str).map(str::to_owned);
        let listeners = raw.pointer("/spec/listeners").and_then(Value::as_array);
        let port = |listener: &Value| {
            let protocol = serde_json::from_value(listener.get("protocol")?.clone()).ok()?;
            Some((protocol, u16::try_from(listener.get("port")?.as_u64()?).ok()?))
        };
        let ports = listeners.into_iter().flatten().filter_map(port).collect();
        let namespace = text("/spec/service/namespace").unwrap_or_default();
        Some(Self { namespace, key: text("/spec/sharingKey")?, ports })
    }
}

/// Why these two cannot have one address.
pub(crate) fn conflict(own: Option<&Sharing>, other: Option<&Sharing>, scope: Scope) -> Option<Conflict> {
    let (Some(own), Some(other)) = (own, other) else { return Some(Conflict::Address) };
    if own.key != other.key || scope == Scope::Namespace && own.namespace != other.namespace {
        return Some(Conflict::Address);
    }
    own.ports.intersection(&other.ports).next().map(|(protocol, port)| Conflict::Port(*protocol, *port))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::BTreeMap;

    use serde_json::json;

    use super::*;
    use crate::allocation::tests::load_balancer;

    pub(crate) fn sharing(namespace: &str, key: &str, ports: &[u16]) -> Sharing {
        let ports = ports.iter().map(|port| (ListenerProtocol::Tcp, *port)).collect();
        Sharing { namespace: namespace.to_owned(), key: key.to_owned(), ports }
    }

    #[test]
    fn an_address_is_shared_under_one_key_with_other_ports() {
        let own = sharing("shop", "web", &[80, 443]);
        let with = |other: &Sharing, scope| conflict(Some(&own), Some(other), scope);
        for scope in [Scope::Namespace, Scope::Cluster] {
            assert_eq!(with(&sharing("shop", "web", &[25]), scope), None);
            assert_eq!(with(&sharing("shop", "dns", &[25]), scope), Some(Conflict::Address));
            let port = Some(Conflict::Port(ListenerProtocol::Tcp, 443));
            assert_eq!(with(&sharing("shop", "web", &[443]), scope), port);
            assert_eq!(conflict(Some(&own), None, scope), Some(Conflict::Address));
            assert_eq!(conflict(None, None, scope), Some(Conflict::Address));
        }
        assert_eq!(with(&sharing("bank", "web", &[25]), Scope::Namespace), Some(Conflict::Address));
        assert_eq!(with(&sharing("bank", "web", &[25]), Scope::Cluster), None);
        let udp = Sharing { ports: [(ListenerProtocol::Udp, 443)].into(), ..own.clone() };
        assert_eq!(with(&udp, Scope::Namespace), None, "another protocol");
    }

    #[test]
    fn a_key_is_a_word() {
        let key_of = |value: &str| {
            let annotations = BTreeMap::from([(ADDRESS_SHARING_KEY.to_owned(), value.to_owned())]);
            key(&LoadBalancer { annotations, ..load_balancer("a", &[]) })
        };
        assert_eq!(key_of(" web-1.x_Y ").expect("valid").as_deref(), Some("web-1.x_Y"));
        assert_eq!(key(&load_balancer("a", &[])).expect("none"), None);
        for bad in ["", " ", "a b", "a/b", "ä", &"a".repeat(64)] {
            assert_eq!(key_of(bad).expect_err(bad).reason(), INVALID_ANNOTATION, "{bad}");
        }
    }

    #[test]
    fn an_object_of_a_later_version_shares_as_well() {
        let raw = json!({"spec": {"service": {"namespace": "shop"}, "sharingKey": "web",
            "listeners": [{"protocol": "TCP", "port": 80}, {"protocol": "QUIC", "port": 443}]}});
        assert_eq!(Sharing::of_raw(&raw), Some(sharing("shop", "web", &[80])));
        assert_eq!(Sharing::of_raw(&json!({"spec": {}})), None);
    }
}
