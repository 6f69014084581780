//! yunion-mpsctl.

fn main() {}
