#!/usr/bin/env python3
"""Real faults in runs of `launch --restarts`: see scripts/check-recovery."""

import argparse
import glob
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
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from trials.stalls import LAUNCHERS, has_thread, processes  # noqa: E402

PATIENCE_S = 240
STEPS = 400
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
# A fault comes when the flight recorder of its rank shows an op that begins like this.
OPS = {
    "load": ("load",),
    "forward": ("forward",),
    "backward": ("backward",),
    "collective": ("wait for reduced", "wait for gathered", "wait for refreshed", "wait for the norm"),
    "message": ("wait for received", "wait for sent"),
    "optimizer": ("measure", "clip", "step"),
}
WHEN = ("start", *OPS, "checkpoint", "rollback", "end", "agent")


def prepare(kintsugi, folder):
    """Data with a spike. Returns their path."""
    line, strange = "the cat sat on the mat and looked at the moon.\n", "".join(chr(0x4E00 + 37 * number) for number in range(40))
    with open(os.path.join(folder, "text.txt"), "w") as file:
        file.write(line * 900 + strange + "\n" + line * 900)
    subprocess.run([kintsugi, "prepare", "text.txt", "--out", "text", "--tokenizer", "bytes"], cwd=folder, check=True, capture_output=True)
    return os.path.join(folder, "text")


class Wrong(Exception):
    """Something that must not happen."""


def last_op(folder, rank):
    try:
        with open(os.path.join(folder, "out", "flight", f"rank-{rank:05}")) as file:
            lines = [line.split(" ", 2) for line in file.read().splitlines()[1:]]
    except OSError:
        return 0, ""
    _, step, op = max(((int(time), int(step), op) for time, step, op in (line for line in lines if len(line) == 3)), default=(0, 0, ""))
    return step, op


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
    return None


def is_due(folder, victim, pid, when):
    if when == "start":
        return has_thread(pid, "heartbeat")
    if when == "end":
        return len(metrics(folder)) == STEPS
    if len(metrics(folder)) < 30:
        return False
    if when == "rollback":
        return os.path.exists(os.path.join(folder, "out", "rollbacks.jsonl"))
    if when == "checkpoint":
        return bool(glob.glob(os.path.join(folder, "out", "checkpoints", "*.partial")))
    return when == "agent" or last_op(folder, victim)[1].startswith(OPS[when])


class Trial:
    def __init__(self, kintsugi, folder, random, references, layouts):
        self.kintsugi, self.folder, self.random, self.references, self.layouts = kintsugi, folder, random, references, layouts

    def reference(self, index):
        """The losses of an undisturbed run of threads."""
        if index not in self.references:
            folder = f"{self.folder}-reference"
            os.makedirs(folder)
            subprocess.run([self.kintsugi, "train", *settings({**TINY, **self.layouts[index]})], cwd=folder, check=True, capture_output=True, timeout=PATIENCE_S)
            self.references[index] = metrics(folder)
        return self.references[index]

    def run(self):
        index = self.random.randrange(len(self.layouts))
        values = {**TINY, **self.layouts[index]}
        possible = {"message": values["parallel.pp"] > 1, "rollback": "run.on_spike" in values}
        when = self.random.choice([when for when in WHEN if possible.get(when, True)])
        how = "KILL" if when in ("end", "agent") else self.random.choice(("KILL", "STOP"))
        if when == "start" and how == "STOP":
            # Before the first step a stopped process is noticed after run.communication_timeout.
            values["run.communication_timeout"] = 8
        reference = self.reference(index)
        ranks = values["parallel.tp"] * values["parallel.pp"] * values["parallel.dp"]
        victim, launcher = self.random.randrange(ranks), self.random.choice(LAUNCHERS)
        os.makedirs(self.folder)
        launch = ["launch", "--mpirun", launcher, "--ranks", str(ranks), "--restarts", "1", "train", *settings(values)]
        with open(os.path.join(self.folder, "stderr"), "w") as errors:
            process = subprocess.Popen([self.kintsugi, *launch], cwd=self.folder, stdout=subprocess.DEVNULL, stderr=errors)
        try:
            return self.watch(process, victim, when, how, reference, launcher)
        finally:
            for pid in [process.pid, *processes(self.folder).values()]:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            process.wait()

    def watch(self, process, victim, when, how, reference, launcher):
        end = time.monotonic() + PATIENCE_S
        pid = None
        while process.poll() is None:
            pid = pid or processes(self.folder).get(victim)
            if pid is not None and is_due(self.folder, victim, pid, when):
                break
            if time.monotonic() > end:
                raise Wrong("the job does not come so far")
        if process.poll() is not None:
            return None
        fault = time.monotonic()
        try:
            os.kill(agent_of(process.pid) if when == "agent" else pid, getattr(signal, f"SIG{how}"))
        except ProcessLookupError:
            process.wait()
            return None
        noticed = resumed = None
        while process.poll() is None:
            text = self.stderr()
            if noticed is None and ("error:" in text or "warning: the agent" in text):
                noticed = time.monotonic() - fault
            if resumed is None and "restarted:" in text:
                resumed = time.monotonic() - fault
            if time.monotonic() > end:
                raise Wrong(f"{how} in {when}: the job does not end: {text[-600:]}")
            time.sleep(0.01)
        text, code = self.stderr(), process.returncode
        if noticed is None and "restart 1" not in text:
            # It had finished what it was stopped for.
            return None
        what = f"SIG{how} of rank {victim} at {when} under {launcher}"
        if when == "agent":
            if code != 0 or "restart 1" in text or metrics(self.folder) != reference or self.blamed(text) is not None:
                raise Wrong(f"{what}: exit code {code}, or other losses: {text[-1500:]}")
            return {"fault": "SIGKILL, agent", "noticed": noticed, "resumed": resumed, "named": True}
        if when == "end" and code == 1 and os.path.exists(os.path.join(self.folder, "out", "summary.json")):
            # The run has its results, so it is not started again, but its failure is explained.
            code = 0
        if code != 0:
            raise Wrong(f"{what}: exit code {code}: {text[-1500:]}")
        if metrics(self.folder) != reference:
            raise Wrong(f"{what}: other losses than an undisturbed run")
        blamed = self.blamed(text)
        if blamed not in (victim, None):
            raise Wrong(f"{what}: rank {blamed} is blamed: {text[-1500:]}")
        return {"fault": f"SIG{how}, {when}", "noticed": noticed, "resumed": resumed, "named": blamed == victim}

    def stderr(self):
        with open(os.path.join(self.folder, "stderr"), errors="replace") as file:
            return file.read()

    def blamed(self, text):
        """The culprit of the verdict; before the first step, of the message."""
        found = re.search(r"verdict: rank (\d+)", text)
        found = found or re.search(r"rank (\d+) on \S+?, (?:whose process has sent nothing|which waits for no other rank)", text)
        found = found or re.search(r"error: rank (\d+) on \S+ failed: its process has", text)
        return int(found[1]) if found else None


def table(results):
    print(f"\n{'fault':24} {'trials':>6} {'noticed s, median':>18} {'most':>6} {'first step s, median':>21} {'most':>6} {'named':>6}")
    for fault in sorted(results):
        rows = results[fault]

        def figures(key):
            values = sorted(row[key] for row in rows if row[key] is not None)
            return (f"{values[len(values) // 2]:.1f}", f"{values[-1]:.1f}") if values else ("", "")

        named = sum(row["named"] for row in rows)
        print(f"{fault:24} {len(rows):6} {figures('noticed')[0]:>18} {figures('noticed')[1]:>6} {figures('resumed')[0]:>21} {figures('resumed')[1]:>6} {named:6}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--kintsugi", required=True)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    work = tempfile.mkdtemp(prefix="kintsugi-recovery-")
    kintsugi = os.path.abspath(arguments.kintsugi)
    layouts = (*LAYOUTS, {**SPIKES, "data.source": prepare(kintsugi, work)})
    results, failed, references = defaultdict(list), 0, {}
    for number in range(arguments.trials):
        trial = Trial(kintsugi, os.path.join(work, str(number)), random.Random(f"{arguments.seed}/{number}"), references, layouts)
        try:
            row = trial.run()
        except Wrong as wrong:
            failed += 1
            print(f"trial {number}: {wrong}\n  its files are in {trial.folder}", flush=True)
            continue
        if row is None:
            print(f"trial {number}: the job ended before the fault", flush=True)
        else:
            print(f"trial {number}: {row}", flush=True)
            results[row["fault"]].append(row)
        shutil.rmtree(trial.folder, ignore_errors=True)
    table(results)
    count = sum(len(rows) for rows in results.values())
    named = sum(row["named"] for rows in results.values() for row in rows)
    print(f"\n{count} faults, {named} with the right culprit, none with another; {failed} trials failed")
    if not failed:
        shutil.rmtree(work, ignore_errors=True)
    return 1 if failed or count == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
