//! A string on the bus that stands for a variant of an enum.

use std::convert::Infallible;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer};
use strum::VariantNames;

/// A string in an answer of the service that stands for a variant of `E`. A newer service may send a string that this version
/// does not know. `Unknown` has such a string, and differs from every variant of `E`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Word<E> {
    Known(E),
    Unknown(String),
}

impl<E: Copy> Word<E> {
    pub fn known(&self) -> Option<E> {
        if let Self::Known(meaning) = self { Some(*meaning) } else { None }
    }
}

impl<E: VariantNames> Word<E> {
    /// The words of all variants of `E`. If this version does not know `self`, the word of `self` follows.
    pub fn and_others(&self) -> impl Iterator<Item = &str> {
        let unknown = if let Self::Unknown(word) = self { Some(word.as_str()) } else { None };
        E::VARIANTS.iter().copied().chain(unknown)
    }
}

/// The empty word is the value of a key that is absent from the service's answer.
impl<E> Default for Word<E> {
    fn default() -> Self {
        Self::Unknown(String::new())
    }
}

impl<E> From<E> for Word<E> {
    fn from(meaning: E) -> Self {
        Self::Known(meaning)
    }
}

impl<E: PartialEq> PartialEq<E> for Word<E> {
    fn eq(&self, meaning: &E) -> bool {
        matches!(self, Self::Known(known) if known == meaning)
    }
}

impl<E: FromStr> FromStr for Word<E> {
    type Err = Infallible;

    fn from_str(word: &str) -> Result<Self, Infallible> {
        Ok(E::from_str(word).map_or_else(|_| Self::Unknown(word.to_owned()), Self::Known))
    }
}

impl<E: fmt::Display> fmt::Display for Word<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Known(meaning) => meaning.fmt(f),
            Self::Unknown(word) => f.write_str(word),
        }
    }
}

impl<'de, E: FromStr> Deserialize<'de> for Word<E> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Ok(word) = String::deserialize(deserializer)?.parse();
        Ok(word)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::published::control_daemon::ControlDaemonState;
    use serde_json::json;

    fn read(word: &str) -> Word<ControlDaemonState> {
        serde_json::from_value(json!(word)).unwrap()
    }

    #[test]
    fn a_word_is_read_as_its_variant_and_shown_as_it_came() {
        for word in ControlDaemonState::VARIANTS {
            assert!(read(word).known().is_some());
            assert_eq!(read(word).to_string(), *word);
        }
        assert_eq!(read("ready"), ControlDaemonState::Ready);
    }

    #[test]
    fn a_word_of_a_newer_service_is_shown_as_it_came_and_is_no_variant() {
        let word = read("resting");
        assert_eq!((word.known(), word.to_string().as_str()), (None, "resting"));
        assert_eq!(word, Word::Unknown("resting".to_owned()));
        assert_ne!(word, ControlDaemonState::Ready);
    }
}
