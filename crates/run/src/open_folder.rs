//! Folders whose links are not followed. Who may write into a folder of runs could otherwise put a link there, and a page
//! would show any file that its owner can read.
//!
//! Everything is opened relative to an open folder, so that a name cannot become a link between the check and the opening.

use std::ffi::{OsStr, OsString};
use std::fs::{File, Metadata};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use kintsugi_spec::input;
use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, Stat, openat, statat};

/// The path of a folder: one that the user named, and the names of folders below it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FolderPath {
    root: PathBuf,
    below: Vec<OsString>,
}

impl FolderPath {
    /// A folder that the user named. It may be a link.
    pub fn new(root: &Path) -> Self {
        FolderPath { root: root.to_owned(), below: Vec::new() }
    }

    /// A folder in this one.
    #[must_use]
    pub fn join(&self, name: &OsStr) -> Self {
        let mut path = self.clone();
        path.below.push(name.to_owned());
        path
    }

    /// Opens the folder. No name below the user's folder may be a link.
    pub fn open(&self) -> io::Result<OpenFolder> {
        let root = openat(CWD, &self.root, FOLDER, Mode::empty())?;
        self.below.iter().try_fold(OpenFolder(root), |folder, name| folder.folder(name))
    }
}

/// The flags that open a folder.
const FOLDER: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// An open folder.
#[derive(Debug)]
pub struct OpenFolder(OwnedFd);

impl OpenFolder {
    /// Opens a folder in this one; an error if it is a link.
    pub fn folder(&self, name: &OsStr) -> io::Result<OpenFolder> {
        Ok(OpenFolder(openat(&self.0, name, FOLDER.union(OFlags::NOFOLLOW), Mode::empty())?))
    }

    /// The names of the folders in this one, sorted. Links to folders are left out.
    pub fn folders(&self) -> io::Result<Vec<OsString>> {
        let mut names = Vec::new();
        for entry in Dir::read_from(&self.0)? {
            let entry = entry?;
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            let is_folder = match entry.file_type() {
                // Some file systems do not say.
                FileType::Unknown => self.stat(name).is_ok_and(|found| kind(&found) == FileType::Directory),
                other => other == FileType::Directory,
            };
            if is_folder && name != "." && name != ".." {
                names.push(name.to_owned());
            }
        }
        names.sort();
        Ok(names)
    }

    /// Opens a regular file; an error if it is a link or anything else.
    pub fn file(&self, name: &str) -> io::Result<(File, Metadata)> {
        let refused = || io::Error::new(io::ErrorKind::InvalidInput, format!("{name} is not a regular file"));
        // Opening a device may have an effect, so it is not tried.
        if !self.has_file(name)? {
            return Err(refused());
        }
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = File::from(openat(&self.0, name, flags, Mode::empty())?);
        let metadata = file.metadata()?;
        if metadata.is_file() { Ok((file, metadata)) } else { Err(refused()) }
    }

    /// Reads the text of a regular file. Fails if it has more than `most` bytes.
    pub fn text(&self, name: &str, most: u64) -> io::Result<String> {
        input::text_of(self.file(name)?.0, most)
    }

    /// Whether a name is that of a regular file; an error if there is nothing of that name.
    pub fn has_file(&self, name: &str) -> io::Result<bool> {
        Ok(kind(&self.stat(name)?) == FileType::RegularFile)
    }

    /// What is known of a name; of the link itself if it is one.
    pub fn stat(&self, name: impl AsRef<OsStr>) -> io::Result<Stat> {
        Ok(statat(&self.0, name.as_ref(), AtFlags::SYMLINK_NOFOLLOW)?)
    }
}

fn kind(found: &Stat) -> FileType {
    FileType::from_raw_mode(found.st_mode)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn links_below_the_named_folder_are_not_followed() {
        let base = std::env::temp_dir().join(format!("kintsugi-folder-{}", std::process::id()));
        fs::create_dir_all(base.join("real/inside")).expect("folders");
        fs::write(base.join("real/inside/file"), "text").expect("a file");
        symlink("real", base.join("link")).expect("a link");
        symlink("inside/file", base.join("real/link")).expect("a link");
        let opened = |path: &FolderPath| path.open().and_then(|folder| folder.text("file", 10)).ok();
        let root = FolderPath::new(&base);
        assert_eq!(root.open().and_then(|folder| folder.folders()).expect("names"), ["real"]);
        let real = root.join(OsStr::new("real"));
        assert_eq!(opened(&real.join(OsStr::new("inside"))).as_deref(), Some("text"));
        assert_eq!(opened(&root.join(OsStr::new("link")).join(OsStr::new("inside"))), None);
        assert!(real.open().and_then(|folder| folder.text("link", 10)).is_err());
        let named = FolderPath::new(&base.join("link"));
        assert_eq!(opened(&named.join(OsStr::new("inside"))).as_deref(), Some("text"), "the user named it");
        fs::remove_dir_all(&base).ok();
    }
}
