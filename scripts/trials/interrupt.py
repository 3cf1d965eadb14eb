"""Runs that are killed, stopped or asked to end at random moments, and several runs in one folder."""

import os
import signal
import time

from trials.program import Wrong, wait_until
from trials.runs import check_whole, configuration, draw_settings, read_numbers, resume_to_end

# Kills of one run, at most.
MAX_KILLS = 12
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)


def wait_for_a_moment(trial, process, out, seconds):
    """A moment of a run of so many seconds: anywhere, or in the middle of a save."""
    if trial.random.random() < 0.6:
        time.sleep(trial.random.uniform(0, 1.1 * seconds))
        return
    checkpoints = os.path.join(out, "checkpoints")

    def saving():
        try:
            return any(name.endswith(".partial") for name in os.listdir(checkpoints))
        except FileNotFoundError:
            return False

    time.sleep(trial.random.uniform(0, 0.5 * seconds))
    wait_until(saving, process, 5.0)
    time.sleep(trial.random.uniform(0, 0.004))


def kill(trial):
    """kill -9 again and again, then to the end."""
    settings = draw_settings(trial)
    reference, seconds = trial.references.of(settings)
    out = os.path.join(trial.folder, "out")
    newest = 0
    for _ in range(trial.random.randint(1, MAX_KILLS)):
        if newest >= settings["run.steps"]:
            break
        process = trial.program.start(["train", configuration(trial.folder, settings), "--resume"], trial.folder)
        wait_for_a_moment(trial, process, out, seconds)
        killed = process.poll() is None
        process.kill()
        finished = trial.program.finish(process)
        finished.check((0, -signal.SIGKILL))
        if "trying the previous checkpoint" in finished.stderr:
            raise Wrong(f"a checkpoint was published and is not whole: {finished.said()}")
        trial.fault("kill -9", killed)
        now = check_whole(out)
        if now < newest:
            raise Wrong(f"what was saved is lost: step {now} after step {newest}")
        newest = now
    resume_to_end(trial, settings, trial.folder, reference)


def lines(out):
    try:
        return read_numbers(os.path.join(out, "metrics.jsonl"))
    except (OSError, ValueError):
        return []


def stop_by_signal(trial):
    """SIGTERM and the like at random moments: the run saves, ends with exit code 0, and goes on."""
    settings = draw_settings(trial)
    reference, seconds = trial.references.of(settings)
    out = os.path.join(trial.folder, "out")
    for _ in range(trial.random.randint(1, 4)):
        newest = check_whole(out)
        if newest >= settings["run.steps"]:
            break
        # A run that was killed may have left lines beyond its last checkpoint, which stay until the next one has begun.
        before = max(newest, len(lines(out)))
        process = trial.program.start(["train", configuration(trial.folder, settings), "--resume"], trial.folder)
        wait_for_a_moment(trial, process, out, seconds)
        number = trial.random.choice(STOP_SIGNALS)
        asked = process.poll() is None
        process.send_signal(number)
        twice = trial.random.random() < 0.15
        if twice:
            time.sleep(trial.random.uniform(0, 0.002))
            process.send_signal(number)
        finished = trial.program.finish(process).check((0, -number))
        trial.fault(number.name, asked)
        if finished.code == 0:
            done = len(lines(out))
            if done and check_whole(out) != done:
                raise Wrong(f"{number.name} after step {done}: the newest checkpoint is {check_whole(out)}")
        elif not twice and len(lines(out)) > before:
            raise Wrong(f"{number.name} ended a training run with nothing saved after step {newest}")
        check_whole(out)
    resume_to_end(trial, settings, trial.folder, reference)


def pause(trial):
    """SIGSTOP and SIGCONT at random moments: the run ends as if nothing had happened."""
    settings = draw_settings(trial)
    reference, seconds = trial.references.of(settings)
    process = trial.program.start(["train", configuration(trial.folder, settings)], trial.folder)
    for _ in range(trial.random.randint(1, 3)):
        time.sleep(trial.random.uniform(0, 0.6 * seconds))
        trial.fault("SIGSTOP", process.poll() is None)
        process.send_signal(signal.SIGSTOP)
        time.sleep(trial.random.uniform(0, 0.3))
        process.send_signal(signal.SIGCONT)
    trial.program.finish(process).check((0,))
    resume_to_end(trial, settings, trial.folder, reference)


def pair(trial):
    """Several runs are started in one folder at one time: one has it, the others are refused and change nothing."""
    settings = draw_settings(trial)
    settings["run.steps"] = 60
    reference, _ = trial.references.of(settings)
    folders = [trial.subfolder(f"from-{number}") for number in range(trial.random.randint(2, 3))]
    shared = {**settings, "run.out": "../out"}
    processes = []
    for folder in folders:
        processes.append(trial.program.start(["train", configuration(folder, shared), "--resume"], folder))
        time.sleep(trial.random.choice((0, 0, trial.random.uniform(0, 0.03))))
    ended = [trial.program.finish(process).check((0, 2)) for process in processes]
    refused = [finished for finished in ended if finished.code == 2]
    # A run that starts after the first has finished says so.
    late = [finished for finished in ended if "nothing is left to train" in finished.stdout]
    for finished in refused:
        if "another run" not in finished.stderr:
            raise Wrong(f"refused for another reason: {finished.said()}")
    for finished in ended:
        if "trying the previous checkpoint" in finished.stderr:
            raise Wrong(f"a checkpoint was published and is not whole: {finished.said()}")
    trial.fault("second run", True, len(ended) - 1)
    trial.found("refused", len(refused))
    if len(refused) + len(late) < len(ended) - 1:
        raise Wrong(f"{len(ended) - len(refused) - len(late)} of {len(ended)} runs had one folder at one time")
    resume_to_end(trial, settings, trial.folder, reference)
