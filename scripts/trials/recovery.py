#!/usr/bin/env python3
"""Real faults in runs of `launch --restarts`: see scripts/check-recovery."""

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict

sys.dont_write_bytecode = True
SCRIPTS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, SCRIPTS)

from trials.faults import STEPS, Agent, Disk, Flip, Signal, Strangers, last_op  # noqa: E402
from trials.stalls import LAUNCHERS, processes  # noqa: E402

PATIENCE_S = 120
LAYOUTS = (
    {"parallel.tp": 1, "parallel.pp": 1, "parallel.dp": 3, "sharding.zero": 3},
    {"parallel.tp": 1, "parallel.pp": 2, "parallel.dp": 2, "sharding.zero": 1},
    {"parallel.tp": 2, "parallel.pp": 2, "parallel.dp": 1},
)
# A run whose data have a line of letters that are nowhere else goes back to a checkpoint, and skips it.
SPIKES = {
    "parallel.tp": 1,
    "parallel.pp": 1,
    "parallel.dp": 3,
    "model.vocab": 257,
    "optimizer.lr": 3e-3,
    "run.on_spike": "rollback",
    "run.spike_window": 8,
}
TINY = {
    "model.layers": 2,
    "model.hidden": 32,
    "model.heads": 2,
    "batch.sequence": 16,
    "batch.micro": 1,
    "batch.global": 12,
    "run.steps": STEPS,
    "run.eval_every": 0,
    "run.checkpoint_every": 20,
    "optimizer.warmup": 2,
}
# How often each is drawn.
FAULTS = {Signal: 11, Agent: 2, Disk: 1, Flip: 2, Strangers: 1}
# Faults of hosts, which scripts/trials/hosts.py knows by these words.
HOST_FAULTS = ("node", "cut", "blink", "slow")


def prepare(kintsugi, folder):
    """Data with a spike. Returns their path."""
    line, strange = "the cat sat on the mat and looked at the moon.\n", "".join(chr(0x4E00 + 37 * number) for number in range(40))
    with open(os.path.join(folder, "text.txt"), "w") as file:
        file.write(line * 900 + strange + "\n" + line * 900)
    subprocess.run([kintsugi, "prepare", "text.txt", "--out", "text", "--tokenizer", "bytes"], cwd=folder, check=True, capture_output=True)
    return os.path.join(folder, "text")


class Wrong(Exception):
    """Something that must not happen."""


def metrics(folder):
    found = {}
    try:
        with open(os.path.join(folder, "out", "metrics.jsonl")) as file:
            for line in file:
                if line.endswith("\n"):
                    step = json.loads(line)
                    found[step["step"]] = (step["loss"], step["grad_norm"])
    except OSError:
        pass
    return found


def settings(values):
    return [word for key, value in values.items() for word in ("--set", f"{key}={json.dumps(value)}")]


def blamed(text):
    """All ranks that verdicts name; before the first step, those of errors."""
    found = re.findall(r"verdict: rank (\d+)", text)
    errors = "\n".join(line for line in text.splitlines() if "error: " in line)
    found = found or re.findall(r"rank (\d+) on \S+?, (?:whose process has sent nothing|which waits for no other rank)", errors)
    return {int(rank) for rank in found}


class Trial:
    """A run of three or four ranks, and a fault."""

    def __init__(self, kintsugi, folder, random, references, layouts):
        self.kintsugi, self.folder, self.references = kintsugi, folder, references
        kind = random.choices(list(FAULTS), FAULTS.values())[0]
        layout = {"parallel.tp": 1, "parallel.pp": 1, "parallel.dp": 3} if kind is Flip else random.choice(layouts)
        self.fault = kind(random, {**TINY, **layout})
        self.fault.kintsugi = kintsugi
        self.values = {**TINY, **layout, **self.fault.settings}
        self.ranks = self.values["parallel.tp"] * self.values["parallel.pp"] * self.values["parallel.dp"]
        self.victim, self.launcher = random.randrange(self.ranks), random.choice(LAUNCHERS)

    def reference(self):
        """The losses of an undisturbed run of threads."""
        key = json.dumps({key: value for key, value in self.values.items() if key != "run.communication_timeout"})
        if key not in self.references:
            folder = f"{self.folder}-reference"
            os.makedirs(folder)
            subprocess.run([self.kintsugi, "train", *settings(self.values)], cwd=folder, check=True, capture_output=True, timeout=PATIENCE_S)
            self.references[key] = metrics(folder)
            shutil.rmtree(folder)
        return self.references[key]

    def run(self):
        reference = self.reference()
        os.makedirs(self.folder)
        self.fault.prepare(self.folder)
        launch = ["launch", "--mpirun", self.launcher, "--ranks", str(self.ranks), "--restarts", "1", "train", *settings(self.values)]
        with open(os.path.join(self.folder, "output"), "w") as output:
            process = subprocess.Popen([self.kintsugi, *launch], cwd=self.folder, stdout=output, stderr=output)
        try:
            times = self.watch(process)
            return None if times is None else self.judge(process.returncode, reference, times)
        finally:
            for pid in [process.pid, *processes(self.folder).values()]:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            process.wait()
            self.fault.end(self.folder)

    def watch(self, process):
        """The times from the fault until it was noticed and until the first step after it; None if it came too late."""
        end = time.monotonic() + PATIENCE_S
        pid = None
        while process.poll() is None:
            pid = pid or processes(self.folder).get(self.victim)
            if pid is not None and self.fault.is_due(self.folder, self.victim, pid):
                break
            self.check_time(end, "the fault does not come")
            time.sleep(0.001 if pid else 0.02)
        begun, times, came = time.monotonic(), {}, process.poll() is None
        try:
            if came:
                self.fault.inject(self.folder, self.victim, pid, process.pid)
        except ProcessLookupError:
            came = False
        while process.poll() is None:
            text = self.output()
            if "noticed" not in times and self.fault.noticed(text):
                times["noticed"] = time.monotonic() - begun
                self.fault.when_noticed()
            if "resumed" not in times and "restarted:" in text:
                times["resumed"] = time.monotonic() - begun
            self.check_time(end, "the job does not end")
            time.sleep(0.01)
        # A rank that was stopped may have had nothing left to do, and a wrong weight may have been overwritten.
        return times if came and (times or not self.fault.restarts) else None

    def check_time(self, end, what):
        if time.monotonic() > end:
            states = [f"rank {rank} in {last_op(self.folder, rank)}: {state(pid)}" for rank, pid in sorted(processes(self.folder).items())]
            raise Wrong(f"{self}: {what}: {'; '.join(states)}: {self.output()[-1500:]}")

    def __str__(self):
        return f"{self.fault.name}, rank {self.victim} of {self.ranks}, {self.launcher}"

    def judge(self, code, reference, times):
        text = self.output()
        named = blamed(text)
        if not named <= ({self.victim} if self.fault.has_culprit else set()):
            raise Wrong(f"{self}: rank {named} is blamed: {text[-1500:]}")
        if code == 1 and os.path.exists(os.path.join(self.folder, "out", "summary.json")) and getattr(self.fault, "when", "") == "end":
            # The run has its results, so it is not started again, but its failure is explained.
            code = 0
        if code != 0:
            raise Wrong(f"{self}: exit code {code}: {text[-1500:]}")
        if not self.fault.restarts and "restart 1" in text:
            raise Wrong(f"{self}: the ranks were started again: {text[-1500:]}")
        if metrics(self.folder) != reference:
            raise Wrong(f"{self}: other losses than an undisturbed run")
        return {"fault": self.fault.name, **times, "named": self.victim in named if self.fault.has_culprit else None}

    def output(self):
        with open(os.path.join(self.folder, "output"), errors="replace") as file:
            return file.read()


def state(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat, open(f"/proc/{pid}/wchan") as channel:
            return f"{stat.read().rsplit(') ', 1)[1][0]} {channel.read()}"
    except OSError:
        return "gone"


def on_hosts(kintsugi, folder, random, undisturbed):
    """A fault of a host, which is a network namespace."""
    fault, host = random.choice(HOST_FAULTS), random.choice((2, 3))
    os.makedirs(folder)
    rows = os.path.join(folder, "rows")
    trial = [os.path.join(SCRIPTS, "trials", "hosts.py"), "--kintsugi", kintsugi, "--work", folder, "--undisturbed", undisturbed]
    only = ["--fault", fault, "--host", str(host), "--rows", rows]
    inside = [os.path.join(SCRIPTS, "several-hosts"), os.path.join(folder, "network"), "3", sys.executable, *trial, *only]
    try:
        ran = subprocess.run(inside, capture_output=True, text=True, timeout=2 * PATIENCE_S)
    except subprocess.TimeoutExpired as expired:
        raise Wrong(f"host {host}: {fault}: it does not end: {expired.stdout}") from None
    if ran.returncode != 0:
        raise Wrong(f"host {host}: {fault}: {ran.stdout[-1500:]}{ran.stderr[-500:]}")
    with open(rows) as file:
        return json.loads(file.readline())


def table(results):
    print(f"\n{'fault':48} {'trials':>6} {'noticed s, median':>18} {'most':>6} {'first step s, median':>21} {'most':>6} {'named':>6}")
    for fault in sorted(results):
        rows = results[fault]

        def figures(key):
            values = sorted(row[key] for row in rows if row.get(key) is not None)
            return (f"{values[len(values) // 2]:.1f}", f"{values[-1]:.1f}") if values else ("", "")

        named = [row["named"] for row in rows if row["named"] is not None]
        count = f"{sum(named)}" if named else ""
        print(f"{fault:48} {len(rows):6} {figures('noticed')[0]:>18} {figures('noticed')[1]:>6} {figures('resumed')[0]:>21} {figures('resumed')[1]:>6} {count:>6}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kintsugi", required=True)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--trial", type=int, help="this one only")
    arguments = parser.parse_args()
    work = tempfile.mkdtemp(prefix="kintsugi-recovery-")
    kintsugi = os.path.abspath(arguments.kintsugi)
    layouts = (*LAYOUTS, {**SPIKES, "data.source": prepare(kintsugi, work)})
    results, failed, references = defaultdict(list), 0, {}
    for number in range(arguments.trials) if arguments.trial is None else [arguments.trial]:
        draw, folder = random.Random(f"{arguments.seed}/{number}"), os.path.join(work, str(number))
        begun = time.monotonic()
        try:
            # Every fifth.
            if draw.randrange(5) == 0:
                row = on_hosts(kintsugi, folder, draw, os.path.join(work, "hosts-undisturbed"))
            else:
                row = Trial(kintsugi, folder, draw, references, layouts).run()
        except Wrong as wrong:
            failed += 1
            print(f"trial {number}: {wrong}\n  its files are in {folder}", flush=True)
            continue
        seconds = time.monotonic() - begun
        print(f"trial {number}, {seconds:.0f} s: {row or 'the job ended before the fault'}", flush=True)
        if row is not None:
            results[row["fault"]].append(row)
        shutil.rmtree(folder, ignore_errors=True)
    table(results)
    rows = [row for rows in results.values() for row in rows]
    with_culprit = [row["named"] for row in rows if row["named"] is not None]
    print(f"\n{len(rows)} faults; of {len(with_culprit)} with a culprit {sum(with_culprit)} were named, and no other rank; {failed} trials failed")
    if not failed:
        shutil.rmtree(work, ignore_errors=True)
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
