//! Why something does not work, and what to do about it.

use std::fmt;

/// A reason in words for an administrator. Its text is the finding, and the remedy behind a semicolon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reason {
    /// The finding.
    pub found: String,
    /// The step that helps; empty if only the obvious one is known.
    pub remedy: String,
}

impl Reason {
    /// A finding with its remedy.
    pub fn new(found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { found: found.into(), remedy: remedy.into() }
    }

    /// The same reason, for something that fails because of it.
    #[must_use]
    pub fn of(self, failed: &str) -> Self {
        Self { found: format!("{failed}: {}", self.found), ..self }
    }

    /// The remedy, or this one where there is none.
    pub fn remedy_or<'r>(&'r self, otherwise: &'r str) -> &'r str {
        if self.remedy.is_empty() { otherwise } else { &self.remedy }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { found, remedy } = self;
        if remedy.is_empty() { f.write_str(found) } else { write!(f, "{found}; {remedy}") }
    }
}

impl From<Reason> for String {
    fn from(reason: Reason) -> Self {
        reason.to_string()
    }
}

impl From<String> for Reason {
    fn from(found: String) -> Self {
        Self::new(found, "")
    }
}

impl From<&str> for Reason {
    fn from(found: &str) -> Self {
        Self::new(found, "")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_semicolon_in_the_finding_or_in_the_remedy_moves_nothing() {
        let reason = Reason::new("/tmp/a; b does not exist", "make it; then reload").of("it can't be read");
        assert_eq!(reason.found, "it can't be read: /tmp/a; b does not exist");
        assert_eq!(reason.remedy_or("-"), "make it; then reload");
        assert_eq!(reason.to_string(), "it can't be read: /tmp/a; b does not exist; make it; then reload");
    }

    #[test]
    fn without_a_remedy_there_is_the_finding_alone() {
        let reason = Reason::from("one; two");
        assert_eq!((reason.to_string().as_str(), reason.remedy_or("see dmesg")), ("one; two", "see dmesg"));
    }
}
