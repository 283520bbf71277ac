//! Placeholder until this crate is filled.
fn main() {}
