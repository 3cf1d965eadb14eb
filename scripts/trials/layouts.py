"""Random legal layouts: each is stopped and goes on, on the same layout bit for bit, on another to rounding."""

import os
import shutil
import signal
import time

from trials.program import Wrong
from trials.runs import Result, check_whole, configuration, of_corpus, resume_to_end

# Relative differences of losses that rounding may make: those of `kintsugi verify`.
BOUNDS = {"fp32": 1e-5, "bf16": 1e-3}
FAMILIES = ("gpt", "neox", "llama")


def draw_model(random, corpus):
    """What all layouts of a trial share."""
    heads = random.choice((2, 4))
    model = {
        "model.preset": "demo",
        "model.family": random.choice(FAMILIES),
        "model.layers": random.choice((2, 3, 4, 6)),
        "model.hidden": heads * random.choice((8, 16)),
        "model.heads": heads,
        "batch.sequence": random.choice((8, 16)),
        "batch.global": random.choice((4, 8, 12)),
        "optimizer.warmup": 2,
        "precision.compute": random.choice(("fp32", "fp32", "bf16")),
        "run.steps": random.randint(6, 12),
        "run.checkpoint_every": random.choice((1, 2, 3)),
        "run.out": "out",
        "run.seed": random.randint(1, 1000),
    }
    if random.random() < 0.3:
        model.update(of_corpus(corpus))
        model["data.mask_documents"] = random.choice((True, False))
    return model


def draw_layout(random):
    schedule = random.choice(("gpipe", "1f1b", "1f1b", "interleaved", "zero-bubble"))
    layout = {
        "parallel.tp": random.choice((1, 1, 2, 4)),
        "parallel.pp": random.choice((1, 2, 3, 4)),
        "parallel.dp": random.choice((1, 2, 2, 3, 4)),
        "parallel.schedule": schedule,
        "parallel.sequence_parallel": random.choice((True, False)),
        "parallel.prefetch": random.choice((0, 1, 2)),
        "parallel.overlap": random.choice((True, True, False)),
        "sharding.zero": random.choice((0, 1, 2, 3)),
        "memory.recompute": random.choice(("none", "selective", "full")),
        "memory.attention": random.choice(("flash", "flash", "plain")),
        "batch.micro": random.choice((1, 1, 2)),
    }
    if schedule == "interleaved":
        layout["parallel.virtual_stages"] = random.choice((2, 3))
    if layout["sharding.zero"] >= 2:
        layout["sharding.reduce"] = random.choice(("step", "micro-batch"))
    if layout["sharding.zero"] == 3:
        layout["sharding.gather"] = random.choice(("step", "micro-batch"))
    return layout


def draw_codes(random, layout):
    """What is quantised. It changes the losses, so only runs of the same layout can be compared."""
    if layout["sharding.zero"] == 0:
        return {}
    return {
        "sharding.quantize_weights": random.choice(("none", "int8")),
        "sharding.quantize_gradients": random.choice(("none", "int8", "int4")),
    }


def legal(trial, model):
    """A layout that `plan` accepts for the model."""
    for _ in range(200):
        settings = {**model, **draw_layout(trial.random)}
        ranks = settings["parallel.tp"] * settings["parallel.pp"] * settings["parallel.dp"]
        if ranks > 16:
            continue
        if trial.program.run(["plan", configuration(trial.folder, settings), "--json"], trial.folder).check((0, 2)).code == 0:
            return settings
        trial.found("layout refused")
    raise Wrong("200 layouts were refused")


def layout(trial):
    """Trains on one layout, is stopped, and goes on, there and elsewhere."""
    model = draw_model(trial.random, trial.corpus)
    settings = legal(trial, model)
    other = legal(trial, model)
    reference, seconds = trial.references.of(settings)
    process = trial.program.start(["train", configuration(trial.folder, settings)], trial.folder)
    time.sleep(trial.random.uniform(0, 1.1 * seconds))
    stop = trial.random.choice((signal.SIGTERM, signal.SIGKILL))
    trial.fault(stop.name, process.poll() is None)
    process.send_signal(stop)
    trial.program.finish(process).check((0, -stop))
    out = os.path.join(trial.folder, "out")
    moved = trial.subfolder("other")
    if os.path.isdir(out):
        shutil.copytree(out, os.path.join(moved, "out"))
    stopped_at = check_whole(out)
    resume_to_end(trial, settings, trial.folder, reference)
    if stopped_at >= settings["run.steps"]:
        return
    trial.note("out is the run on the same layout, other/out the one that went on elsewhere")
    trial.program.run(["train", configuration(moved, other), "--resume"], moved).check((0,))
    found = Result(os.path.join(moved, "out"), settings["run.steps"])
    compare(trial, reference, found, BOUNDS[settings["precision.compute"]])


def compare(trial, reference, found, bound):
    if len(found.numbers) != len(reference.numbers):
        raise Wrong(f"{len(found.numbers)} lines of metrics, and not {len(reference.numbers)}")
    for one, two in zip(reference.numbers, found.numbers):
        difference = abs(one[1] - two[1]) / abs(one[1])
        if not difference <= bound:
            raise Wrong(f"step {one[0]}: loss {two[1]} on the other layout, {one[1]} on the first: {difference:.1e}")
    trial.found("equal to rounding on another layout")
