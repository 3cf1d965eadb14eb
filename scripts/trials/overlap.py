#!/usr/bin/env python3
"""Overlap over emulated links, measured beside the prediction: see scripts/check-overlap."""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile

# A model whose step takes some 300 ms on one core, so that sleeping and waking cost little beside it.
CONFIG = """
[model]
family = "gpt"
layers = 8
hidden = 256
heads = 8
vocab = 512
[batch]
sequence = 128
micro = 4
global = 8
[run]
log_every = 1000
checkpoint_every = 0
"""
# The link of a case is about half as fast as its computation needs. Without overlap a step has to wait for it.
CASES = {
    "zero1": ({"parallel.dp": 2, "sharding.zero": 1}, 150e6, "threads"),
    "zero3": ({"parallel.dp": 2, "sharding.zero": 3, "parallel.prefetch": 2}, 250e6, "threads"),
    "pipeline": ({"parallel.pp": 2, "batch.micro": 1, "batch.global": 8}, 20e6, "threads"),
    "tensor": ({"parallel.tp": 2}, 250e6, "threads"),
    # Two nodes of two ranks on one machine: each has one of its cores.
    "mesh": ({"parallel.tp": 2, "parallel.dp": 2, "cluster.per_node": 2, "cluster.cores": 1}, 100e6, "threads"),
    "zero1-mpi": ({"parallel.dp": 2, "sharding.zero": 1}, 150e6, "mpi"),
    "zero3-mpi": ({"parallel.dp": 2, "sharding.zero": 3, "parallel.prefetch": 2}, 250e6, "mpi"),
}
LATENCY = 2e-4
# The predicted and the measured saving may differ by this share.
TOLERANCE = 0.15
# An overlapped step of ZeRO-3 may take so many times max(compute, communication).
BOUND = 1.1


class Bench:
    def __init__(self, kintsugi, work, turns, steps):
        self.kintsugi, self.work, self.turns, self.steps = os.path.abspath(kintsugi), work, turns, steps
        self.config = os.path.join(work, "config.toml")
        with open(self.config, "w") as file:
            file.write(CONFIG)

    def settings(self, values):
        return [word for key, value in values.items() for word in ("--set", f"{key}={json.dumps(value)}")]

    def calibrate(self):
        profile = os.path.join(self.work, "profile.toml")
        command = [self.kintsugi, "calibrate", self.config, "--warm-up", "1", "--sustained", "0.06"]
        subprocess.run([*command, "--out", profile], check=True, capture_output=True)
        return profile

    def run(self, values, transport):
        """Seconds of every step but the first, the predicted seconds, and the bytes that a step sends, by level."""
        out = os.path.join(self.work, "run")
        shutil.rmtree(out, ignore_errors=True)
        values = {**values, "run.out": out, "run.steps": self.steps}
        command = ["train", self.config, "--profile", self.profile, *self.settings(values)]
        if transport == "mpi":
            command = ["launch", "--mpirun", "mpirun.openmpi", "--ranks", "2", *command]
        done = subprocess.run([self.kintsugi, *command], capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)}\n{done.stderr}")
        with open(os.path.join(out, "metrics.jsonl")) as lines:
            steps = [row["step_s"] for row in map(json.loads, lines) if "step_s" in row]
        with open(os.path.join(out, "summary.json")) as file:
            summary = json.load(file)
        sent = {level: sum(operations.values()) for level, operations in summary["measured"]["comm_bytes"].items()}
        return steps[1:], summary["predicted"]["step_s"], {level: of / summary["ranks"] for level, of in sent.items()}

    def case(self, name):
        values, bandwidth, transport = CASES[name]
        level = "cluster" if "cluster.per_node" in values else "node"
        link = {f"cluster.emulated.{level}.bandwidth": bandwidth, f"cluster.emulated.{level}.latency": LATENCY}
        key = "parallel.overlap_tp" if name == "tensor" else "parallel.overlap"
        variants = {
            "overlap": {**values, **link, key: True},
            "in turn": {**values, **link, key: False},
            "no links": {**values, key: True},
        }
        measured, predicted = {variant: [] for variant in variants}, {}
        for _ in range(self.turns):
            for variant, settings in variants.items():
                steps, predicted[variant], sent = self.run(settings, transport)
                measured[variant] += steps
        measured = {variant: statistics.median(steps) for variant, steps in measured.items()}
        # Nothing is faster than the computation, with its copies, or than the bytes on the emulated links.
        return measured, predicted, max(measured["no links"], sent[level] / bandwidth)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kintsugi", required=True)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=13)
    parser.add_argument("--json", help="a file for the numbers")
    parser.add_argument("--profile", help="what calibrate has measured on this machine; otherwise it measures now")
    parser.add_argument("cases", nargs="*", default=list(CASES))
    options = parser.parse_args()
    results, missed = {}, []
    with tempfile.TemporaryDirectory() as work:
        bench = Bench(options.kintsugi, work, options.turns, options.steps)
        bench.profile = options.profile or bench.calibrate()
        print("times in ms: measured (predicted); hidden: of the time on links; bound: times max(compute, communication)")
        print(f"{'case':10} {'overlap':>16} {'in turn':>16} {'no links':>16} {'faster by':>16} {'hidden':>7} {'bound':>6}")
        for name in options.cases:
            measured, predicted, bound = bench.case(name)
            cells = [f"{1e3 * measured[v]:.0f} ({1e3 * predicted[v]:.0f})" for v in measured]
            faster = [times["in turn"] / times["overlap"] for times in (measured, predicted)]
            hidden = (measured["in turn"] - measured["overlap"]) / (measured["in turn"] - measured["no links"])
            print(f"{name:10} " + " ".join(f"{cell:>16}" for cell in cells), end="")
            print(f" {faster[0]:8.2f} ({faster[1]:.2f}) {hidden:7.0%} {measured['overlap'] / bound:6.2f}", flush=True)
            results[name] = {"measured": measured, "predicted": predicted, "hidden": hidden, "bound": bound}
            if abs(faster[0] / faster[1] - 1) > TOLERANCE:
                missed.append(f"{name}: {faster[0]:.2f} times as fast, predicted {faster[1]:.2f}")
            if name == "mesh" and hidden < 0.6:
                missed.append(f"{name}: {hidden:.0%} of the reduction is hidden")
            if name.startswith("zero3") and measured["overlap"] > BOUND * bound:
                missed.append(f"{name}: {measured['overlap'] / bound:.2f} times max(compute, communication)")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)
    sys.exit("\n".join(missed) or None)


if __name__ == "__main__":
    main()
