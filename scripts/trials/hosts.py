#!/usr/bin/env python3
"""Faults of hosts that are network namespaces: see scripts/check-hosts. Runs inside scripts/several-hosts."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from trials.recovery import Wrong, blamed, metrics, settings, table  # noqa: E402

HOSTS = 3
PATIENCE_S = 200
# A step takes some tens of milliseconds, so that a host that is slow for moments is slow in every step.
VALUES = {
    "parallel.tp": 1,
    "parallel.pp": 1,
    "parallel.dp": HOSTS,
    "model.layers": 2,
    "model.hidden": 64,
    "model.heads": 2,
    "batch.sequence": 64,
    "batch.micro": 4,
    "batch.global": 24,
    "run.steps": 400,
    "run.eval_every": 0,
    "run.checkpoint_every": 20,
    "optimizer.warmup": 2,
}
FAULTS = {
    "node": "all processes of a host are killed",
    "cut": "a host is cut off until it was noticed",
    "blink": "a host is cut off for 2 s",
    "slow": "a host is stopped for 2/3 of the time",
}


def is_rank(pid):
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return any(variable.startswith(b"OMPI_COMM_WORLD_RANK=") for variable in file.read().split(b"\0"))
    except OSError:
        return False


def processes_on(host):
    answer = subprocess.run(["host", "pids", str(host)], capture_output=True, text=True, check=True).stdout
    return [int(pid) for pid in answer.split()]


def ranks_on(host):
    return [pid for pid in processes_on(host) if is_rank(pid)]


def kill(pids):
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def slow_down(host, over):
    """Stops the ranks on a host for 40 ms of every 60 ms, until `over` is set."""
    pids = ranks_on(host)
    while not over.is_set():
        for name, seconds in ((signal.SIGSTOP, 0.04), (signal.SIGCONT, 0.02)):
            for pid in pids:
                try:
                    os.kill(pid, name)
                except ProcessLookupError:
                    return
            time.sleep(seconds)


class Trial:
    def __init__(self, kintsugi, folder, fault, host):
        self.folder, self.fault, self.host = folder, fault, host
        os.makedirs(folder)
        launch = [kintsugi, "launch", "--mpirun", "mpirun", "--ranks", str(HOSTS), "--nodes", str(HOSTS), "--restarts", "2", "train"]
        with open(os.path.join(folder, "stderr"), "w") as errors:
            self.process = subprocess.Popen([*launch, *settings(VALUES)], cwd=folder, stdout=subprocess.DEVNULL, stderr=errors)
        self.end = time.monotonic() + PATIENCE_S

    def stderr(self):
        with open(os.path.join(self.folder, "stderr"), errors="replace") as file:
            return file.read()

    def wait(self, what, condition):
        while not condition():
            if time.monotonic() > self.end:
                raise Wrong(f"{self.fault}: {what}: {self.stderr()[-1500:]}")
            if self.process.poll() is not None and not condition():
                raise Wrong(f"{self.fault}: the job has ended ({self.process.returncode}): {self.stderr()[-1500:]}")
            time.sleep(0.05)

    def run(self, reference):
        self.wait("no step is trained", lambda: len(metrics(self.folder)) > 30)
        begun = time.monotonic()
        seconds_since = lambda: time.monotonic() - begun  # noqa: E731
        noticed = resumed = None
        if self.fault == "slow":
            over = threading.Event()
            thread = threading.Thread(target=slow_down, args=(self.host, over))
            thread.start()
            try:
                self.wait("no straggler is named", lambda: "is a straggler" in self.stderr())
            finally:
                over.set()
                thread.join()
            noticed = seconds_since()
        elif self.fault == "blink":
            subprocess.run(["host", "cut", str(self.host)], check=True)
            time.sleep(2)
            subprocess.run(["host", "join", str(self.host)], check=True)
        else:
            if self.fault == "cut":
                subprocess.run(["host", "cut", str(self.host)], check=True)
            else:
                kill(processes_on(self.host))
            self.wait("nothing is noticed", lambda: "error:" in self.stderr())
            noticed = seconds_since()
            subprocess.run(["host", "join", str(self.host)], check=True)
            self.wait("the run does not go on", lambda: "restarted:" in self.stderr())
            resumed = seconds_since()
        try:
            code = self.process.wait(timeout=max(self.end - time.monotonic(), 1))
        except subprocess.TimeoutExpired:
            raise Wrong(f"{self.fault}: the job does not end: {self.stderr()[-1500:]}") from None
        text = self.stderr()
        if code != 0 or metrics(self.folder) != reference:
            raise Wrong(f"{self.fault}: exit code {code}, or other losses than an undisturbed run: {text[-1500:]}")
        named = blamed(text) | {int(rank) for rank in re.findall(r"rank (\d+)[^,]*? is a straggler", text)}
        expected = set() if self.fault == "blink" else {self.host - 1}
        if not named <= expected:
            raise Wrong(f"{self.fault}: rank {self.host - 1} is the cause, and {sorted(named)} are named: {text[-1500:]}")
        if self.fault in ("blink", "slow") and "restart" in text:
            raise Wrong(f"{self.fault}: the run was started again: {text[-1500:]}")
        if self.fault == "cut" and noticed > 10:
            raise Wrong(f"{self.fault}: noticed after {noticed:.1f} s")
        return {"fault": FAULTS[self.fault], "noticed": noticed, "resumed": resumed, "named": named == expected if expected else None}

    def stop(self):
        for host in range(1, HOSTS + 1):
            kill(ranks_on(host))
        self.process.kill()
        self.process.wait()
        subprocess.run(["host", "join", str(self.host)], check=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kintsugi", required=True)
    parser.add_argument("--work", required=True)
    parser.add_argument("--undisturbed", help="the folder of the undisturbed run, which may exist")
    parser.add_argument("--trials", type=int, default=2, help="of each fault")
    parser.add_argument("--fault", choices=FAULTS, help="this one only, once")
    parser.add_argument("--host", type=int, default=2)
    parser.add_argument("--rows", help="a file for a line of JSON for every trial")
    arguments = parser.parse_args()
    undisturbed = arguments.undisturbed or os.path.join(arguments.work, "undisturbed")
    if not os.path.exists(undisturbed):
        os.makedirs(undisturbed)
        subprocess.run([arguments.kintsugi, "train", *settings(VALUES)], cwd=undisturbed, check=True, capture_output=True)
    # Host 1 has the launcher.
    every = [(fault, 2 + number % (HOSTS - 1)) for number in range(arguments.trials) for fault in FAULTS]
    reference, failed, results = metrics(undisturbed), 0, defaultdict(list)
    for number, (fault, host) in enumerate([(arguments.fault, arguments.host)] if arguments.fault else every):
        trial = Trial(arguments.kintsugi, os.path.join(arguments.work, f"host-{number}"), fault, host)
        try:
            row = trial.run(reference)
            results[row["fault"]].append(row)
            print(f"host {host}: {row}", flush=True)
        except Wrong as wrong:
            failed += 1
            print(wrong, flush=True)
        finally:
            trial.stop()
    if arguments.rows:
        with open(arguments.rows, "w") as file:
            file.writelines(json.dumps(row) + "\n" for rows in results.values() for row in rows)
    else:
        table(results)
        print(f"{failed} trials failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
