//! Tests of commands that wait for the service or follow it: `is-ready`, `events --follow` and `status --watch`.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::process::Stdio;
use std::time::Duration;

use common::published::snapshot::{Snapshot, State};
use rustix::process::Signal;
use serde_json::Value;

use crate::support::bus::{PrivateBus, ctl, ended};
use crate::support::client::Client;
use crate::support::host::{Host, binaries, signal_pid};
use crate::support::screen::Screen;
use crate::support::service::Service;
use crate::support::snapshot::{p40_board, starting};
use crate::support::wait::wait_for;

fn degraded() -> Snapshot {
    Snapshot {
        state: State::Degraded,
        reason: "1 of 2 GPUs not served\u{1b}[2J".to_owned(),
        generation: 7,
        ..p40_board()
    }
}

#[tokio::test]
async fn is_ready_says_the_state_by_its_exit_status() {
    let bus = PrivateBus::start();
    let (status, said, complained) = ended(&mut ctl(&bus, &["is-ready"])).await;
    assert_eq!((status, said.as_str()), (Some(3), ""));
    assert!(complained.contains("yunion-mps-daemon is not running"), "{complained}");
    let quiet = ended(&mut ctl(&bus, &["is-ready", "--quiet"])).await;
    assert_eq!(quiet, (Some(3), String::new(), String::new()));

    let mut service = Service::start_on(bus, starting()).await;
    let broken = "degraded: 1 of 2 GPUs not served\u{fffd}[2J\n";
    for (snapshot, expected, line) in [
        (starting(), 1, "starting: looking for GPUs\n"),
        (degraded(), 1, broken),
        (Snapshot { generation: 9, ..p40_board() }, 0, "ready\n"),
    ] {
        service.publish(snapshot).await;
        let told = ended(&mut ctl(&service.bus, &["is-ready"])).await;
        assert_eq!(told, (Some(expected), line.to_owned(), String::new()));
        let quiet = ended(&mut ctl(&service.bus, &["is-ready", "-q"])).await;
        assert_eq!(quiet, (Some(expected), String::new(), String::new()));
    }
}

#[tokio::test]
async fn is_ready_waits_for_the_service_and_no_longer_than_it_may() {
    let bus = PrivateBus::start();
    let begun = std::time::Instant::now();
    let (status, _, complained) = ended(&mut ctl(&bus, &["is-ready", "--wait", "1"])).await;
    assert!(status == Some(3) && complained.contains("is not running"), "{status:?} {complained}");
    assert!(begun.elapsed() >= Duration::from_secs(1), "{:?}", begun.elapsed());

    let mut waiting = ctl(&bus, &["is-ready", "--wait", "600"]);
    let waiting = tokio::spawn(async move { ended(&mut waiting).await });
    let mut service = Service::start_on(bus, starting()).await;
    let late = ended(&mut ctl(&service.bus, &["is-ready", "--wait", "1"])).await;
    assert_eq!(late, (Some(1), "starting: looking for GPUs\n".to_owned(), String::new()));
    assert!(!waiting.is_finished());
    service.publish(Snapshot { generation: 2, ..p40_board() }).await;
    assert_eq!(waiting.await.unwrap(), (Some(0), "ready\n".to_owned(), String::new()));
}

/// A yunion-mpsctl that follows the service, and the files with its output. The program ends when this value is dropped.
struct Follower {
    program: Client,
    files: tempfile::TempDir,
}

impl Follower {
    fn start(host: &Host, arguments: &[&str]) -> Self {
        let files = tempfile::tempdir().unwrap();
        let file = |name: &str| File::create(files.path().join(name)).unwrap();
        let mut command = host.command(binaries().join("yunion-mpsctl"));
        command.args(arguments).stdout(file("out")).stderr(file("err"));
        Self { program: Client::start(&mut command), files }
    }

    fn text(&self, name: &str) -> String {
        fs::read_to_string(self.files.path().join(name)).unwrap()
    }

    fn wait_for(&self, name: &str, text: &str) {
        wait_for(text, || self.text(name).contains(text).then_some(()));
    }

    /// Counts the messages which say that the service does not run. If the service ends before it answers a request, the
    /// program also prints another message, which does not count.
    fn absences(&self) -> usize {
        self.text("err").matches(NOT_RUNNING).count()
    }

    fn interrupted(&mut self) -> Option<i32> {
        signal_pid(self.program.id(), Signal::INT);
        self.program.wait().unwrap().code()
    }
}

const NOT_RUNNING: &str = "yunion-mpsctl: yunion-mps-daemon is not running; waiting for it\n";

#[test]
fn events_are_followed_over_a_restart_of_the_service() {
    let mut host = Host::new("tesla-p40");
    let mut text = Follower::start(&host, &["events", "--follow"]);
    let mut json = Follower::start(&host, &["events", "--follow", "--json"]);
    for follower in [&text, &json] {
        follower.wait_for("err", NOT_RUNNING);
    }
    for starts in 1..=2 {
        let before = [&text, &json].map(|follower| follower.text("out").len());
        host.start();
        host.wait_for_state("ready");
        let all = String::from_utf8(host.mpsctl(&["events"]).stdout).unwrap();
        // The order of the events differs between starts of the service. So the test waits for the event that came last in this
        // start.
        let (_, last) = all.lines().last().unwrap().split_once("  ").unwrap();
        for (follower, before) in [&text, &json].into_iter().zip(before) {
            wait_for(last, || follower.text("out")[before..].contains(last).then_some(()));
        }
        assert_eq!(text.absences(), starts);
        host.stop();
        for follower in [&text, &json] {
            wait_for("an absence that is told", || (follower.absences() == starts + 1).then_some(()));
        }
    }
    assert_eq!((text.interrupted(), json.interrupted()), (Some(0), Some(0)));
    let (text, json) = (text.text("out"), json.text("out"));
    assert!(text.lines().all(|line| line.starts_with("20")), "{text}");
    for line in json.lines() {
        let event: Value = serde_json::from_str(line).unwrap();
        assert!(event["at"].is_u64() && event["text"].is_string(), "{line}");
    }
    let mut lines: Vec<&str> = json.lines().collect();
    lines.sort_unstable();
    lines.dedup();
    assert_eq!(lines.len(), json.lines().count(), "{json}");
}

#[test]
fn a_reader_that_leaves_ends_the_following() {
    let host = Host::serving("tesla-p40");
    let mut command = host.command(binaries().join("yunion-mpsctl"));
    command.args(["events", "--follow"]).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut program = Client::start(&mut command);
    let mut reader = BufReader::new(program.stdout.take().unwrap());
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    assert!(line.starts_with("20"), "{line}");
    drop(reader);
    // yunion-mpsctl notices the closed pipe although no further event comes.
    let status = wait_for("the end of yunion-mpsctl", || program.try_wait().unwrap());
    let mut complaint = String::new();
    program.stderr.take().unwrap().read_to_string(&mut complaint).unwrap();
    assert_eq!((status.code(), complaint.as_str()), (Some(0), ""));
}

#[test]
fn a_watched_status_is_drawn_again_and_fits_the_terminal() {
    let mut host = Host::serving("tesla-p40");
    let mut command = host.command(binaries().join("yunion-mpsctl"));
    let mut screen = Screen::start(command.args(["status", "--watch"]), 40, 120);
    let first = screen.wait_for("control daemon shared is ready");
    assert!(first.starts_with("yunion-mpsctl status at 20") && first.contains("ready"), "{first}");
    screen.wait_until("another time", |text| text.lines().next() != first.lines().next());
    screen.resize(12, 60);
    screen.wait_for("lines more; yunion-mpsctl status -o wide shows all)");
    screen.resize(40, 120);
    host.stop();
    let away = screen.wait_for("yunion-mps-daemon is not running; waiting for it");
    assert!(!away.contains("control daemon"), "{away}");
    host.start();
    screen.wait_for("control daemon shared is ready");
    screen.keys("\u{3}");
    assert_eq!(screen.ended(), 0);
    screen.wait_until_restored();
}

#[test]
fn a_watched_status_that_cannot_be_drawn_is_json_or_an_error() {
    let mut host = Host::serving("tesla-p40");
    let refused = host.mpsctl(&["status", "--watch"]);
    let complaint = String::from_utf8(refused.stderr).unwrap();
    assert!(refused.status.code() == Some(2) && refused.stdout.is_empty(), "{complaint}");
    assert!(complaint.contains("status --watch draws on a terminal"), "{complaint}");

    let mut follower = Follower::start(&host, &["status", "--watch", "--json"]);
    follower.wait_for("out", r#""state":"ready""#);
    host.stop();
    follower.wait_for("err", NOT_RUNNING);
    host.start();
    wait_for("ready again", || {
        let text = follower.text("out");
        let last: Value = serde_json::from_str(text.lines().last()?).ok()?;
        (last["service"]["state"] == "ready" && text.lines().count() > 1).then_some(())
    });
    assert_eq!(follower.interrupted(), Some(0));
    let text = follower.text("out");
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines.windows(2).all(|pair| pair[0] != pair[1]), "{text}");
}
