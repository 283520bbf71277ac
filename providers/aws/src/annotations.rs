// SPDX-License-Identifier: Apache-2.0
//! The annotations of a Service that only this provider reads.

/// Scheme of the load balancer: `internal` or `internet-facing`. AWS's own controllers use the same name and values. AWS
/// cannot change the scheme of an existing load balancer.
pub(crate) const SCHEME: &str = "service.beta.kubernetes.io/aws-load-balancer-scheme";
