"""Failures of the operating system: system calls that fail, files that may not grow, disks that are full."""

import os
import shutil
import signal
import subprocess
import time

from trials.program import Wrong
from trials.runs import check_whole, configuration, draw_settings, resume_to_end, steps_of

# System calls, how each may fail, and about how many of them a thread makes.
ERRORS = {
    "write": (("ENOSPC", "EIO", "EDQUOT", "EFBIG", "EINTR"), 90),
    "fsync": (("EIO", "ENOSPC", "EDQUOT"), 60),
    "fdatasync": (("EIO", "ENOSPC"), 20),
    "rename": (("EIO", "ENOSPC", "EACCES", "EROFS"), 20),
    "openat": (("EIO", "EACCES", "EMFILE", "ENFILE", "ENOSPC", "EINTR"), 60),
    "mkdir": (("ENOSPC", "EACCES", "EROFS", "EDQUOT"), 16),
    "unlink": (("EIO", "EACCES", "EBUSY"), 4),
    "unlinkat": (("EIO", "EACCES"), 30),
    "rmdir": (("EIO", "EACCES"), 4),
    "ftruncate": (("EIO", "ENOSPC"), 2),
    "read": (("EIO", "EINTR"), 40),
    "pread64": (("EIO", "EINTR"), 90),
    "lseek": (("EINVAL",), 4),
    "statx": (("EIO", "EACCES"), 20),
    "getdents64": (("EIO",), 10),
    "flock": (("ENOLCK", "EINTR"), 1),
    "clone3": (("EAGAIN",), 6),
    "sched_getaffinity": (("EINVAL",), 2),
    "copy_file_range": (("EIO", "ENOSPC"), 2),
}
# A loader that cannot read a library ends so, before the program begins.
LOADER = 127


def begin(trial, settings):
    """The arguments of a run to disturb. Half of them go on from where an earlier one was killed."""
    arguments = ["train", configuration(trial.folder, settings), "--resume"]
    if trial.random.random() < 0.5:
        _, seconds = trial.references.of(settings)
        process = trial.program.start(arguments, trial.folder)
        time.sleep(trial.random.uniform(0.3, 0.9) * seconds)
        process.kill()
        trial.program.finish(process).check((0, -signal.SIGKILL))
    if max(steps_of(os.path.join(trial.folder, "out")), default=0) >= settings["run.steps"]:
        # It came to its end too early.
        shutil.rmtree(os.path.join(trial.folder, "out"))
    return arguments


def check_nothing_lost(trial, before, settings):
    """What was saved before the fault is still there, or newer ones in its place."""
    out = os.path.join(trial.folder, "out")
    check_whole(out)
    after = steps_of(out)
    if before and (not after or max(after) < max(before)):
        raise Wrong(f"what was saved is lost: steps {sorted(before)} before, {sorted(after)} after")
    if len(after) < min(len(before), settings["run.keep"]):
        raise Wrong(f"too few checkpoints are left: steps {sorted(before)} before, {sorted(after)} after")


def call(trial):
    """One system call fails, or all from one on."""
    settings = draw_settings(trial)
    reference, _ = trial.references.of(settings)
    name = trial.random.choice(sorted(ERRORS))
    errors, calls = ERRORS[name]
    error = trial.random.choice(errors)
    when = int((calls + 1) ** trial.random.random())
    # One that is interrupted may be tried again; for ever is a hang of the system's making.
    after = "+" if error not in ("EINTR",) and trial.random.random() < 0.3 else ""
    arguments = begin(trial, settings)
    out = os.path.join(trial.folder, "out")
    before = steps_of(out)
    log = os.path.join(trial.folder, ".strace")
    inject = f"inject={name}:error={error}:when={when}{after}"
    trial.note(f"strace -f -e {inject} kintsugi {' '.join(arguments)}")
    under = ["strace", "-f", "-qq", "-o", log, "-e", f"trace={name}", "-e", inject]
    finished = trial.program.run(arguments, trial.folder, under)
    injected = "(INJECTED)" in open(log, errors="replace").read()
    trial.fault(f"{name}", injected)
    if not (finished.code == LOADER and "shared libraries" in finished.stderr):
        # Where writing to stderr is what fails, nothing can be said there.
        mute = name == "write" and injected and "error:" not in finished.stderr
        if not (mute and finished.code in (1, 2)):
            finished.check()
    check_nothing_lost(trial, before, settings)
    trial.found("run went on" if finished.code == 0 else "error told")
    resume_to_end(trial, settings, trial.folder, reference, finished)


def limit(trial):
    """No file may grow beyond a size: a write fails, and SIGXFSZ comes."""
    settings = draw_settings(trial)
    reference, _ = trial.references.of(settings)
    arguments = begin(trial, settings)
    out = os.path.join(trial.folder, "out")
    before = steps_of(out)
    size = trial.random.choice((0, 100, 2000, 10_000, 30_000, 60_000))
    trial.note(f"ulimit -f of {size} bytes, kintsugi {' '.join(arguments)}")
    finished = trial.program.run(arguments, trial.folder, file_limit=size)
    trial.fault("file limit")
    # Its output goes to files too, so it may not be able to say anything.
    if finished.code not in (1, 2):
        finished.check()
    check_nothing_lost(trial, before, settings)
    trial.found("run went on" if finished.code == 0 else "error told")
    resume_to_end(trial, settings, trial.folder, reference, finished)


def disk(trial):
    """run.out is a disk that is full at some moment, and is given room later."""
    settings = draw_settings(trial)
    reference, _ = trial.references.of(settings)
    out = os.path.join(trial.folder, "out")
    os.makedirs(out)
    size = trial.random.choice((4, 32, 100, 150, 200, 300, 400, 600))
    trial.note(f"run.out is a tmpfs of {size} KiB")
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", out], check=True)
    try:
        before = set()
        for _ in range(trial.random.randint(1, 2)):
            finished = trial.program.run(["train", configuration(trial.folder, settings), "--resume"], trial.folder).check()
            trial.fault("full disk", finished.code != 0 or "warning" in finished.stderr)
            check_nothing_lost(trial, before, settings)
            before = steps_of(out)
            trial.found("run went on" if finished.code == 0 else "error told")
            if finished.code == 0:
                break
        subprocess.run(["mount", "-o", "remount,size=64m", out], check=True)
        resume_to_end(trial, settings, trial.folder, reference, finished)
    finally:
        kept = trial.folder + "-out"
        shutil.copytree(out, kept, dirs_exist_ok=True)
        subprocess.run(["umount", out], check=True)
        shutil.rmtree(out)
        os.rename(kept, out)


def can_mount(folder):
    """Whether this machine lets us mount a disk."""
    if os.geteuid() != 0 or not shutil.which("mount"):
        return False
    probe = os.path.join(folder, "probe")
    os.makedirs(probe, exist_ok=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", probe], capture_output=True)
    if mounted.returncode == 0:
        subprocess.run(["umount", probe], check=True)
    return mounted.returncode == 0
