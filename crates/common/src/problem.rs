//! The type with which all parts of the programs report a problem and its remedy.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::Serialize;

/// A problem in words for an administrator. As text, it is the finding, a semicolon, and the remedy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Problem {
    pub found: String,
    /// Empty if the remedy is obvious.
    pub remedy: String,
}

impl Problem {
    pub fn new(found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { found: found.into(), remedy: remedy.into() }
    }

    /// The same problem, with `failed` in front: the name of the thing that fails because of the problem.
    #[must_use]
    pub fn prefixed(self, failed: impl fmt::Display) -> Self {
        Self { found: format!("{failed}: {}", self.found), ..self }
    }

    /// The same problem with its place in the configuration. An empty key stands for the whole line or file.
    pub fn at(self, origin: Origin, key: impl Into<String>) -> LocatedProblem {
        LocatedProblem { origin, key: key.into(), problem: self }
    }

    #[must_use]
    pub fn or_remedy(self, otherwise: &str) -> Self {
        if self.remedy.is_empty() { Self { remedy: otherwise.to_owned(), ..self } } else { self }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { found, remedy } = self;
        if remedy.is_empty() { f.write_str(found) } else { write!(f, "{found}; {remedy}") }
    }
}

impl From<LocatedProblem> for Problem {
    fn from(located: LocatedProblem) -> Self {
        located.with_key().prefixed(located.origin)
    }
}

impl From<Problem> for String {
    fn from(problem: Problem) -> Self {
        problem.to_string()
    }
}

impl From<String> for Problem {
    fn from(found: String) -> Self {
        Self::new(found, "")
    }
}

impl From<&str> for Problem {
    fn from(found: &str) -> Self {
        Self::new(found, "")
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedProblem {
    pub name: &'static str,
    pub problem: Problem,
}

impl NamedProblem {
    pub fn new(name: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { name, problem: Problem::new(found, remedy) }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize)]
pub struct Origin {
    pub file: PathBuf,
    /// Counted from 1. None if the problem concerns the file as a whole.
    pub line: Option<usize>,
}

impl Origin {
    pub fn whole(file: &Path) -> Self {
        Self { file: file.to_owned(), line: None }
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            Some(line) => write!(f, "{}:{line}", self.file.display()),
            None => write!(f, "{}", self.file.display()),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LocatedProblem {
    #[serde(flatten)]
    pub origin: Origin,
    /// The key or the entry, such as `cuda_mps_replicas` or `devices[2].virtual_number`. Empty for the whole line or file.
    pub key: String,
    #[serde(flatten)]
    pub problem: Problem,
}

impl LocatedProblem {
    pub fn new(
        origin: Origin,
        key: impl Into<String>,
        found: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Problem::new(found, remedy).at(origin, key)
    }

    pub fn with_key(&self) -> Problem {
        let problem = self.problem.clone();
        if self.key.is_empty() { problem } else { problem.prefixed(&self.key) }
    }
}

impl fmt::Display for LocatedProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.origin, self.with_key())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_semicolon_in_the_finding_or_in_the_remedy_moves_nothing() {
        let problem =
            Problem::new("/tmp/a; b does not exist", "make it; then reload").prefixed("it can't be read");
        assert_eq!(problem.found, "it can't be read: /tmp/a; b does not exist");
        assert_eq!(problem.clone().or_remedy("-"), problem);
        assert_eq!(problem.to_string(), "it can't be read: /tmp/a; b does not exist; make it; then reload");
    }

    #[test]
    fn without_a_remedy_there_is_the_finding_alone() {
        let problem = Problem::from("one; two");
        assert_eq!(problem.to_string(), "one; two");
        assert_eq!(problem.or_remedy("see dmesg"), Problem::new("one; two", "see dmesg"));
    }

    #[test]
    fn a_place_and_a_key_come_first() {
        let origin = Origin { file: "/etc/a".into(), line: Some(3) };
        let mut located = LocatedProblem::new(origin, "key", "found 0", "write 1");
        assert_eq!(located.to_string(), "/etc/a:3: key: found 0; write 1");
        (located.key, located.origin.line) = (String::new(), None);
        assert_eq!(located.to_string(), "/etc/a: found 0; write 1");
    }
}
