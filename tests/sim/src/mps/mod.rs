//! MPS: the control daemon, its servers, and the CUDA programs that are clients of the servers.
//!
//! The control daemon listens in the pipe directory. A front end sends commands to the control daemon until the front end
//! closes the connection. A client sends a hello to the control daemon, which passes the client's connection on to a server. So
//! the client's connection breaks when the server dies. A server is a child of the control daemon. The stdin of the server is a
//! channel to the control daemon, and the server dies when the channel breaks. All messages are packets of JSON (`wire`).

pub mod client;
pub mod control;
pub mod front_end;
pub mod server;

mod commands;
mod log;
mod wire;

use std::path::PathBuf;

pub fn command_of(pid: u32) -> Option<String> {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let word = line.split(|byte| *byte == 0).next()?;
    (!word.is_empty()).then(|| String::from_utf8_lossy(word).into_owned())
}

fn pipe_directory() -> PathBuf {
    std::env::var_os("CUDA_MPS_PIPE_DIRECTORY").map_or_else(|| "/tmp/nvidia-mps".into(), PathBuf::from)
}

/// The directory in which a control daemon in the background writes its logs.
fn log_directory() -> PathBuf {
    std::env::var_os("CUDA_MPS_LOG_DIRECTORY").map_or_else(|| "/var/log/nvidia-mps".into(), PathBuf::from)
}

/// Parses a memory limit as the control daemon does, and returns bytes. The text has digits, and then `G` for GiB, or anything
/// else for MiB. `None` if the text begins with no digit, or the number is 0.
fn memory_limit(text: &str) -> Option<u64> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at_checked(digits)?;
    let mib = if unit.starts_with(['g', 'G']) { 1024 } else { 1 };
    number.parse::<u64>().ok()?.checked_mul(mib * 1024 * 1024).filter(|limit| *limit > 0)
}

/// Formats a memory limit as the control daemon does: in whole GiB from 1 GiB on, and in MiB below.
fn memory_text(bytes: u64) -> String {
    let mib = bytes >> 20;
    if mib >= 1024 { format!("{}G", mib / 1024) } else { format!("{mib}M") }
}

/// Parses a thread percentage. `None` if the control daemon does not accept the percentage.
fn percentage(text: &str) -> Option<f64> {
    text.parse().ok().filter(|percentage| *percentage > 0.0 && *percentage <= 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_memory_limit_reads_back_as_recorded() {
        let read_back = |text| memory_limit(text).map(memory_text);
        for (text, back) in [
            ("35000M", "34G"),
            ("5760M", "5G"),
            ("5760", "5G"),
            ("512M", "512M"),
            ("10G", "10G"),
            ("99999999M", "97656G"),
            ("1.5G", "1M"),
            ("5g", "5G"),
            ("2T", "2M"),
            ("2000000K", "1953G"),
        ] {
            assert_eq!(read_back(text).as_deref(), Some(back), "{text}");
        }
        assert_eq!(read_back("abc"), None);
        assert_eq!(memory_limit("35000M"), Some(0x8_8b80_0000));
    }

    #[test]
    fn a_percentage_is_above_0_and_at_most_100() {
        assert_eq!(percentage("12.34"), Some(12.34));
        for bad in ["abc", "0", "101", "", "nan"] {
            assert_eq!(percentage(bad), None, "{bad}");
        }
    }
}
