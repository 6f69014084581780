//! Questions on a terminal. With `--yes`, every question gets its default answer.

use std::io::{self, BufRead, IsTerminal, Write};

use crate::{Error, Result};

/// The largest number of slices that setup accepts, in an answer and in `--slices`.
pub(super) const MOST: u32 = 999;

pub(super) struct Questions {
    /// None with `--yes`: no question is asked, and each answer is the default.
    answers: Option<Box<dyn BufRead>>,
}

impl Questions {
    /// Fails if questions have to be asked and standard input is no terminal.
    pub(super) fn new(yes: bool) -> Result<Self> {
        if yes {
            return Ok(Self { answers: None });
        }
        if !io::stdin().is_terminal() {
            let words = "setup asks questions, but standard input is no terminal; with --yes setup takes \
                         the default answers";
            return Err(Error::Failed(words.to_owned()));
        }
        Ok(Self { answers: Some(Box::new(io::stdin().lock())) })
    }

    pub(super) fn number(&mut self, question: &str, default: u32, out: &mut dyn Write) -> Result<u32> {
        let read = |answer: &str| answer.parse().ok().filter(|number| *number <= MOST);
        let help = format!("a whole number from 0 to {MOST}");
        self.answer(question, &default.to_string(), default, read, &help, out)
    }

    pub(super) fn yes_or_no(&mut self, question: &str, out: &mut dyn Write) -> Result<bool> {
        self.answer(question, "Y/n", true, boolean, "y or n", out)
    }

    pub(super) fn no_or_yes(&mut self, question: &str, out: &mut dyn Write) -> Result<bool> {
        self.answer(question, "y/N", false, boolean, "y or n", out)
    }

    fn answer<T>(
        &mut self,
        question: &str,
        hint: &str,
        default: T,
        read: impl Fn(&str) -> Option<T>,
        help: &str,
        out: &mut dyn Write,
    ) -> Result<T> {
        let Some(answers) = &mut self.answers else { return Ok(default) };
        loop {
            write!(out, "{question} [{hint}] ")?;
            out.flush()?;
            let mut line = Vec::new();
            if answers.read_until(b'\n', &mut line)? == 0 {
                writeln!(out)?;
                return Err(Error::Failed(
                    "standard input ended before the last answer, so nothing was written".to_owned(),
                ));
            }
            let line = String::from_utf8_lossy(&line);
            match line.trim() {
                "" => return Ok(default),
                answer => match read(answer) {
                    Some(answer) => return Ok(answer),
                    None => writeln!(out, "Please answer with {help}.")?,
                },
            }
        }
    }
}

fn boolean(answer: &str) -> Option<bool> {
    match answer.to_ascii_lowercase().as_str() {
        "y" | "yes" => Some(true),
        "n" | "no" => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn questions(answers: &'static str) -> Questions {
        Questions { answers: Some(Box::new(answers.as_bytes())) }
    }

    #[test]
    fn a_wrong_answer_is_asked_for_again() {
        let mut out = Vec::new();
        let mut asked = questions("many\n1000\n-1\n 4 \n\nmaybe\nNo\nYES\n");
        assert_eq!(asked.number("Slices?", 10, &mut out).unwrap(), 4);
        assert_eq!(asked.number("Slices?", 10, &mut out).unwrap(), 10);
        assert!(!asked.yes_or_no("Write?", &mut out).unwrap());
        assert!(asked.no_or_yes("Platform?", &mut out).unwrap());
        let error = asked.yes_or_no("Write?", &mut out).unwrap_err().to_string();
        assert_eq!(error, "standard input ended before the last answer, so nothing was written");
        let again = "Please answer with a whole number from 0 to 999.\nSlices? [10] ";
        assert_eq!(
            String::from_utf8(out).unwrap(),
            format!(
                "Slices? [10] {}Slices? [10] Write? [Y/n] Please answer with y or n.\nWrite? [Y/n] \
                 Platform? [y/N] Write? [Y/n] \n",
                again.repeat(3)
            )
        );
    }

    #[test]
    fn with_yes_nobody_is_asked() {
        let mut out = Vec::new();
        let mut asked = Questions::new(true).unwrap();
        assert_eq!(asked.number("Slices?", 3, &mut out).unwrap(), 3);
        assert!(asked.yes_or_no("Write?", &mut out).unwrap());
        assert!(!asked.no_or_yes("Platform?", &mut out).unwrap());
        assert_eq!(out, b"");
    }
}
