//! Describes clients that lose their work, so that an administrator can find their owners.

use std::collections::BTreeMap;

use common::counted::counted;
use mps_core::register::KnownClient;
use mps_core::tenants::first_named;

/// Describes clients in words such as `2 clients: PID 1153 of user alice, slice 00:06.0-1, container 4f1c2d3e5a6b; PID 1160 of
/// user bob`. A client that is listed for several GPUs is named once. None if there are no clients.
pub(crate) fn describe(clients: impl IntoIterator<Item = KnownClient>) -> Option<String> {
    let clients: BTreeMap<u32, KnownClient> =
        clients.into_iter().map(|client| (client.process.pid, client)).collect();
    if clients.is_empty() {
        return None;
    }
    let named = first_named(clients.values().map(ToString::to_string));
    Some(format!("{}: {named}", counted(clients.len(), "client")))
}

#[cfg(test)]
mod tests {
    use mps_core::register::{KnownBy, Membership};
    use mps_core::terms::ProcessId;

    use super::*;

    fn client(pid: u32) -> KnownClient {
        let slices = vec!["00:06.0-1".parse().unwrap()];
        KnownClient {
            user: Some("alice".to_owned()),
            slices: Some(Membership { slices, known_by: KnownBy::Mount }),
            ..KnownClient::only(ProcessId { pid, start_time: 1 })
        }
    }

    #[test]
    fn all_that_is_known_is_said() {
        let contained = KnownClient { container: Some("4f1c2d3e5a6b".repeat(5)), ..client(1153) };
        let unknown = KnownClient::only(client(7).process);
        assert_eq!(describe([]), None);
        assert_eq!(
            describe([contained.clone(), unknown, contained]).unwrap(),
            "2 clients: PID 7; PID 1153 of user alice, slice 00:06.0-1, container 4f1c2d3e5a6b"
        );
    }

    #[test]
    fn the_words_are_bounded() {
        let words = describe((1..=40).map(client)).unwrap();
        assert!(words.starts_with("40 clients: PID 1 of user alice, slice 00:06.0-1; PID 2 "), "{words}");
        assert!(words.ends_with("PID 32 of user alice, slice 00:06.0-1; and 8 more"), "{words}");
        assert!(!describe((1..=32).map(client)).unwrap().contains("more"));
    }
}
