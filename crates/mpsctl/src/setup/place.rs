//! Writes new files: all of them or none, and no file partly.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

use super::files::File;
use common::config::below;
use common::whole_file;

/// True if the path exists, even as a link without a target.
pub(super) fn is_taken(sysroot: &Path, file: &Path) -> bool {
    // A path that can't be examined counts as taken, since setup must not replace an existing file.
    below(sysroot, file)
        .symlink_metadata()
        .map_or_else(|error| error.kind() != io::ErrorKind::NotFound, |_| true)
}

/// Writes the files in this order. If a file can't be written, the files before it are removed again, and the error names the
/// file.
pub(super) fn all(sysroot: &Path, files: &[File]) -> Result<(), String> {
    let mut placed: Vec<PathBuf> = Vec::new();
    for file in files {
        let path = below(sysroot, &file.path);
        if let Err(error) = place(&path, file.text.as_bytes()) {
            for path in placed {
                let _ = fs::remove_file(path);
            }
            return Err(format!(
                "{path} can't be written: {error}; nothing was written",
                path = file.path.display()
            ));
        }
        placed.push(path);
    }
    Ok(())
}

fn place(path: &Path, text: &[u8]) -> io::Result<()> {
    let directory = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
    DirBuilder::new().recursive(true).mode(0o755).create(directory)?;
    whole_file::write_new(path, text)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn file(path: &str, text: &str) -> File {
        File { path: path.into(), text: text.to_owned(), lines: String::new(), change: "" }
    }

    fn names(directory: &Path) -> Vec<String> {
        let names =
            fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<String> = names.collect();
        names.sort();
        names
    }

    #[test]
    fn both_files_are_written_for_everybody_to_read() {
        let root = tempfile::tempdir().unwrap();
        all(root.path(), &[file("/etc/yunion/a", "1\n"), file("/etc/yunion/b", "2\n")]).unwrap();
        let directory = root.path().join("etc/yunion");
        assert_eq!(names(&directory), ["a", "b"]);
        for (name, text) in [("a", "1\n"), ("b", "2\n")] {
            assert_eq!(fs::read_to_string(directory.join(name)).unwrap(), text);
            assert_eq!(directory.join(name).metadata().unwrap().permissions().mode() & 0o7777, 0o644);
            assert!(is_taken(root.path(), &Path::new("/etc/yunion").join(name)));
        }
    }

    #[test]
    fn nothing_that_is_there_is_touched_and_nothing_of_ours_is_left() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("etc");
        fs::create_dir(&directory).unwrap();
        let theirs: [fn(&Path); 3] = [
            |path| fs::write(path, "theirs").unwrap(),
            |path| symlink("nowhere", path).unwrap(),
            |path| fs::create_dir(path).unwrap(),
        ];
        for make in theirs {
            let there = directory.join("b");
            make(&there);
            let before = there.symlink_metadata().unwrap();
            assert!(is_taken(root.path(), Path::new("/etc/b")));
            let error = all(root.path(), &[file("/etc/a", "1\n"), file("/etc/b", "2\n")]).unwrap_err();
            assert!(
                error.starts_with("/etc/b can't be written: ") && error.ends_with("; nothing was written"),
                "{error}"
            );
            assert_eq!(names(&directory), ["b"]);
            let after = there.symlink_metadata().unwrap();
            assert_eq!((before.modified().unwrap(), before.len()), (after.modified().unwrap(), after.len()));
            let remove = if before.is_dir() { fs::remove_dir } else { fs::remove_file };
            remove(there).unwrap();
        }
    }
}
