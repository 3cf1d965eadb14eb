#!/usr/bin/env python3
"""Losses with quantised collectives beside losses without: see scripts/check-convergence."""

import argparse
import concurrent.futures
import json
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import time

import curves

# The machine that the ranks stand for: two nodes, each of them one package of two ranks.
RANKS = 4
LEVELS = {"cluster.per_node": 2, "cluster.per_package": 2, "parallel.dp": RANKS}
VARIANTS = {
    "no sharding": {},
    "ZeRO-3": {"sharding.zero": 3},
    "ZeRO++": {"sharding.preset": "zero++"},
    "three-level": {"sharding.preset": "three-level"},
    "ZeRO++, blocks of 64": {"sharding.preset": "zero++", "sharding.quantize_block": 64},
    "ZeRO++, blocks of 2048": {"sharding.preset": "zero++", "sharding.quantize_block": 2048},
}
REFERENCE = "no sharding"
# Final losses may differ by this share.
TOLERANCE = 0.01
# Steps of the runs that measure the time of a step, and the mean of how many steps is a loss.
PILOT, LAST = 30, 50
EVALUATIONS = 10
# Seconds that a run has to end after it was asked to.
GRACE = 15.0


class Run:
    """A training run that goes on beside others."""

    def __init__(self, options, name, steps, work):
        self.name, self.out = name, work / name.replace(" ", "-").replace(",", "").replace("+", "p")
        shutil.rmtree(self.out, ignore_errors=True)
        self.out.mkdir(parents=True)
        config = self.out / "config.toml"
        config.write_text("")
        sets = {**settings(options, steps), **VARIANTS[name], "run.out": str(self.out / "run")}
        words = [word for key, value in sets.items() for word in ("--set", f"{key}={json.dumps(value)}")]
        self.log = open(self.out / "log", "w+")
        self.process = subprocess.Popen(
            [options.kintsugi, "train", str(config), *words], stdout=self.log, stderr=subprocess.STDOUT
        )

    def end(self, deadline):
        """Waits until it has ended, or asks it to end at the deadline; gives whether it trained to the end."""
        try:
            self.process.wait(max(deadline - time.monotonic(), 0.01))
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(GRACE)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            return False
        if self.process.returncode != 0:
            self.log.seek(0)
            sys.exit(f"{self.name}: kintsugi train ended with {self.process.returncode}\n{self.log.read()[-2000:]}")
        return True

    def metrics(self):
        """The lines of the run, also of one that was cut off."""
        lines = []
        for line in open(self.out / "run" / "metrics.jsonl"):
            try:
                lines.append(json.loads(line))
            except ValueError:
                break
        return lines


def settings(options, steps):
    """What all variants share."""
    hidden = options.hidden
    every = max(steps // EVALUATIONS, 1)
    values = {
        "model.family": "gpt", "model.layers": options.layers, "model.hidden": hidden,
        "model.heads": max(hidden // 64, 1), "model.vocab": options.vocab,
        "batch.sequence": options.sequence, "batch.micro": options.micro,
        "batch.global": options.micro * RANKS * options.accumulate,
        "precision.compute": "bf16", "optimizer.lr": options.lr, "optimizer.min_lr": options.lr / 10,
        "optimizer.warmup": max(steps // 20, 1), "optimizer.schedule": "cosine",
        "run.steps": steps, "run.seed": options.seed, "run.device": options.device, "run.transport": "threads",
        "run.keep": 0, "run.log_every": 1000, "run.eval_every": every, "run.eval_tokens": options.eval_tokens,
        **LEVELS,
    }
    if options.corpus:
        values |= {"data.source": options.corpus, "data.split": 0.02}
    return values


def run_all(options, names, steps, seconds, work):
    """All variants, some of them side by side; gives their metrics, and those that did not come to their end."""
    deadline = time.monotonic() + seconds

    def run_one(name):
        run = Run(options, name, steps, work)
        try:
            return run, run.end(deadline)
        finally:
            run.process.poll() is None and run.process.kill()

    with concurrent.futures.ThreadPoolExecutor(options.at_once) as pool:
        ended = list(pool.map(run_one, names))
    return {run.name: run.metrics() for run, _ in ended}, [run.name for run, whole in ended if not whole]


def step_seconds(metrics, at_once):
    """Seconds of a step of all variants, without their first steps."""
    times = [[line["step_s"] for line in lines if "step_s" in line][PILOT // 3 :] for lines in metrics.values()]
    if not all(times):
        sys.exit("the runs that measure the time of a step made too few steps; give --steps")
    means = {name: statistics.mean(part) for name, part in zip(metrics, times)}
    print(", ".join(f"{name} {1e3 * mean:.1f} ms" for name, mean in means.items()), flush=True)
    return sum(means.values()) / at_once


def losses(lines, key):
    return {line["step"]: line[key] for line in lines if line.get(key) is not None}


def compare(metrics):
    """The losses of every variant at the last step that all have made, and at the last evaluation that all have."""
    train = {name: losses(lines, "loss") for name, lines in metrics.items()}
    validation = {name: losses(lines, "validation_loss") for name, lines in metrics.items()}
    last = min(max(by_step) for by_step in train.values())
    common = set.intersection(*(set(by_step) for by_step in validation.values()))
    evaluated = max((step for step in common if step > 0), default=None)
    rows = {}
    for name in metrics:
        final = [loss for step, loss in train[name].items() if last - LAST < step <= last]
        rows[name] = {"train": statistics.mean(final), "validation": evaluated and validation[name][evaluated]}
    for row in rows.values():
        row["ratios"] = {kind: row[kind] / rows[REFERENCE][kind] for kind in ("train", "validation") if row[kind]}
    return {"last_step": last, "evaluated_at": evaluated, "rows": rows}, train, validation


def thinned(by_step, points=200):
    """The mean of each of at most `points` ranges of steps, at its last step."""
    steps = sorted(by_step)
    width = max(-(-len(steps) // points), 1)
    ranges = [steps[i : i + width] for i in range(0, len(steps), width)]
    return [[part[-1], round(statistics.mean(by_step[step] for step in part), 5)] for part in ranges]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kintsugi", required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--corpus", help="the prefix of token files; without it, the demo's stories")
    parser.add_argument("--out", default="convergence", help="the folder for curves.json, curves.svg and the runs")
    parser.add_argument("--seconds", type=float, default=140.0, help="of everything together")
    parser.add_argument("--steps", type=int, help="without it, as many as fit into the seconds, up to --most-steps")
    parser.add_argument("--most-steps", type=int, default=4000)
    parser.add_argument("--at-once", type=int, default=1, help="variants that run side by side")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=448)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--micro", type=int, default=8, help="samples of a micro-batch of a rank")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a rank in a step")
    parser.add_argument("--eval-tokens", type=int, default=65536)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    options = parser.parse_args()
    options.kintsugi = os.path.abspath(options.kintsugi)
    options.corpus = options.corpus and os.path.abspath(options.corpus)
    begun = time.monotonic()
    out = pathlib.Path(options.out)
    names = list(dict.fromkeys([REFERENCE, *options.variants]))
    steps, pilot = options.steps, None
    if steps is None:
        # The first runs also compile kernels, which the others then find.
        pilot = step_seconds(run_all(options, names, PILOT, options.seconds / 3, out / "pilot")[0], options.at_once)
        left = options.seconds - (time.monotonic() - begun)
        # Starting, evaluating and the spread of step times take the rest.
        steps = int(min(options.most_steps, 0.75 * left / pilot))
        print(f"{1e3 * pilot:.0f} ms for a step of all variants: {steps} steps", flush=True)
    left = options.seconds - (time.monotonic() - begun)
    metrics, cut = run_all(options, names, steps, left, out / "runs")
    result, train, validation = compare(metrics)
    print(f"step {result['last_step']} of {steps}, validation at step {result['evaluated_at']}")
    print(f"{'variant':24} {'train':>8} {'validation':>10}   of the one without sharding")
    missed = []
    for name, row in result["rows"].items():
        ratios = row["ratios"]
        shown = f"{row['validation']:10.4f}" if row["validation"] else f"{'–':>10}"
        print(f"{name:24} {row['train']:8.4f} {shown}   " + ", ".join(f"{kind} {ratio:.4f}" for kind, ratio in ratios.items()))
        # Other block sizes only show how far the default is from one that does not serve.
        if "sharding.quantize_block" not in VARIANTS[name]:
            missed += [f"{name}: {kind} loss {ratio:.4f}" for kind, ratio in ratios.items() if abs(ratio - 1) > TOLERANCE]
    described = {key: value for key, value in vars(options).items() if key not in ("kintsugi", "out", "corpus", "variants")}
    result |= {
        "options": {**described, "steps": steps, "corpus": options.corpus and os.path.basename(options.corpus)},
        "pilot_step_s": pilot, "seconds": round(time.monotonic() - begun, 1), "cut": cut,
        "train": {name: thinned(by_step) for name, by_step in train.items()},
        "validation": {name: sorted(by_step.items()) for name, by_step in validation.items()},
    }
    (out / "curves.json").write_text(json.dumps(result, indent=None) + "\n")
    (out / "curves.svg").write_text(curves.svg(result["train"], "step", "training loss"))
    print(f"{result['seconds']} s; cut off: {', '.join(cut) or 'none'}; curves in {out / 'curves.json'}")
    sys.exit("\n".join(missed) or None)


if __name__ == "__main__":
    main()
