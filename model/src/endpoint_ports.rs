// SPDX-License-Identifier: Apache-2.0
//! The ports of an `EndpointSlice`, stored in few bytes: a slice may have 20,000 of them, and every program that watches slices keeps
//! those of all tenants.

use crate::Protocol;

/// One port of a slice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointPort {
    /// The name of its Service port; empty for an unnamed port.
    pub name: String,
    /// The transport protocol.
    pub protocol: Protocol,
    /// The port that the pods listen on.
    pub port: u16,
}

/// A port in [`EndpointPorts`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndpointPortRef<'a> {
    /// The name of its Service port; empty for an unnamed port.
    pub name: &'a str,
    /// The transport protocol.
    pub protocol: Protocol,
    /// The port that the pods listen on.
    pub port: u16,
}

/// The ports of a slice. To change them, build them anew.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EndpointPorts {
    /// One after the other.
    names: Box<str>,
    ports: Box<[Entry]>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    name_len: u16,
    port: u16,
    protocol: Protocol,
}

impl EndpointPorts {
    /// All ports in order.
    pub fn iter(&self) -> impl Iterator<Item = EndpointPortRef<'_>> {
        let mut rest = &*self.names;
        self.ports.iter().map(move |entry| {
            let (name, behind) = rest.split_at_checked(entry.name_len.into()).unwrap_or_default();
            rest = behind;
            EndpointPortRef { name, protocol: entry.protocol, port: entry.port }
        })
    }

    /// All ports in order.
    pub fn to_vec(&self) -> Vec<EndpointPort> {
        let owned = |EndpointPortRef { name, protocol, port }: EndpointPortRef<'_>| EndpointPort {
            name: name.to_owned(),
            protocol,
            port,
        };
        self.iter().map(owned).collect()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.ports.is_empty()
    }
}

impl FromIterator<EndpointPort> for EndpointPorts {
    /// Leaves out ports whose names have more than 65,535 bytes: the API allows 63.
    fn from_iter<T: IntoIterator<Item = EndpointPort>>(ports: T) -> Self {
        let (mut names, mut entries) = (String::new(), Vec::new());
        for EndpointPort { name, protocol, port } in ports {
            let Ok(name_len) = u16::try_from(name.len()) else { continue };
            names.push_str(&name);
            entries.push(Entry { name_len, port, protocol });
        }
        Self { names: names.into(), ports: entries.into() }
    }
}

impl From<Vec<EndpointPort>> for EndpointPorts {
    fn from(ports: Vec<EndpointPort>) -> Self {
        ports.into_iter().collect()
    }
}

impl<const N: usize> From<[EndpointPort; N]> for EndpointPorts {
    fn from(ports: [EndpointPort; N]) -> Self {
        ports.into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port(name: &str, protocol: Protocol, port: u16) -> EndpointPort {
        EndpointPort { name: name.to_owned(), protocol, port }
    }

    #[test]
    fn ports_keep_their_names_and_order() {
        let all = vec![
            port("web", Protocol::Tcp, 80),
            port("", Protocol::Udp, 53),
            port("ünï", Protocol::Sctp, 0),
            port("web", Protocol::Tcp, u16::MAX),
        ];
        let ports = EndpointPorts::from(all.clone());
        assert_eq!(ports.to_vec(), all);
        assert!(!ports.is_empty() && EndpointPorts::default().is_empty());
        let long = port(&"x".repeat(70_000), Protocol::Tcp, 1);
        assert_eq!(EndpointPorts::from([long, all[0].clone()]).to_vec(), all[..1]);
    }

    #[test]
    fn a_port_takes_few_bytes() {
        let ports: EndpointPorts = (0..20_000).map(|n| port(&n.to_string(), Protocol::Tcp, n)).collect();
        let bytes = size_of_val(&*ports.ports) + ports.names.len();
        assert!(bytes <= 20_000 * (6 + 5), "{bytes}");
    }
}
