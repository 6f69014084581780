//! Writes a file as a whole. A reader sees either the former file or the new one, and if the disk is full, the former file
//! stays. A link or a FIFO at the path of the file is replaced and not followed. All users may read the file, independent of
//! the umask.

use std::fs::{self, File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use tempfile::{Builder, NamedTempFile};

pub fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    write_parts(path, &[bytes])
}

pub fn write_parts(path: &Path, parts: &[&[u8]]) -> io::Result<()> {
    unfinished(path, parts)?.persist(path).map(drop).map_err(|failed| failed.error)
}

/// Like [`write()`], but returns only after the content is on the disk. So a power failure does not leave an empty file.
pub fn write_durably(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let new = unfinished(path, &[bytes])?;
    new.as_file().sync_all()?;
    new.persist(path).map(drop).map_err(|failed| failed.error)
}

/// Like [`write_durably`], but fails if the file exists already.
pub fn write_new(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let new = unfinished(path, &[bytes])?;
    new.as_file().sync_all()?;
    new.persist_noclobber(path).map_err(|failed| failed.error)?;
    let synced = File::open(directory(path)).and_then(|directory| directory.sync_all());
    synced.inspect_err(|_| _ = fs::remove_file(path))
}

/// Writes the content to a new file with a temporary name. The file is removed when the returned value is dropped. The name
/// ends with `.new`, so that container runtimes and metrics collectors do not read the unfinished file: they read only files
/// with certain other suffixes.
fn unfinished(path: &Path, parts: &[&[u8]]) -> io::Result<NamedTempFile> {
    // An error of the library `tempfile` contains the random name. A caller that reports an error only when its text changes
    // would report the error each time. So `File::create_new` opens the file.
    let open = |path: &Path| File::create_new(path);
    let mut new = Builder::new().prefix(".yunion-mps.").suffix(".new").make_in(directory(path), open)?;
    let file = new.as_file_mut();
    file.set_permissions(Permissions::from_mode(0o644))?;
    for part in parts {
        file.write_all(part)?;
    }
    Ok(new)
}

fn directory(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, symlink};
    use std::process::Command;

    use super::*;

    fn count(directory: &Path) -> usize {
        fs::read_dir(directory).unwrap().count()
    }

    #[test]
    fn a_file_is_replaced_as_a_whole_and_for_everybody_to_read() {
        for write in [write, write_durably] {
            let directory = tempfile::tempdir().unwrap();
            let file = directory.path().join("a.prom");
            write(&file, b"one").unwrap();
            let mut open = File::open(&file).unwrap();
            write(&file, b"two").unwrap();
            assert_eq!(io::read_to_string(&mut open).unwrap(), "one", "a reader of the former file keeps it");
            assert_eq!(fs::read_to_string(&file).unwrap(), "two");
            assert_eq!(file.metadata().unwrap().mode() & 0o7777, 0o644);
            assert_eq!(count(directory.path()), 1, "nothing unfinished is left");
        }
    }

    #[test]
    fn a_link_and_a_fifo_are_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let (file, elsewhere) = (directory.path().join("file"), directory.path().join("elsewhere"));
        fs::write(&elsewhere, "theirs").unwrap();
        symlink(&elsewhere, &file).unwrap();
        write(&file, b"ours").unwrap();
        assert!(file.symlink_metadata().unwrap().is_file());
        assert_eq!(fs::read_to_string(&elsewhere).unwrap(), "theirs");
        fs::remove_file(&file).unwrap();
        assert!(Command::new("mkfifo").arg(&file).status().unwrap().success());
        write(&file, b"ours").unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "ours");
    }

    #[test]
    fn a_failure_leaves_nothing_and_names_no_other_file() {
        let directory = tempfile::tempdir().unwrap();
        let full = directory.path().join("full");
        fs::create_dir_all(full.join("below")).unwrap();
        let missing = directory.path().join("none/file");
        for write in [write, write_durably, write_new] {
            write(&full, b"ours").unwrap_err();
            assert_eq!(write(&missing, b"ours").unwrap_err().raw_os_error(), Some(2));
            assert_eq!(count(directory.path()), 1);
        }
    }

    #[test]
    fn nothing_that_is_there_is_touched_by_a_new_file() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("file");
        symlink("nowhere", &file).unwrap();
        assert_eq!(write_new(&file, b"ours").unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::read_link(&file).unwrap(), Path::new("nowhere"));
        fs::remove_file(&file).unwrap();
        write_new(&file, b"ours").unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "ours");
        assert_eq!(count(directory.path()), 1);
    }
}
