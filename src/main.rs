//! yunion-mps-daemon.

fn main() {}
