//! The signals that say that the service has published something new, for yunion-mpsctl.

use tokio::sync::watch;
use tokio::task::JoinSet;
use zbus::export::ordered_stream::OrderedStreamExt;
use zbus::{Connection, MatchRule, MessageStream};

use super::{MANAGER, NAME};

/// Tells yunion-mpsctl that the service has published something new, has started, or has ended. A signal of the service does not
/// say which value has changed.
#[derive(Debug)]
pub struct ServiceChanges {
    told: watch::Receiver<()>,
    /// The task that receives the service's signals. The task takes every signal at once: an unread signal would delay the
    /// answers behind the signal.
    _hears: JoinSet<()>,
}

impl ServiceChanges {
    pub async fn on(connection: &Connection) -> zbus::Result<Self> {
        let of_service = format!("type='signal',sender='{NAME}',path='{MANAGER}'");
        let of_bus =
            format!("type='signal',sender='org.freedesktop.DBus',member='NameOwnerChanged',arg0='{NAME}'");
        let (tell, told) = watch::channel(());
        let mut hears = JoinSet::new();
        for rule in [of_service, of_bus] {
            let rule = MatchRule::try_from(rule.as_str())?;
            let mut signals = MessageStream::for_match_rule(rule, connection, None).await?;
            let tell = tell.clone();
            hears.spawn(async move {
                while signals.next().await.is_some() {
                    tell.send_replace(());
                }
            });
        }
        Ok(Self { told, _hears: hears })
    }

    /// Returns once the service has reported a change since the last call. False means that the bus has closed the connection,
    /// so the service can report no further change.
    pub async fn next(&mut self) -> bool {
        self.told.changed().await.is_ok()
    }
}
