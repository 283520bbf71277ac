//! Placeholder until this crate is filled.
