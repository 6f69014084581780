//! A CUDA client of ours: this program started again, in the environment of a slice. It reads requests line by line on its
//! stdin, and answers on its stdout. At the end of its stdin it leaves, between two kernels: however its parent ends, its
//! neighbours are safe.

use std::ffi::OsString;
use std::io::{self, BufRead, Write};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::time::timeout;

use crate::cuda::{self, GpuContext, Kernel};
use crate::show::env::host_environment;
use crate::{Error, Result};
use common::bus::proxy::DaemonProxy;
use common::host::proc;

/// The first argument of the process that becomes a CUDA client.
const BECOME: &str = "become-cuda-client";

/// A pipe directory that does not exist, and that nobody but root could make, so nothing listens in it.
const NOWHERE: &str = "/nonexistent";

/// The time that an answer may take. A kernel of ours takes milliseconds; a server that has to start, seconds.
const ANSWER_DEADLINE: Duration = Duration::from_secs(120);

const LEAVE_DEADLINE: Duration = Duration::from_secs(5);

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(crate) enum CudaRequest {
    /// Count the multiprocessors, without a context.
    Count,
    /// Open a context and report its GPU. Then allocate until an allocation fails or that many MiB are reached, and free
    /// all of it.
    Look { allocate: Option<u64> },
    /// Run the kernel so many times. The answer is the time from the first launch to the end of the last kernel, in
    /// seconds.
    Run(Work),
}

/// The answer to a request, or why there is none.
type Answer<T> = Result<T, String>;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Work {
    /// Blocks of the kernel's grid.
    pub(crate) blocks: u32,
    pub(crate) rounds: u32,
    /// Kernels, one after the other.
    pub(crate) launches: u32,
}

/// The multiprocessors and the memory that a client sees in its context, in MiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ContextFacts {
    pub(crate) sms: u32,
    pub(crate) memory_free: u64,
    pub(crate) memory_total: u64,
    /// The memory that it got; None where it did not try.
    #[serde(rename = "memory_allocated")]
    pub(crate) allocated: Option<u64>,
}

#[derive(Debug, Clone)]
pub(crate) struct Environment(Vec<(String, String)>);

impl Environment {
    /// The environment that the daemon answers for a slice, as in `yunion-mpsctl run`.
    pub(crate) async fn of_slice(daemon: &DaemonProxy, name: &str) -> Result<Self> {
        Ok(Self(host_environment(&daemon.container_config(&[name.to_owned()]).await?)))
    }

    /// The same without the limits: only the limits of the control daemon are left.
    pub(crate) fn without_limits(&self) -> Self {
        let kept = ["CUDA_MPS_PIPE_DIRECTORY", "CUDA_VISIBLE_DEVICES"];
        Self(self.0.iter().filter(|(name, _)| kept.contains(&name.as_str())).cloned().collect())
    }

    /// The same GPU with no control daemon.
    pub(crate) fn without_mps(&self) -> Self {
        let mut environment = self.without_limits();
        for (name, value) in &mut environment.0 {
            if name == "CUDA_MPS_PIPE_DIRECTORY" {
                NOWHERE.clone_into(value);
            }
        }
        environment
    }
}

/// A client that runs. It leaves by itself when this value is dropped.
#[derive(Debug)]
pub(crate) struct CudaClient {
    child: Child,
    requests: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl CudaClient {
    /// Starts a client. It does nothing on a GPU before its first request.
    pub(crate) fn start(environment: &Environment) -> Result<Self> {
        let mut command = Command::new(proc::OWN_PROGRAM);
        // With the caller's own settings of this kind it would be a client of something else.
        let ours = |name: &str| name.starts_with("CUDA_MPS_") || name == "CUDA_VISIBLE_DEVICES";
        for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(ours)) {
            command.env_remove(name);
        }
        let mut child = command
            .arg(BECOME)
            .envs(environment.0.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            // Ctrl-C is for us: a signal alone, in the middle of a kernel, would be a fault for its neighbours.
            .process_group(0)
            .spawn()
            .map_err(|error| Error::System("start a process", error))?;
        let (Some(requests), Some(answers)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(Error::Failed("a CUDA process has no pipes".to_owned()));
        };
        Ok(Self { child, requests, answers: BufReader::new(answers).lines() })
    }

    /// Starts a client for one request, and waits until it has left.
    pub(crate) async fn ask_once<T: DeserializeOwned>(
        environment: &Environment,
        request: CudaRequest,
    ) -> Result<T> {
        let mut client = Self::start(environment)?;
        client.send(request).await?;
        let answer = client.answer().await;
        client.leave().await;
        answer
    }

    /// Sends a request; [`Self::answer`] fetches the answer.
    pub(crate) async fn send(&mut self, request: CudaRequest) -> Result<()> {
        let mut line = serde_json::to_vec(&request)?;
        line.push(b'\n');
        // If the client has ended, the missing answer says why.
        let _ = self.requests.write_all(&line).await;
        Ok(())
    }

    pub(crate) async fn answer<T: DeserializeOwned>(&mut self) -> Result<T> {
        let seconds = ANSWER_DEADLINE.as_secs();
        let trouble = match timeout(ANSWER_DEADLINE, self.answers.next_line()).await {
            Ok(Ok(Some(line))) => match serde_json::from_str::<Answer<T>>(&line) {
                Ok(Ok(answer)) => return Ok(answer),
                Ok(Err(text)) => format!("a CUDA process: {text}"),
                Err(_) => format!("a CUDA process said {line:?}"),
            },
            Ok(Ok(None)) => format!("a CUDA process {}", self.ending().await),
            Ok(Err(error)) => format!("a CUDA process: {error}"),
            Err(_) => format!("no answer of a CUDA process within {seconds} s"),
        };
        Err(Error::Failed(trouble))
    }

    async fn ending(&mut self) -> String {
        match timeout(LEAVE_DEADLINE, self.child.wait()).await {
            Ok(Ok(status)) => format!("ended without an answer: {status}"),
            _ => "closed its end of the pipe".to_owned(),
        }
    }

    /// Waits until it has left. If it doesn't leave by itself, its GPU work is ended before it is killed.
    pub(crate) async fn leave(self) {
        let Self { mut child, requests, answers } = self;
        let pid = child.id();
        drop((requests, answers));
        if timeout(LEAVE_DEADLINE, child.wait()).await.is_ok() {
            return;
        }
        let terminate = async {
            let daemon = DaemonProxy::connect().await?;
            daemon.terminate_client(pid.unwrap_or_default()).await
        };
        let _ = timeout(LEAVE_DEADLINE, terminate).await;
        // A client that hangs in the driver does not even end by SIGKILL.
        let _ = timeout(LEAVE_DEADLINE, child.kill()).await;
    }
}

/// If the arguments (the first one is the program's name) ask for it, this process is a CUDA client until the end of its
/// stdin. Returns its exit status.
pub(crate) fn become_cuda_client(arguments: &[OsString], out: &mut dyn Write) -> Option<u8> {
    let [_, ask] = arguments else { return None };
    if ask != BECOME {
        return None;
    }
    cuda::exit_with_message_on_panic(|out, text| {
        let _ = say(out, &Err(text.to_owned()));
    });
    let left = Arc::new(AtomicBool::new(false));
    let requests = requests(Arc::clone(&left));
    let mut member = CudaWork { gpu: None, kernel: None, left };
    for request in requests {
        if say(out, &member.carry_out(request).map_err(|error| error.to_string())).is_err() {
            break;
        }
    }
    Some(0)
}

fn say(out: &mut dyn Write, answer: &Answer<Value>) -> io::Result<()> {
    serde_json::to_writer(&mut *out, answer)?;
    writeln!(out)?;
    out.flush()
}

/// The lines of stdin as they come; `left` is set at their end, while the last one may still be carried out.
fn requests(left: Arc<AtomicBool>) -> mpsc::Receiver<CudaRequest> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        for line in io::stdin().lock().lines().map_while(Result::ok) {
            let Ok(request) = serde_json::from_str(&line) else { break };
            if sender.send(request).is_err() {
                break;
            }
        }
        left.store(true, Ordering::Relaxed);
    });
    receiver
}

struct CudaWork {
    // Dropped in this order: the kernel before its context.
    kernel: Option<Kernel>,
    gpu: Option<GpuContext>,
    left: Arc<AtomicBool>,
}

impl CudaWork {
    fn carry_out(&mut self, request: CudaRequest) -> Result<Value, cuda::CudaError> {
        Ok(match request {
            CudaRequest::Count => json!(cuda::multiprocessors_without_context()?),
            CudaRequest::Look { allocate } => {
                let gpu = self.gpu()?;
                let (memory_free, memory_total) = gpu.memory()?;
                json!(ContextFacts {
                    sms: gpu.multiprocessors()?,
                    memory_free,
                    memory_total,
                    allocated: allocate.map(|most| gpu.allocate_up_to(most)).transpose()?,
                })
            }
            CudaRequest::Run(work) => json!(self.run(work)?.as_secs_f64()),
        })
    }

    fn gpu(&mut self) -> Result<&GpuContext, cuda::CudaError> {
        match &mut self.gpu {
            Some(gpu) => Ok(gpu),
            none => Ok(none.insert(GpuContext::open()?)),
        }
    }

    fn run(&mut self, work: Work) -> Result<Duration, cuda::CudaError> {
        if self.kernel.is_none() {
            self.kernel = Some(self.gpu()?.kernel()?);
        }
        let Some(kernel) = &self.kernel else { return Ok(Duration::ZERO) };
        let start = Instant::now();
        for _ in 0..work.launches {
            if self.left.load(Ordering::Relaxed) {
                break;
            }
            kernel.run(work.blocks, work.rounds)?;
        }
        Ok(start.elapsed())
    }
}
