// SPDX-License-Identifier: Apache-2.0
//! What only the kernel's version tells. Pure: [`crate::kernel`] reads it.

/// Changes that no request reveals: with "`nft_set_hash`: mark set element as dead when deleting from packet path" (Linux 6.5,
/// c92db3030492) the kernel frees elements that rules delete. Before, each of them took room in its set until that was deleted.
/// The first version of each series that has it; all series after the last one do.
const FREES_DELETED: [(u32, u32, u32); 4] = [(5, 15, 134), (6, 1, 56), (6, 4, 11), (6, 5, 0)];

/// The version of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct KernelVersion(pub u32, pub u32, pub u32);

impl KernelVersion {
    /// From `uname -r`, and texts that may name the version more exactly: distributions write `6.1.0-50-amd64` and `5.15.0-91-generic`
    /// where they mean a later 6.1 or 5.15. `None` if the release begins with no version.
    pub fn new<'t>(release: &str, others: impl IntoIterator<Item = &'t str>) -> Option<Self> {
        let version = leading(release)?;
        let words = others.into_iter().flat_map(str::split_whitespace);
        let same_series = |other: &Self| (other.0, other.1) == (version.0, version.1);
        words.filter_map(leading).filter(same_series).chain([version]).max()
    }

    /// Whether an element that a rule deletes is freed.
    pub fn frees_deleted_elements(self) -> bool {
        let Self(major, minor, patch) = self;
        let [.., (last_major, last_minor, _)] = FREES_DELETED;
        (major, minor) >= (last_major, last_minor)
            || FREES_DELETED.iter().any(|(a, b, c)| (*a, *b) == (major, minor) && patch >= *c)
    }
}

/// Three numbers at the beginning of a word, such as `6.1.0-50-amd64` or `5.15.131`; two count, too.
fn leading(word: &str) -> Option<KernelVersion> {
    let end = word.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(word.len());
    let mut numbers = word[..end].split('.').map(str::parse);
    let (Some(Ok(major)), Some(Ok(minor))) = (numbers.next(), numbers.next()) else { return None };
    Some(KernelVersion(major, minor, numbers.next().and_then(Result::ok).unwrap_or(0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_is_the_most_exact_one_of_the_series() {
        let debian = "#1 SMP PREEMPT_DYNAMIC Debian 6.1.176-1 (2026-06-01)";
        let ubuntu = "Ubuntu 5.15.0-91.101-generic 5.15.131";
        for (release, others, version) in [
            ("6.18.44", "", Some(KernelVersion(6, 18, 44))),
            ("6.1.0-50-cloud-amd64", debian, Some(KernelVersion(6, 1, 176))),
            ("5.15.0-91-generic", ubuntu, Some(KernelVersion(5, 15, 131))),
            ("5.14.0-427.el9.x86_64", "#1 SMP gcc 11.4.1", Some(KernelVersion(5, 14, 0))),
            ("6.6-rc1", "", Some(KernelVersion(6, 6, 0))),
            ("weird", "6.1.176", None),
        ] {
            assert_eq!(KernelVersion::new(release, [others]), version, "{release}");
        }
    }

    #[test]
    fn deleted_elements_are_freed_since_the_change_in_each_series() {
        for (version, frees) in [
            ((5, 10, 240), false),
            ((5, 14, 0), false),
            ((5, 15, 133), false),
            ((5, 15, 134), true),
            ((5, 19, 17), false),
            ((6, 1, 55), false),
            ((6, 1, 56), true),
            ((6, 2, 16), false),
            ((6, 4, 10), false),
            ((6, 4, 11), true),
            ((6, 5, 0), true),
            ((6, 12, 3), true),
            ((7, 0, 0), true),
        ] {
            let (major, minor, patch) = version;
            assert_eq!(KernelVersion(major, minor, patch).frees_deleted_elements(), frees, "{version:?}");
        }
    }
}
