"""`kintsugi watch --forward`, with the services' own libraries and without a network."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import kintsugi
import pytest

TINY = {"model.preset": "demo", "model.layers": 1, "model.hidden": 32, "model.heads": 2, "batch.sequence": 16, "batch.global": 4,
        "run.steps": 6, "run.eval_every": 3, "run.eval_tokens": 256, "run.out": "run"}


def forward(service, **environment):
    command = [kintsugi.command(), "watch", "run", "--forward", service, "--python", sys.executable]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300)


def records(data):
    """The records of a .wandb file: seven bytes of header, then LevelDB's log in blocks of 32 KiB."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield whole
            whole = b""


@pytest.fixture(scope="module", autouse=True)
def lines(tmp_path_factory):
    """A run in the working directory, and the lines of its metrics."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("forward"))
    kintsugi.train(TINY)
    yield [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    os.chdir(before)


def test_mlflow_gets_every_number_of_every_step_once(lines):
    store = f"file://{Path('mlruns').absolute()}"
    settings = {"MLFLOW_TRACKING_URI": store, "MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}
    os.environ.update(settings)
    import mlflow

    for _ in range(2):
        sent = forward("mlflow")
        assert sent.returncode == 0, sent.stderr
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("kintsugi")
    runs = client.search_runs([experiment.experiment_id])
    assert len(runs) == 1 and runs[0].info.status == "FINISHED" and runs[0].info.run_name == "run"
    assert runs[0].data.params["model.hidden"] == "32"
    for name in ("loss", "lr", "tokens_per_s", "validation_loss"):
        history = [(metric.step, metric.value) for metric in client.get_metric_history(runs[0].info.run_id, name)]
        assert sorted(history) == [(line["step"], line[name]) for line in lines if name in line], name
    assert client.list_artifacts(runs[0].info.run_id)[0].path == "summary.json"


def test_wandb_gets_every_number_of_every_step(lines):
    sent = forward("wandb", WANDB_MODE="offline", WANDB_DIR=str(Path.cwd()), WANDB_SILENT="true")
    assert sent.returncode == 0, sent.stderr
    (folder,) = Path("wandb").glob("offline-run-*")
    (log,) = folder.glob("run-*.wandb")
    from wandb.proto import wandb_internal_pb2

    found = []
    for data in records(log.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            found.append((items["_step"], items["loss"], items["lr"]))
    assert found == [(line["step"], line["loss"], line["lr"]) for line in lines]


def test_what_is_missing_is_a_sentence(tmp_path):
    empty = tmp_path / "python"
    empty.write_text(f"#!/bin/sh\nexec {sys.executable} -S -E \"$@\"\n")
    empty.chmod(0o755)
    command = [kintsugi.command(), "watch", "run", "--forward", "wandb", "--python"]
    for python, sentence in [(str(empty), "cannot import wandb"), ("nothing-here", "cannot start nothing-here")]:
        sent = subprocess.run([*command, python], capture_output=True, text=True)
        assert (sent.returncode, sent.stderr.count("error: ")) == (2, 1) and sentence in sent.stderr, sent.stderr
    sent = subprocess.run([*command[:2], str(tmp_path), *command[3:], "python3"], capture_output=True, text=True)
    assert sent.returncode == 2 and "not the folder of a run" in sent.stderr
