// SPDX-License-Identifier: Apache-2.0
//! The routing daemon BIRD on the router and on edge hosts, with the configurations of `docs/routed-networks.md`.

use super::{Child, Command, Duration, File, PathBuf, Stdio, TestBed, VIP4, VIP6, fs, sh, thread};

const BFD: &str = "protocol bfd { interface \"*\" { interval 200 ms; multiplier 5; }; }";

/// A running daemon.
pub(crate) struct Bird {
    child: Child,
    socket: PathBuf,
}

impl Bird {
    fn start(testbed: &TestBed, host: &str, config: &str) -> Self {
        let file = |extension| testbed.folder.join(format!("bird-{host}.{extension}"));
        fs::write(file("conf"), config).expect("write");
        let log = File::create(file("log")).expect("log");
        let child = Command::new("ip")
            .args(["netns", "exec", &testbed.netns(host), "bird", "-f", "-c"])
            .arg(file("conf"))
            .arg("-s")
            .arg(file("ctl"))
            .stderr(Stdio::from(log))
            .spawn()
            .expect("bird");
        Self { child, socket: file("ctl") }
    }

    /// On an edge host: exports the routes of a table to the router. `has_bfd`: the daemons find a dead host by BFD, in 1s.
    pub(crate) fn on_edge(testbed: &TestBed, edge: u8, table: u32, has_bfd: bool) -> Self {
        let bfd = if has_bfd { "on" } else { "off" };
        let number = 11 + edge;
        let config = format!(
            "router id 10.0.0.{number};
             ipv4 table vips4;
             ipv6 table vips6;
             protocol device {{}}
             {BFD}
             protocol kernel {{ kernel table {table}; learn; ipv4 {{ table vips4; import where krt_source = 83; export none; }}; }}
             protocol kernel {{ kernel table {table}; learn; ipv6 {{ table vips6; import where krt_source = 83; export none; }}; }}
             protocol bgp {{
               local 10.0.0.{number} as 64512; neighbor 10.0.0.1 as 64513; connect delay time 1; connect retry time 1; bfd {bfd};
               ipv4 {{ table vips4; import none; export all; }};
             }}
             protocol bgp {{
               local fd00::{number} as 64512; neighbor fd00::1 as 64513; connect delay time 1; connect retry time 1; bfd {bfd};
               ipv6 {{ table vips6; import none; export all; }};
             }}"
        );
        Self::start(testbed, &format!("edge{}", edge + 1), &config)
    }

    /// On the router, which spreads over these edge hosts. It never asks for a VIP on the link: without a route it drops what comes
    /// for one.
    pub(crate) fn on_router(testbed: &TestBed, edges: u8, has_bfd: bool) -> Self {
        let router = testbed.netns("router");
        sh(&format!(
            "ip netns exec {router} sysctl -qw net.ipv4.fib_multipath_hash_policy=1 net.ipv6.fib_multipath_hash_policy=1 \
                net.ipv4.conf.all.rp_filter=1
             ip -n {router} route add blackhole {VIP4}/32 metric 4096; ip -n {router} route add blackhole {VIP6}/128 metric 4096"
        ));
        let mut config = format!(
            "router id 10.0.0.1;
             protocol device {{}}
             {BFD}
             protocol kernel {{ merge paths on; ipv4 {{ import none; export all; }}; }}
             protocol kernel {{ merge paths on; ipv6 {{ import none; export all; }}; }}
             "
        );
        let bfd = if has_bfd { "on" } else { "off" };
        for number in (0..edges).map(|edge| 11 + edge) {
            for (prefix, family) in [("10.0.0.", "ipv4"), ("fd00::", "ipv6")] {
                let session = format!(
                    "protocol bgp {{
                       local {prefix}1 as 64513; neighbor {prefix}{number} as 64512; connect delay time 1; connect retry time 1; bfd {bfd};
                       {family} {{ import all; export none; }};
                     }}
                     "
                );
                config.push_str(&session);
            }
        }
        Self::start(testbed, "router", &config)
    }
}

impl Drop for Bird {
    fn drop(&mut self) {
        if thread::panicking() {
            let shown = Command::new("birdc")
                .arg("-s")
                .arg(&self.socket)
                .args(["show", "route", "all", "table", "all"])
                .output();
            eprintln!("--- {}\n{shown:?}", self.socket.display());
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
        // The sockets of the sessions are gone then.
        thread::sleep(Duration::from_millis(10));
    }
}
