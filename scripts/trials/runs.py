"""Runs that are drawn at random, what they come to, and whether two of them came to the same."""

import hashlib
import json
import os
import re
import time
from random import Random

from trials.program import Wrong

# What a line of metrics says that does not depend on the clock.
NUMBERS = ("step", "loss", "grad_norm", "lr", "tokens", "validation_loss", "loss_scale", "skipped")
TINY = {
    "model.preset": "demo",
    "model.layers": 2,
    "model.hidden": 16,
    "model.heads": 2,
    "batch.sequence": 16,
    "batch.micro": 1,
    "batch.global": 4,
    "parallel.tp": 1,
    "parallel.pp": 1,
    "parallel.dp": 2,
    "sharding.zero": 1,
    "optimizer.warmup": 3,
    # Evaluations are made of tiny batches too: many of them would be slow under strace.
    "run.eval_tokens": 256,
    "run.out": "out",
}
LAYOUTS = (
    {},
    {},
    {"parallel.dp": 1, "sharding.zero": 0},
    {"parallel.dp": 2, "sharding.zero": 3},
    {"parallel.tp": 2, "parallel.dp": 1, "sharding.zero": 0},
    {"parallel.pp": 2, "parallel.dp": 1, "sharding.zero": 0, "parallel.schedule": "zero-bubble"},
)


# Configurations that a seed draws from: few, so that each is run undisturbed once.
CONFIGURATIONS = 30


def configuration(folder, settings, name="run.toml"):
    """Writes settings as a configuration file; gives its name."""
    with open(os.path.join(folder, name), "w") as file:
        file.writelines(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
    return name


def draw_settings(trial):
    """A tiny run, of the demo's data or of the corpus."""
    random = Random(f"{trial.seed}/configuration/{trial.random.randrange(CONFIGURATIONS)}")
    steps = random.randint(20, 120)
    settings = {**TINY, **random.choice(LAYOUTS)}
    settings["run.steps"] = steps
    settings["run.checkpoint_every"] = random.choice((1, 1, 2, 3, 5, 7))
    settings["run.keep"] = random.choice((1, 2, 2, 3))
    settings["run.eval_every"] = random.choice((0, 0, 4))
    settings["run.seed"] = random.randint(1, 1000)
    settings["precision.compute"] = random.choice(("fp32", "fp32", "bf16", "fp16"))
    if random.random() < 0.5:
        settings.update(of_corpus(trial.corpus))
    return settings


def of_corpus(corpus):
    return {"data.source": corpus, "model.vocab": 300, "data.split": 0.1}


class Result:
    """What a run came to: its metrics and the bits of its last checkpoint."""

    def __init__(self, folder, steps):
        self.numbers = read_numbers(os.path.join(folder, "metrics.jsonl"))
        newest = os.path.join(folder, "checkpoints", f"step-{steps:08}")
        if not os.path.isdir(newest):
            raise Wrong(f"the run of {steps} steps ended without {newest}")
        self.weights = digests(newest)
        manifest = json.load(open(os.path.join(newest, "manifest.json")))["manifest"]
        self.progress = manifest["progress"]

    def steps_missing(self, other):
        """The steps that have a line there and none here."""
        return {line[0] for line in other.numbers} - {line[0] for line in self.numbers}

    def differs_from(self, other, without=()):
        """In which respect two results differ, or None; the lines of some steps may be missing here."""
        if self.weights != other.weights:
            return "its final weights differ"
        expected = [line for line in other.numbers if line[0] not in without]
        if self.numbers != expected:
            pairs = zip(self.numbers, expected)
            first = next((pair for pair in pairs if pair[0] != pair[1]), None)
            return f"its metrics differ: {len(self.numbers)} and {len(other.numbers)} lines, first {first}"
        if self.progress != other.progress:
            return f"its progress differs: {self.progress} and {other.progress}"
        return None


def read_numbers(path):
    numbers = []
    for line in open(path, encoding="utf-8"):
        entry = json.loads(line)
        numbers.append(tuple(entry.get(key) for key in NUMBERS))
    return numbers


def digests(folder):
    """A digest of every shard in a folder."""
    shards = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors"))
    return {name: hashlib.sha256(open(os.path.join(folder, name), "rb").read()).hexdigest() for name in shards}


class References:
    """Runs that nothing disturbed, each made once."""

    def __init__(self, program, folder):
        self.program, self.folder, self.known = program, folder, {}

    def of(self, settings):
        """The result of a configuration, and the seconds that it takes."""
        key = json.dumps(settings, sort_keys=True)
        if key not in self.known:
            name = hashlib.sha256(key.encode()).hexdigest()[:16]
            folder = os.path.join(self.folder, f"reference-{name}")
            os.makedirs(folder, exist_ok=True)
            begun = time.monotonic()
            self.program.run(["train", configuration(folder, settings)], folder).check((0,))
            seconds = time.monotonic() - begun
            self.known[key] = (Result(os.path.join(folder, "out"), settings["run.steps"]), seconds)
        return self.known[key]


def steps_of(folder):
    """The steps of the checkpoints that have their names, in this folder and in those set aside."""
    found = set()
    for parent in os.listdir(folder) if os.path.isdir(folder) else ():
        if re.fullmatch(r"checkpoints(-\d+)?", parent):
            for name in os.listdir(os.path.join(folder, parent)):
                if re.fullmatch(r"step-\d{8}", name):
                    found.add(int(name[5:]))
    return found


def check_whole(folder):
    """Every checkpoint that has its name has a manifest and all files in full length; gives the newest step."""
    checkpoints = os.path.join(folder, "checkpoints")
    newest = 0
    for name in os.listdir(checkpoints) if os.path.isdir(checkpoints) else ():
        if not re.fullmatch(r"step-\d{8}", name):
            continue
        path = os.path.join(checkpoints, name)
        try:
            files = json.load(open(os.path.join(path, "manifest.json")))["manifest"]["files"]
            lengths = [(file["bytes"], os.path.getsize(os.path.join(path, file["name"]))) for file in files]
        except (OSError, ValueError) as error:
            raise Wrong(f"half a checkpoint: {path}: {error}") from error
        if any(said != found for said, found in lengths):
            raise Wrong(f"half a checkpoint: {path}: lengths {lengths}")
        newest = max(newest, int(name[5:]))
    return newest


def steps_said_missing(said):
    """The steps for which a run said that it found no metrics."""
    steps = set()
    for gaps in re.findall(r"has no lines for steps ([\d to,]+)", said):
        for first, last in re.findall(r"(\d+) to (\d+)", gaps):
            steps.update(range(int(first), int(last) + 1))
    return steps


def resume_to_end(trial, settings, folder, reference, disturbed=None):
    """Goes on to the end, undisturbed, and compares with the run that was never disturbed. Metrics that could not be
    written may be missing if that was said: by the run that goes on, or by the `disturbed` one if it came to its end."""
    out = os.path.join(folder, "out")
    steps = settings["run.steps"]
    newest = check_whole(out)
    said = None
    if newest < steps:
        finished = trial.program.run(["train", configuration(folder, settings), "--resume"], folder).check((0,))
        if "trying the previous checkpoint" in finished.stderr:
            raise Wrong(f"a checkpoint was published and is not whole: {finished.said()}")
        note = f"resumes after step {newest} "
        if newest and note not in finished.stdout:
            raise Wrong(f"it did not go on from step {newest}: {finished.stdout[-400:]}")
        said = steps_said_missing(finished.stderr)
    result = Result(out, steps)
    missing = result.steps_missing(reference)
    if missing and said is None and (disturbed is None or disturbed.code == 0):
        raise Wrong(f"metrics of steps {sorted(missing)} are missing, and the run ended without an error")
    if said is not None and missing != said:
        raise Wrong(f"metrics of steps {sorted(missing)} are missing, and those of {sorted(said)} were said to be")
    difference = result.differs_from(reference, missing)
    if difference:
        raise Wrong(f"not the run that was never disturbed: {difference}")
    trial.found("gap in metrics told", 1 if missing else 0)
    trial.found("bit-identical")
