"""Tests of the installed package. scripts/check-python runs them in an environment of their own."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import kintsugi
import ml_dtypes
import numpy as np
import pytest

TINY = {
    "model": {"layers": 2, "hidden": 32, "heads": 2},
    "batch": {"sequence": 16, "micro": 1, "global": 4},
    "run.eval_every": 2,
    "run.eval_tokens": 256,
    "optimizer.warmup": 2,
}
ENDLESS = {"run.steps": 1_000_000, "run.eval_every": 0}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def answer(*arguments):
    """What the command prints as JSON."""
    return json.loads(subprocess.run([kintsugi.command(), *arguments], check=True, capture_output=True, text=True).stdout)


def tiny(**settings):
    """The tiny model on the demo's layout, with more settings: run__steps=4."""
    base = {"model.preset": "demo", "parallel": {"tp": 2, "pp": 2, "dp": 2}, "sharding.zero": 1, "data.source": "demo"}
    flat = {f"{table}.{key}": value for table, keys in TINY.items() if isinstance(keys, dict) for key, value in keys.items()}
    flat.update({key: value for key, value in TINY.items() if not isinstance(value, dict)})
    return {**base, **flat, **{key.replace("__", "."): value for key, value in settings.items()}}


FRONTIER = {"model.preset": "gpt-22b", "batch": {"sequence": 2048, "global": 640}, "precision.compute": "fp16",
            "cluster": {"preset": "frontier", "nodes": 16}}
FRONTIER_TOML = """
model.preset = "gpt-22b"
batch = { sequence = 2048, global = 640 }
precision.compute = "fp16"
cluster = { preset = "frontier", nodes = 16 }
"""


def test_a_plan_is_what_the_command_prints(folder):
    (folder / "run.toml").write_text(FRONTIER_TOML)
    layout = {"parallel.tp": 8, "parallel.pp": 4}
    sets = [word for key, value in layout.items() for word in ("--set", f"{key}={value}")]
    expected = answer("plan", "run.toml", "--json", *sets)
    assert expected["step_s"] > 0 and len(expected["memory"]) == 4
    assert kintsugi.plan("run.toml", sets=layout) == expected
    assert kintsugi.plan(Path("run.toml"), sets=layout) == expected
    assert kintsugi.plan({**FRONTIER, **layout}) == expected
    assert kintsugi.plan()["ranks"] == 8, "the demo"


def test_a_search_is_what_the_command_prints(folder):
    (folder / "run.toml").write_text(FRONTIER_TOML)
    expected = answer("plan", "run.toml", "--search", "--json", "--top", "3", "--only", "parallel.pp=1,2,4")
    found = kintsugi.search(FRONTIER, top=3, only={"parallel.pp": [1, 2, 4]})
    assert list(found) == expected["best"] and len(found) == 3
    assert (found.ranks, found.pick, found.gains) == (128, expected["pick"], expected["gains"])
    assert found.given == expected["given"]
    assert {row["pp"] for row in found} <= {1, 2, 4}


@pytest.mark.parametrize("config, sentence", [
    ({"parallel.tp": 3, "model.preset": "demo"}, "parallel.tp = 3"),
    ({"run.stepz": 3}, "unknown key run.stepz"),
    ("nothing.toml", "nothing.toml"),
    ({"model": {"layers": object()}}, "model.layers"),
    ({3: 4}, "3 is not a key"),
])
def test_a_mistake_is_a_value_error_with_a_sentence(config, sentence):
    for call in (kintsugi.plan, kintsugi.train):
        with pytest.raises(ValueError, match=sentence) as error:
            call(config)
        assert "\n" not in str(error.value)


def test_a_mistake_in_a_search_is_a_value_error_with_a_sentence():
    for arguments, sentence in [({"by": "size"}, 'by = "size"'), ({"only": {"parallel.tq": [1]}}, "parallel.tq")]:
        with pytest.raises(ValueError, match=sentence):
            kintsugi.search(FRONTIER, **arguments)


def test_other_files_are_value_errors(folder):
    for call in (kintsugi.load, kintsugi.Checkpoint, kintsugi.tokens):
        with pytest.raises(ValueError):
            call(folder / "nothing")


def test_a_run_gives_its_steps_metrics_and_tensors(folder, capfd):
    steps = []
    run = kintsugi.train(tiny(run__steps=4, run__out="runs/a"), steps.append)
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    lines = [json.loads(line) for line in (folder / "runs/a/metrics.jsonl").read_text().splitlines()]
    assert steps == lines
    assert capfd.readouterr().out == ""
    metrics = kintsugi.load("runs/a").metrics
    assert metrics["loss"].tolist() == [line["loss"] for line in lines]
    assert metrics["validation_step"].tolist() == [2, 4]
    assert run.summary["loss_last"] == lines[-1]["loss"] and "[parallel]" in run.config

    # The same numbers in one file: a checkpoint of one rank.
    subprocess.run([kintsugi.command(), "convert", "runs/a", "one", "--to", "checkpoint"], check=True, capture_output=True)
    sharded, whole = run.checkpoint(), kintsugi.Checkpoint("one")
    assert (sharded.step, sharded.path.name) == (4, "step-00000004")
    assert set(sharded.tensors) == {"weights", "first_moment", "second_moment"}
    assert list(sharded.weights) == list(whole.weights) and len(whole.weights) > 20
    for kind in whole.tensors:
        for name, expected in whole.tensors[kind].items():
            np.testing.assert_array_equal(sharded.tensors[kind][name], expected, err_msg=f"{kind} of {name}")
            assert not expected.flags.owndata and not expected.flags.writeable, "a view of the file"
    assert whole.weights["layer.1.query_weight"].shape == (32, 32)
    assert whole.weights["layer.1.query_bias"].shape == (32,)
    assert run.checkpoint(4).step == run.checkpoint("best").step == 4


def test_bf16_states_are_bfloat16():
    run = kintsugi.train(tiny(run__steps=2, run__out="out", precision__states="bf16", precision__compute="bf16"))
    moments = run.checkpoint().tensors["first_moment"]
    assert moments["layer.0.query_weight"].dtype == ml_dtypes.bfloat16
    assert np.abs(moments["layer.0.query_weight"].astype(np.float32)).max() > 0
    assert run.checkpoint().weights["layer.0.query_weight"].dtype == np.float32


def wait_for_steps(path, count):
    for _ in range(600):
        if path.exists() and len(path.read_text().splitlines()) >= count:
            return
        time.sleep(0.1)
    raise AssertionError(f"{path} did not reach {count} lines")


def test_ctrl_c_saves_and_the_run_resumes(folder):
    config = tiny(**{key.replace(".", "__"): value for key, value in ENDLESS.items()}, run__out="out")
    # A shell's jobs in the background ignore SIGINT, and so do their children.
    handler = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    program = f"{handler}; import kintsugi; kintsugi.train({config!r})"
    child = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_for_steps(folder / "out/metrics.jsonl", 3)
    # A terminal and Jupyter send it to the whole group.
    os.killpg(child.pid, signal.SIGINT)
    _, error = child.communicate(timeout=60)
    assert child.returncode != 0 and "KeyboardInterrupt" in error
    run = kintsugi.load("out")
    last = len(run.metrics["step"])
    assert run.summary["stopped"] and run.checkpoint().step == last
    steps = []
    kintsugi.train({**config, "run.steps": last + 3}, lambda step: steps.append(step["step"]), resume=True)
    assert steps == [last + 1, last + 2, last + 3]


def test_an_exception_of_on_step_stops_the_run_with_a_checkpoint():
    def stop(step):
        if step["step"] == 3:
            raise StopIteration("enough")

    with pytest.raises(StopIteration):
        kintsugi.train({**tiny(run__out="out"), **ENDLESS}, stop)
    assert kintsugi.load("out").checkpoint().step >= 3


def test_a_run_that_fails_is_a_training_error_with_its_sentence():
    with pytest.raises(kintsugi.TrainingError, match="run.device = \"hip\""):
        kintsugi.train(tiny(run__device="hip", run__out="out"))


def test_ranks_can_be_processes(folder):
    # A launcher that only starts the command: what matters is that its arguments come first.
    launcher = folder / "kintsugi"
    launcher.write_text(f"#!/bin/sh\necho \"$@\" > {folder}/arguments\nshift 3\nexec {kintsugi.command()} \"$@\"\n")
    launcher.chmod(0o755)
    os.environ["KINTSUGI_COMMAND"] = str(launcher)
    try:
        kintsugi.train(tiny(run__steps=1, run__out="out"), launch=["--ranks", "8"])
    finally:
        del os.environ["KINTSUGI_COMMAND"]
    assert (folder / "arguments").read_text().startswith("launch --ranks 8 train ")


def test_token_files_are_arrays(folder):
    documents = ["one document", "another, longer document", "a third"]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    arguments = ["prepare", "text.jsonl", "--tokenizer", "bytes", "--validation", "0", "--out", "corpus"]
    subprocess.run([kintsugi.command(), *arguments], check=True, capture_output=True)
    corpus = kintsugi.tokens("corpus")
    assert len(corpus) == 3 and corpus.vocab == 257 and corpus.tokens.dtype == np.uint16
    texts = [bytes(document[document < 256].tolist()).decode() for document in corpus]
    assert texts == documents
    assert sum(len(document) for document in corpus) == len(corpus.tokens)
    assert not corpus.tokens.flags.owndata, "a view of the file"
    np.testing.assert_array_equal(corpus[-1], corpus[2])
    with pytest.raises(IndexError):
        corpus[3]
    with open("corpus.bin", "ab") as file:
        file.write(b"xx")
    with pytest.raises(ValueError, match="corpus.bin"):
        kintsugi.tokens("corpus")
