// SPDX-License-Identifier: Apache-2.0
//! `ServiceCIDR`s.

use serde::Deserialize;
use steerage_model::{Key, ServiceCidr};

use super::json::{Meta, address_or_note, or_default};
use super::{Kind, Malformed};

/// All `ServiceCIDR`s. API servers serve them since Kubernetes 1.33.
#[derive(Clone, Copy, Debug)]
pub struct ServiceCidrs;

impl Kind for ServiceCidrs {
    type Object = ServiceCidr;

    fn name(&self) -> &'static str {
        "servicecidrs"
    }

    fn path(&self) -> String {
        "/apis/networking.k8s.io/v1/servicecidrs".to_owned()
    }

    fn may_be_missing(&self) -> bool {
        true
    }

    fn key(&self, key: Key) -> String {
        key.name().to_owned()
    }

    fn project(json: &str, notes: &mut Vec<String>) -> Result<Option<ServiceCidr>, Malformed> {
        let Wire { metadata, spec } = serde_json::from_str(json)?;
        let networks =
            spec.cidrs.iter().filter_map(|cidr| address_or_note("spec.cidrs", cidr, notes)).collect();
        Ok(Some(ServiceCidr { name: metadata.name, networks }))
    }
}

#[derive(Deserialize)]
struct Wire {
    metadata: Meta,
    #[serde(default, deserialize_with = "or_default")]
    spec: Spec,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Spec {
    #[serde(deserialize_with = "or_default")]
    cidrs: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_network_is_ignored() {
        let mut notes = Vec::new();
        let json =
            r#"{"metadata":{"name":"kubernetes"},"spec":{"cidrs":["10.96.0.0/16","fd00::/112","ten"]}}"#;
        let found = ServiceCidrs::project(json, &mut notes).unwrap().unwrap();
        let networks = ["10.96.0.0/16", "fd00::/112"].map(|net| net.parse().unwrap()).to_vec();
        assert_eq!(found, ServiceCidr { name: "kubernetes".to_owned(), networks });
        assert!(notes[0].contains("`ten`"), "{notes:?}");
        for empty in [r#"{"metadata":{"name":"a"}}"#, r#"{"metadata":{"name":"a"},"spec":{"cidrs":null}}"#] {
            assert_eq!(ServiceCidrs::project(empty, &mut notes).unwrap().unwrap().networks, []);
        }
    }
}
