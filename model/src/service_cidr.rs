// SPDX-License-Identifier: Apache-2.0
//! The projection of a `ServiceCIDR`.

use ipnet::IpNet;

/// Networks that the API server allocates cluster IPs from (KEP-1880). Readiness and deletion are left out: the addresses stay
/// reserved until the object is gone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ServiceCidr {
    /// The object's name.
    pub name: String,
    /// `spec.cidrs`: at most one per family.
    pub networks: Vec<IpNet>,
}
