//! Completions of the word before the cursor, for the shell scripts in `packaging/completions`. If the service does not answer
//! in time, this program prints no completions and no error.

use std::ffi::{OsStr, OsString};
use std::io::Write;
use std::time::Duration;

use clap_complete::engine::{ArgValueCompleter, CompletionCandidate, complete};
use tokio::time::timeout;

use common::bus::proxy::{BusError, DaemonProxy};
use common::text::is_unprintable;
use mps_core::register::SHORT_ID;

/// The first argument with which a shell script asks for completions. The words of the command line follow, and the last word
/// ends at the cursor.
const ASK: &str = "complete-words";

/// The longest wait for the service's answer: a user waits at the keyboard.
const PATIENCE: Duration = Duration::from_secs(1);

/// If the first argument after the program's name is [`ASK`], prints the matching words. Each line has a word, a tab, and the
/// meaning of the word.
pub(super) fn complete_words(arguments: &[OsString], out: &mut dyn Write) -> Option<u8> {
    let [_, ask, words @ ..] = arguments else { return None };
    let last = words.len().checked_sub(1).filter(|_| ask == ASK)?;
    let here = std::env::current_dir().ok();
    let found = complete(&mut super::command(), words.to_vec(), last, here.as_deref());
    for candidate in found.unwrap_or_default() {
        // A file name may contain any character. A name with a line break or another unprintable character is skipped, since
        // each line of the output has one word.
        let Some(word) = candidate.get_value().to_str().filter(|word| !word.contains(is_unprintable)) else {
            continue;
        };
        let help = candidate.get_help().map(ToString::to_string).unwrap_or_default();
        let help = help.lines().next().unwrap_or_default().replace(is_unprintable, "\u{fffd}");
        // This write fails only if the shell no longer reads the words.
        let _ = writeln!(out, "{word}\t{help}");
    }
    let _ = out.flush();
    Some(0)
}

/// A word that completes the command line, and the meaning of the word.
type Completion = (String, String);

/// Completes the names of slices and GPUs.
pub(super) fn devices() -> ArgValueCompleter {
    names(true)
}

/// Completes the names of slices for a command that accepts no GPU.
pub(super) fn slices() -> ArgValueCompleter {
    names(false)
}

fn names(with_gpus: bool) -> ArgValueCompleter {
    ArgValueCompleter::new(move |begun: &OsStr| {
        let devices = ask(async |daemon| daemon.devices().await).unwrap_or_default();
        let mut words: Vec<Completion> = Vec::new();
        for device in &devices {
            let model = device.model.clone().unwrap_or_default();
            let gpu = (device.base_addr.clone(), format!("{model}, the GPU"));
            if with_gpus && !words.contains(&gpu) {
                words.push(gpu);
                // UUIDs are long, so a UUID is offered only after the user has typed `GPU-`.
                let uuid = device.device_path.clone().filter(|_| begun.to_string_lossy().starts_with("GPU-"));
                words.extend(uuid.map(|uuid| (uuid, format!("{model}, the GPU"))));
            }
            let state = if device.drained { ", drained" } else { "" };
            words.push((device.addr.clone(), format!("{model}, a slice{state}")));
        }
        beginning_with(begun, words)
    })
}

pub(super) fn clients() -> ArgValueCompleter {
    ArgValueCompleter::new(|begun: &OsStr| {
        let clients = ask(async |daemon| daemon.clients().await).unwrap_or_default();
        let mut words: Vec<Completion> = Vec::new();
        for client in clients.iter().filter(|client| !client.bypass) {
            let user = client.user.as_ref().map(|user| format!(", user {user}")).unwrap_or_default();
            let slice = client.device.as_ref().map(|device| format!(", {device}")).unwrap_or_default();
            words.push((client.pid.to_string(), format!("{}{user}{slice}", client.command)));
        }
        // The service lists a process on several GPUs once for each GPU.
        words.dedup();
        beginning_with(begun, words)
    })
}

pub(super) fn containers() -> ArgValueCompleter {
    ArgValueCompleter::new(|begun: &OsStr| {
        let clients = ask(async |daemon| daemon.clients().await).unwrap_or_default();
        let ids = clients.iter().filter_map(|client| {
            let id = client.container_id.as_ref()?;
            Some((id.chars().take(SHORT_ID).collect(), client.command.clone()))
        });
        let mut words: Vec<Completion> = ids.collect();
        words.sort();
        words.dedup_by(|next, before| next.0 == before.0);
        beginning_with(begun, words)
    })
}

/// None if the service refuses the request or does not answer within [`PATIENCE`].
fn ask<T>(question: impl AsyncFnOnce(&DaemonProxy) -> Result<T, BusError>) -> Option<T> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().ok()?;
    let answer = async { question(&DaemonProxy::connect().await?).await };
    runtime.block_on(async { timeout(PATIENCE, answer).await }).ok()?.ok()
}

fn beginning_with(begun: &OsStr, words: Vec<Completion>) -> Vec<CompletionCandidate> {
    let begun = begun.to_string_lossy();
    let fitting = words.into_iter().filter(|(word, _)| word.starts_with(&*begun));
    fitting.map(|(word, help)| CompletionCandidate::new(word).help(Some(help.into()))).collect()
}
