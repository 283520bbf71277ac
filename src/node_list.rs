// SPDX-License-Identifier: Apache-2.0
//! Names the nodes of a list in one line of the log. Pure.

/// Nodes named in one line.
const SHOWN: usize = 10;

/// The first nodes, separated by commas, and the number of the others.
pub(crate) fn first_nodes(nodes: &[&str]) -> String {
    let (shown, others) = nodes.split_at(nodes.len().min(SHOWN));
    let shown = shown.join(", ");
    if others.is_empty() { shown } else { format!("{shown} and {} more", others.len()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ten_nodes_are_named_and_the_others_counted() {
        let nodes = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"];
        assert_eq!(first_nodes(&[]), "");
        assert_eq!(first_nodes(&nodes[..2]), "a, b");
        assert_eq!(first_nodes(&nodes[..10]), "a, b, c, d, e, f, g, h, i, j");
        assert_eq!(first_nodes(&nodes), "a, b, c, d, e, f, g, h, i, j and 2 more");
    }
}
