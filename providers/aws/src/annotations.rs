// SPDX-License-Identifier: Apache-2.0
//! The annotations of a Service that only this provider reads. `docs/reference/annotations.md` lists them.

steerage_model::annotations! {
    /// Scheme of a new load balancer, instead of `--aws-scheme`. AWS cannot change the scheme of an existing one. AWS's own controllers use the same name and values.
    SCHEME = "service.beta.kubernetes.io/aws-load-balancer-scheme", "`internal` or `internet-facing`";
    /// Older form of the scheme. A Service with both must request the same by both.
    INTERNAL = "service.beta.kubernetes.io/aws-load-balancer-internal", "`true` (internal) or `false` (internet-facing)";
}
