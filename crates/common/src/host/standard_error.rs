//! Finds out if standard error is the journal, and if it can show colours.

use std::io::IsTerminal;
use std::os::fd::AsFd;

/// True if standard error is the journal. systemd sets `JOURNAL_STREAM` to the device and inode of the journal's socket. After
/// a redirection, standard error has another device or inode.
pub fn is_journal() -> bool {
    let said = std::env::var("JOURNAL_STREAM").unwrap_or_default();
    let Some((device, inode)) = said.split_once(':') else { return false };
    let Ok(stat) = rustix::fs::fstat(std::io::stderr().as_fd()) else { return false };
    device.parse() == Ok(stat.st_dev) && inode.parse() == Ok(stat.st_ino)
}

pub fn takes_colours() -> bool {
    std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none()
}
