"""The table of scripts/bench-tune: runs every method on the groups and prints the medians as Markdown."""

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

TARGET = 0.95
OURS = ["tuner", "planner's order", "without planner", "reversed planner", "shuffled planner", "random"]
FAST, SLOW = ["TPE"], ["Optuna GP", "DeepHyper"]


def outcomes(group, seed):
    """One run of each layout. Runs of the same layout differ; the seed chooses."""
    choose = random.Random(seed)
    return [choose.choice(layout["measured_s"]) for layout in group["layouts"]]


class Table:
    """A group as a table of trials. Combinations that nobody ran are not trials."""

    def __init__(self, group, seed):
        layouts = [layout["values"] for layout in group["layouts"]]
        keys = sorted(layouts[0])
        self.space = {key: sorted({int(layout[key]) for layout in layouts}) for key in keys}
        self.space = {key: values for key, values in self.space.items() if len(values) > 1}
        # The mesh has as many ranks as the group, so dp follows.
        self.space.pop("parallel.dp", None)
        self.rows = {}
        for index, layout in enumerate(layouts):
            self.rows[tuple(int(layout[key]) for key in self.space)] = index
        self.times = outcomes(group, seed)
        worked = [seconds for seconds in self.times if seconds]
        self.good = min(worked) / TARGET if worked else None
        self.tried = set()
        self.random = random.Random(seed)

    def index(self, values):
        """The row of a combination; None if nobody ran it or if it was tried."""
        index = self.rows.get(tuple(values[key] for key in self.space))
        return None if index in self.tried else index

    def any(self):
        """A row that was not tried."""
        return self.random.choice([index for index in range(len(self.times)) if index not in self.tried])

    def values(self, index):
        found = next(key for key, row in self.rows.items() if row == index)
        return dict(zip(self.space, found))

    def run(self, index):
        self.tried.add(index)
        return self.times[index]


# Proposals in a row that are no new trial, before one is taken at random.
PATIENCE = 60


def optuna_trials(table, sampler):
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=sampler)
    worst = 0.0
    while True:
        for _ in range(PATIENCE):
            trial = study.ask()
            values = {key: trial.suggest_categorical(key, choices) for key, choices in table.space.items()}
            index = table.index(values)
            if index is not None:
                break
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            index = table.any()
            study.enqueue_trial(table.values(index))
            trial = study.ask()
            for key, choices in table.space.items():
                trial.suggest_categorical(key, choices)
        seconds = table.run(index)
        if seconds and seconds <= table.good:
            return len(table.tried)
        worst = max(worst, seconds or 0.0)
        study.tell(trial, math.log(seconds if seconds else 2 * worst or 1e3))


def tpe(table, seed):
    import optuna

    return optuna_trials(table, optuna.samplers.TPESampler(seed=seed))


def gaussian(table, seed):
    import optuna

    return optuna_trials(table, optuna.samplers.GPSampler(seed=seed))


def deephyper(table, seed):
    from deephyper.hpo import CBO, HpProblem

    problem = HpProblem()
    for key, choices in table.space.items():
        problem.add_hyperparameter(choices, key.replace(".", "_"))
    search = CBO(problem, random_state=seed, verbose=0, log_dir=f"/tmp/deephyper-{seed}-{id(table)}")
    names = {key.replace(".", "_"): key for key in table.space}
    while True:
        for _ in range(PATIENCE):
            asked = search.ask(1)[0]
            index = table.index({names[name]: int(value) for name, value in asked.items() if name in names})
            if index is not None:
                break
            search.tell([(asked, "F_nobody_ran_it")])
        else:
            index = table.any()
            asked = {key.replace(".", "_"): value for key, value in table.values(index).items()}
        seconds = table.run(index)
        if seconds and seconds <= table.good:
            return len(table.tried)
        search.tell([(asked, -math.log(seconds) if seconds else "F_failed")])


METHODS = {"TPE": tpe, "Optuna GP": gaussian, "DeepHyper": deephyper}


def one(job):
    group, method, seed = job
    warnings.simplefilter("ignore")
    table = Table(group, seed)
    begun = time.monotonic()
    trials = METHODS[method](table, seed)
    return group["name"], method, trials, time.monotonic() - begun


def others(groups, arguments):
    """Trials by group, method and seed. What an earlier call found is not run again."""
    file = arguments.folder / "others.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    seeds = {name: arguments.seeds if name in FAST else arguments.slow_seeds for name in FAST + SLOW}
    found = {(name, method, seed): trials for name, method, seed, trials, _ in map(json.loads, lines) if seed < seeds[method]}
    work = []
    for method in FAST + SLOW:
        for seed in range(seeds[method]):
            for group in groups:
                worked = any(seconds for layout in group["layouts"] for seconds in layout["measured_s"])
                if worked and (group["name"], method, seed) not in found:
                    work.append((group, method, seed))
    with ProcessPoolExecutor(arguments.jobs) as pool, file.open("a") as out:
        for (_, _, seed), (name, method, trials, seconds) in zip(work, pool.map(one, work)):
            found[name, method, seed] = trials
            print(json.dumps([name, method, seed, trials, round(seconds, 1)]), file=out, flush=True)
            print(f"{name} {method} {seed}: {trials} trials, {seconds:.1f} s", file=sys.stderr)
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("program")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--slow-seeds", type=int, default=3)
    parser.add_argument("--only", choices=["ours"])
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    file = arguments.folder / "jobs.json"
    groups = json.loads(file.read_text())
    ran = subprocess.run([arguments.program, "run", str(file), str(arguments.seeds)], check=True, capture_output=True)
    results = json.loads(ran.stdout)
    methods = list(OURS)
    if arguments.only != "ours":
        methods += FAST + SLOW if arguments.slow_seeds else FAST
        for (name, method, _), trials in sorted(others(groups, arguments).items()):
            results[name].setdefault(method, []).append(trials)
    medians = {name: [] for name in methods}
    print("| group | layouts | worked |", " | ".join(methods), "|")
    print("|---|--:|--:|" + "--:|" * len(methods))
    nothing = []
    for group in groups:
        layouts = group["layouts"]
        worked = sum(any(layout["measured_s"]) for layout in layouts)
        if not worked:
            over = sum((layout["memory_share"] or math.inf) > 1 for layout in layouts)
            nothing.append(f"{group['name']} nodes: nothing ran, and {over} of {len(layouts)} were predicted not to fit")
            continue
        cells = []
        for name in methods:
            trials = results[group["name"]].get(name)
            if not trials:
                cells.append("–")
                continue
            median = statistics.median(trials)
            medians[name].append(median)
            cells.append(f"{median:g} ({min(trials)}–{max(trials)})")
        print(f"| {group['name']} | {len(layouts)} | {worked} |", " | ".join(cells), "|")
    print("| median | | |", " | ".join(f"{statistics.median(medians[name]):g}" for name in methods), "|")
    print("| worst | | |", " | ".join(f"{max(medians[name]):g}" for name in methods), "|")
    print("\n" + "\n".join(nothing))


if __name__ == "__main__":
    main()
