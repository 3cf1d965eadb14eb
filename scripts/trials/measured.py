"""Runs over emulated links, as threads and as processes: what their steps take, beside the prediction."""

import json
import os
import shutil
import statistics
import subprocess
import sys


class Bench:
    """Trains one configuration under many settings."""

    def __init__(self, kintsugi, work, config, turns, steps, profile=None):
        # Runs whose bytes by level and operation were compared with those predicted, and the commands of those that differ.
        self.compared_bytes, self.different_bytes = 0, []
        self.kintsugi, self.work, self.turns, self.steps = os.path.abspath(kintsugi), work, turns, steps
        self.config, self.profile = os.path.join(work, "config.toml"), os.path.join(work, "profile.toml")
        with open(self.config, "w") as file:
            file.write(config)
        if profile:
            shutil.copyfile(profile, self.profile)
            return
        command = [self.kintsugi, "calibrate", self.config, "--warm-up", "1", "--sustained", "0.06"]
        subprocess.run([*command, "--out", self.profile], check=True, capture_output=True)

    def run(self, values, transport, ranks):
        """Seconds of every step but the first, the predicted seconds, and the bytes that a rank sends in a step, by level."""
        out = os.path.join(self.work, "run")
        shutil.rmtree(out, ignore_errors=True)
        values = {"run.steps": self.steps, **values, "run.out": out}
        sets = [word for key, value in values.items() for word in ("--set", f"{key}={json.dumps(value)}")]
        command = ["train", self.config, "--profile", self.profile, *sets]
        if transport == "mpi":
            command = ["launch", "--mpirun", "mpirun.openmpi", "--ranks", str(ranks), *command]
        done = subprocess.run([self.kintsugi, *command], capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)}\n{done.stderr}")
        with open(os.path.join(out, "metrics.jsonl")) as lines:
            steps = [row["step_s"] for row in map(json.loads, lines) if "step_s" in row]
        with open(os.path.join(out, "summary.json")) as file:
            summary = json.load(file)
        traffic = summary["measured"]["comm_bytes"]
        self.compared_bytes += 1
        if traffic != summary["predicted"]["comm_bytes"]:
            self.different_bytes.append(f"bytes are not those predicted: {' '.join(command)}")
        sent = {level: sum(operations.values()) / summary["ranks"] for level, operations in traffic.items()}
        return steps[1:], summary["predicted"]["step_s"], sent

    def compare(self, variants, transport, ranks):
        """For every variant, run in turn: the median step, its prediction, and the bytes that a rank sends, by level."""
        measured, predicted, sent = {variant: [] for variant in variants}, {}, {}
        for _ in range(self.turns):
            for variant, settings in variants.items():
                steps, predicted[variant], sent[variant] = self.run(settings, transport, ranks)
                measured[variant] += steps
        return {variant: statistics.median(steps) for variant, steps in measured.items()}, predicted, sent
