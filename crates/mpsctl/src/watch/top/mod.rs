//! `yunion-mpsctl top`: the main loop.

use std::io::Write;
use std::time::Duration;

use crossterm::event::{Event, read};
use ratatui_core::layout::Rect;
use ratatui_core::terminal::{Terminal, TerminalOptions, Viewport};
use ratatui_crossterm::CrosstermBackend;
use rustix::process::{Signal, getpid, kill_process};
use tokio::sync::mpsc::{self, UnboundedSender};
use tokio::time::interval;

use self::draw::draw;
use self::model::{Model, TopAnswers};
use self::state::{Action, TopState};
use self::terminal::Entered;
use crate::screen::size;
use crate::show::table::{colour, is_drawn_on};
use crate::signals::CaughtSignals;
use crate::{Error, FAILED, Result};
use common::bus::proxy::{BusError, Listed};
use common::bus::rows::Client;

mod ask;
mod draw;
mod model;
mod state;
mod terminal;

/// The time after which the screen is drawn again if nothing changes, since the screen shows a clock and ages.
const PERIOD: Duration = Duration::from_secs(1);

#[derive(Debug)]
enum TopEvent {
    Published(Result<TopAnswers, BusError>),
    Clients(Result<Vec<Listed<Client>>, BusError>),
    /// The result of a request to end the GPU work of the process with this PID.
    Ended(u32, Result<(), BusError>),
    /// An event of the keyboard, or an error after which no more keys come.
    Typed(std::io::Result<Event>),
}

pub(crate) async fn top(out: &mut dyn Write) -> Result<u8> {
    if !is_drawn_on() || !rustix::termios::isatty(rustix::stdio::stdin()) {
        return Err(Error::Usage(
            "top needs a terminal for its screen and for keys; yunion-mpsctl status and yunion-mpsctl list print the \
             same values"
                .to_owned(),
        ));
    }
    let mut signals =
        CaughtSignals::catch(&[Signal::TERM, Signal::HUP, Signal::INT, Signal::QUIT, Signal::CONT])?;
    let _entered = Entered::enter()?;
    let viewport = Viewport::Fixed(area());
    let mut screen = Terminal::with_options(CrosstermBackend::new(out), TerminalOptions { viewport })?;
    let (sender, mut events) = mpsc::unbounded_channel();
    read_keys(sender.clone());
    let mut tasks = ask::start(&sender);
    let mut ticks = interval(PERIOD);
    let (mut model, mut state, has_colour) = (Model::default(), TopState::default(), colour());
    loop {
        if screen.get_frame().area() != area() {
            screen.resize(area())?;
        }
        screen.draw(|frame| draw(frame, &model, &state, has_colour))?;
        let mut next = tokio::select! {
            signal = signals.next() => match signal {
                Signal::CONT => {
                    Entered::interrupt(|| ())?;
                    screen.resize(area())?;
                    None
                }
                Signal::INT => return Ok(0),
                signal => return Ok(u8::try_from(128 + signal.as_raw()).unwrap_or(FAILED)),
            },
            next = events.recv() => next,
            _ = ticks.tick() => None,
        };
        // All events that wait are handled before the screen is drawn again.
        while let Some(one) = next {
            match take(one, &mut model, &mut state)? {
                Action::Draw => {}
                Action::Quit => return Ok(0),
                Action::Stop => {
                    Entered::interrupt(|| {
                        let _ = kill_process(getpid(), Signal::TSTP);
                    })?;
                    screen.resize(area())?;
                }
                Action::End(pid) => ask::end(pid, &sender, &mut tasks),
            }
            next = events.try_recv().ok();
        }
    }
}

/// The size of the screen. If the terminal does not report its size, as on a serial line, the terminal library's own function
/// returns a wrong size.
fn area() -> Rect {
    let (columns, rows) = size();
    Rect::new(0, 0, columns, rows)
}

fn take(events: TopEvent, model: &mut Model, state: &mut TopState) -> Result<Action> {
    match events {
        TopEvent::Published(answer) => model.publish(answer),
        TopEvent::Clients(answer) => model.list(answer),
        TopEvent::Ended(pid, done) => state.ended(pid, &done),
        TopEvent::Typed(Ok(Event::Key(key))) => return Ok(state.key(key, model)),
        // Drawing reads the size of the terminal, so a change of the size needs no handling here.
        TopEvent::Typed(Ok(_)) => {}
        TopEvent::Typed(Err(error)) => return Err(Error::Failed(format!("can't read keys: {error}"))),
    }
    state.settle(model);
    Ok(Action::Draw)
}

/// Reads keys in a separate thread, since a read can't be interrupted. The thread ends with the program.
fn read_keys(events: UnboundedSender<TopEvent>) {
    std::thread::spawn(move || {
        loop {
            let typed = read();
            let is_last = typed.is_err();
            if events.send(TopEvent::Typed(typed)).is_err() || is_last {
                return;
            }
        }
    });
}

#[cfg(test)]
mod tests;
