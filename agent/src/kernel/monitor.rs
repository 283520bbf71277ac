// SPDX-License-Identifier: Apache-2.0
//! Notices when another program changes the agent's tables.

use std::io;
use std::time::Duration;

use steerage_nft::{Change, Error, Monitor};

use crate::rules::TABLE;

/// Foreign changes within this time are reported once.
const DEBOUNCE: Duration = Duration::from_millis(200);
/// How often the thread checks whether it is still needed.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Calls `changed(true)`, on a thread of its own, when others than the netlink `ports` may have changed the agent's tables, and
/// `changed(false)` at least once a second. Ends when `changed` returns `false`, and on an error of the socket.
pub fn watch_foreign(
    mut monitor: Monitor,
    ports: Vec<u32>,
    mut changed: impl FnMut(bool) -> bool + Send + 'static,
) -> io::Result<()> {
    let watch = move || {
        loop {
            match wait(&mut monitor, &ports) {
                Ok(foreign) => {
                    if !changed(foreign) {
                        return;
                    }
                    if foreign {
                        std::thread::sleep(DEBOUNCE);
                    }
                }
                Err(error) => {
                    tracing::error!(%error, "foreign changes of the tables no longer watched; restart the agent");
                    return;
                }
            }
        }
    };
    std::thread::Builder::new().name("nft-monitor".to_owned()).spawn(watch).map(drop)
}

/// Waits for at most [`CHECK_INTERVAL`]. Returns whether another program changed the tables.
fn wait(monitor: &mut Monitor, ports: &[u32]) -> Result<bool, Error> {
    let mut foreign = false;
    if monitor.wait(CHECK_INTERVAL)? {
        loop {
            match monitor.receive() {
                Ok(Some(changes)) => foreign |= changes.iter().any(|change| is_foreign(change, ports)),
                Ok(None) => break,
                // Lost messages may have been foreign changes.
                Err(Error::Overrun) => foreign = true,
                Err(error) => return Err(error),
            }
        }
    }
    Ok(foreign)
}

fn is_foreign(change: &Change, ports: &[u32]) -> bool {
    change.table.name == TABLE && !ports.contains(&change.port)
}
