// SPDX-License-Identifier: Apache-2.0
//! The program's object file, which `hack/ebpf` builds and which is part of this one.

/// The object file, aligned as the parser needs it.
pub(crate) static OBJECT: &[u8] = aya::include_bytes_aligned!("../../ebpf/edge.o");

#[cfg(test)]
mod tests {
    use super::*;
    use sha2::{Digest as _, Sha256};
    use std::fmt::Write as _;
    use std::fs;
    use std::path::{Path, PathBuf};

    fn hex(bytes: &[u8]) -> String {
        Sha256::digest(bytes).iter().fold(String::new(), |mut hex, byte| {
            write!(hex, "{byte:02x}").unwrap();
            hex
        })
    }

    /// What the program is made of, as in `hack/ebpf`: tests and the model are no part of it.
    fn sources(root: &Path) -> Vec<PathBuf> {
        let mut sources = ["edge/ebpf/Cargo.toml", "edge/ebpf/Cargo.lock"].map(PathBuf::from).to_vec();
        for folder in ["edge/ebpf/src", "edge/packet/src"] {
            for entry in fs::read_dir(root.join(folder)).unwrap() {
                let name = entry.unwrap().file_name().into_string().unwrap();
                if !["tests.rs", "model.rs", "frames.rs"].contains(&name.as_str()) {
                    sources.push(Path::new(folder).join(name));
                }
            }
        }
        sources.sort();
        sources
    }

    #[test]
    fn object_file_is_of_these_sources() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let mut list = String::new();
        for source in sources(&root) {
            let hash = hex(&fs::read(root.join(&source)).unwrap());
            writeln!(list, "{hash}  {}", source.display()).unwrap();
        }
        let fingerprint = format!("sources {}\nobject {}\n", hex(list.as_bytes()), hex(OBJECT));
        let recorded = fs::read_to_string(root.join("edge/ebpf/edge.o.fingerprint")).unwrap();
        assert!(
            recorded == fingerprint,
            "edge/ebpf/edge.o is not of these sources of edge/ebpf and edge/packet: run hack/ebpf"
        );
    }
}
