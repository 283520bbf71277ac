// SPDX-License-Identifier: Apache-2.0
//! Link-layer addresses.

pub(crate) use steerage_edge_dataplane::MacAddress as Mac;

/// In the usual notation.
pub(crate) fn display_mac(mac: Mac) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}
