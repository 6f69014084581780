//! Tests the shutdown report. Before the service ends a control daemon, it names the clients that lose their work in the
//! journal, in the unit's status line and in an event.

use std::time::Instant;

use rustix::process::Signal;

use crate::support::client::{Client, describe, own_user};
use crate::support::container::{ContainerGroup, NO_CONTAINER_GROUP};
use crate::support::host::{Host, control_pid, signal_pid, text};
use crate::support::service_manager::ServiceManager;
use crate::support::skip::{root_or_skip, skip};
use crate::support::wait::wait_for;

/// Fails unless the log has exactly one line with this text. The line must be a warning, and must come before the line about
/// the control daemon's end.
fn assert_warned(host: &Host, expected: &str, control_daemon: u32) {
    let log = host.log();
    let lines: Vec<&str> = log.lines().collect();
    let places: Vec<usize> = lines
        .iter()
        .enumerate()
        .filter(|(_, line)| line.contains(expected))
        .map(|(place, _)| place)
        .collect();
    assert_eq!(places.len(), 1, "{expected}\n{log}");
    assert!(lines[places[0]].contains("WARN"), "{log}");
    let ended = format!("(PID {control_daemon}) ended by");
    let end = lines.iter().position(|line| line.contains(&ended)).unwrap_or_else(|| panic!("{log}"));
    assert!(places[0] < end, "{log}");
}

/// Starts a host with a service that ends a control daemon 1 s after `quit`, instead of 10 s.
fn serving_with_a_short_end() -> Host {
    let mut host = Host::new("h200");
    host.configure("cuda_mps_quit_timeout: 1");
    host.start();
    host.wait_for_state("ready");
    host
}

#[test]
fn the_stop_names_the_clients() {
    let mut host = Host::new("h200");
    let mut manager = ServiceManager::of(&mut host);
    host.configure("cuda_mps_quit_timeout: 1");
    host.start();
    manager.until(|message| message == "READY=1");
    let control_daemon = control_pid(&host.wait_for_state("ready"));
    let (one, two) = (host.client_of("00:06.0-1"), host.client_of("00:06.0-2"));
    let user = own_user();
    let container = ContainerGroup::new();
    let inside = match &container {
        Some(container) => {
            container.take(two.id(), "init");
            format!(", container {}", &container.id[..12])
        }
        None => {
            skip("the_stop_names_the_clients: the container", NO_CONTAINER_GROUP);
            String::new()
        }
    };
    let words = describe(&[
        (one.id(), &user, ", slice 00:06.0-1"),
        (two.id(), &user, &format!(", slice 00:06.0-2{inside}")),
    ]);
    let expected = format!("the stop ends the work of {words}");
    host.signal(Signal::TERM);
    manager.until(|message| message == "STOPPING=1");
    manager.until(|message| message.starts_with("STATUS=stopping") && message.ends_with(&expected));
    assert_eq!(host.ended().code(), Some(0));
    assert_warned(&host, &expected, control_daemon);
    drop((one, two));
}

/// When another program kills a control daemon, the service names the clients that have lost their work. The control daemon's
/// log does not explain such an end.
#[test]
fn the_end_of_a_control_daemon_names_the_clients() {
    let mut host = Host::new("h200");
    host.configure("log_level: debug");
    host.start();
    let control_daemon = control_pid(&host.wait_for_state("ready"));
    let gone = host.client_of("00:06.0-2");
    let (gone_pid, client) = (gone.id(), host.client_of("00:06.0-1"));
    gone.end();
    let named =
        format!("PID {} of user {}, slice 00:06.0-1, command \"cuda-client\"", client.id(), own_user());
    let left = format!("Client process {gone_pid}");
    wait_for("the news of both", || {
        let log = host.log();
        (log.contains(&format!("client {named}")) && log.contains(&left)).then_some(())
    });
    signal_pid(control_daemon, Signal::KILL);
    let told =
        format!("the control daemon ended (signal: 9 (SIGKILL)), which ends the work of 1 client: {named}");
    wait_for(&told, || host.log().contains(&told).then_some(()));
    let status = host.wait_for_state("ready");
    let events = status["events"].as_array().unwrap();
    assert!(events.iter().any(|event| event["text"] == told.as_str()), "{status:#}");
    assert!(!host.log().contains("its log ends"), "{}", host.log());
    assert_eq!(host.stop().code(), Some(0));
}

#[test]
fn the_clients_of_another_user_are_named_as_theirs() {
    if !root_or_skip("the_clients_of_another_user_are_named_as_theirs") {
        return;
    }
    let mut host = serving_with_a_short_end();
    let control_daemon = control_pid(&host.wait_for_state("ready"));
    let own = host.client_of("00:06.0-1");
    let mut command = host.command_as_member(host.path("bin/cuda-client"));
    let theirs = Client::start(command.envs(host.environment_of("00:06.0-2")).args(["hold", "600"]));
    host.wait_until_listed(theirs.id());
    let words =
        describe(&[(own.id(), "root", ", slice 00:06.0-1"), (theirs.id(), "nobody", ", slice 00:06.0-2")]);
    assert_eq!(host.stop().code(), Some(0));
    assert_warned(&host, &format!("the stop ends the work of {words}"), control_daemon);
    drop((own, theirs));
}

#[test]
fn without_clients_nothing_is_said() {
    let mut host = Host::serving("h200");
    host.wait_for_state("ready");
    assert!(host.mpsctl(&["apply", "--force"]).status.success());
    assert_eq!(host.stop().code(), Some(0));
    assert!(!host.log().contains("ends the work of"), "{}", host.log());
}

/// A restart of the service ends no client. So the service names none.
#[test]
fn clients_that_carry_on_are_not_named() {
    let mut host = Host::serving("h200");
    host.wait_for_state("ready");
    let client = host.client_of("00:06.0-1");
    // No change waits for clients, so `apply --force` has nothing to end.
    assert!(host.mpsctl(&["apply", "--force"]).status.success());
    host.configure("log_level: debug");
    assert!(host.call("Control.Reload").status.success());
    assert!(!host.log().contains("ends the work of"), "{}", host.log());
    drop(client);
    assert_eq!(host.stop().code(), Some(0));
}

#[test]
fn a_forced_change_names_the_clients() {
    let mut host = Host::new("h200");
    let mut manager = ServiceManager::of(&mut host);
    host.configure("cuda_mps_quit_timeout: 1");
    host.start();
    manager.until(|message| message == "READY=1");
    let control_daemon = control_pid(&host.wait_for_state("ready"));
    let client = host.client_of("00:06.0-1");
    let user = own_user();
    let expected =
        format!("apply --force ends the work of {}", describe(&[(client.id(), &user, ", slice 00:06.0-1")]));
    host.configure("cuda_mps_topology: per_gpu");
    assert!(host.call("Control.Reload").status.success());
    let refused = host.mpsctl(&["apply"]);
    assert!(text(&refused).contains("only after its clients have ended (1 client)"), "{}", text(&refused));
    assert!(!host.log().contains(&expected));
    let applied = host.mpsctl(&["apply", "--force"]);
    assert!(applied.status.success(), "{}", text(&applied));
    manager.until(|message| message.starts_with("STATUS=") && message.ends_with(&expected));
    // When the named clients have ended, the status line does not name them any more.
    manager.until(|message| message == "STATUS=ready: 4 slices on 1 of 1 GPUs");
    let status = host.wait_for_state("ready");
    let events = status["events"].as_array().unwrap();
    assert!(events.iter().any(|event| event["text"] == expected), "{events:?}");
    drop(client);
    assert_eq!(host.stop().code(), Some(0));
    assert_warned(&host, &expected, control_daemon);
}

#[test]
fn a_configuration_that_disables_names_the_clients() {
    let mut host = Host::new("h200");
    let mut manager = ServiceManager::of(&mut host);
    host.configure("cuda_mps_quit_timeout: 1");
    host.start();
    manager.until(|message| message == "READY=1");
    let control_daemon = control_pid(&host.wait_for_state("ready"));
    let client = host.client_of("00:06.0-3");
    let user = own_user();
    let expected = format!(
        "enable_cuda_mps: false ends the work of {}",
        describe(&[(client.id(), &user, ", slice 00:06.0-3")])
    );
    host.configure("enable_cuda_mps: false");
    assert!(host.call("Control.Reload").status.success());
    manager.until(|message| message.starts_with("STATUS=") && message.ends_with(&expected));
    manager.until(|message| message == "STATUS=disabled; enable_cuda_mps is false");
    host.wait_for_status("nobody on the way out", |status| {
        status["control_daemons"].as_array().unwrap().is_empty()
    });
    assert_warned(&host, &expected, control_daemon);
    // A later reload does not report the same clients again.
    assert!(host.call("Control.Reload").status.success());
    assert_warned(&host, &expected, control_daemon);
    drop(client);
    assert_eq!(host.stop().code(), Some(0));
}

/// The service names the clients of a control daemon that hangs. It must not ask that control daemon, which would never answer.
#[test]
fn the_clients_of_a_control_daemon_that_hangs_are_named() {
    let mut host = Host::new("h200");
    host.configure("cuda_mps_quit_timeout: 1");
    host.start();
    let control_daemon = control_pid(&host.wait_for_state("ready"));
    let client = host.client_of("00:06.0-1");
    host.plant("mps/fault/front-end-hangs", "");
    assert_eq!(host.listed(client.id()).unwrap()["device"], "00:06.0-1");
    let begun = Instant::now();
    assert_eq!(host.stop().code(), Some(0));
    println!("stopped after {:?}", begun.elapsed());
    let words = describe(&[(client.id(), &own_user(), ", slice 00:06.0-1")]);
    assert_warned(&host, &format!("the stop ends the work of {words}"), control_daemon);
    drop(client);
    host.nothing_runs();
}

/// Without a driver, the service takes no control daemon over. Its stop still ends the control daemon and names the clients.
#[test]
fn the_clients_of_a_control_daemon_that_was_not_taken_over_are_named() {
    let mut host = serving_with_a_short_end();
    host.wait_for_state("ready");
    let client = host.client_of("00:06.0-1");
    let user = own_user();
    host.signal(Signal::KILL);
    host.ended();
    host.clear("driver");
    host.start();
    host.wait_for_state("failed");
    assert_eq!(host.stop().code(), Some(0));
    let words = describe(&[(client.id(), &user, ", slice 00:06.0-1")]);
    let expected = format!("the stop ends the work of {words}");
    assert!(host.log().contains(&expected), "{expected}\n{}", host.log());
    drop(client);
    host.nothing_runs();
}
