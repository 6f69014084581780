//! Tests of the whole.

#[cfg(test)] // clippy.toml allows more in tests, and goes by this attribute, helper functions included
mod unit_file;
