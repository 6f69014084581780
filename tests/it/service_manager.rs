//! Tests which notifications the service sends to systemd, and when.

use rustix::process::Signal;

use crate::support::host::Host;
use crate::support::service_manager::ServiceManager;

#[test]
fn ready_is_said_when_it_is_true() {
    let mut host = Host::new("h200");
    let mut manager = ServiceManager::of(&mut host);
    host.start();
    let first = manager.next();
    assert!(first.starts_with("STATUS=starting: 0 slices on 0 of 1 GPUs"), "{first}");
    let heard = manager.until(|message| message == "READY=1");
    assert!(heard.contains(&"STATUS=ready: 4 slices on 1 of 1 GPUs".to_owned()), "{heard:?}");
    let status = host.json(&["status"]).expect("READY=1 came before the name on the bus");
    assert_eq!(status["service"]["state"], "ready");

    host.signal(Signal::HUP);
    assert_eq!(manager.next(), "RELOADING=1");
    let now = manager.next();
    let now: u64 = now.strip_prefix("MONOTONIC_USEC=").unwrap_or_else(|| panic!("{now}")).parse().unwrap();
    assert!(now > 0);
    assert_eq!(manager.next(), "READY=1");

    // After a reload, the service sends READY=1 even if it has refused the reload.
    host.configure("cuda_mps_replicas: none");
    host.signal(Signal::HUP);
    let heard = manager.until(|message| message == "READY=1");
    assert_eq!(heard[0], "RELOADING=1");
    assert!(
        heard[2].starts_with("STATUS=degraded: 4 slices on 1 of 1 GPUs; the new configuration was refused"),
        "{heard:?}"
    );

    host.signal(Signal::TERM);
    assert_eq!(manager.next(), "STOPPING=1");
    let status = manager.next();
    assert!(status.starts_with("STATUS=stopping"), "{status}");
    assert_eq!(host.ended().code(), Some(0));
}

/// The service sends READY=1 only after it has its name on the bus. Until then it still sends WATCHDOG=1. Otherwise systemd
/// would end the service.
#[test]
fn ready_waits_for_the_bus() {
    let mut host = Host::new("tesla-p40");
    host.stop_bus();
    let mut manager = ServiceManager::of(&mut host);
    host.set("WATCHDOG_USEC", "300000");
    host.start();
    let mut heard = manager.until(|message| message == "STATUS=ready: 4 slices on 1 of 1 GPUs");
    // The service's loop sends WATCHDOG=1. Two more of these messages prove that the loop has run at least once after the
    // status was ready.
    for _ in 0..2 {
        heard.extend(manager.until(|message| message == "WATCHDOG=1"));
    }
    assert!(!heard.contains(&"READY=1".to_owned()), "{heard:?}");
    assert_eq!(host.compute_mode(0), "Exclusive_Process");

    host.restart_bus();
    manager.until(|message| message == "READY=1");
    // The notifications now have no reader. The service must still work.
    drop(manager);
    let status = host.json(&["status"]).expect("READY=1 came before the name on the bus");
    assert_eq!(status["service"]["state"], "ready");
    assert_eq!(host.stop().code(), Some(0));
}

/// The kernel stores only ten notifications, and would block the sender of the next. A service manager that reads none must not
/// delay the service.
#[test]
fn a_service_manager_that_does_not_read_holds_nobody_up() {
    let mut host = Host::new("tesla-p40");
    let mut manager = ServiceManager::of(&mut host);
    host.start();
    manager.until(|message| message == "READY=1");
    for _ in 0..20 {
        let reloaded = host.call("Control.Reload");
        assert!(reloaded.status.success(), "{}", crate::support::host::text(&reloaded));
    }
    // From here on, the service manager reads notifications again, which it did not do during the reloads. The first
    // notification that it reads is the start of a reload.
    let heard = manager.until(|message| message.starts_with("STATUS=") || message == "READY=1");
    assert_eq!(heard.first().map(String::as_str), Some("RELOADING=1"), "{heard:?}");
    host.signal(Signal::TERM);
    manager.until(|message| message == "STOPPING=1");
    assert_eq!(host.ended().code(), Some(0));
}

/// The service sends READY=1 even if it can't serve any GPU. Otherwise systemd would wait for the start until its time limit.
#[test]
fn ready_is_said_even_without_a_driver() {
    let mut host = Host::new("tesla-p40");
    host.clear("driver");
    let mut manager = ServiceManager::of(&mut host);
    host.start();
    let heard = manager.until(|message| message == "READY=1");
    assert!(heard.iter().any(|message| message.starts_with("STATUS=failed; ")), "{heard:?}");
    assert_eq!(host.stop().code(), Some(0));
}

/// Kills the service, and starts another with a new topology. The control daemons that still run do not fit this topology.
fn started_with_another_topology(host: &mut Host) -> ServiceManager {
    host.signal(Signal::KILL);
    host.ended();
    host.configure("cuda_mps_topology: per_gpu");
    let manager = ServiceManager::of(host);
    host.start();
    manager
}

/// The new control daemon may have to wait for days for the clients of the present one. A start or a reload must not wait for
/// them, since systemd would end a start that takes too long, again and again.
#[test]
fn ready_does_not_wait_for_clients() {
    let mut host = Host::serving("h200");
    let mut client = host.only_client();
    let mut manager = started_with_another_topology(&mut host);
    let heard = manager.until(|message| message == "READY=1");
    let last = heard.iter().rev().find(|message| message.starts_with("STATUS=")).unwrap();
    assert!(
        last.starts_with("STATUS=degraded: 0 slices on 0 of 1 GPUs; 1 of 1 GPUs not served"),
        "{heard:?}"
    );
    assert!(
        last.contains("control daemon shared still has the GPU: this control daemon is no longer needed"),
        "{heard:?}"
    );

    host.signal(Signal::HUP);
    manager.until(|message| message == "RELOADING=1");
    manager.until(|message| message == "READY=1");
    assert!(client.try_wait().unwrap().is_none());
    client.kill().unwrap();
    client.wait().unwrap();
    manager.until(|message| message == "STATUS=ready: 4 slices on 1 of 1 GPUs");
    assert_eq!(host.stop().code(), Some(0));
}

#[test]
fn ready_waits_for_the_next_control_daemon() {
    let mut host = Host::serving("h200");
    host.wait_for_state("ready");
    let mut manager = started_with_another_topology(&mut host);
    let heard = manager.until(|message| message == "READY=1");
    assert!(heard.contains(&"STATUS=ready: 4 slices on 1 of 1 GPUs".to_owned()), "{heard:?}");
    assert!(!heard.iter().any(|message| message.starts_with("STATUS=failed")), "{heard:?}");
    assert_eq!(host.stop().code(), Some(0));
}

/// A control daemon must not inherit the service's variables for systemd. With the path of the notification socket it could
/// send false notifications, and the variables of the watchdog would tell it to send WATCHDOG=1.
#[test]
fn the_control_daemon_does_not_inherit_the_socket() {
    let mut host = Host::new("tesla-p40");
    let mut manager = ServiceManager::of(&mut host);
    host.set("WATCHDOG_USEC", "60000000");
    host.set("MALLOC_ARENA_MAX", "1");
    host.start();
    manager.until(|message| message == "READY=1");
    let pid = crate::support::host::control_pid(&host.wait_for_state("ready"));
    let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap();
    let environment = String::from_utf8(environment).unwrap();
    assert!(environment.contains("CUDA_MPS_PIPE_DIRECTORY="), "{environment}");
    for name in ["NOTIFY_SOCKET=", "WATCHDOG_USEC=", "RUNTIME_DIRECTORY=", "MALLOC_ARENA_MAX="] {
        assert!(!environment.split('\0').any(|variable| variable.starts_with(name)), "{name}");
    }
    assert_eq!(host.stop().code(), Some(0));
}
