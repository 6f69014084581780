//! A small service that tests `common::host::systemd`: it asks systemd the questions that yunion-mps-daemon asks, and prints
//! the answers.
//!
//! The small service runs in the machine. If the file /run/asker exists, the small service asks systemd for a scope with the
//! name in this file. The scope gets a shell that prints a line when it ends. The answers go to the journal and to /var/order.

use std::io::Write;
use std::process::{Command, ExitCode, Stdio};

use common::host::systemd::{move_to_scope, runs_us, why_stopping};
use sd_notify::NotifyState;
use tokio::signal::unix::{SignalKind, signal};

/// With this first argument, the test program runs as the small service of this file.
pub(crate) const ARGUMENT: &str = "asker";

/// A shell script that runs until it gets SIGTERM. The script then writes a line to /var/order and exits.
const HELD: &str = "trap 'echo held >>/var/order; exit' TERM; while :; do sleep 0.05; done";

pub(crate) fn run() -> ExitCode {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(ask());
    ExitCode::SUCCESS
}

async fn scope(id: &str, pid: u32) -> Result<String, String> {
    move_to_scope(id, pid).await.map_err(|error| error.to_string())
}

async fn ask() {
    let mut stop = signal(SignalKind::terminate()).unwrap();
    if !runs_us() {
        println!("not a service: {:?}, {:?}", why_stopping().await, scope("x", std::process::id()).await);
        return;
    }
    if let Ok(id) = std::fs::read_to_string("/run/asker") {
        let mut shell = Command::new("sh");
        shell.args(["-c", HELD]).stdin(Stdio::null()).stderr(Stdio::null());
        let pid = shell.spawn().unwrap().id();
        println!("scope of {pid}: {:?}", scope(id.trim(), pid).await);
    }
    let _ = sd_notify::notify(&[NotifyState::Ready]);
    stop.recv().await;
    let why = why_stopping().await;
    println!("{why:?}");
    // systemd must stop the scope only after this small service has ended. The small service waits before it writes its line.
    // If systemd stops the scope too early, the first line in /var/order comes from the shell in the scope.
    tokio::time::sleep(std::time::Duration::from_millis(300)).await;
    let mut order = std::fs::File::options().create(true).append(true).open("/var/order").unwrap();
    writeln!(order, "{why:?}").unwrap();
}
