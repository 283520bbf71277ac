// SPDX-License-Identifier: Apache-2.0
//! A client of a case: a machine, and the load balancer that it asks. Cases make it, and `under_load` turns it into the meter's. It
//! opens nothing.

use steerage_meter::Source;
use steerage_meter::client::Target;
use steerage_meter::load;

use crate::cluster::Host;

/// A machine, and where it connects to.
#[derive(Clone, Debug)]
pub struct Client {
    /// The machine.
    pub host: Host,
    /// The load balancer and its backends.
    pub to: Target,
    /// What the load balancer is, for messages and tables.
    pub what: String,
}

impl Host {
    /// For the meter.
    pub fn source(&self) -> Source {
        Source { netns: self.netns.clone(), addresses: vec![self.ipv4.into(), self.ipv6.into()] }
    }
}

impl From<Client> for load::Client {
    fn from(Client { host, to, what }: Client) -> Self {
        Self { from: host.source(), to, what }
    }
}
