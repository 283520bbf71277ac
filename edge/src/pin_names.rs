// SPDX-License-Identifier: Apache-2.0
//! The name of an interface's folder of pins. A BPF file system takes no names with dots, which interfaces of VLANs have. Pure.

/// The folder of an interface.
pub(crate) fn folder(interface: &str) -> String {
    interface.replace('%', "%25").replace('.', "%2E")
}

/// The interface of a folder.
pub(crate) fn interface(folder: &str) -> String {
    folder.replace("%2E", ".").replace("%25", "%")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folder_has_no_dot_and_names_its_interface() {
        for name in ["eth0", "eth0.100", "a%2E", "%", "%25.", "bond0.4.2"] {
            assert!(!folder(name).contains('.'), "{name}");
            assert_eq!(interface(&folder(name)), name);
        }
        assert_eq!(folder("eth0.100"), "eth0%2E100");
    }
}
