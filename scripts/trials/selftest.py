"""Proves that the trials catch what they are for: a build with bugs on purpose, one at a time, must fail them."""

import os
import shutil
import time

from trials.program import Program
from trials.seeds import copy_with_bugs

# Each bug, the trials that should catch it (a kind, and for changed bytes which file), and what they say then.
BUGS = {
    "checksum": (("corrupt", "shard"), ("another result", "that of no checkpoint")),
    "fsync": (("order", None), ("before rank-00000.safetensors was synced",)),
    # Two runs in one folder disturb each other in many ways.
    "lock": (("pair", None), ("",)),
    "rename": (("kill", None), ("half a checkpoint", "published and is not whole")),
}
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
MAX_TRIALS = 30
TRIAL_FAILED = "the trial itself failed"
# Without a bug these must find nothing.
TRIALS_WITHOUT = 4


def run(folder, options, build, Bench, Trial, missing):
    if missing:
        print(f"skipped: the self-test needs {' and '.join(sorted(missing))}")
        return 1
    binary = options.kintsugi or build_with_bugs(folder, build)
    # The next build of the program itself replaces the original.
    copied = os.path.join(folder, "kintsugi-seeded")
    shutil.copy2(binary, copied)
    rows = [without_a_bug(copied, folder, options, Bench, Trial)]
    for bug in BUGS:
        rows.append(with_bug(bug, copied, folder, options, Bench, Trial))
    print("| seeded bug | trials | seconds | verdict |\n|---|---|---|---|")
    for name, trials, seconds, good, words in rows:
        print(f"| {name} | {trials} | {seconds:.0f} | {'' if good else '**'}{words[:160]}{'' if good else '**'} |")
    return 0 if all(good for *_, good, _ in rows) else 1


def build_with_bugs(folder, build):
    sources = os.path.join(folder, "sources")
    shutil.rmtree(sources, ignore_errors=True)
    copy_with_bugs(ROOT, sources)
    return build(sources)


def bench_of(bug, binary, folder, options, Bench):
    place = os.path.join(folder, f"bug-{bug}")
    shutil.rmtree(place, ignore_errors=True)
    os.makedirs(place)
    return Bench(Program(binary, {"KINTSUGI_SEEDED_BUG": bug}), place, options.seed)


def with_bug(bug, binary, folder, options, Bench, Trial):
    begun = time.monotonic()
    bench = bench_of(bug, binary, folder, options, Bench)
    (kind, bench.only_files), words = BUGS[bug]
    for number in range(MAX_TRIALS):
        failure = Trial(bench, number, kind).run()
        if failure and any(word in failure for word in words) and not failure.startswith(TRIAL_FAILED):
            return bug, number + 1, time.monotonic() - begun, True, f"caught by {kind}: {failure}"
    return bug, MAX_TRIALS, time.monotonic() - begun, False, "not caught"


def without_a_bug(binary, folder, options, Bench, Trial):
    begun, tried = time.monotonic(), 0
    bench = bench_of("none", binary, folder, options, Bench)
    for (kind, bench.only_files), _ in BUGS.values():
        for number in range(TRIALS_WITHOUT):
            tried += 1
            failure = Trial(bench, number, kind).run()
            if failure:
                return "none", tried, time.monotonic() - begun, False, f"false alarm of {kind}: {failure}"
    return "none", tried, time.monotonic() - begun, True, "nothing found, as it should be"
