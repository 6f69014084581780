//! `yunion-mpsctl env`.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io::{self, Write};
use std::path::Path;

use clap::ValueEnum;
use serde_json::{Value, json};

use crate::chosen::{Devices, take};
use crate::screen::say;
use crate::{Error, Result, print_json};
use common::bus::proxy::DaemonProxy;
use common::membership::PIPE_DIRECTORY_VARIABLE;
use common::published::cdi;
use common::published::container::{ContainerConfig, Mount, devices_in, gives_gpus};
use common::published::slices_of_one_gpu;
use common::text::escaped;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum EnvFormat {
    /// Lines for a shell on this host to eval, `CUDA_VISIBLE_DEVICES` included
    Shell,
    /// Options of `docker run` with NVIDIA's runtime, one per line
    Docker,
    /// Options of `podman run`, and of `docker run` with CDI, one per line; the GPU is from NVIDIA's CDI spec
    Podman,
    /// A Compose file with a service `mps-slice` that other services extend; with NVIDIA's runtime
    Compose,
    /// Names of the CDI devices of one slice, one per line, for a host with `cuda_mps_cdi_directory`
    Cdi,
    /// Environment, mounts and GPUs as one JSON object
    Json,
}

impl EnvFormat {
    /// The line that `env` prints instead of settings if `env` fails. `docker run $(yunion-mpsctl env ...) IMAGE` ignores the
    /// exit status of `env`, and would start a container without limits. So the line is an option or a device name that every
    /// container engine refuses. None if the readers of the format refuse an empty output.
    pub(crate) fn refused_line(self) -> Option<&'static str> {
        match self {
            Self::Shell => Some("false"),
            Self::Docker | Self::Podman => Some("--yunion-mpsctl-env-failed"),
            Self::Cdi => Some("yunion.io/mps=yunion-mpsctl-env-failed"),
            Self::Compose | Self::Json => None,
        }
    }
}

/// The line that `env` prints for a wrong command line. None if the command line is for another subcommand.
pub(crate) fn refused_line_of_wrong_usage(arguments: &[OsString]) -> Option<&'static str> {
    let [_, subcommand, words @ ..] = arguments else { return None };
    if subcommand != "env" {
        return None;
    }
    let words: Vec<_> = words.iter().map(|word| word.to_string_lossy()).collect();
    let named = words.iter().enumerate().find_map(|(at, word)| match word.strip_prefix("--format") {
        Some("") => Some(words.get(at + 1).map_or("", |next| next.as_ref())),
        Some(value) => value.strip_prefix('='),
        None => None,
    });
    // An unknown format is most likely the name of another container engine. So `env` prints the line for Docker, which every
    // container engine refuses.
    let format =
        named.map_or(EnvFormat::Shell, |name| EnvFormat::from_str(name, false).unwrap_or(EnvFormat::Docker));
    format.refused_line()
}

pub(crate) async fn env(
    daemon: &DaemonProxy,
    devices: &Devices,
    format: EnvFormat,
    out: &mut dyn Write,
) -> Result<()> {
    let answer = take(daemon, &devices.wish()?).await?;
    // With the format `cdi`, several slices are an error below.
    if format != EnvFormat::Cdi {
        warn_of_several(&answer);
    }
    match format {
        EnvFormat::Shell => {
            ensure_reachable(&answer)?;
            for (name, value) in host_environment(&answer) {
                writeln!(out, "export {name}={}", quoted(&value))?;
            }
        }
        EnvFormat::Docker => {
            // Only NVIDIA's runtime reads `NVIDIA_VISIBLE_DEVICES`, so the options name that runtime.
            writeln!(out, "--runtime=nvidia")?;
            write_options(&answer, |_| true, out)?;
        }
        EnvFormat::Podman => {
            for device in nvidias_devices(&answer) {
                writeln!(out, "--device={device}")?;
            }
            // `NVIDIA_VISIBLE_DEVICES` is omitted. NVIDIA's CDI device sets this variable, so that NVIDIA's hook does not add
            // the GPU a second time.
            write_options(&answer, |name| !gives_gpus(name), out)?;
        }
        EnvFormat::Compose => write!(out, "{}", compose_file(&answer)?)?,
        EnvFormat::Cdi => {
            let slice = only_slice(devices_in(&answer.environment)).map_err(Error::Failed)?;
            for device in nvidias_devices(&answer).chain([format!("{}={slice}", cdi::KIND)]) {
                writeln!(out, "{device}")?;
            }
        }
        EnvFormat::Json => print_json(out, &document(&answer))?,
    }
    Ok(())
}

/// Writes the environment and the mounts as options that `docker run` and `podman run` both accept.
fn write_options(answer: &ContainerConfig, wanted: impl Fn(&str) -> bool, out: &mut dyn Write) -> Result<()> {
    for (name, value) in answer.environment.iter().filter(|(name, _)| wanted(name)) {
        writeln!(out, "--env={name}={value}")?;
    }
    for Mount { host, container, read_only } in &answer.mounts {
        writeln!(out, "--volume={host}:{container}{}", if *read_only { ":ro" } else { "" })?;
    }
    Ok(())
}

fn nvidias_devices(answer: &ContainerConfig) -> impl Iterator<Item = String> {
    answer.gpus.iter().map(|uuid| format!("nvidia.com/gpu={uuid}"))
}

/// A CDI device is one slice with one set of limits, so several slices are an error.
fn only_slice(devices: &str) -> Result<&str, String> {
    if devices.contains(',') {
        let devices = devices.replace(',', " and ");
        return Err(format!(
            "a container can take only one of these CDI devices, since the limits of {devices} would \
             overwrite each other; --format podman prints the options for several slices"
        ));
    }
    if !devices.contains('-') {
        return Err(format!(
            "{devices} is a GPU, but a CDI device of this service is one slice: name a slice (`yunion-mpsctl \
             list` shows the names), or take a free slice with --free"
        ));
    }
    Ok(devices)
}

/// A Compose file with one service, which other services extend. The service has no image: Compose needs an image only in the
/// services that extend it.
fn compose_file(answer: &ContainerConfig) -> Result<String> {
    let mut lines = vec![
        "services:".to_owned(),
        "  mps-slice:".to_owned(),
        "    runtime: nvidia".to_owned(),
        "    environment:".to_owned(),
    ];
    for (name, value) in &answer.environment {
        lines.push(format!("      {name}: {}", yaml(value)?));
    }
    lines.push("    volumes:".to_owned());
    for Mount { host, container, read_only } in &answer.mounts {
        lines.push("      - type: bind".to_owned());
        lines.push(format!("        source: {}", yaml(host)?));
        lines.push(format!("        target: {}", yaml(container)?));
        lines.push(format!("        read_only: {read_only}"));
    }
    Ok(lines.join("\n") + "\n")
}

/// Writes a text as quoted YAML, since YAML parsers may read 00:06.0 as a number. Dollar signs are doubled, since Compose
/// expands variables.
fn yaml(text: &str) -> Result<String> {
    Ok(escaped(&serde_json::to_string(&text.replace('$', "$$"))?))
}

/// Several slices of one GPU give a program no more than one slice. A user who names several slices expects more, so this
/// function prints a warning.
pub(crate) fn warn_of_several(answer: &ContainerConfig) {
    for slices in slices_of_one_gpu::given_several(devices_in(&answer.environment)).values() {
        say(&format!("warning: {}", slices_of_one_gpu::describe(slices)));
    }
}

fn document(answer: &ContainerConfig) -> Value {
    let environment: BTreeMap<_, _> = answer.environment.iter().cloned().collect();
    json!({"environment": environment, "mounts": answer.mounts, "gpus": answer.gpus})
}

/// The environment for a process on this host. The process has no mounts of a container, so each directory has its path on the
/// host. The process can see all GPUs, and the memory limit applies to its device 0. So `CUDA_VISIBLE_DEVICES` makes the GPU of
/// the slice device 0.
pub(crate) fn host_environment(answer: &ContainerConfig) -> Vec<(String, String)> {
    let mut environment = answer.environment.clone();
    for (_, value) in &mut environment {
        if let Some(mount) = answer.mounts.iter().find(|mount| mount.container == *value) {
            value.clone_from(&mount.host);
        }
    }
    environment.push(("CUDA_VISIBLE_DEVICES".to_owned(), answer.gpus.join(",")));
    environment
}

/// Fails if this process sees other directories than the service, and so does not see the control daemon's socket. A CUDA
/// program that does not find its control daemon starts without MPS, or gets CUDA error 46.
pub(crate) fn ensure_reachable(answer: &ContainerConfig) -> Result<()> {
    let environment = host_environment(answer);
    let directory = environment.iter().find(|(name, _)| name == PIPE_DIRECTORY_VARIABLE);
    let Some((_, directory)) = directory else { return Ok(()) };
    match fs::metadata(Path::new(directory).join("control")) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let why = if Path::new(directory).starts_with("/tmp") {
                "probably since it has a /tmp of its own, by PrivateTmp= of its unit or by \
                 job_container/tmpfs of Slurm; in host.conf, set cuda_mps_pipe_directory to a directory \
                 outside of /tmp, such as /run/yunion-mps/pipe"
            } else {
                "since it has other mounts than the service, or since another program has just removed the \
                 file; yunion-mpsctl doctor looks for the reason"
            };
            Err(Error::Failed(format!(
                "the service has {directory}/control, but this process does not see this file, {why}"
            )))
        }
        // A user without permission for the pipe directory gets no error here, since CUDA itself reports that error.
        _ => Ok(()),
    }
}

/// The text as one word for a POSIX shell.
pub(crate) fn quoted(text: &str) -> String {
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
    fn a_cdi_device_is_one_slice() {
        assert_eq!(only_slice("0001:1a:00.0-3"), Ok("0001:1a:00.0-3"));
        for (devices, complaint) in [
            ("00:06.0-1,00:07.0-0", "the limits of 00:06.0-1 and 00:07.0-0 would overwrite each other"),
            ("00:06.0,00:07.0", "the limits of 00:06.0 and 00:07.0 would"),
            ("00:06.0", "00:06.0 is a GPU"),
        ] {
            let said = only_slice(devices).unwrap_err();
            assert!(said.contains(complaint), "{said}");
        }
    }

    #[test]
    fn a_wrong_command_line_of_env_is_refused_by_its_reader_too() {
        for (line, expected) in [
            ("y env --format docker", Some("--yunion-mpsctl-env-failed")),
            ("y env 00:06.0-1 --format=podman --bogus", Some("--yunion-mpsctl-env-failed")),
            ("y env 00:06.0-1 --format dokcer", Some("--yunion-mpsctl-env-failed")),
            ("y env 00:06.0-1 --format", Some("--yunion-mpsctl-env-failed")),
            ("y env --format cdi", Some("yunion.io/mps=yunion-mpsctl-env-failed")),
            ("y env", Some("false")),
            ("y env --format json", None),
            ("y run --format docker", None),
            ("y", None),
        ] {
            let words: Vec<OsString> = line.split(' ').map(OsString::from).collect();
            assert_eq!(refused_line_of_wrong_usage(&words), expected, "{line}");
        }
    }

    #[test]
    fn compose_gets_every_text_back() {
        for (text, written) in [
            ("00:06.0", r#""00:06.0""#),
            (r#"/srv/a "b" \c"#, r#""/srv/a \"b\" \\c""#),
            ("/srv/$HOME", r#""/srv/$$HOME""#),
            ("a\nb\u{9b}", r#""a\nb\u009b""#),
        ] {
            assert_eq!(yaml(text).unwrap(), written);
        }
    }

    #[test]
    fn a_shell_gets_every_text_back() {
        assert_eq!(quoted("/tmp/nvidia-mps/pipe"), "/tmp/nvidia-mps/pipe");
        assert_eq!(quoted(""), "''");
        assert_eq!(quoted("/srv/a b"), "'/srv/a b'");
        assert_eq!(quoted("it's $HOME"), r"'it'\''s $HOME'");
    }
}
