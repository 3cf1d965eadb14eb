"""Bugs on purpose, in a copy of the sources: the program itself has no switch for them. In the copy, the environment variable
KINTSUGI_SEEDED_BUG names the safeguard that is disabled."""

import os
import shutil
import subprocess

CRATE = "crates/checkpoint/src"
SWITCH = """
/// Whether the environment names this bug.
pub(crate) fn has_bug(name: &str) -> bool {
    std::env::var_os("KINTSUGI_SEEDED_BUG").is_some_and(|bug| bug == name)
}
"""
# For each bug the file, a line of it, and what replaces the line.
CHANGES = {
    "checksum": (
        "checkpoint.rs",
        "if checksum != record.checksum {",
        'if checksum != record.checksum && !crate::has_bug("checksum") {',
    ),
    "fsync": (
        "files.rs",
        "        self.file.sync_all()?;\n        Ok((self.bytes,",
        '        if !crate::has_bug("fsync") {\n            self.file.sync_all()?;\n        }\n        Ok((self.bytes,',
    ),
    "lock": (
        "lock.rs",
        "match try_lock(&file) {",
        'match if crate::has_bug("lock") { Ok(()) } else { try_lock(&file) } {',
    ),
    "rename": (
        "folder.rs",
        'self.path.join(format!("{OWN}{STEP}{step:08}{PARTIAL}"))',
        'if crate::has_bug("rename") { self.of_step(step) } else { self.path.join(format!("{OWN}{STEP}{step:08}{PARTIAL}")) }',
    ),
}


def copy_with_bugs(root, target):
    """Copies the files that git knows to a folder, and adds the bugs."""
    listed = ["git", "-C", root, "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, capture_output=True, check=True).stdout.decode().split("\0"):
        source = os.path.join(root, name)
        if name and os.path.isfile(source):
            copied = os.path.join(target, name)
            os.makedirs(os.path.dirname(copied), exist_ok=True)
            shutil.copy2(source, copied)
    for file, line, changed in CHANGES.values():
        path = os.path.join(target, CRATE, file)
        with open(path) as source:
            text = source.read()
        if text.count(line) != 1:
            raise SystemExit(f"{CRATE}/{file} has changed: {line!r} is in it {text.count(line)} times and not once")
        with open(path, "w") as source:
            source.write(text.replace(line, changed))
    with open(os.path.join(target, CRATE, "lib.rs"), "a") as source:
        source.write(SWITCH)
