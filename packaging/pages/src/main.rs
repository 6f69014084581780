//! Writes the manual pages and shell completions that come from the command lines: `yunion-mps-pages OUT GOLDEN`.
//!
//! OUT gets `yunion-mps-daemon.8`, `yunion-mps-device-plugin.8`, `yunion-mpsctl.1` and the completions of yunion-mps-daemon
//! for bash, zsh and fish. GOLDEN
//! has the recorded output of yunion-mpsctl's subcommands, `<subcommand>.txt` or `screens/<subcommand>.80.txt` each.

mod manual;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::{env, fs, io::Write};

use clap::Command;
use clap_complete::{Shell, generate, generate_to};

fn main() -> ExitCode {
    let words: Vec<PathBuf> = env::args_os().skip(1).map(PathBuf::from).collect();
    let [out, golden] = words.as_slice() else {
        return fail("usage: yunion-mps-pages OUT GOLDEN");
    };
    match write(out, golden) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&error.to_string()),
    }
}

fn fail(reason: &str) -> ExitCode {
    let _ = writeln!(std::io::stderr(), "yunion-mps-pages: {reason}");
    ExitCode::FAILURE
}

fn write(out: &Path, golden: &Path) -> Result<(), Box<dyn Error>> {
    fs::create_dir_all(out)?;
    let daemon = common::arguments::command();
    let ctl = mpsctl::command();
    fs::write(out.join("yunion-mps-daemon.8"), manual::daemon(&daemon)?)?;
    fs::write(out.join("yunion-mps-device-plugin.8"), manual::device_plugin(&device_plugin::command())?)?;
    fs::write(out.join("yunion-mpsctl.1"), manual::ctl(&ctl, golden)?)?;
    complete(daemon, out)?;
    Ok(())
}

fn complete(mut command: Command, out: &Path) -> Result<(), Box<dyn Error>> {
    let name = command.get_name().to_owned();
    for shell in [Shell::Zsh, Shell::Fish] {
        generate_to(shell, &mut command, &name, out)?;
    }
    let mut script = Vec::new();
    generate(Shell::Bash, &mut command, &name, &mut script);
    Ok(fs::write(out.join(format!("{name}.bash")), script)?)
}
