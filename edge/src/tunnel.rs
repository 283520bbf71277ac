// SPDX-License-Identifier: Apache-2.0
//! Keeps the device through which this host reaches nodes off its link. `compose` makes the [`TunnelKeeper`], `kernel` asks it again
//! each second. At the end of the process the device stays, as the program does; `steerage-edge cleanup` removes it.

use steerage_model::chain;
use steerage_tunnel::{Device, Ensured, RECEIVERS, SENDER, TunnelError};

use crate::args::TunnelArgs;
use crate::metrics::Metrics;
use crate::reach::Tunnel;

#[derive(Debug)]
pub(crate) struct TunnelKeeper {
    device: Device,
    vni: u32,
    port: u16,
    mtu: Option<u16>,
    /// The device's index, once it is there.
    index: Option<u32>,
    /// Why it is not, as of the last attempt.
    error: Option<String>,
}

impl TunnelKeeper {
    /// The keeper that the flags ask for; `None` without a tunnel. Adopts the device of an earlier process, or makes it.
    pub(crate) fn start(flags: TunnelArgs) -> Option<Self> {
        let TunnelArgs { vni, port, mtu } = flags;
        if vni == 0 {
            warn_of_device();
            return None;
        }
        let mtu = (mtu != 0).then_some(mtu);
        let mut keeper =
            Self { device: steerage_tunnel::sender(port), vni, port, mtu, index: None, error: None };
        let made = steerage_tunnel::ensure_anew(&keeper.device);
        keeper.record(made);
        Some(keeper)
    }

    /// Makes the device if it is missing. Whether its index is another one than before.
    pub(crate) fn keep(&mut self) -> bool {
        let before = self.index;
        let made = steerage_tunnel::ensure(&self.device);
        self.record(made);
        self.index != before
    }

    fn record(&mut self, made: Result<Ensured, TunnelError>) {
        let made = match made {
            // The agent on this host has the port for what other hosts send to it. Nothing comes: hosts of a group share a link.
            Err(TunnelError::PortInUse { .. }) if remove_receivers() => steerage_tunnel::ensure(&self.device),
            made => made,
        };
        if self.index.is_some() && made.as_ref().is_err_and(TunnelError::is_unknown) {
            // The next second tells. Without a device all targets behind it would go.
            tracing::debug!(
                device = SENDER,
                "the kernel does not say whether the tunnel's device exists; continuing as if it did"
            );
            return;
        }
        let error = match made {
            Ok(Ensured { index, is_new }) => {
                if is_new {
                    tracing::info!(device = SENDER, index, "the tunnel's device is set up");
                }
                self.index = Some(index);
                None
            }
            Err(error) => {
                self.index = None;
                Some(chain(&error))
            }
        };
        if let Some(error) = error.as_ref().filter(|error| self.error.as_ref() != Some(error)) {
            tracing::error!(
                error,
                "the tunnel's device is missing; nodes off the link get no packets; retrying"
            );
        }
        self.error = error;
    }

    /// The device's index; `None` while it is missing.
    pub(crate) fn index(&self) -> Option<u32> {
        self.index
    }

    /// Shows in the metrics whether the device exists.
    pub(crate) fn show(&self, metrics: &Metrics) {
        metrics.tunnel_ready.set(self.index.is_some().into());
        metrics.tunnel_failed.set(self.index.is_none().into());
    }

    pub(crate) fn state(&self) -> Tunnel {
        match &self.error {
            None => Tunnel::Ready { vni: self.vni, port: self.port, mtu: self.mtu },
            Some(error) => Tunnel::Failed(error.clone()),
        }
    }
}

/// Whether there was one.
fn remove_receivers() -> bool {
    let remove = |name| match steerage_tunnel::remove(name) {
        Ok(is_removed) => is_removed,
        Err(error) => {
            tracing::debug!(error = chain(&error), "the agent's device is not removed");
            false
        }
    };
    RECEIVERS.map(remove).contains(&true)
}

fn warn_of_device() {
    if steerage_tunnel::is_up(SENDER).unwrap_or(false) {
        tracing::warn!(
            device = SENDER,
            "an earlier process has left the device of a tunnel; unless another steerage-edge runs here, remove it: \
             ip link delete {SENDER}"
        );
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use steerage_requirements::{in_new_netns, requires};

    use super::*;

    fn ip(line: &str) {
        assert!(Command::new("ip").args(line.split(' ')).status().is_ok_and(|status| status.success()));
    }

    const FLAGS: TunnelArgs = TunnelArgs { vni: 7, port: 10_361, mtu: 0 };

    #[test]
    fn device_is_adopted_made_again_and_reported_while_missing() {
        requires!(NetworkNamespace, Program("ip"));
        in_new_netns(|| {
            assert!(TunnelKeeper::start(TunnelArgs { vni: 0, ..FLAGS }).is_none());
            let mut keeper = TunnelKeeper::start(FLAGS).expect("a tunnel");
            let index = keeper.index().expect("a device");
            assert!(!keeper.keep());
            assert_eq!(keeper.state(), Tunnel::Ready { vni: 7, port: 10_361, mtu: None });
            let next = TunnelKeeper::start(TunnelArgs { mtu: 1400, ..FLAGS }).expect("a tunnel");
            assert_eq!(
                (next.index(), next.state()),
                (Some(index), Tunnel::Ready { vni: 7, port: 10_361, mtu: Some(1400) })
            );

            ip(&format!("link delete {SENDER}"));
            assert!(keeper.keep() && keeper.index().is_some_and(|made| made != index));
            ip(&format!("link delete {SENDER}"));
            ip(&format!("link add {SENDER} type bridge"));
            assert!(keeper.keep() && keeper.index().is_none());
            assert!(matches!(keeper.state(), Tunnel::Failed(error) if error.contains("not Steerage's")));
            let shown = |keeper: &TunnelKeeper| {
                let metrics = Metrics::default();
                keeper.show(&metrics);
                (metrics.tunnel_ready.get(), metrics.tunnel_failed.get())
            };
            assert_eq!(shown(&keeper), (0, 1));
            ip(&format!("link delete {SENDER}"));
            assert!(keeper.keep() && keeper.index().is_some());
            assert_eq!(shown(&keeper), (1, 0));
        });
    }

    #[test]
    fn edge_host_takes_the_port_of_its_agents_devices() {
        requires!(NetworkNamespace, Program("ip"));
        in_new_netns(|| {
            for device in steerage_tunnel::receivers(7, 10_361) {
                steerage_tunnel::ensure(&device).expect("made");
            }
            let keeper = TunnelKeeper::start(FLAGS).expect("a tunnel");
            assert!(keeper.index().is_some(), "{keeper:?}");
            let refused = steerage_tunnel::ensure(&steerage_tunnel::receivers(7, 10_361)[0]);
            assert!(matches!(refused, Err(TunnelError::PortInUse { .. })), "{refused:?}");
        });
    }
}
