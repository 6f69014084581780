//! The moments at which the service publishes something else, as yunion-mpsctl hears of them.

use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::sync::watch;
use tokio::task::JoinSet;
use zbus::export::futures_core::Stream;
use zbus::message::Type;
use zbus::{Connection, MatchRule, MessageStream};

use super::{MANAGER, NAME};

/// Tells that the service publishes something else, that it has come, or that it has gone. Only a
/// question finds out the change.
#[derive(Debug)]
pub struct ServiceChanges {
    told: watch::Receiver<()>,
    /// Takes every signal at once: a signal that waits would hold up the answers behind it.
    _hears: JoinSet<()>,
}

impl ServiceChanges {
    pub async fn on(connection: &Connection) -> zbus::Result<Self> {
        let of_service = MatchRule::builder().msg_type(Type::Signal).sender(NAME).path(MANAGER).build()?;
        let of_bus = MatchRule::builder()
            .msg_type(Type::Signal)
            .sender("org.freedesktop.DBus")
            .member("NameOwnerChanged")
            .arg(0, NAME)
            .build()?;
        let mut streams = [
            MessageStream::for_match_rule(of_service, connection, None).await?,
            MessageStream::for_match_rule(of_bus, connection, None).await?,
        ];
        let (tell, told) = watch::channel(());
        let mut hears = JoinSet::new();
        hears.spawn(async move {
            while std::future::poll_fn(|context| heard(&mut streams, context)).await {
                tell.send_replace(());
            }
        });
        Ok(Self { told, _hears: hears })
    }

    /// Returns once something has changed since the last call. False: the bus has closed the connection, and nothing more
    /// is told.
    pub async fn next(&mut self) -> bool {
        self.told.changed().await.is_ok()
    }
}

/// Whether there are signals, or no stream any more.
fn heard(streams: &mut [MessageStream], context: &mut Context<'_>) -> Poll<bool> {
    let mut is_heard = false;
    for stream in streams {
        while let Poll::Ready(next) = Pin::new(&mut *stream).poll_next(context) {
            if next.is_none() {
                return Poll::Ready(false);
            }
            is_heard = true;
        }
    }
    if is_heard { Poll::Ready(true) } else { Poll::Pending }
}
