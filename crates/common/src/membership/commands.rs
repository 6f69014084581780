//! The commands that a client can give its control daemon. NVIDIA's control daemon decides by the user that the kernel reports,
//! and by the socket that the client uses: measured on an H200 with driver 580.159.04 (docs/security.md).

use mps_core::register::MayCommand;

/// The way in which a process reaches a control daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reach {
    /// The process runs on the host.
    Host,
    /// The process is in a container in which the control daemon's own directory, or an ancestor of it, is mounted.
    OwnDirectory,
    /// The process is in a container, and reaches only the socket `control`.
    Control,
}

/// The commands that the control daemon takes from a process. `uid` is the effective user id of the process as seen from the
/// host.
pub(super) fn may_command(uid: u32, reach: Reach) -> MayCommand {
    match (uid, reach) {
        (0, Reach::Host | Reach::OwnDirectory) => MayCommand::All,
        (0, Reach::Control) => MayCommand::Neighbours,
        _ => MayCommand::Nothing,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_user_and_the_directory_decide() {
        for (reach, root) in
            [(Reach::Host, "all"), (Reach::OwnDirectory, "all"), (Reach::Control, "neighbours")]
        {
            assert_eq!(may_command(0, reach).to_string(), root, "{reach:?}");
            // The root user of a user namespace is another user of the host.
            for uid in [1, 1000, 100_000, u32::MAX] {
                assert_eq!(may_command(uid, reach).to_string(), "nothing", "{reach:?} {uid}");
            }
        }
    }
}
