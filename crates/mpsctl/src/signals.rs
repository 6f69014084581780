//! The signals that subcommands catch.

use std::future::poll_fn;
use std::io;
use std::task::Poll;

use rustix::process::Signal;
use tokio::signal::unix::{self, SignalKind};

use super::{Error, Result};
use common::host::proc;

/// Signals that do not end this process while this value exists.
pub(super) struct CaughtSignals(Vec<(Signal, unix::Signal)>);

impl CaughtSignals {
    /// A signal that was ignored when this process started stays ignored: `nohup` and a shell's `&` start programs with ignored
    /// signals.
    pub(super) fn catch(signals: &[Signal]) -> Result<Self> {
        let own = proc::status(proc::OWN);
        let ignored = |signal: Signal| own.as_ref().is_ok_and(|own| own.ignores(signal.as_raw()));
        let caught = signals.iter().copied().filter(|signal| !ignored(*signal));
        let caught = caught.map(|signal| Ok((signal, unix::signal(SignalKind::from_raw(signal.as_raw()))?)));
        caught.collect::<io::Result<_>>().map(Self).map_err(|error| Error::System("watch for signals", error))
    }

    pub(super) async fn next(&mut self) -> Signal {
        poll_fn(|context| {
            let arrived = self
                .0
                .iter_mut()
                .find_map(|(signal, stream)| stream.poll_recv(context).is_ready().then_some(*signal));
            arrived.map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }
}
