// SPDX-License-Identifier: Apache-2.0
//! The process that removes routes which are not renewed, without the process that starts it.

use std::io::{Read as _, Write as _};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use nix::time::{ClockId, clock_gettime};
use steerage_requirements::{in_new_netns, requires};

use crate::testbed::{eventually, sh};

type Expiry = [u8; 9];

struct Fence {
    child: Child,
    input: Option<ChildStdin>,
}

impl Fence {
    /// Returns the lifetime that it has taken over; the exit code if it has ended.
    fn start() -> Result<(Self, Expiry), Option<i32>> {
        let mut child = Command::new(env!("CARGO_BIN_EXE_steerage-edge"))
            .args(["--route-table", "83", "route-fence"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("fence");
        let mut inherited = Expiry::default();
        match child.stdout.take().expect("output").read_exact(&mut inherited) {
            Ok(()) => Ok((Self { input: child.stdin.take(), child }, inherited)),
            Err(_) => Err(child.wait().expect("wait").code()),
        }
    }

    fn renew(&mut self, expiry: Expiry) {
        self.input.as_mut().expect("not closed").write_all(&expiry).expect("write");
    }

    /// As if the first process were killed.
    fn abandon(&mut self) {
        self.input = None;
        std::thread::sleep(Duration::from_millis(100));
    }

    fn terminate(&self) {
        sh(&format!("kill -TERM {}", self.child.id()));
    }

    fn has_ended(&mut self) -> bool {
        self.child.try_wait().expect("wait").is_some()
    }
}

impl Drop for Fence {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn expiry_in(left: Duration, may_withdraw: bool) -> Expiry {
    let now = Duration::from(clock_gettime(ClockId::CLOCK_BOOTTIME).expect("clock"));
    let until = u64::try_from((now + left).as_nanos()).expect("a time");
    let mut expiry = Expiry::default();
    expiry[..8].copy_from_slice(&until.to_ne_bytes());
    expiry[8] = may_withdraw.into();
    expiry
}

fn add_route() {
    sh("ip route replace blackhole 10.0.0.100/32 table 83 proto 83");
}

fn has_route() -> bool {
    sh("ip route show table all proto 83").contains("10.0.0.100")
}

#[test]
fn routes_go_when_they_are_not_renewed_in_time() {
    requires!(NetworkNamespace, Program("ip"));
    in_new_netns(|| {
        sh("ip link set lo up");
        add_route();
        let (mut fence, inherited) = Fence::start().expect("the first fence");
        assert_eq!(inherited, Expiry::default());
        for _ in 0..3 {
            fence.renew(expiry_in(Duration::from_secs(2), true));
            std::thread::sleep(Duration::from_secs(1));
        }
        assert!(has_route(), "it was renewed");
        let begun = Instant::now();
        eventually("the route of a process that is stopped goes", || !has_route());
        assert!(begun.elapsed() < Duration::from_secs(3));
        assert!(!fence.has_ended(), "the process may continue");
        add_route();
        fence.renew(expiry_in(Duration::from_secs(2), true));
        fence.abandon();
        assert!(has_route() && !fence.has_ended());
        eventually("the route of a process that is dead goes", || !has_route());
        eventually("nothing is left to guard", || fence.has_ended());
    });
}

#[test]
fn supervisors_sigterm_after_a_crash_ends_the_fence_at_once() {
    requires!(NetworkNamespace, Program("ip"));
    in_new_netns(|| {
        sh("ip link set lo up");
        // Without another host that can serve the route stays.
        for may_withdraw in [true, false] {
            add_route();
            let (mut fence, _) = Fence::start().expect("a fence");
            fence.renew(expiry_in(Duration::from_mins(5), may_withdraw));
            fence.terminate();
            std::thread::sleep(Duration::from_millis(300));
            assert!(has_route() && !fence.has_ended(), "the first process decides while it lives");
            fence.abandon();
            eventually("the fence ends", || fence.has_ended());
            assert_eq!(has_route(), !may_withdraw);
        }
    });
}

#[test]
fn fence_of_a_dead_process_hands_the_rest_of_the_lifetime_over() {
    requires!(NetworkNamespace, Program("ip"));
    in_new_netns(|| {
        sh("ip link set lo up");
        add_route();
        let (mut first, _) = Fence::start().expect("the first fence");
        let expiry = expiry_in(Duration::from_secs(3), true);
        first.renew(expiry);
        assert_eq!(Fence::start().err(), Some(Some(4)), "the first process lives");
        first.abandon();
        let (mut second, inherited) = Fence::start().expect("the second fence");
        assert_eq!(inherited, expiry);
        eventually("the first fence ends", || first.has_ended());
        assert!(has_route());
        // Without a renewal it is as if nobody had started.
        eventually("the route goes", || !has_route());
        second.abandon();
        eventually("the second fence ends", || second.has_ended());
    });
}
