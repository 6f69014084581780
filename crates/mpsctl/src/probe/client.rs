//! A CUDA client for measurements: yunion-mpsctl starts its own program again, in the environment of a slice. The client gets one
//! request as an argument, prints the answer to stdout, and ends. The client runs no kernel, so it causes no fault for other
//! clients, even if it is killed.

use std::ffi::{OsStr, OsString};
use std::io::Write;
use std::process::Stdio;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::process::Command;
use tokio::time::timeout;

use super::cuda;
use crate::{Error, Result};
use common::bus::proxy::DaemonProxy;
use common::host::proc;

/// The first argument of the process that becomes a CUDA client; the second is a [`CudaRequest`] in JSON.
const BECOME: &str = "become-cuda-client";

/// A pipe directory that does not exist. Only root could create this directory, so no control daemon listens in it.
const NOWHERE: &str = "/nonexistent";

/// The longest time for an answer: the start of a server takes seconds.
const ANSWER_DEADLINE: Duration = Duration::from_secs(120);

const END_DEADLINE: Duration = Duration::from_secs(5);

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) enum CudaRequest {
    /// Count the multiprocessors of the GPU without opening a context.
    Count,
    /// Open a context and report its GPU. With `allocate`, also allocate memory until an allocation fails or `allocate` MiB are
    /// allocated, and free this memory. With None, allocate nothing.
    Look { allocate: Option<u64> },
}

/// The multiprocessors and the memory that a client sees in its context, in MiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ContextFacts {
    pub(super) sms: u32,
    pub(super) memory_free: u64,
    pub(super) memory_total: u64,
    /// The memory that the client could allocate, in MiB. None if the client was asked to allocate nothing.
    #[serde(rename = "memory_allocated")]
    pub(super) allocated: Option<u64>,
}

/// The environment of a slice without the slice's limits, so that only the control daemon's defaults apply.
pub(super) fn without_limits(environment: &[(String, String)]) -> Vec<(String, String)> {
    let kept = ["CUDA_MPS_PIPE_DIRECTORY", "CUDA_VISIBLE_DEVICES"];
    environment.iter().filter(|(name, _)| kept.contains(&name.as_str())).cloned().collect()
}

/// The environment for the GPU of a slice without a control daemon.
pub(super) fn without_mps(environment: &[(String, String)]) -> Vec<(String, String)> {
    let mut environment = without_limits(environment);
    for (name, value) in &mut environment {
        if name == "CUDA_MPS_PIPE_DIRECTORY" {
            NOWHERE.clone_into(value);
        }
    }
    environment
}

/// Starts a client in this environment, and waits for its answer and its end.
pub(super) async fn ask<T: DeserializeOwned>(
    environment: &[(String, String)],
    request: CudaRequest,
) -> Result<T> {
    let mut command = Command::new(proc::OWN_PROGRAM);
    // The caller's own environment may have variables that would make the probe a client of another slice, so they are
    // removed.
    let ours = |name: &str| name.starts_with("CUDA_MPS_") || name == "CUDA_VISIBLE_DEVICES";
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(ours)) {
        command.env_remove(name);
    }
    let child = command
        .arg(BECOME)
        .arg(serde_json::to_string(&request)?)
        .envs(environment.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        // The client has a process group of its own, so that Ctrl-C reaches only yunion-mpsctl and not the client. After
        // Ctrl-C the client frees its memory and ends by itself.
        .process_group(0)
        .spawn()
        .map_err(|error| Error::System("start a process", error))?;
    let pid = child.id();
    let Ok(output) = timeout(ANSWER_DEADLINE, child.wait_with_output()).await else {
        if let Some(pid) = pid {
            end_client(pid).await;
        }
        let seconds = ANSWER_DEADLINE.as_secs();
        return Err(Error::Failed(format!("no answer of a CUDA process within {seconds} s")));
    };
    let output = output.map_err(|error| Error::System("wait for a process", error))?;
    let answer = String::from_utf8_lossy(&output.stdout);
    match serde_json::from_str::<Result<T, String>>(&answer) {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(text)) => Err(Error::Failed(format!("a CUDA process: {text}"))),
        Err(_) if answer.is_empty() => Err(Error::Failed(format!(
            "a CUDA process ended without an answer: {status}",
            status = output.status
        ))),
        Err(_) => Err(Error::Failed(format!("a CUDA process said {answer:?}"))),
    }
}

/// Ends the GPU work of a client that hangs. Such a client ends as soon as its calls of CUDA return.
async fn end_client(pid: u32) {
    let terminate = async { DaemonProxy::connect().await?.terminate_client(pid).await };
    let _ = timeout(END_DEADLINE, terminate).await;
}

/// If the first argument after the program's name is [`BECOME`], this process is a CUDA client for one request. Returns the exit
/// status of the client.
pub(crate) fn become_cuda_client(arguments: &[OsString], out: &mut dyn Write) -> Option<u8> {
    let [_, ask, request] = arguments else { return None };
    if ask != BECOME {
        return None;
    }
    cuda::exit_with_message_on_panic(|out, text| {
        let _ = say(out, &Err(text.to_owned()));
    });
    let answer = match request.to_str().map(serde_json::from_str::<CudaRequest>) {
        Some(Ok(request)) => carry_out(request),
        _ => Err(format!("{} is no request", OsStr::display(request))),
    };
    Some(u8::from(say(out, &answer).is_err()))
}

fn say(out: &mut dyn Write, answer: &Result<Value, String>) -> Result<()> {
    serde_json::to_writer(&mut *out, answer)?;
    out.flush()?;
    Ok(())
}

fn carry_out(request: CudaRequest) -> Result<Value, String> {
    match request {
        CudaRequest::Count => Ok(json!(cuda::multiprocessors_without_context()?)),
        CudaRequest::Look { allocate } => {
            let gpu = cuda::open()?;
            let (memory_free, memory_total) = cuda::memory(&gpu)?;
            Ok(json!(ContextFacts {
                sms: cuda::multiprocessors(&gpu)?,
                memory_free,
                memory_total,
                allocated: allocate.map(|most| cuda::allocate_up_to(&gpu, most)).transpose()?,
            }))
        }
    }
}
