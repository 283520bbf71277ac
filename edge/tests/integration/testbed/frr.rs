// SPDX-License-Identifier: Apache-2.0
//! The routing daemon FRR on an edge host, with the configuration of `docs/routed-networks.md`.

use super::{Child, Command, Duration, File, Stdio, TestBed, VIP4, VIP6, fs, sh, thread};

/// A running daemon: `zebra` and `bgpd`.
pub(crate) struct Frr(Vec<Child>);

impl Frr {
    /// Exports the routes of the VIPs in the main table to the router.
    pub(crate) fn on_edge(testbed: &TestBed, edge: u8) -> Self {
        let number = 11 + edge;
        let config = format!(
            "ip prefix-list VIPS permit {VIP4}/32
ipv6 prefix-list VIPS permit {VIP6}/128
route-map VIPS permit 10
 match ip address prefix-list VIPS
route-map VIPS permit 20
 match ipv6 address prefix-list VIPS
router bgp 64512
 bgp router-id 10.0.0.{number}
 no bgp ebgp-requires-policy
 neighbor 10.0.0.1 remote-as 64513
 neighbor fd00::1 remote-as 64513
 address-family ipv4 unicast
  redistribute kernel route-map VIPS
  no neighbor fd00::1 activate
 exit-address-family
 address-family ipv6 unicast
  redistribute kernel route-map VIPS
  neighbor fd00::1 activate
 exit-address-family
"
        );
        let host = format!("edge{}", edge + 1);
        let folder = testbed.folder.join(format!("frr-{host}"));
        fs::create_dir_all(&folder).expect("folder");
        fs::write(folder.join("zebra.conf"), "").expect("write");
        fs::write(folder.join("bgpd.conf"), config).expect("write");
        sh(&format!("chown -R frr:frr {}", folder.display()));
        let start = |program: &str| {
            let log = File::create(folder.join(format!("{program}.log"))).expect("log");
            let child = Command::new("ip")
                .args(["netns", "exec", &testbed.netns(&host), &format!("/usr/lib/frr/{program}"), "-P", "0"])
                .arg("-f")
                .arg(folder.join(format!("{program}.conf")))
                .arg("-i")
                .arg(folder.join(format!("{program}.pid")))
                .arg("-z")
                .arg(folder.join("zserv.api"))
                .arg("--vty_socket")
                .arg(&folder)
                .stdout(Stdio::null())
                .stderr(Stdio::from(log))
                .spawn()
                .expect("frr");
            // `bgpd` needs the socket of `zebra`.
            thread::sleep(Duration::from_millis(500));
            child
        };
        Self(["zebra", "bgpd"].into_iter().map(start).collect())
    }
}

impl Drop for Frr {
    fn drop(&mut self) {
        for child in self.0.iter_mut().rev() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
