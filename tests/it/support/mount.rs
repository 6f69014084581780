//! A small file system that a test can fill.

use std::fs::{self, File};
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;

use super::host::text;

pub(crate) struct Mount(PathBuf);

impl Mount {
    pub(crate) fn at(path: PathBuf, options: &str) -> Self {
        fs::create_dir_all(&path).unwrap();
        let options = format!("mode=0755,{options}");
        let mounted =
            Command::new("mount").args(["-t", "tmpfs", "-o", &options, "none"]).arg(&path).output().unwrap();
        assert!(mounted.status.success(), "{}", text(&mounted));
        Self(path)
    }

    pub(crate) fn fill(&self) {
        let mut file = File::create(self.0.join("fill")).unwrap();
        while file.write_all(&[0; 4096]).is_ok() {}
    }

    pub(crate) fn make_room(&self) {
        fs::remove_file(self.0.join("fill")).unwrap();
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // Processes of the host may still have open files on the file system. So the unmount is lazy.
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}
