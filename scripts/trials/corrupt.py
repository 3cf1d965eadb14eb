"""Bytes that change on the disk, in every file that `train`, `prepare` and `convert` leave.

A checkpoint is protected by checksums: the results are the same bits, or the one before it is used and the file is
named. Nothing protects the others: a flipped bit in a token is another token. There a command may succeed or fail, but
it ends by itself and names the file."""

import json
import os
import shutil

from trials.program import Wrong
from trials.runs import TINY, Result, configuration, digests, of_corpus

# Two checkpoints, of steps 8 and 12; the rate is constant, so that a run of 20 steps has them on its way.
SETTINGS = {**TINY, "run.checkpoint_every": 4, "run.keep": 2, "optimizer.schedule": "constant"}
TRAINED, FURTHER = 12, 20
TEXT = """A plan is a list of steps. The pipeline has stages, and every stage has layers; a stage sends what it computed
to the next. Weights are split over ranks, gradients are summed, and the optimizer moves every weight a little. """


def write_texts(folder):
    """Texts that differ enough to make a tokenizer of."""
    os.makedirs(os.path.join(folder, "texts"), exist_ok=True)
    words = TEXT.split()
    for number in range(6):
        text = " ".join(words[(i * (number + 3) + i // 7) % len(words)] for i in range(700))
        with open(os.path.join(folder, "texts", f"{number}.txt"), "w") as file:
            file.write(text + "\n")


def prepare(program, folder):
    """Token files with a tokenizer of their own, as `corpus`."""
    write_texts(folder)
    arguments = ["prepare", "texts", "--train-tokenizer", "300", "--append-eod", "--out", "corpus"]
    program.run(arguments, folder).check((0,))


def settings_of(steps):
    return {**SETTINGS, **of_corpus("corpus"), "run.steps": steps}


class Template:
    """A run, its data and its export, which every trial starts from a copy of."""

    def __init__(self, program, folder):
        self.program, self.folder = program, folder
        if not os.path.isdir(folder):
            os.makedirs(folder)
            prepare(program, folder)
            program.run(["train", configuration(folder, settings_of(TRAINED))], folder).check((0,))
            program.run(["convert", "out", "exported"], folder).check((0,))
        self.known = {}

    def copy(self, to):
        shutil.copytree(self.folder, to, dirs_exist_ok=True)

    def expected(self, action):
        """What an action comes to when nothing was changed: from the newest checkpoint, and from the one before."""
        if action not in self.known:
            found = []
            for removed in (None, f"out/checkpoints/step-{TRAINED:08}"):
                folder = f"{self.folder}-{action}-{len(found)}"
                shutil.rmtree(folder, ignore_errors=True)
                self.copy(folder)
                if removed:
                    shutil.rmtree(os.path.join(folder, removed))
                arguments, read = ACTIONS[action]
                self.program.run(arguments(folder), folder).check((0,))
                found.append(read(folder))
                shutil.rmtree(folder)
            self.known[action] = found
        return self.known[action]


def answer(folder):
    """What a command printed, without what depends on the clock and on which checkpoint it read."""
    found = json.load(open(os.path.join(folder, ".stdout")))
    clock = lambda key: key.endswith(("_s", "per_s")) or key in ("seconds", "step", "checkpoint", "model", "from")
    return {key: value for key, value in found.items() if not clock(key)} if isinstance(found, dict) else found


def tuned():
    """The settings of a run that starts from the export."""
    kept = {key: value for key, value in settings_of(3).items() if not key.startswith("model.")}
    return {**kept, "model.init": "exported", "run.out": "tuned"}


def trained(folder):
    return Result(os.path.join(folder, "out"), FURTHER)


# A command, and how its result is read. Those of a run read its checkpoints, the others its export or its data.
ACTIONS = {
    "resume": (lambda folder: ["train", configuration(folder, settings_of(FURTHER)), "--resume"], trained),
    "eval": (lambda _: ["eval", "out", "--data", "corpus", "--split", "validation", "--json"], answer),
    "generate": (lambda _: ["generate", "out", "--prompt", "A plan", "--tokens", "6", "--json"], answer),
    "convert": (lambda _: ["convert", "out", "new"], lambda folder: digests(os.path.join(folder, "new"))),
    "eval export": (lambda _: ["eval", "exported", "--data", "corpus", "--json"], answer),
    "generate export": (lambda _: ["generate", "exported", "--prompt", "A plan", "--tokens", "6", "--json"], answer),
    "convert export": (
        lambda _: ["convert", "exported", "new", "--to", "checkpoint"],
        lambda folder: digests(os.path.join(folder, "new")),
    ),
    "train export": (lambda folder: ["train", configuration(folder, tuned())], lambda folder: None),
    "prepare": (
        lambda _: ["prepare", "texts", "--tokenizer", "corpus.tokenizer.json", "--out", "again"],
        lambda folder: None,
    ),
    "plan": (lambda _: ["plan", "out/config.toml", "--json"], lambda folder: None),
    "repeat": (lambda _: ["train", "out/config.toml", "--resume", "--set", f"run.steps={FURTHER}"], lambda folder: None),
}
OF_RUN = ("resume", "resume", "eval", "generate", "convert")
OF_EXPORT = ("eval export", "generate export", "convert export", "train export")


def kind_of(path):
    """What a file is to us: its name in the table, the actions that read it, and whether checksums protect it."""
    name = os.path.basename(path)
    if name.endswith("run.lock"):
        return "lock", ("resume",), True
    if path.startswith("out/checkpoints/"):
        return ("manifest" if name == "manifest.json" else "shard"), OF_RUN, True
    if path.startswith("exported/"):
        return "export", OF_EXPORT, False
    kinds = {
        "out/metrics.jsonl": ("metrics", ("resume",), False),
        "out/summary.json": ("summary", ("resume",), True),
        "out/config.toml": ("config", ("plan", "resume", "repeat"), False),
        "corpus.tokenizer.json": ("tokenizer", ("prepare", "resume"), False),
        "corpus.tokenizer_config.json": ("tokenizer", ("prepare", "resume"), False),
    }
    if path in kinds:
        return kinds[path]
    if path.startswith("corpus."):
        return "tokens", ("resume", "eval"), False
    return "tokenizer", ("generate", "convert"), False


def mutate(random, data):
    """Changed bytes, and what was done to them."""
    size = len(data)
    at = random.randrange(size) if size else 0
    length = min(size - at, random.choice((1, 1, 4, 8, 64, 512, 4096)))
    kinds = ("flip", "flip", "flip", "zero", "random", "truncate", "append", "remove", "repeat", "empty")
    kind = random.choice(kinds) if size else "append"
    if kind == "flip":
        changed = bytearray(data)
        for _ in range(random.choice((1, 1, 1, 3))):
            changed[random.randrange(size)] ^= 1 << random.randrange(8)
        return bytes(changed), kind
    parts = {
        "zero": (at, bytes(length), at + length),
        "random": (at, random.randbytes(length), at + length),
        "truncate": (at, b"", size),
        "append": (size, random.randbytes(random.choice((1, 8, 100))), size),
        "remove": (at, b"", at + length),
        "repeat": (at, data[at : at + length] * 2, at + length),
        "empty": (0, b"", size),
    }
    start, new, end = parts[kind]
    return data[:start] + new + data[end:], kind


def corrupt(trial):
    """Changes one file and runs one command that reads it."""
    template, random = trial.template, trial.random
    template.copy(trial.folder)
    files = []
    for folder, _, names in os.walk(trial.folder):
        files += [os.path.relpath(os.path.join(folder, name), trial.folder) for name in names]
    files = sorted(path for path in files if not path.startswith((".", "texts/", "run.toml")))
    # A kind first, so that a rare file is as likely as one of many shards.
    kind = random.choice(sorted({kind_of(path)[0] for path in files}) + ["manifest", "shard"])
    kind = trial.only_files or kind
    path = random.choice([path for path in files if kind_of(path)[0] == kind])
    _, actions, protected = kind_of(path)
    action = random.choice(actions)
    expected = template.expected(action)
    whole = os.path.join(trial.folder, path)
    with open(whole, "rb") as file:
        before = file.read()
    after, what = mutate(random, before)
    with open(whole, "wb") as file:
        file.write(after)
    trial.note(f"{what} in {path} ({len(before)} to {len(after)} bytes), then {action}")
    trial.fault(f"{kind}", before != after)
    arguments, read = ACTIONS[action]
    finished = trial.program.run(arguments(trial.folder), trial.folder).check()
    judge(trial, finished, path, protected, expected, read)


def judge(trial, finished, path, protected, expected, read):
    name = os.path.basename(path)
    complaints = [line for line in finished.stderr.splitlines() if line.startswith(("warning:", "error:"))]
    # What is wrong with a checkpoint as a whole is said of its folder.
    places = (name, os.path.dirname(path)) if path.startswith("out/checkpoints/") else (name,)
    named = any(place in line for line in complaints for place in places)
    if finished.code != 0:
        if finished.arguments[0] == "train" and (protected or name == "metrics.jsonl"):
            raise Wrong(f"one bad file ended the run: {finished.said()}")
        # A configuration is refused by the key, and what it names may be missing.
        if not named and name not in ("config.toml", "config.json"):
            raise Wrong(f"the error does not name {path}: {finished.said()}")
        trial.found("error told")
    elif name == "metrics.jsonl":
        if read(trial.folder).weights != expected[0].weights:
            raise Wrong("bytes of the metrics changed the weights")
        trial.found("same result")
    elif not protected:
        trial.found("survived")
    elif equal(read(trial.folder), expected[0]):
        trial.found("error told, bit-identical" if named else "same result")
    elif not named:
        raise Wrong(f"another result, and {path} is not named: {finished.said()}")
    elif equal(read(trial.folder), expected[1]):
        trial.found("checkpoint before used")
    else:
        raise Wrong("the result is that of no checkpoint")


def equal(one, other):
    return one.differs_from(other) is None if isinstance(one, Result) else one == other
