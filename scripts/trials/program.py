"""Runs the binary, and refuses what no run may do: panic, hang, die by a signal nobody sent, or end with another exit
code than 0, 1 and 2."""

import os
import resource
import signal
import subprocess
import time

# Far more than any trial takes, also on a busy machine.
PATIENCE_S = 120
# A mutated number must not take the machine's memory.
ADDRESS_SPACE = 8 << 30


class Wrong(Exception):
    """Something that must never happen."""


class Finished:
    """A process that has ended."""

    def __init__(self, arguments, code, stdout, stderr):
        self.arguments, self.code, self.stdout, self.stderr = arguments, code, stdout, stderr

    def said(self):
        lines = self.stderr.strip().splitlines()
        panic = next((number for number, line in enumerate(lines) if "panicked" in line), None)
        if panic is not None:
            lines = lines[panic : panic + 3]
        return " | ".join(lines[-3:])[:600]

    def check(self, codes=(0, 1, 2)):
        """Refuses panics and exit codes that are not among `codes`."""
        what = " ".join(self.arguments)
        if self.code == 101 or "panicked" in self.stderr:
            raise Wrong(f"panic of `{what}`: {self.said()}")
        if self.code not in codes:
            raise Wrong(f"exit code {self.code} of `{what}`: {self.said()}")
        # The loader's and strace's own failures come before main.
        if self.code in (1, 2) and "error:" not in self.stderr:
            raise Wrong(f"exit code {self.code} without a sentence of `{what}`: {self.said()}")
        return self


class Program:
    """The binary under trial."""

    def __init__(self, binary, environment=None):
        self.binary = os.path.abspath(binary)
        self.environment = {**os.environ, **(environment or {})}
        self.environment["RUST_BACKTRACE"] = "0"

    def start(self, arguments, folder, under=(), file_limit=None):
        """Starts it in a folder, by way of other commands where there are some."""

        def limit():
            resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            if file_limit is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))

        # Files, because a pipe that nobody reads would stop it.
        outputs = [open(os.path.join(folder, f".{name}"), "w+b") for name in ("stdout", "stderr")]
        process = subprocess.Popen(
            [*under, self.binary, *arguments],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=outputs[0],
            stderr=outputs[1],
            env=self.environment,
            preexec_fn=limit,
            start_new_session=True,
        )
        process.trial = (arguments, outputs)
        return process

    def finish(self, process, patience=PATIENCE_S):
        """Waits for its end; one that does not come is a hang."""
        arguments, outputs = process.trial
        hung = False
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            hung = True
        # Under strace the program is a grandchild; nothing of a trial outlives it.
        kill_group(process)
        process.wait()
        texts = []
        for output in outputs:
            output.seek(0)
            texts.append(output.read().decode("utf-8", "replace"))
            output.close()
        finished = Finished(arguments, process.returncode, *texts)
        if hung:
            raise Wrong(f"hang: `{' '.join(arguments)}` did not end in {patience} s: {finished.said()}")
        return finished

    def run(self, arguments, folder, under=(), file_limit=None):
        return self.finish(self.start(arguments, folder, under, file_limit))


def kill_group(process):
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def wait_until(condition, process, seconds=10.0):
    """Waits for a condition, but no longer than the process lives."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None and not condition():
        time.sleep(0.0002)
