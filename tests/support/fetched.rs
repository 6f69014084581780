//! Programs of other packages that the tests use.

use std::path::{Path, PathBuf};

/// Returns the path of a program that `scripts/fetch-programs.sh` has fetched.
///
/// # Panics
///
/// The program was not fetched.
pub(crate) fn fetched(name: &str) -> PathBuf {
    let program = Path::new(env!("CARGO_MANIFEST_DIR")).join(".cache/programs").join(name);
    assert!(program.is_file(), "{} is missing; scripts/fetch-programs.sh fetches it", program.display());
    program
}
