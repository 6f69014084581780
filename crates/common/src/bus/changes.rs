//! Follows the D-Bus signals with which the service reports that its published values have changed, for yunion-mpsctl.

use tokio::select;
use tokio::sync::watch;
use zbus::export::ordered_stream::OrderedStreamExt;
use zbus::{Connection, MatchRule, MessageStream};

use super::{MANAGER, NAME};

/// Makes a receiver that wakes after the service has published new values, has started, or has ended. The receiver does not get
/// the new values. The receiver gets an error once the bus has closed the connection.
pub(super) async fn on(connection: &Connection) -> zbus::Result<watch::Receiver<()>> {
    let of_service = format!("type='signal',sender='{NAME}',path='{MANAGER}'");
    let of_bus =
        format!("type='signal',sender='org.freedesktop.DBus',member='NameOwnerChanged',arg0='{NAME}'");
    let (tell, told) = watch::channel(());
    for rule in [of_service, of_bus] {
        let rule = MatchRule::try_from(rule.as_str())?;
        let mut signals = MessageStream::for_match_rule(rule, connection, None).await?;
        let tell = tell.clone();
        // The task reads every signal at once. zbus delivers signals and answers in their order, so an unread signal would
        // delay the answers that come after that signal.
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
