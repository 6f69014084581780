//! Tests of yunion-mpsctl's output on a terminal.

use common::published::events::Event;

use crate::support::bus::printed;
use crate::support::host::mpsctl;
use crate::support::service::Service;
use crate::support::snapshot::{P40, p40_board, serving, tesla_p40};

async fn shown(service: &Service, columns: u32, variables: &[(&str, &str)], arguments: &str) -> String {
    let program = mpsctl();
    // A shell would set `COLUMNS` itself. So `exec env` sets the variables after the shell.
    let variables: String = variables.iter().map(|(name, value)| format!("{name}={value} ")).collect();
    let script = format!("stty cols {columns} rows 50 && exec env {variables}'{program}' {arguments}");
    let mut command = service.bus.command("script");
    command.args(["-qec", &script, "/dev/null"]);
    command
        .env("TERM", "xterm-256color")
        .env("TZ", "CET-1")
        .env_remove("COLUMNS")
        .env_remove("NO_COLOR")
        .env("SHELL", "/bin/sh");
    printed(&mut command).await
}

fn longest(screen: &str) -> usize {
    let mut text = String::new();
    let mut inside_a_colour = false;
    for c in screen.chars().filter(|c| *c != '\r') {
        match c {
            '\u{1b}' => inside_a_colour = true,
            'm' if inside_a_colour => inside_a_colour = false,
            c if !inside_a_colour => text.push(c),
            _ => {}
        }
    }
    text.lines().map(|line| line.chars().count()).max().unwrap()
}

async fn service() -> Service {
    let mut lost = tesla_p40("00:07.0", "GPU-2");
    lost.healthy = false;
    lost.reason = "GPU is lost; nothing but a reset of the GPU or of the host heals this".to_owned();
    Service::start(serving(vec![tesla_p40("00:06.0", P40), lost])).await
}

#[tokio::test]
async fn no_line_is_longer_than_the_terminal_is_wide() {
    let service = service().await;
    for arguments in ["list", "list --gpus", "status"] {
        for columns in [60, 80, 120, 200] {
            let screen = shown(&service, columns, &[], arguments).await;
            let longest = longest(&screen);
            assert!(longest <= usize::try_from(columns).unwrap(), "{longest} > {columns}:\n{screen}");
            assert!(screen.contains("00:06.0") && screen.contains("HEALTH"), "{screen}");
        }
        // `COLUMNS` has precedence over the width of the terminal.
        let screen = shown(&service, 200, &[("COLUMNS", "80")], arguments).await;
        assert!((60..=80).contains(&longest(&screen)), "{screen}");
    }
    let all = shown(&service, 300, &[], "list -o wide").await;
    let few = shown(&service, 80, &[], "list -o wide").await;
    assert!(all.contains("PIPE DIRECTORY") && !all.contains("no room"), "{all}");
    assert!(few.contains("(no room for PIPE DIRECTORY,"), "{few}");
    for arguments in ["list", "list --gpus", "status"] {
        let screen = shown(&service, 80, &[], arguments).await;
        assert!(!screen.contains("no room"), "{screen}");
    }
    let table = shown(&service, 80, &[], "list --platform").await;
    assert!(longest(&table) > 200, "{table}");
}

#[tokio::test]
async fn colours_are_for_terminals_that_want_them() {
    let service = service().await;
    for arguments in ["list", "list --gpus", "status"] {
        let screen = shown(&service, 200, &[], arguments).await;
        // Colours are numbers in the terminal's own palette: 3 is yellow, and 1 is red.
        let green = ("status" == arguments).then_some("\u{1b}[38;5;3m");
        for colour in ["\u{1b}[38;5;3mnot enforced", "\u{1b}[38;5;1mnot served"].into_iter().chain(green) {
            assert!(screen.contains(colour), "{arguments}: {screen:?}");
        }
        assert!(shown(&service, 200, &[("NO_COLOR", "")], arguments).await.contains('\u{1b}'));
        for plain in [("NO_COLOR", "1"), ("TERM", "dumb")] {
            let screen = shown(&service, 200, &[plain], arguments).await;
            assert!(!screen.contains('\u{1b}') && screen.contains("not served"), "{plain:?}: {screen:?}");
        }
        let json = shown(&service, 80, &[], &format!("{arguments} --json")).await;
        assert!(!json.contains('\u{1b}'), "{json:?}");
        let mut piped = service.bus.command(mpsctl());
        piped.args(arguments.split(' ')).env("CLICOLOR_FORCE", "1");
        let piped = printed(&mut piped).await;
        assert!(!piped.contains('\u{1b}') && !piped.contains("no room"), "{piped:?}");
        // In a pipe, the reason for the unserved GPU is on one line, and appears once for the whole GPU.
        assert_eq!(piped.matches("nothing but a reset of the GPU").count(), 1, "{piped}");
        // `COLUMNS` counts for a pipe too. The program watch(1) runs its command with a pipe as stdout, and sets `COLUMNS` to
        // the width of the terminal.
        let mut narrow = service.bus.command(mpsctl());
        narrow.args(arguments.split(' ')).env("COLUMNS", "60");
        let narrow = printed(&mut narrow).await;
        assert!(longest(&narrow) <= 60 && !narrow.contains('\u{1b}'), "{narrow:?}");
    }
}

#[tokio::test]
async fn times_are_those_of_the_place() {
    let mut board = p40_board();
    let at = std::time::UNIX_EPOCH + std::time::Duration::from_secs(1_795_264_496);
    board.control_daemons[0].since = at;
    board.events = board.events.iter().map(|event| Event { at, ..event.clone() }).collect();
    let service = Service::start(board).await;
    let screen = shown(&service, 200, &[], "status").await;
    assert!(screen.contains("\n  2026-11-21 13:34:56  "), "{screen}");
    let wide = shown(&service, 200, &[], "status -o wide").await;
    assert!(wide.contains("  2026-11-21 13:34:56  false"), "{wide}");
    let screen = shown(&service, 200, &[("TZ", "CST-8")], "status").await;
    assert!(screen.contains("2026-11-21 20:34:56"), "{screen}");
}
