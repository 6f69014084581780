//! MPS: the control daemon, its servers, and the CUDA programs that are their clients.

/// What a process calls itself, the first word of its command line.
pub fn command_of(pid: u32) -> Option<String> {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let word = line.split(|byte| *byte == 0).next()?;
    (!word.is_empty()).then(|| String::from_utf8_lossy(word).into_owned())
}
