// SPDX-License-Identifier: Apache-2.0
//! An eBPF program that does nothing, in the place of the edge's: what the kernel says of its runs is what the kernel's meter itself
//! costs there, with the caches as they are under the same traffic.

#![allow(unsafe_code, reason = "aya loads object files only; pointers go no further than the call")]

use std::io;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};

use nix::libc;

const PROGRAM_LOAD: i64 = 5;
const LINK_CREATE: i64 = 28;
/// `BPF_PROG_TYPE_SCHED_CLS`.
const CLASSIFIER: u32 = 3;
/// `BPF_TCX_INGRESS`, since Linux 6.6.
const TCX_INGRESS: u32 = 46;
/// `r0 = -1; exit`: the next program, or the kernel, continues with the packet.
const INSTRUCTIONS: [u64; 2] = [u64::from_le_bytes([0xb7, 0, 0, 0, 255, 255, 255, 255]), 0x95];
const LICENSE: &[u8] = b"Apache-2.0\0";

/// `union bpf_attr` of loading.
#[repr(C)]
struct LoadAttr {
    kind: u32,
    instruction_count: u32,
    instructions: u64,
    license: u64,
}

/// `union bpf_attr` of attaching.
#[repr(C)]
struct LinkAttr {
    program: u32,
    interface: u32,
    attach_type: u32,
    flags: u32,
}

/// The program, attached as long as this exists.
#[derive(Debug)]
pub struct EmptyProgram {
    _program: OwnedFd,
    _link: OwnedFd,
}

impl EmptyProgram {
    /// At tc ingress of an interface of this thread's network namespace.
    ///
    /// # Errors
    /// If the kernel refuses, as one without tcx does.
    pub fn attach(interface: u32) -> io::Result<Self> {
        let load = LoadAttr {
            kind: CLASSIFIER,
            instruction_count: 2,
            instructions: INSTRUCTIONS.as_ptr() as u64,
            license: LICENSE.as_ptr() as u64,
        };
        let program = bpf(PROGRAM_LOAD, &load)?;
        let number = u32::try_from(program.as_raw_fd()).map_err(io::Error::other)?;
        let link = LinkAttr { program: number, interface, attach_type: TCX_INGRESS, flags: 0 };
        let link = bpf(LINK_CREATE, &link)?;
        Ok(Self { _program: program, _link: link })
    }
}

/// A command that returns a descriptor.
fn bpf<T>(command: i64, attr: &T) -> io::Result<OwnedFd> {
    // SAFETY: the kernel reads the attributes, which are of this size, and what they point to.
    let fd = unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_ref(attr), size_of::<T>()) };
    match i32::try_from(fd) {
        // SAFETY: a descriptor that nobody else has.
        Ok(fd) if fd >= 0 => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::process::{self, Command};

    use nix::net::if_::if_nametoindex;
    use steerage_requirements::{in_new_netns, requires};

    use super::*;
    use crate::edge::kernel::Statistics;

    /// The meter counts each packet, and the program takes none away.
    #[test]
    fn runs_are_those_of_the_packets() {
        requires!(NetworkNamespace, Program("ip"));
        in_new_netns(|| {
            assert!(Command::new("ip").args(["link", "set", "lo", "up"]).status().expect("ip").success());
            let own = [i32::try_from(process::id()).expect("id")];
            let _program = EmptyProgram::attach(if_nametoindex("lo").expect("lo")).expect("attach");
            let statistics = Statistics::begin(&own).expect("statistics");
            let receiver = UdpSocket::bind("127.0.0.1:0").expect("bind");
            let sender = UdpSocket::bind("127.0.0.1:0").expect("bind");
            for _ in 0..100 {
                sender.send_to(b"x", receiver.local_addr().expect("address")).expect("send");
                receiver.recv(&mut [0; 8]).expect("receive");
            }
            let time = statistics.end(&own).expect("end");
            assert_eq!(time.runs, 100);
            assert!((0.1..100_000.0).contains(&time.nanoseconds_each()), "{time:?}");
        });
    }
}
