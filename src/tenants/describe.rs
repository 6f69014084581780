//! Clients in words, for people who look for the owners of work that was ended.

use std::collections::BTreeMap;

use common::counted::counted;
use mps_core::tenants::first_named;

pub(crate) use common::membership::whose::Whose;

/// `2 clients: PID 1153 of user alice, slice 00:06.0-1, container 4f1c2d3e5a6b; PID 1160 of user bob`. A client that
/// is listed for several GPUs is named once. None without any client.
pub(crate) fn describe(clients: impl IntoIterator<Item = Whose>) -> Option<String> {
    let clients: BTreeMap<u32, Whose> = clients.into_iter().map(|client| (client.pid, client)).collect();
    if clients.is_empty() {
        return None;
    }
    let named = first_named(clients.values().map(ToString::to_string));
    Some(format!("{}: {named}", counted(clients.len(), "client")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whose(pid: u32) -> Whose {
        let text = |text: &str| Some(text.to_owned());
        Whose { user: text("alice"), slices: Some(vec!["00:06.0-1".parse().unwrap()]), ..Whose::only(pid) }
    }

    #[test]
    fn whatever_is_known_is_said() {
        let contained = Whose { container: Some("4f1c2d3e5a6b".repeat(5)), ..whose(1153) };
        let unknown = Whose { user: None, slices: None, ..whose(7) };
        assert_eq!(describe([]), None);
        assert_eq!(
            describe([contained.clone(), unknown, contained]).unwrap(),
            "2 clients: PID 7; PID 1153 of user alice, slice 00:06.0-1, container 4f1c2d3e5a6b"
        );
    }

    #[test]
    fn the_words_are_bounded() {
        let words = describe((1..=40).map(whose)).unwrap();
        assert!(words.starts_with("40 clients: PID 1 of user alice, slice 00:06.0-1; PID 2 "), "{words}");
        assert!(words.ends_with("PID 32 of user alice, slice 00:06.0-1; and 8 more"), "{words}");
        assert!(!describe((1..=32).map(whose)).unwrap().contains("more"));
        let greedy = Whose { slices: Some(vec!["00:06.0-1".parse().unwrap(); 64]), ..whose(1) };
        let words = describe([greedy]).unwrap();
        assert!(words.ends_with(", slices 00:06.0-1,00:06.0-1,00:06.0-1,00:06.0-1,..."), "{words}");
    }
}
