// SPDX-License-Identifier: Apache-2.0
//! The termination message: `kubectl describe pod` prints this file as the container's last message.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;

/// The default `terminationMessagePath` of a container.
const PATH: &str = "/dev/termination-log";

/// Writes `message` to the termination log, if there is one. A failure is ignored: the message is also in the log.
pub(crate) fn write(message: &str) {
    write_to(Path::new(PATH), message);
}

fn write_to(path: &Path, message: &str) {
    // Never created: outside a container no program reads or removes it.
    if let Ok(mut file) = OpenOptions::new().write(true).truncate(true).open(path) {
        let _ = file.write_all(message.as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_is_written_only_to_an_existing_file() {
        let path = std::env::temp_dir().join(format!("steerage-termination-{}", std::process::id()));
        write_to(&path, "lost");
        assert!(!path.exists());
        std::fs::write(&path, "an older and longer message").expect("file");
        write_to(&path, "lost the lease");
        let read = std::fs::read_to_string(&path).expect("read");
        std::fs::remove_file(&path).expect("remove");
        assert_eq!(read, "lost the lease");
    }
}
