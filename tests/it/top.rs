//! Tests of `yunion-mpsctl top` on a terminal.

use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::support::client::Client;
use crate::support::host::{Host, binaries, process_state, signal_pid, text};
use crate::support::screen::Screen;
use crate::support::wait::wait_for;

fn top(host: &Host) -> Command {
    let mut command = host.command(binaries().join("yunion-mpsctl"));
    command.arg("top").env_remove("NO_COLOR");
    command
}

fn started(host: &Host, rows: u16, columns: u16) -> Screen {
    let screen = Screen::start(&top(host), rows, columns);
    screen.wait_for("Slices ");
    screen.wait_until("the clients", |text| text.contains(" client"));
    screen
}

fn client(host: &Host, device: &str) -> Client {
    host.served(&mut host.program_of(device, &["hold", "600"]))
}

fn longest(text: &str) -> usize {
    text.lines().map(|line| line.trim_end().chars().count()).max().unwrap()
}

fn shown_pids(text: &str) -> Vec<u32> {
    let clients = text.lines().skip_while(|line| !line.starts_with("Clients")).skip(2);
    clients
        .map_while(|line| line.trim_start_matches(['>', ' ']).split_whitespace().next()?.parse().ok())
        .collect()
}

#[test]
fn clients_come_are_sorted_and_are_ended() {
    let host = Host::serving("h200");
    let devices = host.list();
    let device = |at: usize| devices[at]["addr"].as_str().unwrap().to_owned();
    let mut screen = started(&host, 40, 120);
    screen.wait_for("0 clients");
    screen.wait_for("ready");
    screen.wait_for("control daemon shared is ready");

    // `top` must show a new client within 2 s. On a busy machine the service may need longer to list it. So the 2 s begin when
    // the service lists it.
    let mut one = Client::start(&mut host.program_of(&device(1), &["hold", "600"]));
    host.wait_for_only_client();
    let listed = Instant::now();
    screen.wait_for(&one.id().to_string());
    assert!(listed.elapsed() < Duration::from_secs(2), "{:?}", listed.elapsed());
    let other = client(&host, &device(0));
    let mut pids = vec![one.id(), other.id()];
    pids.sort_unstable();
    screen.wait_until("both clients by PID", |text| shown_pids(text) == pids);

    // Tab selects the table of clients, and `r` reverses its order.
    screen.keys("\tr");
    pids.reverse();
    screen.wait_until("both reversed", |text| shown_pids(text) == pids && text.contains("by PID, reversed"));
    screen.keys("rss");
    let by_slice = [other.id(), one.id()];
    screen.wait_until("both by slice", |text| shown_pids(text) == by_slice && text.contains("by SLICE"));

    // Tab and `jj` select the second slice. `top` then shows only the clients of this slice.
    screen.keys("\tjj");
    let of = format!("Clients of {} (1)", device(1));
    screen.wait_until("one slice", |text| text.contains(&of) && shown_pids(text) == [one.id()]);
    screen.keys("k");
    screen.wait_until("the other", |text| shown_pids(text) == [other.id()]);
    screen.keys("j\t");

    let question = format!("End the GPU work of process {} (", one.id());
    screen.keys("t");
    screen.wait_until("a question", |text| text.contains(&question) && text.contains("? y/N"));
    screen.keys("n");
    screen.wait_for(&format!("The GPU work of process {} was not ended.", one.id()));
    screen.keys("K");
    screen.wait_for(&question);
    screen.keys("y");
    screen.wait_for(&format!("Process {} uses no GPU any more.", one.id()));
    wait_for("the client's end", || one.try_wait().unwrap());
    screen.wait_until("none of the slice", |text| shown_pids(text).is_empty());
    screen.wait_for("1 client ");

    screen.keys("q");
    assert_eq!(screen.ended(), 0);
    screen.wait_until_restored();
    // Green is the numbered colour of the terminal's palette, and no RGB value.
    let written = screen.written();
    assert!(written.contains("\u{1b}[38;5;2") && !written.contains("38;2;"), "{written:?}");
}

#[test]
fn a_narrow_terminal_shows_less_and_names_it() {
    let host = Host::serving("h200x8");
    let _client = client(&host, host.list()[3]["addr"].as_str().unwrap());
    let mut screen = started(&host, 40, 160);
    screen.wait_until("everything", |text| text.contains("CONTAINER") && !text.contains("no room for"));
    screen.resize(20, 60);
    // The test may read the screen while `top` draws it. So the test waits for each part.
    let parts = [
        "ready",
        "driver ",
        "1 client",
        "no room for GPU",
        "Slices 1-",
        "> all",
        "Clients (1)",
        "Last events",
        "q quit",
    ];
    screen.wait_until("less", |text| parts.iter().all(|part| text.contains(part)) && longest(text) <= 60);
    screen.resize(40, 160);
    screen.wait_until("everything again", |text| text.contains("CONTAINER") && !text.contains("no room for"));
    screen.keys("h");
    screen.wait_for("reverse the order");
    screen.keys("xq");
    assert_eq!(screen.ended(), 0);
    screen.wait_until_restored();
}

#[test]
fn the_service_may_be_started_again() {
    let mut host = Host::new("tesla-p40");
    let mut screen = Screen::start(&top(&host), 30, 100);
    screen.wait_for("yunion-mps-daemon is not running; waiting for it");
    for _ in 0..2 {
        host.start();
        screen.wait_until("ready", |text| {
            text.contains("  ready  ") && text.contains("not enforced") && !text.contains("waiting")
        });
        host.stop();
        screen.wait_until("old rows", |text| {
            text.contains("not running; waiting for it")
                && text.contains("; as of ")
                && text.contains("00:06.0-3")
        });
    }
    // While the service does not run, `top` still handles keys.
    screen.keys("\u{1b}");
    assert_eq!(screen.ended(), 0);
    screen.wait_until_restored();
}

#[test]
fn keys_work_while_a_question_takes_its_time() {
    let host = Host::serving("tesla-p40");
    let _client = client(&host, "00:06.0-1");
    let mut screen = started(&host, 30, 100);
    screen.wait_for("1 client ");
    // SIGSTOP keeps the service from answering `top`. The keys must work all the same.
    host.signal(Signal::STOP);
    screen.wait_for("; as of ");
    screen.keys("jj");
    screen.wait_for("Clients of 00:06.0-1 (1)");
    screen.keys("h");
    screen.wait_for("reverse the order");
    screen.keys("q");
    host.signal(Signal::CONT);
    screen.wait_until("new rows", |text| text.contains("ready") && !text.contains("as of"));
    screen.keys("\u{3}");
    assert_eq!(screen.ended(), 0);
    screen.wait_until_restored();
}

#[test]
fn the_terminal_is_given_back_after_a_signal_and_for_the_shell() {
    let host = Host::serving("tesla-p40");
    for (signal, status) in [(Signal::TERM, 143), (Signal::HUP, 129), (Signal::INT, 0)] {
        let mut screen = started(&host, 24, 80);
        assert!(!screen.is_restored());
        signal_pid(screen.pid(), signal);
        assert_eq!(screen.ended(), status);
        screen.wait_until_restored();
    }
    // In a shell, Ctrl-Z would stop `top`. No shell has started this `top`, so its process group is orphaned, and the kernel
    // ignores a stop by Ctrl-Z. SIGSTOP stops `top` instead.
    let mut screen = started(&host, 24, 80);
    signal_pid(screen.pid(), Signal::STOP);
    wait_for("a stopped program", || (process_state(screen.pid()) == Some('T')).then_some(()));
    signal_pid(screen.pid(), Signal::CONT);
    screen.keys("\u{1a}h");
    screen.wait_for("reverse the order");
    screen.keys("xq");
    assert_eq!(screen.ended(), 0);
    screen.wait_until_restored();
}

#[test]
fn without_colours_there_are_none() {
    let host = Host::serving("tesla-p40");
    let mut screen = Screen::start(top(&host).env("NO_COLOR", "1"), 24, 80);
    screen.wait_for("not enforced");
    screen.keys("q");
    assert_eq!(screen.ended(), 0);
    screen.wait_until_restored();
    let written = screen.written();
    let is_coloured = ["38;", "31m", "32m", "33m"].iter().any(|colour| written.contains(colour));
    assert!(!is_coloured && written.contains("\u{1b}[1m"), "{written:?}");
}

#[test]
fn top_needs_a_terminal() {
    let host = Host::new("tesla-p40");
    let output = top(&host).output().unwrap();
    let said = text(&output);
    assert_eq!(output.status.code(), Some(2), "{said}");
    for part in ["top needs a terminal", "yunion-mpsctl status", "yunion-mpsctl list"] {
        assert!(said.contains(part), "{said}");
    }
    assert!(!said.contains('\u{1b}'), "{said:?}");
}
