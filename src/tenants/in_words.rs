//! Clients in words, for people who look for the owners of work that was ended.

use std::collections::BTreeMap;
use std::fmt;

use crate::counted::counted;
use crate::tenants::clients::ClientView;

/// The most clients that are named, and the most slices of one of them.
const NAMED: usize = 32;
const SLICES: usize = 4;

/// As much of a container's id as its runtime shows in tables.
pub(crate) const SHORT_ID: usize = 12;

/// The facts that tell the owner of a client. The name of its program is not among them: a tenant chooses that name, and
/// could make it look like another client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Whose {
    pub pid: u32,
    pub user: Option<String>,
    /// The slices that it has.
    pub slices: Option<Vec<String>>,
    pub container: Option<String>,
}

impl From<&ClientView> for Whose {
    fn from(client: &ClientView) -> Self {
        Self {
            pid: client.pid,
            user: client.user.clone(),
            slices: client.slices.as_ref().map(|known| known.slices.clone()),
            container: client.container_id.clone(),
        }
    }
}

impl fmt::Display for Whose {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PID {}", self.pid)?;
        if let Some(user) = &self.user {
            write!(f, " of user {user}")?;
        }
        if let Some(slices) = &self.slices {
            let plural = if slices.len() > 1 { "s" } else { "" };
            write!(f, ", slice{plural} {}", shortened(slices))?;
        }
        if let Some(container) = &self.container {
            write!(f, ", container {container:.SHORT_ID$}")?;
        }
        Ok(())
    }
}

/// `2 clients: PID 1153 of user alice, slice 00:06.0-1, container 4f1c2d3e5a6b; PID 1160 of user bob`. A client that
/// is listed for several GPUs is named once. None without any client.
pub(crate) fn in_words(clients: impl IntoIterator<Item = Whose>) -> Option<String> {
    let clients: BTreeMap<u32, Whose> = clients.into_iter().map(|client| (client.pid, client)).collect();
    if clients.is_empty() {
        return None;
    }
    let mut named: Vec<String> = clients.values().take(NAMED).map(ToString::to_string).collect();
    if let Some(more) = clients.len().checked_sub(NAMED).filter(|more| *more > 0) {
        named.push(format!("and {more} more"));
    }
    Some(format!("{}: {}", counted(clients.len(), "client"), named.join("; ")))
}

/// The first of these names, with commas.
pub(super) fn shortened(slices: &[String]) -> String {
    let mut names: Vec<&str> = slices.iter().take(SLICES).map(String::as_str).collect();
    if slices.len() > SLICES {
        names.push("...");
    }
    names.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whose(pid: u32) -> Whose {
        let text = |text: &str| Some(text.to_owned());
        Whose { pid, user: text("alice"), slices: Some(vec!["00:06.0-1".to_owned()]), container: None }
    }

    #[test]
    fn whatever_is_known_is_said() {
        let contained = Whose { container: Some("4f1c2d3e5a6b".repeat(5)), ..whose(1153) };
        let unknown = Whose { user: None, slices: None, ..whose(7) };
        assert_eq!(in_words([]), None);
        assert_eq!(
            in_words([contained.clone(), unknown, contained]).unwrap(),
            "2 clients: PID 7; PID 1153 of user alice, slice 00:06.0-1, container 4f1c2d3e5a6b"
        );
    }

    #[test]
    fn the_words_are_bounded() {
        let words = in_words((1..=40).map(whose)).unwrap();
        assert!(words.starts_with("40 clients: PID 1 of user alice, slice 00:06.0-1; PID 2 "), "{words}");
        assert!(words.ends_with("PID 32 of user alice, slice 00:06.0-1; and 8 more"), "{words}");
        assert!(!in_words((1..=32).map(whose)).unwrap().contains("more"));
        let greedy = Whose { slices: Some(vec!["00:06.0-1".to_owned(); 64]), ..whose(1) };
        let words = in_words([greedy]).unwrap();
        assert!(words.ends_with(", slices 00:06.0-1,00:06.0-1,00:06.0-1,00:06.0-1,..."), "{words}");
    }
}
