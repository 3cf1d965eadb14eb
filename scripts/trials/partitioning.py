#!/usr/bin/env python3
"""Sharding schemes over emulated links, measured beside the prediction: see scripts/check-partitioning."""

import argparse
import json
import sys
import tempfile

from measured import Bench

# Many weights and few tokens: links take most of every step. Four ranks share two cores, so time of kernels is known less well.
CONFIG = """
[model]
family = "gpt"
layers = 2
hidden = 256
heads = 8
vocab = 512
[batch]
sequence = 16
micro = 1
[precision]
compute = "bf16"
gradients = "compute"
[run]
log_every = 1000
keep = 0
"""
# Two nodes, each of them one package of two ranks. Links between nodes are a twentieth as fast as those inside.
RANKS, PER_NODE = 4, 2
LINKS = {
    "cluster.per_node": PER_NODE,
    "cluster.per_package": PER_NODE,
    "cluster.emulated.package.bandwidth": 50e6,
    "cluster.emulated.package.latency": 2e-4,
    "cluster.emulated.cluster.bandwidth": 2.5e6,
    "cluster.emulated.cluster.latency": 5e-4,
    "parallel.dp": RANKS,
}
SCHEMES = {
    "ZeRO-3": {"sharding.zero": 3, "sharding.collectives": "ring"},
    "ZeRO++": {"sharding.preset": "zero++"},
    "three-level": {"sharding.preset": "three-level"},
}
CASES = {f"{transport}-{count}": (transport, count) for transport in ("threads", "mpi") for count in (1, 8)}
# A predicted and a measured ratio of two schemes may differ by this share.
TOLERANCE = 0.15


def case(bench, name):
    """The median step of every scheme and its prediction."""
    transport, count = CASES[name]
    batch = {"batch.global": count * RANKS}
    variants = {scheme: {**LINKS, **batch, **values} for scheme, values in SCHEMES.items()}
    measured, predicted, _ = bench.compare(variants, transport, RANKS)
    return measured, predicted


def misses(name, measured, predicted):
    """What is not as predicted, and what does not win as it must."""
    count = CASES[name][1]
    must_win = {("ZeRO-3", "ZeRO++"): True, ("ZeRO++", "three-level"): count > 1, ("ZeRO-3", "three-level"): False}
    for (slow, fast), win in must_win.items():
        found, said = measured[slow] / measured[fast], predicted[slow] / predicted[fast]
        if abs(found / said - 1) > TOLERANCE:
            yield f"{name}: {fast} is {found:.2f} times as fast as {slow}, predicted {said:.2f}"
        if win and found <= 1:
            yield f"{name}: {fast} does not beat {slow}: {found:.2f} times as fast"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kintsugi", required=True)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", help="a file for the numbers")
    parser.add_argument("cases", nargs="*", default=list(CASES))
    options = parser.parse_args()
    results, missed = {}, []
    with tempfile.TemporaryDirectory() as work:
        bench = Bench(options.kintsugi, work, CONFIG, options.turns, options.steps)
        print("a step in ms, and how many times as fast as ZeRO-3: measured (predicted)")
        print(f"{'case':10}" + "".join(f" {scheme:>18}" for scheme in SCHEMES) + f" {'ZeRO++':>13} {'three-level':>13}")
        for name in options.cases:
            measured, predicted = case(bench, name)
            cells = [f"{1e3 * measured[scheme]:.0f} ({1e3 * predicted[scheme]:.0f})" for scheme in SCHEMES]
            faster = [
                f"{measured['ZeRO-3'] / measured[scheme]:.2f} ({predicted['ZeRO-3'] / predicted[scheme]:.2f})"
                for scheme in ("ZeRO++", "three-level")
            ]
            print(f"{name:10}" + "".join(f" {cell:>18}" for cell in cells), end="")
            print("".join(f" {cell:>13}" for cell in faster), flush=True)
            results[name] = {"measured": measured, "predicted": predicted}
            missed += misses(name, measured, predicted)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)
    sys.exit("\n".join(missed) or None)


if __name__ == "__main__":
    main()
