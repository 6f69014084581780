//! Listens to the D-Bus signals of the service, which gdbus prints.

use std::fs::{self, File};
use std::path::PathBuf;

use super::client::Client;
use super::host::Host;
use super::wait::wait_for;

/// A gdbus that prints every signal of the service. The gdbus ends when this value is dropped.
pub(crate) struct Listener {
    _gdbus: Client,
    file: PathBuf,
}

impl Listener {
    /// Starts gdbus, and waits until it receives signals.
    pub(crate) fn start(host: &Host) -> Self {
        let file = host.path("heard");
        let mut gdbus = host.command("gdbus");
        gdbus.args(["monitor", "--system", "--dest", "io.yunion.Mps1"]).env("LC_ALL", "C");
        gdbus.stdout(File::create(&file).unwrap());
        let listener = Self { _gdbus: Client::start(&mut gdbus), file };
        listener.wait_for("is owned by");
        listener
    }

    pub(crate) fn heard(&self) -> String {
        fs::read_to_string(&self.file).unwrap()
    }

    pub(crate) fn wait_for(&self, text: &str) {
        wait_for(text, || self.heard().contains(text).then_some(()));
    }

    /// Waits for `ClientFault` signals with these PIDs. If the server is slow to name all clients, the service sends several
    /// signals.
    pub(crate) fn wait_for_fault(&self, pids: &[u32]) -> String {
        // The digits of one PID may be a part of another PID. So whole numbers are compared.
        let names = |text: &str, pid: &u32| {
            text.split(|letter: char| !letter.is_ascii_digit()).any(|number| number.parse() == Ok(*pid))
        };
        wait_for("ClientFault", || {
            let heard = self.heard();
            let names_one =
                |line: &&str| line.contains("ClientFault") && pids.iter().any(|pid| names(line, pid));
            let told = heard.lines().filter(names_one).collect::<Vec<_>>().join("\n");
            pids.iter().all(|pid| names(&told, pid)).then_some(told)
        })
    }
}
