"""The order of writes, syncs and renames, read from a log of system calls: what a machine that loses power would keep.

A file or folder that gets its final name by a rename must have been synced after the last write to it; the folder that
it then lies in must be synced after the rename."""

import os
import re
from collections import defaultdict

from trials.corrupt import settings_of
from trials.program import Wrong
from trials.runs import configuration

CALLS = "openat,creat,write,pwrite64,writev,ftruncate,fsync,fdatasync,rename,renameat,renameat2,mkdir,mkdirat,copy_file_range,sendfile"
CALL = re.compile(r"^(\d+) +(\w+)\((.*)\) += (-?\d+)")
BEGUN = re.compile(r"^(\d+) +(\w+)\((.*) <unfinished \.\.\.>")
RESUMED = re.compile(r"^(\d+) +<\.\.\. (\w+) resumed>(.*)\) += (-?\d+)")
DESCRIPTOR = re.compile(r"(?:\d+|AT_FDCWD)<([^>]*)>")
STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
# A checkpoint that `convert` writes.
CONVERTED = "converted"
# What a machine that loses power must not lose once it is there.
PROMISED = ("config.toml", "metrics.jsonl", "checkpoints", CONVERTED)


def calls(log):
    """Name, arguments and result of the calls of a log, in the order in which they ended."""
    begun = {}
    for line in open(log, errors="replace"):
        if match := BEGUN.match(line):
            begun[match[1], match[2]] = match[3]
        elif match := RESUMED.match(line):
            yield match[2], begun.pop((match[1], match[2]), "") + match[3], int(match[4])
        elif match := CALL.match(line):
            yield match[2], match[3], int(match[4])


class Disk:
    """Which contents and which names are not on the disk yet."""

    def __init__(self, folder):
        self.folder = os.path.realpath(folder)
        self.unsynced = set()
        # By folder, the names in it that were added since it was synced.
        self.added = defaultdict(set)
        self.findings, self.checked = [], 0

    def apply(self, name, arguments, result):
        """A system call that has ended."""
        if result < 0:
            return
        paths = []
        if not name.startswith(("write", "pwrite")):
            paths = [os.path.normpath(os.path.join(self.folder, text)) for text in STRING.findall(arguments)]
        if name == "creat" or name == "openat" and "O_CREAT" in arguments:
            self.unsynced.add(paths[0])
            self.add_name(paths[0])
        elif name in ("mkdir", "mkdirat"):
            self.add_name(paths[0])
        elif name in ("fsync", "fdatasync"):
            path = DESCRIPTOR.search(arguments)[1]
            self.unsynced.discard(path)
            self.added.pop(path, None)
        elif name.startswith("rename"):
            self.rename(paths[0], paths[1])
        elif found := DESCRIPTOR.findall(arguments):
            # The calls that copy write to their last descriptor, but for sendfile.
            self.unsynced.add(found[-1] if name == "copy_file_range" else found[0])

    def add_name(self, path):
        if path.startswith(self.folder + "/"):
            self.added[os.path.dirname(path)].add(os.path.basename(path))

    def rename(self, old, new):
        name = os.path.basename(new)
        if promised(name):
            self.checked += 1
            for path in sorted(within(self.unsynced, old)):
                self.findings.append(f"{name} got its name before {os.path.basename(path)} was synced")
            if self.added.get(old):
                self.findings.append(f"{name} got its name before its folder was synced")
            if "checkpoints" in self.added[os.path.dirname(os.path.dirname(new))]:
                self.findings.append(f"{name} got its name before that of `checkpoints` was synced")
        for path in within(self.unsynced, old):
            self.unsynced.remove(path)
            self.unsynced.add(new + path[len(old) :])
        for path in within(self.added, old):
            self.added[new + path[len(old) :]] = self.added.pop(path)
        self.added[os.path.dirname(old)].discard(os.path.basename(old))
        self.add_name(new)

    def end(self):
        """What must be on the disk when the command has ended."""
        for folder, names in self.added.items():
            for name in sorted(filter(promised, names)):
                self.findings.append(f"{os.path.relpath(folder, self.folder)} was not synced after {name} got its name")


def within(paths, folder):
    return [path for path in paths if path == folder or path.startswith(folder + "/")]


def promised(name):
    """Whether it must survive a loss of power once it has its name."""
    return name in PROMISED or re.fullmatch(r"step-\d+", name) is not None


def order(trial):
    """Follows the system calls of one command."""
    trial.template.copy(trial.folder)
    action = trial.random.choice(("new", "resume", "convert"))
    fresh = {**settings_of(6), "run.out": "fresh", "run.checkpoint_every": 2}
    arguments = {
        "new": ["train", configuration(trial.folder, fresh)],
        "resume": ["train", configuration(trial.folder, settings_of(20), "further.toml"), "--resume"],
        "convert": ["convert", "exported", CONVERTED, "--to", "checkpoint"],
    }[action]
    log = os.path.join(trial.folder, ".strace")
    under = ["strace", "-f", "-y", "-qq", "-o", log, "-e", f"trace={CALLS}"]
    trial.program.run(arguments, trial.folder, under).check((0,))
    disk = Disk(trial.folder)
    for call in calls(log):
        disk.apply(*call)
    disk.end()
    trial.fault("rename", True, disk.checked)
    if not disk.checked:
        raise Wrong("no rename was seen: the log of system calls cannot be read")
    if disk.findings:
        raise Wrong(f"{action}: " + "; ".join(dict.fromkeys(disk.findings)))
    trial.found("in order")
