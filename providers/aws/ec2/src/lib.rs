// SPDX-License-Identifier: Apache-2.0
//! The few actions of EC2 that Steerage and its tests use, with the few fields of each. `client` sends them by the runtime of AWS's
//! SDK, which has credentials, signatures and timeouts; `form` writes requests, `answer` reads answers, `types` is what both carry.
//!
//! Why not AWS's own crate: see decision 24. The protocol is "EC2 query": a form is posted, XML comes back.
//! <https://smithy.io/2.0/aws/protocols/aws-ec2-query-protocol.html>
//!
//! The provider for AWS and the tests call it. It decides nothing, retries nothing and remembers nothing.

mod answer;
mod client;
mod error;
mod form;
mod types;

pub use client::Client;
pub use error::{Error, Refusal};
pub use types::{
    AssociationState, Filter, Instance, IpPermission, IpRange, Ipv6Association, Ipv6Range, NewSecurityGroup,
    PrefixListId, SecurityGroup, Subnet, Tag,
};
