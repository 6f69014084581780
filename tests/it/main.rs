//! Tests of the whole.

// clippy.toml allows more in tests, and goes by the attribute, helper functions included.
#[cfg(test)]
mod bus;
#[cfg(test)]
mod host;
#[cfg(test)]
mod unit_file;
