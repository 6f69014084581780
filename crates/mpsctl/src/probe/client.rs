//! A CUDA client for measurements. `yunion-mpsctl` starts its own program again, in the environment of a slice. The new process
//! gets one request as an argument, prints the answer to stdout, and ends. The process runs no GPU kernel, so killing it causes
//! no fault for other clients.

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

/// The first argument of the process that becomes a CUDA client. The second argument is a [`CudaRequest`] in JSON.
const BECOME: &str = "become-cuda-client";

/// A pipe directory in which no control daemon listens: the directory does not exist, and only root could create it.
const NOWHERE: &str = "/nonexistent";

/// The longest wait for an answer. The client may be the first of a server, and a server needs seconds to start.
const ANSWER_DEADLINE: Duration = Duration::from_secs(120);

const END_DEADLINE: Duration = Duration::from_secs(5);

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) enum CudaRequest {
    /// Count the multiprocessors of the GPU without opening a context.
    Count,
    /// Open a context and report its GPU. With `allocate`, also allocate memory until an allocation fails or `allocate` MiB are
    /// reached, and free the memory again.
    Look { allocate: Option<u64> },
}

/// The multiprocessors, and the memory in MiB, that a client sees in its context.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ContextFacts {
    pub(super) sms: u32,
    pub(super) memory_free: u64,
    pub(super) memory_total: u64,
    /// The memory that the client could allocate, in MiB. None if the request was to allocate nothing.
    #[serde(rename = "memory_allocated")]
    pub(super) allocated: Option<u64>,
}

/// The environment of a slice without the slice's limits, so that only the limits of the control daemon apply.
pub(super) fn without_limits(environment: &[(String, String)]) -> Vec<(String, String)> {
    let kept = ["CUDA_MPS_PIPE_DIRECTORY", "CUDA_VISIBLE_DEVICES"];
    environment.iter().filter(|(name, _)| kept.contains(&name.as_str())).cloned().collect()
}

/// An environment in which CUDA finds no control daemon, and sees the GPU of the slice without MPS.
pub(super) fn without_mps(environment: &[(String, String)]) -> Vec<(String, String)> {
    let mut environment = without_limits(environment);
    for (name, value) in &mut environment {
        if name == "CUDA_MPS_PIPE_DIRECTORY" {
            NOWHERE.clone_into(value);
        }
    }
    environment
}

pub(super) async fn ask<T: DeserializeOwned>(
    environment: &[(String, String)],
    request: CudaRequest,
) -> Result<T> {
    let mut command = Command::new(proc::OWN_PROGRAM);
    // Variables in the caller's environment could make the new process a client of another slice.
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
        // The client has its own process group, so Ctrl-C ends only `yunion-mpsctl`. The client then frees its memory and ends
        // by itself.
        .process_group(0)
        .spawn()
        .map_err(|error| Error::System("start a process", error))?;
    let pid = child.id();
    let Ok(output) = timeout(ANSWER_DEADLINE, child.wait_with_output()).await else {
        if let Some(pid) = pid {
            end_client(pid).await;
        }
        let seconds = ANSWER_DEADLINE.as_secs();
        return Err(Error::Failed(format!(
            "the CUDA process of the probe did not answer within {seconds} s"
        )));
    };
    let output = output.map_err(|error| Error::System("wait for a process", error))?;
    let answer = String::from_utf8_lossy(&output.stdout);
    match serde_json::from_str::<Result<T, String>>(&answer) {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(text)) => Err(Error::Failed(format!("the CUDA process of the probe: {text}"))),
        Err(_) if answer.is_empty() => Err(Error::Failed(format!(
            "the CUDA process of the probe ended without an answer: {status}",
            status = output.status
        ))),
        Err(_) => {
            Err(Error::Failed(format!("the CUDA process of the probe gave an unknown answer: {answer:?}")))
        }
    }
}

/// Ends the GPU work of a client that hangs. The calls of CUDA then return, and the client ends.
async fn end_client(pid: u32) {
    let terminate = async { DaemonProxy::connect().await?.terminate_client(pid).await };
    let _ = timeout(END_DEADLINE, terminate).await;
}

/// If the first argument after the program's name is [`BECOME`], this process executes one request as a CUDA client. Returns
/// the exit status, or None for any other first argument.
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
