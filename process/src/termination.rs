// SPDX-License-Identifier: Apache-2.0
//! The last words of a process, where Kubernetes shows them: `kubectl describe pod` prints the file as the container's message.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;

/// The default `terminationMessagePath` of a container.
const PATH: &str = "/dev/termination-log";

/// Writes `message` to the termination log, if there is one. Failure to do so is not worth failing for.
pub(crate) fn write(message: &str) {
    write_to(Path::new(PATH), message);
}

fn write_to(path: &Path, message: &str) {
    // Never create it: outside a container nobody would read it, or clean it up.
    if let Ok(mut file) = OpenOptions::new().write(true).truncate(true).open(path) {
        let _ = file.write_all(message.as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_written_only_where_it_exists() {
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
