//! The messages of the service to the service manager, and the moments at which the service sends them.

use rustix::process::Signal;

use crate::support::host::Host;
use crate::support::service_manager::ServiceManager;

/// The service sends READY=1 only when the GPUs are ready, and sends its messages from the start to the stop in the right
/// order.
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

    // The messages about a reload end with READY=1 even if the service refuses the reload.
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

/// The service sends READY=1 only when it has its D-Bus name. Meanwhile the service sends the signs of life for the watchdog.
#[test]
fn ready_waits_for_the_bus() {
    let mut host = Host::new("tesla-p40");
    host.stop_bus();
    let mut manager = ServiceManager::of(&mut host);
    host.set("WATCHDOG_USEC", "300000");
    host.start();
    let mut heard = manager.until(|message| message == "STATUS=ready: 4 slices on 1 of 1 GPUs");
    // The service's main loop sends WATCHDOG=1. After two further of these messages the loop has run at least once since the
    // status was ready.
    for _ in 0..2 {
        heard.extend(manager.until(|message| message == "WATCHDOG=1"));
    }
    assert!(!heard.contains(&"READY=1".to_owned()), "{heard:?}");
    assert_eq!(host.compute_mode(0), "Exclusive_Process");

    host.restart_bus();
    manager.until(|message| message == "READY=1");
    // From now on no program reads the messages of the service, and the service must go on nevertheless.
    drop(manager);
    let status = host.json(&["status"]).expect("READY=1 came before the name on the bus");
    assert_eq!(status["service"]["state"], "ready");
    assert_eq!(host.stop().code(), Some(0));
}

/// A service manager that does not read the service's messages does not delay the service, although the kernel stores only
/// ten messages and would block the sender of the next one.
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
    // When the service manager reads again, the first message that it gets is about the last reload.
    let heard = manager.until(|message| message.starts_with("STATUS=") || message == "READY=1");
    assert_eq!(heard.first().map(String::as_str), Some("RELOADING=1"), "{heard:?}");
    host.signal(Signal::TERM);
    manager.until(|message| message == "STOPPING=1");
    assert_eq!(host.ended().code(), Some(0));
}

/// The service also sends READY=1 if no GPU can be served, since systemd would otherwise wait for the start in vain.
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

/// Kills the service, and starts a service with another topology, which needs none of the control daemons that the former
/// service has left.
fn started_with_another_topology(host: &mut Host) -> ServiceManager {
    host.signal(Signal::KILL);
    host.ended();
    host.configure("cuda_mps_topology: per_gpu");
    let manager = ServiceManager::of(host);
    host.start();
    manager
}

/// The next control daemon of a GPU may have to wait for days until the present clients of the GPU have ended. A start or a
/// reload of the service does not wait for the end of clients: systemd would end a start that takes too long, again and
/// again.
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

/// If a former control daemon has no clients, the service starts the next control daemon at once, and sends READY=1 when the
/// next control daemon is ready.
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

/// A control daemon does not inherit the service's environment variables for the service manager: with the socket it could
/// send false messages, and from the watchdog's variables it would conclude that it must give signs of life.
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
