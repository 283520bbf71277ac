// SPDX-License-Identifier: Apache-2.0
//! Notices when somebody else changes our tables.

use std::io;
use std::time::Duration;

use steerage_nft::{Change, Error, Monitor};

use crate::rules::TABLE;

/// Foreign changes within this time are one.
const QUIET: Duration = Duration::from_millis(200);
/// How often the thread looks whether it is still wanted.
const BREATH: Duration = Duration::from_secs(1);

/// Calls `changed`, on a thread of its own, whenever our tables may have been changed by others than `ports`; with `false` just
/// to ask whether to go on. Ends when that answers `false`, and on an error of the socket.
pub fn watch_foreign(
    mut monitor: Monitor,
    ports: Vec<u32>,
    mut changed: impl FnMut(bool) -> bool + Send + 'static,
) -> io::Result<()> {
    let watch = move || {
        loop {
            match look(&mut monitor, &ports) {
                Ok(foreign) => {
                    if !changed(foreign) {
                        return;
                    }
                    if foreign {
                        std::thread::sleep(QUIET);
                    }
                }
                Err(error) => {
                    tracing::error!(%error, "foreign changes of our tables are not noticed any more");
                    return;
                }
            }
        }
    };
    std::thread::Builder::new().name("nft-monitor".to_owned()).spawn(watch).map(drop)
}

/// Waits for a breath, and says whether anybody else changed our tables.
fn look(monitor: &mut Monitor, ports: &[u32]) -> Result<bool, Error> {
    let mut foreign = false;
    if monitor.wait(BREATH)? {
        loop {
            match monitor.receive() {
                Ok(Some(changes)) => foreign |= changes.iter().any(|change| is_foreign(change, ports)),
                Ok(None) => break,
                // Notifications were lost, most likely of a load of our own; anything may have been among them.
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
