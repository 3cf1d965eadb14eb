#!/usr/bin/env python3
"""Good and bad placements over emulated pods, measured beside the prediction: see scripts/check-placement."""

import argparse
import json
import os
import subprocess
import sys
import tempfile

from measured import Bench

CONFIG = """
[model]
family = "gpt"
layers = 4
hidden = 128
heads = 4
vocab = 512
[batch]
sequence = 128
micro = 1
global = 8
[cluster]
per_node = 1
[cluster.emulated]
pod = { bandwidth = 8e6, latency = 2e-3 }
cluster = { bandwidth = 1e6, latency = 2e-2 }
[run]
log_every = 1000
checkpoint_every = 0
"""
# Four nodes of a rank in two pods: replicas send gradients, stages send activations. Four ranks share two cores, so links are slow:
# kernels, and looking for messages, are a small part of a step.
LAYOUTS = {
    "replicas": {"parallel.pp": 2, "parallel.dp": 2, "sharding.zero": 1},
    "stages": {"parallel.pp": 4, "parallel.dp": 1},
}
CASES = {f"{name}-{transport}": (values, transport) for transport in ("threads", "mpi") for name, values in LAYOUTS.items()}
# The measured step and its prediction may differ by this share.
TOLERANCE = 0.15


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kintsugi", required=True)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--profile", help="what calibrate has measured on this machine; otherwise it measures now")
    parser.add_argument("cases", nargs="*", default=list(CASES))
    options = parser.parse_args()
    missed = []
    with tempfile.TemporaryDirectory() as work:
        bench = Bench(options.kintsugi, work, CONFIG, options.turns, options.steps, options.profile)
        print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        print(f"{'case':17} {'placement':10} {'pods':>6} {'measured':>10} {'predicted':>10} {'ratio':>6}")
        for name in options.cases:
            values, transport = CASES[name]
            # The order of names is the bad one.
            with open(os.path.join(work, "nodes.txt"), "w") as file:
                file.write("n1 a\nn2 b\nn3 a\nn4 b\n")
            sets = [word for key, value in values.items() for word in ("--set", f"{key}={json.dumps(value)}")]
            command = [options.kintsugi, "plan", bench.config, "--profile", bench.profile, *sets, "--json"]
            placed = json.loads(
                subprocess.run([*command, "--place", os.path.join(work, "nodes.txt")], check=True, capture_output=True).stdout
            )
            on = lambda nodes, pods: {**values, "cluster.placement.nodes": nodes, "cluster.placement.pods": pods}
            variants = {
                "placed": on(placed["nodes"], placed["pods"]),
                "by name": on(["n1", "n2", "n3", "n4"], ["a", "b", "a", "b"]),
            }
            measured, predicted, _ = bench.compare(variants, transport, ranks=4)
            for variant, settings in variants.items():
                ratio = measured[variant] / predicted[variant]
                pods = "".join(settings["cluster.placement.pods"])
                print(f"{name:17} {variant:10} {pods:>6} {measured[variant]:8.3f} s {predicted[variant]:8.3f} s {ratio:6.2f}", flush=True)
                if abs(ratio - 1) > TOLERANCE:
                    missed.append(f"{name}, {variant}: {ratio:.2f} times the prediction")
            gains = [times["by name"] / times["placed"] for times in (measured, predicted)]
            print(f"{name:17} the placement gains {gains[0] - 1:.1%}, predicted {gains[1] - 1:.1%}", flush=True)
        bad = bench.different_bytes
        print(f"bytes by level: {bench.compared_bytes} runs compared, {len(bad)} different")
        missed += bad
    sys.exit("\n".join(missed) or None)


if __name__ == "__main__":
    main()
