"""Sends a run to Weights & Biases or MLflow. `kintsugi watch --forward` starts it and writes lines of JSON to its stdin.

The first line describes the run. Every other line is one of metrics.jsonl, or the summary. It ends with its input.
"""

import json
import signal
import sys


def numbers(line):
    """The numbers of a line by name. Those of a table have the table's name before them, as in epochs/wiki."""
    found = {}
    for name, value in line.items():
        inner = {f"{name}/{key}": number for key, number in value.items()} if isinstance(value, dict) else {name: value}
        found.update({key: float(number) for key, number in inner.items() if isinstance(number, (bool, int, float))})
    return {name: number for name, number in found.items() if name not in ("schema", "step", "time")}


def flat(table, prefix=""):
    """A configuration as keys and values: parallel.tp."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


class Wandb:
    """A run of Weights & Biases. Sending the same run again goes on where it ended, except offline."""

    def __init__(self, run):
        import wandb

        self.run = wandb.init(id=run["id"], name=run["name"], config=run["config"], resume="allow")
        self.last = self.run.step - 1 if self.run.resumed else 0

    def step(self, line):
        if line["step"] > self.last:
            self.run.log(numbers(line), step=line["step"])

    def summary(self, summary):
        for name, value in flat(summary):
            self.run.summary[name] = value

    def end(self):
        self.run.finish()


class Mlflow:
    """A run of MLflow, in the experiment of MLFLOW_EXPERIMENT_NAME. Sending the same run again goes on where it ended."""

    def __init__(self, run):
        import os

        import mlflow
        from mlflow.entities import Metric, Param, RunTag

        self.metric, self.client = Metric, mlflow.MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "kintsugi")
        experiment = self.client.get_experiment_by_name(name)
        experiment = experiment.experiment_id if experiment else self.client.create_experiment(name)
        earlier = self.client.search_runs([experiment], f"tags.`kintsugi.id` = '{run['id']}'", max_results=1)
        if earlier:
            self.id = earlier[0].info.run_id
            history = self.client.get_metric_history(self.id, "loss")
            self.last = max((metric.step for metric in history), default=0)
        else:
            created = self.client.create_run(experiment, run_name=run["name"], tags={"kintsugi.id": run["id"]})
            self.id, self.last = created.info.run_id, 0
            parameters = [Param(name, str(value)[:500]) for name, value in flat(run["config"])]
            for first in range(0, len(parameters), 100):
                self.client.log_batch(self.id, params=parameters[first : first + 100], tags=[RunTag("kintsugi.folder", run["folder"])])

    def step(self, line):
        if line["step"] > self.last:
            time = int(1000 * line["time"])
            metrics = [self.metric(name, number, time, line["step"]) for name, number in numbers(line).items()]
            self.client.log_batch(self.id, metrics=metrics)

    def summary(self, summary):
        self.client.log_dict(self.id, summary, "summary.json")

    def end(self):
        self.client.set_terminated(self.id)


def main():
    # Ctrl-C reaches every process of the terminal. This one ends when its input does.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The working directory often has a folder wandb, which is not the library.
    sys.path[:] = [folder for folder in sys.path if folder]
    service = {"wandb": Wandb, "mlflow": Mlflow}[sys.argv[1]]
    try:
        to = service(json.loads(sys.stdin.readline()))
    except ImportError as error:
        print(f"error: {sys.executable} cannot import {error.name}; install it with pip install {sys.argv[1]}", file=sys.stderr)
        return 2
    for text in sys.stdin:
        line = json.loads(text)
        if "step" in line:
            to.step(line)
        else:
            to.summary(line["summary"])
    to.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
