#!/usr/bin/env python3
"""Overlap over emulated links, measured beside the prediction: see scripts/check-overlap."""

import argparse
import json
import sys
import tempfile

from measured import Bench

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
    # Two nodes of two ranks on one machine.
    "mesh": ({"parallel.tp": 2, "parallel.dp": 2, "cluster.per_node": 2}, 100e6, "threads"),
    "zero1-mpi": ({"parallel.dp": 2, "sharding.zero": 1}, 150e6, "mpi"),
    "zero3-mpi": ({"parallel.dp": 2, "sharding.zero": 3, "parallel.prefetch": 2}, 250e6, "mpi"),
}
LATENCY = 2e-4
# The predicted and the measured saving may differ by this share.
TOLERANCE = 0.15
# An overlapped step of ZeRO-3 may take so many times max(compute, communication).
BOUND = 1.1


def case(bench, name):
    values, bandwidth, transport = CASES[name]
    level = "cluster" if "cluster.per_node" in values else "node"
    link = {f"cluster.emulated.{level}.bandwidth": bandwidth, f"cluster.emulated.{level}.latency": LATENCY}
    key = "parallel.overlap_tp" if name == "tensor" else "parallel.overlap"
    # Nodes whose links are not emulated would have the cores of a machine each.
    half = {"cluster.cores": 1} if level == "cluster" else {}
    variants = {
        "overlap": {**values, **link, key: True},
        "in turn": {**values, **link, key: False},
        "no links": {**values, **half, key: True},
    }
    measured, predicted, sent = bench.compare(variants, transport, ranks=2)
    # Nothing is faster than the computation, with its copies, or than the bytes on the emulated links.
    return measured, predicted, max(measured["no links"], sent["overlap"][level] / bandwidth)


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
        bench = Bench(options.kintsugi, work, CONFIG, options.turns, options.steps, options.profile)
        print("times in ms: measured (predicted); hidden: of the time on links; bound: times max(compute, communication)")
        print(f"{'case':10} {'overlap':>16} {'in turn':>16} {'no links':>16} {'faster by':>16} {'hidden':>7} {'bound':>6}")
        for name in options.cases:
            measured, predicted, bound = case(bench, name)
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
