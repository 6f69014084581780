//! `yunion-mpsctl env`.

use std::collections::BTreeMap;
use std::io::{self, Write};

use clap::{Args, ValueEnum};
use serde_json::{Value, json};

use crate::ctl::show::table::printable;
use crate::ctl::{Error, print_json};
use crate::dbus::proxy::{ContainerAnswer, DaemonProxy};
use crate::publish::container::devices_in;
use crate::publish::one_slice;

#[derive(Debug, Args)]
pub(in crate::ctl) struct Arguments {
    /// Names as `list` shows them: 00:06.0-1; a GPU's address or UUID stands for one slice of it
    #[arg(required = true, value_name = "DEVICE")]
    devices: Vec<String>,
    /// Format of the answer
    #[arg(long, value_enum, default_value = "shell")]
    format: Format,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// Lines for a shell on this host to eval, `CUDA_VISIBLE_DEVICES` included
    Shell,
    /// Options of `docker run`, one per line
    Docker,
    /// Environment, mounts and GPUs as one JSON object
    Json,
}

pub(in crate::ctl) async fn env(
    daemon: &DaemonProxy,
    arguments: &Arguments,
    out: &mut dyn Write,
) -> Result<(), Error> {
    let answer = daemon.container_config(&arguments.devices).await?;
    warn_of_several(&answer);
    match arguments.format {
        Format::Shell => {
            for (name, value) in host_environment(&answer) {
                writeln!(out, "export {name}={}", quoted(&value))?;
            }
        }
        Format::Docker => {
            // NVIDIA_VISIBLE_DEVICES means something to that runtime only.
            writeln!(out, "--runtime=nvidia")?;
            for (name, value) in &answer.environment {
                writeln!(out, "--env={name}={value}")?;
            }
            for (host, container, read_only) in &answer.mounts {
                writeln!(out, "--volume={host}:{container}{}", if *read_only { ":ro" } else { "" })?;
            }
        }
        Format::Json => print_json(out, &document(&answer))?,
    }
    Ok(())
}

/// Says on standard error that several slices of one GPU are not joined: whoever names them wants more than one.
pub(in crate::ctl) fn warn_of_several(answer: &ContainerAnswer) {
    for slices in one_slice::given_several(devices_in(&answer.environment)).values() {
        let words = printable(&one_slice::in_words(slices));
        let _ = writeln!(io::stderr(), "yunion-mpsctl: warning: {words}");
    }
}

fn document(answer: &ContainerAnswer) -> Value {
    let environment: BTreeMap<_, _> = answer.environment.iter().cloned().collect();
    let mounts: Vec<Value> = answer
        .mounts
        .iter()
        .map(|(host, container, read_only)| {
            json!({"host": host, "container": container, "read_only": read_only})
        })
        .collect();
    json!({"environment": environment, "mounts": mounts, "gpus": answer.gpus})
}

/// The environment of a process on this host. It sees a directory at the place that the directory has here. No container
/// runtime hides the other GPUs from it, and its device 0, to which the memory limit applies, has to be the right one.
pub(in crate::ctl) fn host_environment(answer: &ContainerAnswer) -> Vec<(String, String)> {
    let mut environment = answer.environment.clone();
    for (_, value) in &mut environment {
        if let Some((host, ..)) = answer.mounts.iter().find(|(_, container, _)| container == value) {
            value.clone_from(host);
        }
    }
    environment.push(("CUDA_VISIBLE_DEVICES".to_owned(), answer.gpus.join(",")));
    environment
}

/// A word that a POSIX shell reads as this text.
pub(in crate::ctl) fn quoted(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:,=@%+".contains(c);
    if !text.is_empty() && text.chars().all(plain) {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_gets_every_text_back() {
        assert_eq!(quoted("/tmp/nvidia-mps/pipe"), "/tmp/nvidia-mps/pipe");
        assert_eq!(quoted(""), "''");
        assert_eq!(quoted("/srv/a b"), "'/srv/a b'");
        assert_eq!(quoted("it's $HOME"), r"'it'\''s $HOME'");
    }
}
