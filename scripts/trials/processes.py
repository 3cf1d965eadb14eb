#!/usr/bin/env python3
"""Trials of ranks as processes: see scripts/check-processes."""

import argparse
import glob
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from trials.layouts import draw_codes, draw_layout, draw_model  # noqa: E402

LAUNCHERS = {"Open MPI": "mpirun.openmpi", "MPICH": "mpirun.mpich"}
PATIENCE_S = 180


class Failed(Exception):
    """A check that did not hold."""


def check(holds, what):
    if not holds:
        raise Failed(what)


class Trials:
    def __init__(self, kintsugi, work, seed):
        self.kintsugi, self.work, self.random = os.path.abspath(kintsugi), work, random.Random(seed)
        self.environment = {**os.environ, "RUST_BACKTRACE": "0"}

    def settings(self, values):
        return [word for key, value in values.items() for word in ("--set", f"{key}={json.dumps(value)}")]

    def threads(self, out, values, *more):
        command = [self.kintsugi, "train", *self.settings({**values, "run.out": out}), *more]
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)

    def launch_command(self, launcher, ranks, out, values, *more):
        settings = self.settings({**values, "run.out": out})
        return [self.kintsugi, "launch", "--mpirun", launcher, "--ranks", str(ranks), "train", *settings, *more]

    def processes(self, launcher, ranks, out, values, *more, environment=None):
        command = self.launch_command(launcher, ranks, out, values, *more)
        environment = {**self.environment, **(environment or {})}
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, env=environment)

    def out(self, name):
        path = os.path.join(self.work, name)
        shutil.rmtree(path, ignore_errors=True)
        return path


def losses(out):
    with open(os.path.join(out, "metrics.jsonl")) as lines:
        steps = [json.loads(line) for line in lines]
    return {step["step"]: (step["loss"], step["grad_norm"]) for step in steps}


def summary(out):
    with open(os.path.join(out, "summary.json")) as file:
        return json.load(file)


def compare_prediction(out):
    """Traffic and memory by category must be what was predicted."""
    found = summary(out)
    predicted, measured = found["predicted"], found["measured"]
    check(predicted["comm_bytes"] == measured["comm_bytes"], f"traffic of {out}: {predicted} and {measured}")
    for rank, (one, other) in enumerate(zip(predicted["peak_bytes"], measured["peak_bytes"])):
        for key, value in one.items():
            if key != "reserved":
                check(value == other[key], f"memory of {out}, rank {rank}, {key}: {value} and {other[key]}")
    return len(measured["peak_bytes"])


def ranks_of(values):
    return values.get("parallel.tp", 2) * values.get("parallel.pp", 2) * values.get("parallel.dp", 2)


def demo(**more):
    return {"run.steps": 12, "run.eval_every": 0, "optimizer.warmup": 2, **{k.replace("__", "."): v for k, v in more.items()}}


# Eight ranks on two nodes of two packages each, and sixteen on four nodes.
LEVELS = [
    {"parallel__dp": 8, "cluster__per_package": 2, "cluster__per_node": 4},
    {"parallel__dp": 16, "cluster__per_package": 4, "cluster__per_node": 4},
]
ONLY_DATA = {"parallel__tp": 1, "parallel__pp": 1, "batch__micro": 1, "batch__global": 32}
QUANTIZED = [{**ONLY_DATA, **mesh, "sharding__preset": preset} for mesh in LEVELS for preset in ("zero++", "three-level")]


def layouts(trials):
    """The demo, ZeRO++, three levels and random layouts: losses bit for bit those of threads, traffic and memory as predicted."""
    chosen, done = [demo(**mesh) for mesh in QUANTIZED] + [demo()], 0
    while done < 25:
        layout = draw_layout(trials.random)
        layout.update(draw_codes(trials.random, layout))
        is_random = not chosen
        values = {**draw_model(trials.random, None), **layout} if is_random else chosen.pop()
        values.pop("run.checkpoint_every", None)
        ranks = ranks_of(values)
        if is_random and (not 2 <= ranks <= 8 or "data.source" in values):
            continue
        reference = trials.out("threads")
        if trials.threads(reference, values).returncode != 0:
            check(is_random, f"{values} are refused")
            continue
        launcher = list(LAUNCHERS.values())[done % 2]
        out = trials.out("processes")
        ran = trials.processes(launcher, ranks, out, values)
        check(ran.returncode == 0, f"{values}: {ran.stderr[-600:]}")
        check(losses(out) == losses(reference), f"losses of {values} on {launcher}")
        check(compare_prediction(out) == ranks, "a rank's memory is missing")
        done += 1
        print(f"    {ranks} processes of {launcher}: as threads", flush=True)
    return f"{done} layouts"


def close(one, other):
    return all(abs(a - b) <= 1e-5 * abs(a) for step in one for a, b in zip(one[step], other[step]))


def checkpoints(trials):
    """Saved by processes and resumed by threads, and the other way round, on the same layout and on another."""
    # A constant learning rate does not depend on the number of steps.
    full = {**demo(), "optimizer.schedule": "constant"}
    three = {"parallel.tp": 1, "parallel.pp": 3, "parallel.dp": 1}
    whole = trials.out("whole")
    check(trials.threads(whole, full).returncode == 0, "the whole run")
    expected = losses(whole)
    for name, launcher in LAUNCHERS.items():
        def on_threads(out, values, *more):
            return trials.threads(out, values, *more)

        def on_processes(out, values, *more):
            return trials.processes(launcher, 8, out, values, *more)

        for what, save, resume, saves, resumes, equal in (
            (f"{name} to threads", on_processes, on_threads, {}, {}, lambda one, other: one == other),
            (f"threads to {name}", on_threads, on_processes, {}, {}, lambda one, other: one == other),
            (f"{name} to 3 threads", on_processes, on_threads, {}, three, close),
            (f"3 threads to {name}", on_threads, on_processes, three, {}, close),
        ):
            out = trials.out("saved")
            ran = save(out, {**full, **saves, "run.steps": 6})
            check(ran.returncode == 0, f"{what}: {ran.stderr[-400:]}")
            ran = resume(out, {**full, **resumes}, "--resume")
            check(ran.returncode == 0, f"{what}: {ran.stderr[-400:]}")
            check(equal(expected, losses(out)), f"losses of {what}")
            print(f"    {what}", flush=True)
    return "8 resumed runs"


def children(out):
    """The processes of a run, by rank where it is known."""
    found = {}
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            words = open(path, "rb").read().split(b"\0")
            environment = open(path.replace("cmdline", "environ"), "rb").read().split(b"\0")
        except OSError:
            continue
        if b"train" in words and any(out.encode() in word for word in words) and b"launch" not in words:
            variables = dict(word.split(b"=", 1) for word in environment if b"=" in word)
            rank = variables.get(b"OMPI_COMM_WORLD_RANK", variables.get(b"PMI_RANK"))
            if rank is not None:
                found[int(rank)] = int(path.split("/")[2])
    return found


def start(trials, launcher, out, values, *more):
    command = trials.launch_command(launcher, 8, out, values, *more)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(condition, patience=60):
    begun = time.time()
    while not condition():
        check(time.time() - begun < patience, "nothing happens")
        time.sleep(0.01)


def ended(run, killed_at, what):
    """The job must end soon, with an exit code and a message."""
    stdout, stderr = run.communicate(timeout=PATIENCE_S)
    seconds = time.time() - killed_at
    check(run.returncode != 0, f"{what}: exit code 0")
    check(seconds < 10, f"{what}: the job ended after {seconds:.1f} s")
    return stdout + stderr, seconds


def kills(trials):
    """A random process is killed at a random moment while checkpoints are written: each is whole or absent, and the run
    goes on from the newest."""
    values = {**demo(run__steps=400), "run.checkpoint_every": 1, "optimizer.schedule": "constant"}
    reference = trials.out("reference")
    check(trials.threads(reference, {**values, "run.steps": 60, "run.checkpoint_every": 0}).returncode == 0, "the reference")
    expected = losses(reference)
    longest = 0
    for number in range(50):
        launcher = list(LAUNCHERS.values())[number % 2]
        out = trials.out("killed")
        run = start(trials, launcher, out, values)
        folder = os.path.join(out, "checkpoints")
        wait_for(lambda: glob.glob(os.path.join(folder, "*")) or run.poll() is not None)
        time.sleep(trials.random.uniform(0, 0.5))
        victims = children(out)
        check(victims, "no process of the run is found")
        rank = trials.random.choice(sorted(victims))
        os.kill(victims[rank], signal.SIGKILL)
        _, seconds = ended(run, time.time(), f"rank {rank} killed")
        longest = max(longest, seconds)
        saved = sorted(glob.glob(os.path.join(folder, "step-*")))
        last = int(saved[-1][-8:]) if saved else 0
        more = trials.threads(out, {**values, "run.steps": last + 2}, "--resume")
        check(more.returncode == 0, f"after rank {rank} was killed: {more.stderr[-400:]}")
        found = losses(out)
        check(all(found[step] == expected[step] for step in found if step in expected), "other losses")
        check(not glob.glob(os.path.join(folder, "*.partial")), "an unfinished checkpoint stays")
    return f"50 kills, a job ended after {longest:.1f} s at most"


def failures(trials):
    """A rank that fails: the job ends with a message that names it."""
    for name, launcher in LAUNCHERS.items():
        # At the start: one process has another configuration.
        settings = trials.settings({**demo(), "run.out": trials.out("start")})
        flags = ["--allow-run-as-root", "--oversubscribe"] if name == "Open MPI" else []
        train = [trials.kintsugi, "train", *settings]
        command = [launcher, *flags, "-n", "7", *train, ":", "-n", "1", *train, "--set", "optimizer.lr=0.1"]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
        check(ran.returncode != 0 and "rank 7 on " in ran.stderr, f"{name}: {ran.stderr[-400:]}")
        check(ran.stderr.count("error:") == 1, f"{name}: one message: {ran.stderr[-400:]}")
        # In a collective or a message: a process that does not go on. The others wait for it, as long as they are told to.
        values = {**demo(run__steps=1000), "run.communication_timeout": 3}
        out = trials.out("stopped")
        run = start(trials, launcher, out, values)
        wait_for(lambda: os.path.exists(os.path.join(out, "metrics.jsonl")) and os.path.getsize(os.path.join(out, "metrics.jsonl")) > 0)
        victims = children(out)
        rank = trials.random.choice(sorted(victims))
        os.kill(victims[rank], signal.SIGSTOP)
        begun = time.time()
        try:
            text, seconds = ended(run, begun + 3, f"{name}: rank {rank} stopped")
        finally:
            for pid in children(out).values():
                os.kill(pid, signal.SIGKILL)
        check("did not reach it" in text, f"{name}: {text[-600:]}")
        print(f"    {name}: rank {rank} stopped; {next(line for line in text.splitlines() if 'error' in line)}", flush=True)
        # In a save: the folder of the checkpoints is taken away. The run goes on, and says what was not written.
        out = trials.out("save")
        run = start(trials, launcher, out, {**demo(run__steps=40), "run.checkpoint_every": 10})
        wait_for(lambda: glob.glob(os.path.join(out, "checkpoints", "step-*")))
        shutil.rmtree(os.path.join(out, "checkpoints"))
        open(os.path.join(out, "checkpoints"), "w").close()
        stdout, stderr = run.communicate(timeout=PATIENCE_S)
        check(run.returncode == 1 and "was not written" in stdout + stderr, f"{name}: a save fails: {stderr[-400:]}")
        # Ctrl-C: the run stops after a step, with a checkpoint.
        out = trials.out("signal")
        run = start(trials, launcher, out, demo(run__steps=1000))
        wait_for(lambda: os.path.exists(os.path.join(out, "metrics.jsonl")) and os.path.getsize(os.path.join(out, "metrics.jsonl")) > 0)
        run.send_signal(signal.SIGINT)
        stdout, stderr = run.communicate(timeout=PATIENCE_S)
        check(run.returncode == 0 and "stopped on request" in stdout, f"{name}: {stderr[-400:]}")
        check(glob.glob(os.path.join(out, "checkpoints", "step-*")), f"{name}: a checkpoint at the end")
    return "start, collective, save and signal on both"


def versions(trials):
    """Other MPI libraries, as Python's packages bring them: Open MPI 5, MPICH 5, Intel MPI, and the standard ABI."""
    reference = trials.out("threads")
    check(trials.threads(reference, demo()).returncode == 0, "the reference")
    done = []
    for package, libraries in (
        ("openmpi", ["libmpi.so.40"]),
        ("mpich", ["libmpi.so.12", "libmpi_abi.so.1"]),
        ("impi-rt", ["libmpi.so.12", "libmpi_abi.so.1"]),
    ):
        venv = os.path.join(trials.work, package)
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        subprocess.run([f"{venv}/bin/pip", "install", "--quiet", package], check=True)
        for library in libraries:
            path, out = os.path.join(venv, "lib", library), trials.out("processes")
            if not os.path.exists(path):
                print(f"    {package} has no {library}", flush=True)
                continue
            environment = {"KINTSUGI_MPI": path, "I_MPI_ROOT": venv, "PATH": f"{venv}/bin:{os.environ['PATH']}"}
            ran = trials.processes(f"{venv}/bin/mpirun", 8, out, demo(), environment=environment)
            check(ran.returncode == 0, f"{package}, {library}: {ran.stderr[-600:]}")
            check(losses(out) == losses(reference), f"losses on {package}, {library}")
            line = next(line for line in ran.stdout.splitlines() if line.startswith("ranks"))
            print("   ", line.replace(trials.work, "…"), flush=True)
            done.append(library)
        shutil.rmtree(venv)
    return f"{len(done)} libraries"


def verify(trials):
    """Every layout of `kintsugi verify` as processes, against one rank."""
    command = [trials.kintsugi, "verify", "--transport", "mpi", "--steps", "5"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    check(ran.returncode == 0, f"{ran.stdout[-800:]} {ran.stderr[-400:]}")
    return next(line for line in ran.stdout.splitlines() if line.startswith("all "))


PARTS = {f.__name__: f for f in (layouts, verify, checkpoints, kills, failures, versions)}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kintsugi", required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("parts", nargs="*", choices=list(PARTS), default=list(PARTS))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        failed = False
        for part in arguments.parts:
            begun = time.time()
            print(f"{part}: {PARTS[part].__doc__.strip().splitlines()[0]}", flush=True)
            try:
                result = PARTS[part](Trials(arguments.kintsugi, work, arguments.seed))
                print(f"  passed: {result}, {time.time() - begun:.0f} s", flush=True)
            except (Failed, OSError, subprocess.SubprocessError) as error:
                failed = True
                print(f"  FAILED: {error}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
