#!/usr/bin/env python3
"""The predicted gain of placements on jobs like those of Arnold (arXiv 2509.15940), beside the published gain. Nothing is run.

Their links between pods had two speeds: messages lost up to 70 % of their bandwidth and collectives up to 17 %. Each column takes one
of them for everything."""

import argparse
import json
import os
import subprocess
import tempfile

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
CONFIG = os.path.join(ROOT, "examples", "two-pods.toml")
# A pod's links to others, of 50 GB/s inside: what messages kept, and what collectives kept.
KEPT = {"as messages": 0.3, "as collectives": 0.83}
# Two stages of six nodes on two pods of six: each stage in a pod, each pipeline in a pod, and neither.
ORDERS = {"stages together": "aaaaaabbbbbb", "pipelines together": "aaabbbaaabbb", "neither": "aaabbbbbbaaa"}
# Their cluster had pods of about 93 nodes (1019 in 11), and more than 2000 nodes.
PODS, NODES_PER_POD = 22, 93
# The model of the large job is not published, except that it has more than 400 G parameters: this one is dense, with 412 G.
LARGE = {
    "model.layers": 128,
    "model.hidden": 16384,
    "model.heads": 128,
    "memory.recompute": "selective",
    "batch.global": 4800,
    "parallel.pp": 8,
    "parallel.dp": 150,
    "parallel.schedule": "interleaved",
    "parallel.virtual_stages": 4,
    "cluster.nodes": 1200,
}
MIDDLE = {"batch.global": 208, "parallel.dp": 13, "cluster.nodes": 26}


def plan(kintsugi, values, *more):
    sets = [word for key, value in values.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    done = subprocess.run([kintsugi, "plan", CONFIG, "--json", *sets, *more], check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def links(kept):
    return {"cluster.links.cluster.bandwidth": kept * 50e9}


def small(kintsugi, chunks):
    """96 GPUs in two pods: what stages together, and pipelines together, gain over neither."""
    schedule = {"parallel.schedule": "interleaved", "parallel.virtual_stages": chunks} if chunks > 1 else {}
    cells = []
    for kept in KEPT.values():
        steps = {}
        for name, pods in ORDERS.items():
            nodes = [f"n{number + 1}" for number in range(len(pods))]
            place = {"cluster.placement.nodes": nodes, "cluster.placement.pods": list(pods)}
            steps[name] = plan(kintsugi, {**links(kept), **schedule, **place})["step_s"]
        gains = [steps["neither"] / steps[name] - 1 for name in ("stages together", "pipelines together")]
        cells.append(" and ".join(f"{gain:.1%}" for gain in gains))
    row(f"96 GPUs in 2 pods, chunks of a stage: {chunks}", "0.0% and 2.3%", cells)


def scattered(kintsugi, name, published, values, nodes):
    """A job on a large cluster: what the best placement gains over random nodes."""
    cells = []
    for kept in KEPT.values():
        found = plan(kintsugi, {**links(kept), **values, "cluster.nodes_per_pod": NODES_PER_POD}, "--place", nodes)
        cells.append(f"{found['random_step_s'] / found['step_s'] - 1:.1%}")
    row(f"{name}, over random nodes of {PODS} pods", published, cells)


def row(job, published, cells):
    print(f"| {job} | {published} | {' | '.join(cells)} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kintsugi", required=True)
    kintsugi = os.path.abspath(parser.parse_args().kintsugi)
    row("job", "published", [f"between pods {kept:.0%}, {name}" for name, kept in KEPT.items()])
    print("|---|--:|--:|--:|")
    for chunks in (1, 6, 12):
        small(kintsugi, chunks)
    with tempfile.TemporaryDirectory() as work:
        nodes = os.path.join(work, "nodes.txt")
        with open(nodes, "w") as file:
            for pod in range(PODS):
                file.write(f"n[{pod * NODES_PER_POD + 1}-{(pod + 1) * NODES_PER_POD}] pod{pod + 1}\n")
        scattered(kintsugi, "208 GPUs", "5.7%", MIDDLE, nodes)
        scattered(kintsugi, "9600 GPUs", "10.6%", LARGE, nodes)


if __name__ == "__main__":
    main()
