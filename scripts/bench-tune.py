"""The tables of scripts/bench-tune: runs every method on the groups and prints the medians as Markdown."""

import argparse
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from pathlib import Path

TARGET = 0.95
OURS = ["tuner", "planner's order", "without planner", "reversed planner", "shuffled planner", "random"]


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

    def nearest(self, values):
        """The row nearest to a combination, of those that were not tried: the fewest settings differ, and by the fewest values."""
        wanted = [choices.index(values[key]) for key, choices in self.space.items()]

        def distance(found):
            steps = [abs(choices.index(value) - at) for value, choices, at in zip(found, self.space.values(), wanted)]
            return sum(step > 0 for step in steps), sum(steps), found

        return self.rows[min((found for found, row in self.rows.items() if row not in self.tried), key=distance)]

    def values(self, index):
        found = next(key for key, row in self.rows.items() if row == index)
        return dict(zip(self.space, found))

    def run(self, index):
        self.tried.add(index)
        return self.times[index]


# Proposals of TPE in a row that are no new trial, before one is taken at random.
PATIENCE = 60


def tpe(table, seed):
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    worst = 0.0
    while True:
        for _ in range(PATIENCE):
            trial, values = asked(study, table)
            index = table.index(values)
            if index is not None:
                break
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
        else:
            index = table.any()
            trial = instead(study, table, index)
        seconds = table.run(index)
        if seconds and seconds <= table.good:
            return len(table.tried)
        worst = max(worst, seconds or 0.0)
        study.tell(trial, told(seconds, worst))


def gaussian(table, seed):
    """A proposal takes seconds, so one that nobody ran is replaced by the nearest row at once."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=optuna.samplers.GPSampler(seed=seed))
    worst = 0.0
    while True:
        trial, values = asked(study, table)
        index = table.index(values)
        if index is None:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            index = table.nearest(values)
            trial = instead(study, table, index)
        seconds = table.run(index)
        if seconds and seconds <= table.good:
            return len(table.tried)
        worst = max(worst, seconds or 0.0)
        study.tell(trial, told(seconds, worst))


def asked(study, table):
    """The next trial of a study, and its combination."""
    trial = study.ask()
    return trial, {key: trial.suggest_categorical(key, choices) for key, choices in table.space.items()}


def instead(study, table, index):
    """A trial with the combination of a row."""
    study.enqueue_trial(table.values(index))
    return asked(study, table)[0]


def told(seconds, worst):
    """What a sampler is told of a trial: a failure is twice as slow as the slowest that worked."""
    return math.log(seconds if seconds else 2 * worst or 1e3)


def deephyper(table, seed):
    """As with the Gaussian process, the nearest row replaces a combination that nobody ran."""
    from deephyper.hpo import CBO, HpProblem

    problem = HpProblem()
    for key, choices in table.space.items():
        problem.add_hyperparameter(choices, key.replace(".", "_"))
    with tempfile.TemporaryDirectory() as log:
        search = CBO(problem, random_state=seed, verbose=0, log_dir=log)
        while True:
            (asked,) = search.ask(1)
            values = {key: int(asked[key.replace(".", "_")]) for key in table.space}
            index = table.index(values)
            if index is None:
                index = table.nearest(values)
                asked = {**asked, **{key.replace(".", "_"): value for key, value in table.values(index).items()}}
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
    """Trials of other tuners by method, seed and group. What an earlier call found is not run again."""
    file = arguments.folder / "others.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    found = {(method, seed, name): trials for name, method, seed, trials, _ in map(json.loads, lines)}
    # Whole seeds one after the other, so that those that were run can be compared if the time is up.
    order = [(method, seed) for seed in range(arguments.seeds) for method in METHODS]
    work = [(group, method, seed) for method, seed in order for group in groups if (method, seed, group["name"]) not in found]
    end = time.monotonic() + 60 * arguments.minutes
    with ProcessPoolExecutor(arguments.jobs) as pool, file.open("a") as out:
        pending = {}
        while work or pending:
            while work and len(pending) < arguments.jobs and time.monotonic() < end:
                job = work.pop(0)
                pending[pool.submit(one, job)] = job
            if not pending:
                break
            for done in wait(pending, return_when=FIRST_COMPLETED).done:
                seed = pending.pop(done)[2]
                name, method, trials, seconds = done.result()
                found[method, seed, name] = trials
                print(json.dumps([name, method, seed, trials, round(seconds, 1)]), file=out, flush=True)
                print(f"{name} {method} {seed}: {trials} trials, {seconds:.1f} s", file=sys.stderr)
    return found


def whole_seeds(found, method, groups, seeds):
    """The trials of a method by group, for the seeds that were run on every group."""
    names = [group["name"] for group in groups]
    whole = [seed for seed in range(seeds) if all((method, seed, name) in found for name in names)]
    return {name: [found[method, seed, name] for seed in whole] for name in names}


def table(groups, columns, seeds):
    """The trials of every group as Markdown: median (least–most)."""
    heads = [name if len(next(iter(trials.values()))) == seeds else f"{name}, {seeds_of(trials)}" for name, trials in columns.items()]
    print("| group | layouts | worked |", " | ".join(heads), "|")
    print("|---|--:|--:|" + "--:|" * len(columns))
    for group in groups:
        cells = []
        for trials in columns.values():
            trials = trials[group["name"]]
            cells.append(f"{statistics.median(trials):g} ({min(trials)}–{max(trials)})")
        layouts = group["layouts"]
        worked = sum(any(layout["measured_s"]) for layout in layouts)
        print(f"| {group['name']} | {len(layouts)} | {worked} |", " | ".join(cells), "|")


def summary(columns):
    """The median and the worst of the groups' medians, a row for each method."""
    print("| | median of the groups | worst group | seeds |")
    print("|---|--:|--:|--:|")
    for name, trials in columns.items():
        medians = [statistics.median(one) for one in trials.values()]
        print(f"| {name} | {statistics.median(medians):g} | {max(medians):g} | {len(next(iter(trials.values())))} |")


def seeds_of(trials):
    count = len(next(iter(trials.values())))
    return "1 seed" if count == 1 else f"{count} seeds"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("program")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--only", choices=["ours"])
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    file = arguments.folder / "jobs.json"
    groups = json.loads(file.read_text())
    has_worked = lambda group: any(seconds for layout in group["layouts"] for seconds in layout["measured_s"])
    working = [group for group in groups if has_worked(group)]
    found = {} if arguments.only == "ours" else others(working, arguments)
    ran = subprocess.run([arguments.program, "run", str(file), str(arguments.seeds)], check=True, capture_output=True)
    ours = json.loads(ran.stdout)
    columns = {method: {group["name"]: ours[group["name"]][method] for group in working} for method in OURS}
    peers = {method: whole_seeds(found, method, working, arguments.seeds) for method in METHODS}
    columns.update({method: trials for method, trials in peers.items() if all(trials.values())})
    table(working, columns, arguments.seeds)
    print()
    summary(columns)
    print()
    for group in groups:
        if group not in working:
            over = sum((layout["memory_share"] or math.inf) > 1 for layout in group["layouts"])
            count = len(group["layouts"])
            print(f"{group['name']} nodes: nothing ran, and {over} of {count} were predicted not to fit")


if __name__ == "__main__":
    main()
