"""Runs two builds of kintsugi with the same arguments and compares what they print and write, without times."""

import argparse
import hashlib
import os
import random
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

MODELS = "demo gpt2-124m gpt-1.3b gpt-22b gpt-175b gpt-1t neox-20b llama2-7b llama3-8b llama3-70b".split()
CLUSTERS = "local frontier h200 h100 a100".split()
LEVELS = "none package node cluster".split()

SEARCHES = [
    "model.preset=llama3-8b cluster.preset=h100 cluster.nodes=2 batch.global=64 precision.compute=bf16",
    "model.preset=gpt-1.4b cluster.preset=frontier cluster.nodes=2 batch.global=64 precision.compute=fp16",
]

RUNS = [
    "parallel.tp=2 parallel.pp=2 parallel.dp=2 sharding.zero=1",
    "parallel.dp=4 sharding.zero=3",
    "parallel.pp=4 parallel.schedule=zero-bubble",
    "parallel.pp=2 parallel.dp=2 parallel.schedule=interleaved model.layers=8 sharding.zero=2 memory.recompute=full",
    "parallel.dp=8 cluster.preset=frontier sharding.preset=three-level precision.compute=bf16",
    "parallel.dp=8 cluster.preset=frontier sharding.preset=zero++ precision.compute=bf16",
    "parallel.tp=4 parallel.sequence_parallel=true memory.recompute=selective parallel.overlap_tp=true",
]
RUN = "run.steps=6 run.out=out batch.global=16 batch.micro=2 run.checkpoint_every=3 run.device=cpu"


def random_plan(draw):
    """Settings of a plan. Some are refused; then both builds must print the same error."""
    tp, pp, dp = draw.choice([1, 2, 4, 8]), draw.choice([1, 2, 3, 4, 8, 16]), draw.choice([1, 2, 4, 8, 16])
    micro = draw.choice([1, 2, 4])
    schedule = draw.choice(["gpipe", "1f1b", "1f1b", "interleaved", "zero-bubble"])
    settings = {
        "model.preset": draw.choice(MODELS),
        "cluster.preset": draw.choice(CLUSTERS),
        "parallel.tp": tp,
        "parallel.pp": pp,
        "parallel.dp": dp,
        "parallel.schedule": schedule,
        "batch.micro": micro,
        "batch.global": micro * dp * draw.choice([1, 2, 4, 8, 16]),
        "precision.compute": draw.choice(["bf16", "fp16", "fp32"]),
        "memory.recompute": draw.choice(["none", "selective", "full"]),
    }
    if schedule == "interleaved":
        settings["parallel.virtual_stages"] = draw.choice([2, 3, 4])
    sharding = draw.random()
    if sharding < 0.5:
        settings["sharding.zero"] = draw.choice([0, 1, 2, 3])
    elif sharding < 0.8:
        settings["sharding.preset"] = draw.choice(["zero++", "three-level", "mics"])
    else:
        for what in ("weights", "gradients", "states"):
            settings[f"sharding.{what}"] = draw.choice(LEVELS)
    sometimes = [
        (0.4, "parallel.sequence_parallel", ["true"]),
        (0.2, "parallel.overlap_tp", ["true"]),
        (0.3, "parallel.prefetch", [0, 2, 3]),
        (0.2, "parallel.overlap", ["false"]),
        (0.4, "sharding.gather", ["step", "micro-batch"]),
        (0.4, "sharding.reduce", ["step", "micro-batch"]),
        (0.3, "precision.gradients", ["compute"]),
        (0.2, "memory.attention", ["plain"]),
        (0.2, "framework.preset", ["megatron-core", "nanotron", "torchtitan"]),
        (0.2, "data.mask_documents", ["true"]),
    ]
    for chance, key, values in sometimes:
        if draw.random() < chance:
            settings[key] = draw.choice(values)
    return " ".join(f"{key}={value}" for key, value in settings.items())


def without_times(text):
    """Output without what differs between two runs of one binary: durations, speeds, and progress lines."""
    text = re.sub(r'"[a-z_]*(_s|_per_s|mfu|time|seconds)": ?[0-9.e+-]+', "", text)
    return re.sub(r"(?m)^layouts: .*\n|[0-9.]+ (s|ms|seconds|minutes)\b", "", text)


class Comparison:
    """Runs both binaries and counts differences."""

    def __init__(self, old, new, folder):
        self.binaries, self.folder = (old, new), folder
        self.compared, self.different = {}, 0

    def run(self, binary, arguments, wash):
        folder = tempfile.mkdtemp(dir=self.folder)
        done = subprocess.run([binary, *arguments], cwd=folder, capture_output=True, text=True)
        result = {"exit code": done.returncode, "stdout": wash(done.stdout), "stderr": wash(done.stderr)}
        for place, _, names in os.walk(os.path.join(folder, "out")):
            for name in names:
                path = os.path.join(place, name)
                result[os.path.relpath(path, folder)] = contents(path)
        return result

    def compare(self, kind, arguments, settings, wash=lambda text: text):
        arguments = arguments + [word for setting in settings.split() for word in ("--set", setting)]
        old, new = (self.run(binary, arguments, wash) for binary in self.binaries)
        self.compared[kind] = self.compared.get(kind, 0) + 1
        if old != new:
            self.different += 1
            print(f"different: kintsugi {' '.join(arguments)}", flush=True)
            for name in sorted(set(old) | set(new)):
                if old.get(name) != new.get(name):
                    print(f"  {name}\n    old {str(old.get(name))[:400]}\n    new {str(new.get(name))[:400]}")
        return old["exit code"]


def contents(path):
    """What a file of a run says, without times: a hash for tensors."""
    name = os.path.basename(path)
    with open(path, "rb") as file:
        data = file.read()
    # The locks have the process's number; the manifest and the summary have times, and a hash over them.
    if name in ("run.lock", ".run.lock", "manifest.json", "summary.json"):
        return None
    # Flight recorders have the time of every op.
    if os.path.basename(os.path.dirname(path)) == "flight":
        return None
    if name.endswith((".jsonl", ".toml")):
        return without_times(data.decode())
    return hashlib.sha256(data).hexdigest()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--plans", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        comparison = Comparison(os.path.abspath(options.old), os.path.abspath(options.new), folder)
        plans = [random_plan(draw) for _ in range(options.plans)]
        codes = list(pool.map(lambda plan: comparison.compare("plans", ["plan", "--json"], plan), plans))
        print(f"plans: {codes.count(0)} of {len(codes)} were accepted", flush=True)
        list(pool.map(lambda plan: comparison.compare("drawings", ["plan", "--draw"], plan), plans[: options.plans // 20]))
        for search in SEARCHES:
            comparison.compare("searches", ["plan", "--search", "--top", "20", "--json"], search, without_times)
        for run in RUNS:
            comparison.compare("runs", ["train"], f"{run} {RUN}", wash=lambda _: "")
        comparison.compare("verify", ["verify", "--steps", "2"], "run.device=cpu", without_times)
    counts = ", ".join(f"{count} {kind}" for kind, count in comparison.compared.items())
    print(f"{counts}: {comparison.different} different")
    sys.exit(1 if comparison.different else 0)


if __name__ == "__main__":
    main()
