"""What disturbs the runs of scripts/check-recovery: a rank, an agent, a disk, memory, strangers."""

import glob
import json
import os
import signal
import socket
import struct
import subprocess
import time

from trials.stalls import has_thread, processes

STEPS = 200
# A fault comes when the flight recorder of its rank shows an op that begins like this.
OPS = {
    "load": ("load",),
    "forward": ("forward",),
    "backward": ("backward",),
    "collective": ("wait for reduced", "wait for gathered", "wait for refreshed", "wait for the norm"),
    "message": ("wait for received", "wait for sent"),
    "optimizer": ("measure", "clip", "step"),
}


def last_op(folder, rank):
    try:
        with open(os.path.join(folder, "out", "flight", f"rank-{rank:05}")) as file:
            lines = [line.split(" ", 2) for line in file.read().splitlines()[1:]]
    except OSError:
        return 0, ""
    _, step, op = max(((int(time), int(step), op) for time, step, op in (line for line in lines if len(line) == 3)), default=(0, 0, ""))
    return step, op


def steps(folder):
    try:
        with open(os.path.join(folder, "out", "metrics.jsonl")) as file:
            return sum(1 for _ in file)
    except OSError:
        return 0


class Fault:
    """A fault of a rank, in the name of which `victim` is replaced."""

    # Settings of the run.
    settings = {}
    # Whether the ranks are started again.
    restarts = True
    # Whether a rank is the cause.
    has_culprit = True

    def __init__(self, random, values):
        self.random, self.values = random, values

    def prepare(self, folder):
        """Before the run."""

    def is_due(self, folder, victim, pid):
        return steps(folder) > 30

    def inject(self, folder, victim, pid, launcher):
        """Raises ProcessLookupError if it comes too late."""

    def noticed(self, text):
        return "error:" in text

    def when_noticed(self):
        """The cause is gone."""

    def end(self, folder):
        """After the run, however it has ended."""


class Signal(Fault):
    """SIGKILL or SIGSTOP of a rank, in an op or between two."""

    WHEN = ("start", *OPS, "checkpoint", "rollback", "end")

    def __init__(self, random, values):
        super().__init__(random, values)
        possible = {"message": values["parallel.pp"] > 1, "rollback": "run.on_spike" in values}
        self.when = random.choice([when for when in self.WHEN if possible.get(when, True)])
        self.how = "KILL" if self.when == "end" else random.choice(("KILL", "STOP"))
        self.name = f"SIG{self.how}, {self.when}"
        if self.when == "start" and self.how == "STOP":
            # Before the first step a stopped process is noticed after run.communication_timeout.
            self.settings = {"run.communication_timeout": 8}

    def is_due(self, folder, victim, pid):
        if self.when == "start":
            return has_thread(pid, "heartbeat")
        if self.when == "end":
            return steps(folder) == STEPS
        if steps(folder) < 30:
            return False
        if self.when == "rollback":
            return os.path.exists(os.path.join(folder, "out", "rollbacks.jsonl"))
        if self.when == "checkpoint":
            return bool(glob.glob(os.path.join(folder, "out", "checkpoints", "*.partial")))
        return last_op(folder, victim)[1].startswith(OPS[self.when])

    def inject(self, folder, victim, pid, launcher):
        os.kill(pid, getattr(signal, f"SIG{self.how}"))


class Agent(Fault):
    """SIGKILL or SIGSTOP of the agent."""

    restarts = has_culprit = False

    def __init__(self, random, values):
        super().__init__(random, values)
        self.how = random.choice(("KILL", "STOP"))
        self.name = f"SIG{self.how}, agent"

    def inject(self, folder, victim, pid, launcher):
        os.kill(agent_of(launcher), getattr(signal, f"SIG{self.how}"))

    def noticed(self, text):
        return "warning: the agent" in text


def agent_of(launcher):
    """The agent that a process has started."""
    for path in glob.glob("/proc/[0-9]*"):
        try:
            with open(f"{path}/cmdline", "rb") as file:
                is_agent = file.read().endswith(b"\0agent\0")
            with open(f"{path}/stat") as file:
                parent = int(file.read().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
        if is_agent and parent == launcher:
            return int(path.split("/")[2])
    raise ProcessLookupError


class Disk(Fault):
    """The disk of the checkpoints is full, until that was noticed."""

    name = "full disk"
    restarts = has_culprit = False

    def prepare(self, folder):
        self.disk = os.path.join(folder, "out", "checkpoints")
        os.makedirs(self.disk)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", self.disk], check=True)

    def inject(self, folder, victim, pid, launcher):
        try:
            with open(os.path.join(self.disk, "filler"), "wb", buffering=0) as filler:
                while True:
                    filler.write(bytes(1 << 16))
        except OSError:
            pass

    def noticed(self, text):
        return "was not written" in text

    def when_noticed(self):
        os.remove(os.path.join(self.disk, "filler"))

    def end(self, folder):
        subprocess.run(["umount", "--lazy", self.disk], check=True)


class Flip(Fault):
    """A bit flips in the weights of a rank, at any moment."""

    name = "flipped bit"
    # Such a rate changes no weight, so that they are found by their initial values.
    settings = {"optimizer.lr": 1e-30, "optimizer.min_lr": 0, "run.checksum_every": 1, "sharding.zero": 1}

    def prepare(self, folder):
        initial = os.path.join(folder, "initial")
        words = [word for key, value in {**self.values, **self.settings, "run.steps": 0}.items() for word in ("--set", f"{key}={json.dumps(value)}")]
        subprocess.run([self.kintsugi, "train", *words, "--set", f"run.out={initial}"], cwd=folder, check=True, capture_output=True)
        with open(os.path.join(initial, "checkpoints", "step-00000000", "rank-00000.safetensors"), "rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
            start = header["table.table"]["data_offsets"][0] + 1024
            file.seek(start, os.SEEK_CUR)
            self.weights = file.read(64)

    def inject(self, folder, victim, pid, launcher):
        flipped = 0
        try:
            with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
                for line in maps:
                    addresses, rights, *_ = line.split()
                    if rights != "rw-p":
                        continue
                    start, end = (int(address, 16) for address in addresses.split("-"))
                    memory.seek(start)
                    content = memory.read(end - start)
                    at = content.find(self.weights)
                    while at >= 0:
                        memory.seek(start + at)
                        memory.write(bytes([self.weights[0] ^ 1]))
                        flipped += 1
                        at = content.find(self.weights, at + 1)
        except OSError:
            pass
        if not flipped:
            raise ProcessLookupError


class Strangers(Fault):
    """Garbage, and a process with a wrong secret, at every port and socket of the job."""

    name = "garbage and a wrong secret"
    restarts = has_culprit = False

    def inject(self, folder, victim, pid, launcher):
        for port in ports([launcher, agent_of(launcher), *processes(folder).values()]):
            for garbage in (b"", b"\0", b"\xff" * 200, self.random.randbytes(5000)):
                try:
                    with socket.create_connection(("127.0.0.1", port), timeout=1) as stranger:
                        stranger.sendall(garbage)
                except OSError:
                    pass
            variables = {"KINTSUGI_RANK": "1", "KINTSUGI_RANKS": "2", "KINTSUGI_RENDEZVOUS": f"127.0.0.1:{port}", "KINTSUGI_SECRET": "wrong"}
            words = ["--set", "run.transport=nccl", "--set", "run.device=cuda", "--set", f"run.out={folder}/stranger", "--set", "run.communication_timeout=2"]
            subprocess.run([self.kintsugi, "train", *words], cwd=folder, env={**os.environ, **variables}, capture_output=True, timeout=60)

    def noticed(self, text):
        return False


def ports(pids):
    """The TCP ports at which processes listen."""
    sockets = set()
    for pid in pids:
        for path in glob.glob(f"/proc/{pid}/fd/*"):
            try:
                sockets.add(os.readlink(path))
            except OSError:
                pass
    with open("/proc/net/tcp") as table:
        rows = [line.split() for line in table.readlines()[1:]]
    return sorted({int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets})
