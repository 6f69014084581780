//! The commands of the simulated MPS control daemon, with the exact answers of the real control daemon. The control daemon also
//! logs every line of an answer.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::control::{Asker, Daemon, Server};
use super::wire::{Order, Status};
use super::{memory_limit, memory_text, percentage};
use crate::state::Gpu;

impl Daemon {
    pub(super) fn command(&'static self, line: &str, asker: Asker) -> String {
        self.log(&format!("Cmd:{line}"));
        let words: Vec<&str> = line.split_whitespace().collect();
        let (name, rest) = words.split_first().unwrap_or((&"", &[]));
        let mut answer = String::new();
        match *name {
            "quit" if !asker.may_command() => {
                self.say(&mut answer, "Not enough privilege to execute quit command");
            }
            "set_default_active_thread_percentage" | "set_default_device_pinned_mem_limit"
                if !asker.may_command() =>
            {
                self.refuse(asker, &mut answer);
            }
            "terminate_client" if !asker.may_change() => {
                self.refuse(asker, &mut answer);
                self.say(&mut answer, "800");
            }
            "shutdown_server" | "set_active_thread_percentage" | "set_device_pinned_mem_limit"
                if !asker.may_change() =>
            {
                self.refuse(asker, &mut answer);
            }
            name => self.carry_out(name, rest, &mut answer),
        }
        answer
    }

    fn refuse(&'static self, asker: Asker, answer: &mut String) {
        let text = format!(
            "Insufficient privileges for UID {}. Control deamon settings can only be modified by the user who started it \
             or by the root user.",
            asker.uid
        );
        self.say(answer, &text);
    }

    fn carry_out(&'static self, name: &str, rest: &[&str], answer: &mut String) {
        let word = |place: usize| rest.get(place).copied().unwrap_or_default();
        match name {
            "get_server_list" => {
                if let Some(server) = self.server() {
                    self.say(answer, &server.pid.to_string());
                }
            }
            "get_server_status" if self.version != 535 => {
                let Some(server) = self.named(word(0), answer) else { return };
                if !server.ready() {
                    return self.say(answer, "INITIALIZING");
                }
                let fault = server.ask(&Order::Query).is_some_and(|status| status.fault);
                self.say(answer, if fault { "FAULT" } else { "ACTIVE" });
            }
            "get_client_list" => self.client_list(word(0), answer),
            "get_device_client_list" => self.device_clients(word(0), answer),
            "ps" => self.ps(rest, answer),
            "device_query" if self.version >= 580 => self.device_query(answer),
            "get_default_client_priority" => self.say(answer, "0"),
            "set_default_client_priority" => {}
            "start_server" => match (word(0), word(1).parse()) {
                ("-uid", Ok(uid)) => self.start_server(uid),
                _ => self.say(answer, "A user id (UID) is required to start a new server"),
            },
            "shutdown_server" => {
                let Some(server) = self.named(word(0), answer) else { return };
                if self.try_shutdown(&server) > 0 && word(1) == "-f" {
                    self.log(&format!("Force shutting down server {}", server.pid));
                    server.order(&Order::ForceShutdown);
                }
            }
            "terminate_client" => self.terminate(word(0), word(1), answer),
            "quit" => self.quit(rest),
            _ if self.limit(name, rest, answer) => {}
            _ => self.say(answer, &format!("Unknown command \"{name}\"")),
        }
    }

    /// Carries out a command about thread percentages or memory limits. Returns false if `name` is another command.
    fn limit(&'static self, name: &str, rest: &[&str], answer: &mut String) -> bool {
        let word = |place: usize| rest.get(place).copied().unwrap_or_default();
        match name {
            "get_default_active_thread_percentage" => {
                let now = self.defaults().percentage;
                self.say(answer, &format!("{now:.1}"));
            }
            "set_default_active_thread_percentage" => {
                match percentage(word(0)) {
                    Some(wanted) => self.defaults().percentage = wanted,
                    None => self.log("Invalid percentage, expected between (0.0, 100.0]"),
                }
                let now = self.defaults().percentage;
                self.say(answer, &format!("{now:.1}"));
            }
            "get_active_thread_percentage" => {
                let Some(status) = self.status_of(word(0), answer) else { return true };
                self.say(answer, &format!("{:.1}", status.percentage));
            }
            "set_active_thread_percentage" => {
                let Some(server) = self.named(word(0), answer) else { return true };
                match percentage(word(1)) {
                    Some(wanted) => server.order(&Order::SetPercentage(wanted)),
                    None => self.log("Invalid percentage, expected between (0.0, 100.0]"),
                }
                let Some(status) = server.ask(&Order::Query) else { return true };
                self.say(answer, &format!("{:.1}", status.percentage));
            }
            "set_default_device_pinned_mem_limit" => {
                if let Some(ordinal) = self.ordinal(word(0)) {
                    let mut defaults = self.defaults();
                    let limits = &mut defaults.limits;
                    limits.retain(|(device, _)| *device != ordinal);
                    limits.extend(memory_limit(word(1)).map(|limit| (ordinal, limit)));
                    limits.sort_unstable();
                }
                if self.version >= 580 {
                    self.log(&format!("{name} {} {}.", word(0), word(1)));
                }
            }
            "get_default_device_pinned_mem_limit" => {
                let ordinal = self.ordinal(word(0));
                let limits = self.defaults().limits.clone();
                match limits.into_iter().find(|(device, _)| Some(*device) == ordinal) {
                    Some((_, limit)) => self.say(answer, &memory_text(limit)),
                    None => self.log("No default pinned memory limit set for the device!"),
                }
            }
            "set_device_pinned_mem_limit" => {
                let Some(server) = self.named(word(0), answer) else { return true };
                if let Some(ordinal) = self.ordinal(word(1)) {
                    server.order(&Order::SetLimit(ordinal, memory_limit(word(2))));
                }
            }
            "get_device_pinned_mem_limit" => {
                let Some(status) = self.status_of(word(0), answer) else { return true };
                let ordinal = self.ordinal(word(1));
                if let Some((_, limit)) = status.limits.iter().find(|(device, _)| Some(*device) == ordinal) {
                    self.say(answer, &memory_text(*limit));
                }
            }
            _ => return false,
        }
        true
    }

    fn say(&'static self, answer: &mut String, line: &str) {
        self.log(line);
        *answer += line;
        *answer += "\n";
    }

    /// Returns the server with this PID. If no server has the PID, the function adds an error to the answer, and returns
    /// `None`.
    fn named(&'static self, pid: &str, answer: &mut String) -> Option<Arc<Server>> {
        let pid: u32 = pid.parse().unwrap_or_default();
        let found = self.server().filter(|server| server.pid == pid);
        if found.is_none() {
            self.say(answer, &format!("Server {pid} not found"));
        }
        found
    }

    fn status_of(&'static self, pid: &str, answer: &mut String) -> Option<Status> {
        self.named(pid, answer)?.ask(&Order::Query)
    }

    /// Returns the ordinal of a device that a command names by an ordinal or a UUID. From version 580 on the control daemon
    /// understands a UUID. Before 580 it accepts a UUID without a message, and ignores it.
    fn ordinal(&'static self, device: &str) -> Option<usize> {
        if self.version >= 580 && device.starts_with("GPU-") {
            return self.gpus.iter().position(|gpu| gpu.uuid() == device);
        }
        device.parse().ok()
    }

    fn ps(&'static self, rest: &[&str], answer: &mut String) {
        let server = match rest {
            ["-p", pid, ..] => {
                let found = self.named(pid, answer);
                if found.is_none() {
                    self.say(answer, &format!("Server {pid} not found"));
                    *answer += "\n";
                    return;
                }
                found
            }
            _ => self.server(),
        };
        let Some(server) = server else { return self.say(answer, "Server not found") };
        let Some(status) = server.ask(&Order::Query).filter(|status| !status.clients.is_empty()) else {
            return;
        };
        let row = |columns: [&str; 6]| {
            let [pid, id, server, device, namespace, command] = columns;
            format!("{pid:<10}{id:<10}{server:<15}{device:<26}{namespace:<15}{command:<15}")
        };
        self.say(answer, &row(["PID", "ID", "SERVER", "DEVICE", "NAMESPACE", "COMMAND"]));
        for client in &status.clients {
            let device = client.uuid.get(..22).unwrap_or(&client.uuid);
            let (pid, id, server) = (client.pid.to_string(), client.id.to_string(), server.pid.to_string());
            self.say(answer, &row([&pid, &id, &server, device, &client.namespace, &client.command]));
        }
    }

    fn client_list(&'static self, server: &str, answer: &mut String) {
        let Some(status) = self.status_of(server, answer) else { return };
        if status.fault && self.host.fault("faulted-lists-none").is_some() {
            return;
        }
        for client in status.clients {
            self.say(answer, &client.pid.to_string());
        }
    }

    fn device_clients(&'static self, pid: &str, answer: &mut String) {
        let server = if pid.is_empty() { self.server() } else { self.named(pid, answer) };
        let Some(status) = server.and_then(|server| server.ask(&Order::Query)) else { return };
        let mut ordinals: Vec<(usize, &str)> =
            status.clients.iter().map(|client| (client.ordinal, client.name.as_str())).collect();
        ordinals.sort_unstable();
        ordinals.dedup();
        for (ordinal, name) in ordinals {
            self.say(answer, &format!("[{ordinal}] 00:00.0, {name}"));
            for client in status.clients.iter().filter(|client| client.ordinal == ordinal) {
                self.say(answer, &format!("{}.1", client.pid));
            }
        }
    }

    fn device_query(&'static self, answer: &mut String) {
        self.say(answer, "Default");
        self.devices(answer);
        if let Some(server) = self.server()
            && server.ask(&Order::DeviceQuery).is_some()
        {
            self.say(answer, &format!("\nServer {}", server.pid));
            self.devices(answer);
        }
    }

    fn devices(&'static self, answer: &mut String) {
        let row = |columns: [&str; 5]| {
            let [ordinal, pci, uuid, name, attributes] = columns;
            format!("{ordinal:<16}{pci:<15}{uuid:<42}{name:<34}{attributes}")
        };
        self.say(answer, &row(["Device Ordinal", "PCI IDs", "UUID", "Name", "Attributes"]));
        for (ordinal, gpu) in self.gpus.iter().enumerate() {
            self.say(answer, &row([&ordinal.to_string(), &dotted(gpu), &gpu.uuid(), &gpu.name(), "N/A"]));
        }
    }

    fn terminate(&'static self, server: &str, client: &str, answer: &mut String) {
        let Some(server) = self.named(server, answer) else {
            let pid: u32 = server.parse().unwrap_or_default();
            self.say(answer, &format!("Server {pid} not found!"));
            return self.say(answer, "1");
        };
        let client: u32 = client.parse().unwrap_or_default();
        let Some(status) = server.ask(&Order::Query) else { return };
        if status.clients.iter().any(|known| known.pid == client) {
            // A client has to take part in the end of its work. A client that has lost its work to a fault does not take part,
            // so the control daemon waits until the client's process ends. A stopped client takes part only when it runs again.
            // During the wait the control daemon handles no other command.
            let _nothing_else = self.nothing_else();
            while alive(client) && server.ask(&Order::Query).is_some_and(|status| status.fault) {
                thread::sleep(Duration::from_millis(10));
            }
            _ = server.ask(&Order::Terminate(client));
            return self.say(answer, "0");
        }
        self.say(answer, &format!("Invalid process {client}!"));
        self.say(answer, "1");
    }

    /// Asks a server to end. Returns the number of the server's threads that prevent its end: two for each client.
    pub(super) fn try_shutdown(&'static self, server: &Server) -> usize {
        self.log(&format!("Try shutting down server {}, backoff is disabled", server.pid));
        let threads = server.ask(&Order::Shutdown).map_or(0, |status| status.clients.len() * 2);
        if threads > 0 {
            let pid = server.pid;
            self.log(&format!("Server {pid} has {threads} active worker threads. Server will not shutdown."));
        }
        threads
    }

    /// Carries out `quit`: the control daemon ends after its clients have ended. If a client is still there at the command's
    /// time limit, the control daemon of driver 580 logs that it ends the server by force, and then hangs for ever.
    fn quit(&'static self, rest: &[&str]) {
        let limit = match rest {
            ["-t", seconds, ..] => seconds.parse().ok(),
            _ => None,
        };
        if let Some(seconds) = limit {
            self.log(&format!("quit command issued with timeout of {seconds}"));
        }
        if self.host.fault("quit-hangs").is_some() {
            hang();
        }
        self.refuse_clients();
        let deadline = limit.and_then(|seconds| Instant::now().checked_add(Duration::from_secs(seconds)));
        if let Some(server) = self.server() {
            if !self.wait_until(|server| server.is_none_or(Server::idle), deadline) {
                self.try_shutdown(&server);
                self.log(&format!("Force shutting down server {}", server.pid));
                hang();
            }
            self.try_shutdown(&server);
            self.wait_until(|server| server.is_none(), None);
        }
        self.exit();
    }
}

/// Formats a GPU's PCI address in the control daemon's spelling, such as `0000:00.06.00`.
fn dotted(gpu: &Gpu) -> String {
    let pci = gpu.pci();
    format!("{:04x}:{:02x}.{:02x}.{:02x}", pci.domain, pci.bus, pci.device, pci.function)
}

fn hang() -> ! {
    loop {
        thread::park();
    }
}

/// Returns the letter by which the kernel shows the state of a process. `None` if the process does not exist.
fn process_state(pid: u32) -> Option<char> {
    crate::state::behind_name(pid)?.trim_start().chars().next()
}

fn alive(pid: u32) -> bool {
    process_state(pid).is_some_and(|state| state != 'Z')
}
