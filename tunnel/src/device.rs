// SPDX-License-Identifier: Apache-2.0
//! Makes, adopts and removes the VXLAN devices. A device belongs to Steerage if it is of the kind VXLAN and has an address with
//! Steerage's prefix, which it has from its first moment on; no other device is changed.

use std::io;
use std::net::Ipv4Addr;

use crate::netlink::{Netlink, attribute, find, link, nested, of_link, word};
use crate::{MAX_VNI, PREFIX, RECEIVERS, mac};

const NEWLINK: u16 = 16;
const DELLINK: u16 = 17;
const GETLINK: u16 = 18;
const NEWADDR: u16 = 20;
/// `NLM_F_CREATE | NLM_F_EXCL`
const CREATE: u16 = 0x400 | 0x200;
/// `IFF_UP`, `IFF_NOARP`
const UP: u32 = 0x1;
const NO_ARP: u32 = 0x80;

/// `IFLA_*`
const ADDRESS: u16 = 1;
const NAME: u16 = 3;
const MTU: u16 = 4;
const INFO: u16 = 18;
const FAMILIES: u16 = 26;
/// `IFLA_INFO_*`
const KIND: u16 = 1;
const DATA: u16 = 2;
/// `IFLA_VXLAN_*`
const VNI: u16 = 1;
const LEARNING: u16 = 7;
const PORT: u16 = 15;
const LOCAL6: u16 = 17;
const COLLECT_METADATA: u16 = 25;
/// `IFLA_INET_CONF`, and `IPV4_DEVCONF_RP_FILTER` in it
const INET_CONF: u16 = 1;
const RP_FILTER: u16 = 8;
const STRICT: u32 = 1;
const LOOSE: u32 = 2;
/// `IFLA_INET6_ADDR_GEN_MODE`, `IN6_ADDR_GEN_MODE_NONE`
const ADDR_GEN_MODE: u16 = 8;
const NO_ADDRESS: u8 = 1;
/// `RT_SCOPE_HOST`, `IFA_ADDRESS`, `IFA_LOCAL`
const HOST: u8 = 254;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
/// Loose reverse path filtering drops all that comes by a device without an address, whatever the routes are. This one is the host's
/// own anyway, and in no list of a node's addresses.
const ANY_OWN: Ipv4Addr = Ipv4Addr::new(127, 83, 84, 1);
/// Below the least that IPv6 needs, so that the kernel takes no IPv6 packet from the sender. What the program sends is compared with
/// the MTU of each path, and never with the device's.
const NO_IPV6: u32 = 1279;
/// What is tried.
const ASK: &str = "ask the kernel for";
const FIND: &str = "find";

/// A VXLAN device as it should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    pub(crate) name: &'static str,
    pub(crate) port: u16,
    /// The virtual network from which it receives. Without one it only sends, and to many.
    pub(crate) vni: Option<u32>,
    /// The family of the packets around those that it receives. A sender has both.
    pub(crate) v6: bool,
}

/// A device that is as it should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ensured {
    /// Its index.
    pub index: u32,
    /// Whether it was made now.
    pub is_new: bool,
}

/// Why a device is not as it should be.
#[derive(Debug, thiserror::Error)]
pub enum TunnelError {
    /// Another program has the name.
    #[error(
        "{0} is not Steerage's: another program has made a device of this name. Remove it with `ip link delete {0}`"
    )]
    Foreign(&'static str),
    /// Another process has made the device with other attributes.
    #[error(
        "{0} has another port, or number of the virtual network, than this process wants: another one has made it"
    )]
    Different(&'static str),
    /// Another VXLAN device, of another kind, has the port.
    #[error(
        "UDP port {port} is in use, so {name} cannot receive or send: another VXLAN device or program has it (`ss -ulpn`, `ip -d link show type vxlan`)"
    )]
    PortInUse {
        /// The device.
        name: &'static str,
        /// Its port.
        port: u16,
    },
    /// The kernel refused.
    #[error("cannot {what} {name} (it needs CAP_NET_ADMIN, and a kernel with VXLAN)")]
    Kernel {
        /// What was tried.
        what: &'static str,
        /// The device.
        name: &'static str,
        /// Why not.
        source: io::Error,
    },
}

/// A device of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Found {
    index: u32,
    is_ours: bool,
    is_up: bool,
    vni: Option<u32>,
    port: u16,
    v6: bool,
    /// Reverse path filtering of IPv4, if the kernel says.
    rp_filter: Option<u32>,
}

impl TunnelError {
    /// Whether the kernel did not answer, so that nothing new is known of the device.
    pub fn is_unknown(&self) -> bool {
        matches!(self, Self::Kernel { what: ASK | FIND, .. })
    }
}

impl Device {
    /// The device's name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    fn address(&self) -> crate::MacAddress {
        // A sender has frames of no virtual network: it takes the number that no receiver uses most rarely.
        mac(self.vni.unwrap_or(MAX_VNI))
    }

    fn is(&self, found: &Found) -> bool {
        (found.vni, found.port, found.v6) == (self.vni, self.port, self.v6)
    }

    fn rp_filter(&self) -> u32 {
        if self.vni.is_none() { STRICT } else { LOOSE }
    }

    fn failed(&self, what: &'static str) -> impl Fn(io::Error) -> TunnelError {
        let (name, port) = (self.name, self.port);
        move |source| match source.raw_os_error() {
            Some(libc::EADDRINUSE) => TunnelError::PortInUse { name, port },
            _ => TunnelError::Kernel { what, name, source },
        }
    }

    fn creation(&self) -> Vec<u8> {
        let mut body = link(0, 0, 0);
        attribute(&mut body, NAME, &[self.name.as_bytes(), &[0]].concat());
        attribute(&mut body, ADDRESS, &self.address());
        if self.vni.is_none() {
            attribute(&mut body, MTU, &NO_IPV6.to_ne_bytes());
        }
        nested(&mut body, INFO, |info| {
            attribute(info, KIND, b"vxlan\0");
            nested(info, DATA, |data| {
                match self.vni {
                    Some(vni) => attribute(data, VNI, &vni.to_ne_bytes()),
                    None => attribute(data, COLLECT_METADATA, &[1]),
                }
                attribute(data, LEARNING, &[0]);
                attribute(data, PORT, &self.port.to_be_bytes());
                if self.v6 {
                    attribute(data, LOCAL6, &[0; 16]);
                }
            });
        });
        body
    }

    /// What the kernel does not take at the creation. A sender has no address, and no route leads to it: so it receives nothing by
    /// IPv4.
    fn settings(&self, index: u32) -> Vec<u8> {
        let rp_filter = self.rp_filter();
        let mut body = link(index, 0, 0);
        nested(&mut body, FAMILIES, |families| {
            nested(families, family(libc::AF_INET), |inet| {
                nested(inet, INET_CONF, |conf| attribute(conf, RP_FILTER, &rp_filter.to_ne_bytes()));
            });
        });
        body
    }

    /// Fails where the kernel has no IPv6.
    fn settings6(index: u32) -> Vec<u8> {
        let mut body = link(index, 0, 0);
        nested(&mut body, FAMILIES, |families| {
            nested(families, family(libc::AF_INET6), |inet| attribute(inet, ADDR_GEN_MODE, &[NO_ADDRESS]));
        });
        body
    }
}

fn family(number: i32) -> u16 {
    u16::try_from(number).unwrap_or_default()
}

/// Makes the device in the network namespace of the calling thread, or adopts that of an earlier process, and sets it up. Changes
/// nothing where all is as it should be.
///
/// # Errors
/// If a device of the name is another program's or has other attributes, if the port is another socket's, or the kernel refuses.
pub fn ensure(device: &Device) -> Result<Ensured, TunnelError> {
    let mut netlink = Netlink::open().map_err(device.failed(ASK))?;
    let index = match find_device(&mut netlink, device.name).map_err(device.failed(FIND))? {
        Some(Found { is_ours: false, .. }) => return Err(TunnelError::Foreign(device.name)),
        Some(found) if !device.is(&found) => return Err(TunnelError::Different(device.name)),
        Some(Found { index, is_up: true, rp_filter, .. }) => {
            // Programs that apply the host's settings to each new device change it a moment after it was made.
            if rp_filter.is_some_and(|found| found != device.rp_filter()) {
                netlink.request(NEWLINK, 0, &device.settings(index)).map_err(device.failed("set up"))?;
            }
            return Ok(Ensured { index, is_new: false });
        }
        Some(found) => found.index,
        None => {
            netlink.request(NEWLINK, CREATE, &device.creation()).map_err(device.failed("make"))?;
            let made = find_device(&mut netlink, device.name).map_err(device.failed(FIND))?;
            made.ok_or_else(|| device.failed(FIND)(io::ErrorKind::NotFound.into()))?.index
        }
    };
    let result = set_up(&mut netlink, device, index);
    if matches!(result, Err(TunnelError::PortInUse { .. })) {
        // It would be of no use, and in another one's way.
        let _ = delete(&mut netlink, index);
    }
    result.map(|()| Ensured { index, is_new: true })
}

/// As [`ensure`], and makes a device with other attributes anew: for a process that starts.
///
/// # Errors
/// As [`ensure`].
pub fn ensure_anew(device: &Device) -> Result<Ensured, TunnelError> {
    match ensure(device) {
        Err(TunnelError::Different(_)) => {
            remove(device.name)?;
            ensure(device)
        }
        result => result,
    }
}

/// Before packets can come, all settings are there.
fn set_up(netlink: &mut Netlink, device: &Device, index: u32) -> Result<(), TunnelError> {
    let failed = device.failed("set up");
    netlink.request(NEWLINK, 0, &device.settings(index)).map_err(&failed)?;
    if let Err(error) = netlink.request(NEWLINK, 0, &Device::settings6(index))
        && device.v6
    {
        return Err(failed(error));
    }
    if device.vni.is_some()
        && let Err(error) = netlink.request(NEWADDR, CREATE, &own_address(index))
        && error.raw_os_error() != Some(libc::EEXIST)
    {
        return Err(failed(error));
    }
    netlink.request(NEWLINK, 0, &link(index, UP | NO_ARP, UP | NO_ARP)).map(drop).map_err(failed)
}

fn own_address(index: u32) -> Vec<u8> {
    let mut body = vec![u8::try_from(libc::AF_INET).unwrap_or_default(), 32, 0, HOST];
    body.extend_from_slice(&index.to_ne_bytes());
    attribute(&mut body, IFA_LOCAL, &ANY_OWN.octets());
    attribute(&mut body, IFA_ADDRESS, &ANY_OWN.octets());
    body
}

/// Removes Steerage's device of this name. Returns whether there was one; another program's stays.
///
/// # Errors
/// If the kernel refuses.
pub fn remove(name: &'static str) -> Result<bool, TunnelError> {
    let failed = |source| TunnelError::Kernel { what: "remove", name, source };
    let mut netlink = Netlink::open().map_err(failed)?;
    match find_device(&mut netlink, name).map_err(failed)? {
        Some(Found { index, is_ours: true, .. }) => {
            delete(&mut netlink, index).map_err(failed)?;
            Ok(true)
        }
        _ => Ok(false),
    }
}

/// Whether there is a device of this name, Steerage's, and up.
///
/// # Errors
/// If the kernel refuses to say.
pub fn is_up(name: &'static str) -> Result<bool, TunnelError> {
    let failed = |source| TunnelError::Kernel { what: FIND, name, source };
    let mut netlink = Netlink::open().map_err(failed)?;
    let found = find_device(&mut netlink, name).map_err(failed)?;
    Ok(found.is_some_and(|found| found.is_ours && found.is_up))
}

fn delete(netlink: &mut Netlink, index: u32) -> io::Result<()> {
    match netlink.request(DELLINK, 0, &link(index, 0, 0)) {
        Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(()),
        other => other.map(drop),
    }
}

fn find_device(netlink: &mut Netlink, name: &str) -> io::Result<Option<Found>> {
    let mut body = link(0, 0, 0);
    attribute(&mut body, NAME, &[name.as_bytes(), &[0]].concat());
    match netlink.request(GETLINK, 0, &body) {
        Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(None),
        answer => Ok(answer?.and_then(|message| decode(&message))),
    }
}

fn decode(message: &[u8]) -> Option<Found> {
    let attributes = of_link(message);
    let info = find(attributes, INFO).unwrap_or_default();
    let kind = find(info, KIND).map(|kind| kind.strip_suffix(b"\0").unwrap_or(kind));
    let data = find(info, DATA).unwrap_or_default();
    let is_external = find(data, COLLECT_METADATA).is_some_and(|flag| flag != [0]);
    let address = find(attributes, ADDRESS).unwrap_or_default();
    // An array of all settings, which are counted from one.
    let inet = find(attributes, FAMILIES).and_then(|families| find(families, family(libc::AF_INET)));
    let conf = inet.and_then(|inet| find(inet, INET_CONF));
    Some(Found {
        index: word(message, 4)?,
        is_ours: kind == Some(b"vxlan") && address.starts_with(&PREFIX),
        is_up: word(message, 8)? & UP != 0,
        vni: find(data, VNI).and_then(|vni| word(vni, 0)).filter(|_| !is_external),
        port: find(data, PORT).and_then(|port| port.try_into().ok()).map_or(0, u16::from_be_bytes),
        // The kernel lists an address that is not given by neither family, so the name says it.
        v6: name_of(attributes) == RECEIVERS[1],
        rp_filter: conf.and_then(|conf| word(conf, usize::from(RP_FILTER - 1) * 4)),
    })
}

fn name_of(attributes: &[u8]) -> &str {
    let name = find(attributes, NAME).unwrap_or_default();
    std::str::from_utf8(name.strip_suffix(b"\0").unwrap_or(name)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use steerage_requirements::{in_new_netns, requires};

    use super::*;
    use crate::{SENDER, receivers, sender};

    fn ip(line: &str) -> String {
        let done = Command::new("ip").args(line.split(' ')).output().expect("ip");
        assert!(done.status.success(), "ip {line}: {}", String::from_utf8_lossy(&done.stderr));
        String::from_utf8_lossy(&done.stdout).into_owned()
    }

    /// As systemd-udevd does on some distributions, with the settings of /etc/sysctl.d.
    #[test]
    fn reverse_path_filter_that_another_program_sets_is_set_back() {
        requires!(NetworkNamespace, Program("ip"));
        in_new_netns(|| {
            let [device, _] = receivers(7, 10_361);
            ensure(&device).expect("made");
            let file = format!("/proc/sys/net/ipv4/conf/{}/rp_filter", device.name());
            let read = || std::fs::read_to_string(&file).expect("rp_filter").trim().to_owned();
            assert_eq!(read(), "2");
            for other in ["1", "0"] {
                std::fs::write(&file, other).expect("set");
                assert!(!ensure(&device).expect("kept").is_new);
                assert_eq!(read(), "2");
            }
        });
    }

    #[test]
    fn devices_are_made_adopted_and_removed() {
        requires!(NetworkNamespace, Program("ip"));
        in_new_netns(|| {
            let devices = receivers(7, 10_361);
            let made = devices.map(|device| ensure(&device).expect("made"));
            assert!(made.iter().all(|made| made.is_new));
            for device in devices {
                let shown = ip(&format!("-d link show {}", device.name()));
                for part in ["vxlan id 7", "dstport 10361", "nolearning", "NOARP", "02:53:54:00:00:07", ",UP"]
                {
                    assert!(shown.contains(part), "{part}: {shown}");
                }
                assert!(!ip(&format!("-6 address show {}", device.name())).contains("fe80"));
                let path = format!("/proc/sys/net/ipv4/conf/{}/rp_filter", device.name());
                assert_eq!(std::fs::read_to_string(path).expect("a setting").trim(), "2");
            }
            let again = devices.map(|device| ensure(&device).expect("adopted"));
            assert_eq!(again, made.map(|made| Ensured { is_new: false, ..made }));

            // As after a crash between the creation and the rest, and after somebody set it down.
            ip("link set steerage-vx4 down");
            let repaired = ensure(&devices[0]).expect("set up again");
            assert_eq!(repaired, Ensured { index: made[0].index, is_new: true });

            let other = receivers(8, 10_400);
            assert!(other.iter().all(|device| matches!(ensure(device), Err(TunnelError::Different(_)))));
            let moved = other.map(|device| ensure_anew(&device).expect("made anew"));
            assert!(moved.iter().zip(&made).all(|(moved, made)| moved.is_new && moved.index != made.index));
            assert!(ip("-d link show steerage-vx6").contains("vxlan id 8"));
            for name in RECEIVERS {
                assert_eq!([remove(name).expect("removed"), remove(name).expect("none")], [true, false]);
            }
        });
    }

    #[test]
    fn device_of_another_program_is_refused_and_kept() {
        requires!(NetworkNamespace, Program("ip"));
        in_new_netns(|| {
            for kind in ["type bridge", "type vxlan id 7 dstport 10361"] {
                ip(&format!("link add {SENDER} {kind}"));
                let refused = ensure(&sender(10_361));
                assert!(matches!(refused, Err(TunnelError::Foreign(SENDER))), "{refused:?}");
                assert!(!remove(SENDER).expect("asked") && !is_up(SENDER).expect("asked"));
                ip(&format!("link delete {SENDER}"));
            }
        });
    }

    #[test]
    fn port_of_another_device_is_named_and_nothing_is_left() {
        requires!(NetworkNamespace, Program("ip"));
        in_new_netns(|| {
            ensure(&receivers(7, 10_361)[0]).expect("made");
            let refused = ensure(&sender(10_361));
            assert!(matches!(refused, Err(TunnelError::PortInUse { port: 10_361, .. })), "{refused:?}");
            assert!(!ip("link show").contains("steerage-vx:"));
            ensure(&sender(10_362)).expect("another port");
            assert!(is_up(SENDER).expect("asked"));
            assert!(ip("-d link show steerage-vx").contains("external"));
        });
    }
}
