//! The program `yunion-mps-sim`, which makes and changes simulated hosts for tests.

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use nvidia_ml::{board, host};

const USAGE: &str = "usage: yunion-mps-sim create BOARD DIR [--slices N]\n       \
                     yunion-mps-sim drop-function DIR NVML_FUNCTION";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match words.as_slice() {
        ["create", board, root] => create(board, root, None),
        ["create", board, root, "--slices", slices] => match slices.parse() {
            Ok(slices) => create(board, root, Some(slices)),
            Err(_) => Err(format!("--slices {slices}: a number is wanted")),
        },
        ["drop-function", root, function] => host::without_function(Path::new(root), function),
        _ => Err(USAGE.to_owned()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            _ = writeln!(std::io::stderr(), "{error}");
            ExitCode::FAILURE
        }
    }
}

fn create(board: &str, root: &str, slices: Option<u32>) -> Result<(), String> {
    let program = std::env::current_exe().map_err(|error| error.to_string())?;
    let programs = program.parent().ok_or("this program is in no directory")?;
    host::create(&board::load(board)?, Path::new(root), slices, programs)?;
    let root = Path::new(root).canonicalize().map_err(|error| error.to_string())?;
    std::io::stdout().write_all(host::exports(&root).as_bytes()).map_err(|error| error.to_string())
}
