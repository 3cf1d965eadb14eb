//! Writes files and folders completely or not at all: under a temporary name, then synced to the disk, renamed, and the
//! new name synced too. If the machine loses power at any moment, the old file or the new one is there.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, BufWriter, ErrorKind, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// A file under its temporary name. It is removed if it is dropped before it is published.
#[derive(Debug)]
pub struct UnfinishedFile {
    path: PathBuf,
    file: BufWriter<File>,
    published: bool,
}

impl UnfinishedFile {
    /// Creates or truncates the file `path`. Fails if another process is writing it. On a file system without locks
    /// both write.
    pub fn create(path: PathBuf) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false).open(&path)?;
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => return Err(busy("another process is writing it")),
            Err(TryLockError::Error(_)) | Ok(()) => {}
        }
        let opened = file.metadata()?;
        if !fs::metadata(&path).is_ok_and(|named| named.ino() == opened.ino()) {
            return Err(busy("another process has just moved it into place"));
        }
        file.set_len(0)?;
        Ok(UnfinishedFile { path, file: BufWriter::with_capacity(1 << 16, file), published: false })
    }

    /// Its temporary name.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Another handle to the file. Everything written so far is flushed first.
    pub fn reopen(&mut self) -> io::Result<File> {
        self.file.flush()?;
        self.file.get_ref().try_clone()
    }

    /// Waits until the disk has all of its contents.
    pub fn sync(&mut self) -> io::Result<()> {
        self.file.flush()?;
        self.file.get_ref().sync_all()
    }

    /// Renames a synced file to its final name, and waits until the disk has the new name.
    pub fn publish(mut self, to: &Path) -> io::Result<()> {
        fs::rename(&self.path, to)?;
        self.published = true;
        sync_folder(parent(to))
    }
}

impl Write for UnfinishedFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Drop for UnfinishedFile {
    fn drop(&mut self) {
        if !self.published {
            fs::remove_file(&self.path).ok();
        }
    }
}

fn busy(reason: &str) -> io::Error {
    io::Error::new(ErrorKind::ResourceBusy, reason)
}

/// Writes a file completely or not at all. `unfinished` is its temporary name in the same folder.
pub fn write_whole(path: &Path, unfinished: PathBuf, bytes: &[u8]) -> io::Result<()> {
    let mut file = UnfinishedFile::create(unfinished)?;
    file.write_all(bytes)?;
    file.sync()?;
    file.publish(path)
}

/// Writes a file that the user names, completely or not at all. Follows links. What is not a regular file, such as a pipe, is written
/// directly.
pub fn write_target(path: &Path, bytes: &[u8]) -> io::Result<()> {
    match target(path) {
        Some(file) => write_whole(&file, temporary_name(&file), bytes),
        None => fs::write(path, bytes),
    }
}

/// The file that a path leads to, or that it may become; `None` if it leads to a device or a pipe.
pub fn target(path: &Path) -> Option<PathBuf> {
    match fs::metadata(path) {
        Ok(found) if !found.is_file() => None,
        Ok(_) => Some(path.canonicalize().unwrap_or_else(|_| path.to_owned())),
        Err(_) => Some(path.to_owned()),
    }
}

/// The temporary name of a file that the user names.
pub fn temporary_name(path: &Path) -> PathBuf {
    with_suffix(path, ".kintsugi-partial")
}

/// Renames a folder to its final name. Its files must already be synced. Waits until the disk has the names of the
/// files, and then the folder's new name.
pub fn publish_folder(unfinished: &Path, to: &Path) -> io::Result<()> {
    sync_folder(unfinished)?;
    fs::rename(unfinished, to)?;
    sync_folder(parent(to))
}

/// Waits until the disk has the names in a folder.
pub fn sync_folder(path: &Path) -> io::Result<()> {
    File::open(path)?.sync_all()
}

/// The parent folder of a path.
pub fn parent(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// A path with a suffix: `corpus` with `.bin` is `corpus.bin`, and `corpus.v1` is `corpus.v1.bin`.
pub fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(suffix);
    name.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder that is removed when the test ends.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("kintsugi-{}-{name}", std::process::id()));
            fs::create_dir_all(&path).expect("a folder for tests");
            Folder(path)
        }

        fn names(&self) -> Vec<String> {
            let entries = fs::read_dir(&self.0).expect("a folder");
            let mut names: Vec<String> = entries
                .map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned())
                .collect();
            names.sort();
            names
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).ok();
        }
    }

    #[test]
    fn a_file_has_its_name_when_it_is_published() {
        let folder = Folder::new("published");
        let path = folder.0.join("a.txt");
        fs::write(&path, "old").expect("a file");
        let mut file = UnfinishedFile::create(with_suffix(&path, ".part")).expect("a new file");
        file.write_all(b"new").expect("it is written");
        file.sync().expect("it is synced");
        assert_eq!(fs::read(&path).expect("the old file"), b"old");
        file.publish(&path).expect("it is renamed");
        assert_eq!(
            (fs::read(&path).expect("the new file"), folder.names()),
            (b"new".to_vec(), vec!["a.txt".into()])
        );
    }

    #[test]
    fn an_unfinished_file_goes_away() {
        let folder = Folder::new("unpublished");
        let unfinished = folder.0.join("a.part");
        fs::write(&unfinished, "what a killed process has left").expect("a file");
        drop(UnfinishedFile::create(unfinished.clone()).expect("it is used again"));
        assert!(folder.names().is_empty());
        let target = folder.0.join("a");
        fs::create_dir(&target).expect("a folder");
        write_whole(&target, unfinished, b"a file").expect_err("a folder has the name");
        assert_eq!(folder.names(), ["a"]);
    }

    #[test]
    fn two_at_once_are_refused() {
        let folder = Folder::new("twice");
        let unfinished = folder.0.join("a.part");
        let mut first = UnfinishedFile::create(unfinished.clone()).expect("a new file");
        first.write_all(b"first").expect("it is written");
        let second = UnfinishedFile::create(unfinished).expect_err("it is being written");
        assert_eq!(second.to_string(), "another process is writing it");
        first.sync().expect("it is synced");
        first.publish(&folder.0.join("a")).expect("it is renamed");
        assert_eq!(fs::read(folder.0.join("a")).expect("a file"), b"first");
    }

    #[test]
    fn a_name_without_a_folder_lies_here() {
        assert_eq!(parent(Path::new("a")), Path::new("."));
        assert_eq!(parent(Path::new("a/b")), Path::new("a"));
    }
}
