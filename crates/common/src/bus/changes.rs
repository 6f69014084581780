//! The signals that say that the service has published something new, for yunion-mpsctl.

use tokio::select;
use tokio::sync::watch;
use zbus::export::ordered_stream::OrderedStreamExt;
use zbus::{Connection, MatchRule, MessageStream};

use super::{MANAGER, NAME};

/// Follows the service: the receiver sees a change once the service has published something new, has started, or has ended. A
/// signal of the service does not say which value has changed. The receiver gets an error once the bus has closed the connection,
/// so that the service can report no further change.
pub(super) async fn on(connection: &Connection) -> zbus::Result<watch::Receiver<()>> {
    let of_service = format!("type='signal',sender='{NAME}',path='{MANAGER}'");
    let of_bus =
        format!("type='signal',sender='org.freedesktop.DBus',member='NameOwnerChanged',arg0='{NAME}'");
    let (tell, told) = watch::channel(());
    for rule in [of_service, of_bus] {
        let rule = MatchRule::try_from(rule.as_str())?;
        let mut signals = MessageStream::for_match_rule(rule, connection, None).await?;
        let tell = tell.clone();
        // The task takes every signal at once: an unread signal would delay the answers behind the signal.
        tokio::spawn(async move {
            loop {
                select! {
                    () = tell.closed() => return,
                    signal = signals.next() => match signal {
                        Some(_) => tell.send_replace(()),
                        None => return,
                    },
                }
            }
        });
    }
    Ok(told)
}
