"""Jobs of processes in which one stalls, dies, or sees another folder, and strangers that connect to rank 0."""

import glob
import os
import re
import shutil
import signal
import socket
import subprocess
import time

from trials.program import Wrong
from trials.runs import TINY, check_whole, configuration

LAUNCHERS = ("mpirun.openmpi", "mpirun.mpich")
# How long ranks wait for each other, in seconds, and how long a job may take to end then.
LIMIT_S = 4
END_S = 60
LAYOUTS = ({"parallel.dp": 3}, {"parallel.pp": 2, "parallel.dp": 2}, {"parallel.tp": 2}, {"parallel.dp": 4, "sharding.zero": 3})


def mpi_is_here():
    return all(shutil.which(launcher) for launcher in LAUNCHERS)


def ranks_of(settings):
    return settings["parallel.tp"] * settings["parallel.pp"] * settings["parallel.dp"]


def draw_job(trial, steps):
    settings = {**TINY, "sharding.zero": 1, "batch.global": 12, **trial.random.choice(LAYOUTS)}
    settings.update({"run.steps": steps, "run.eval_every": 0, "run.communication_timeout": LIMIT_S})
    settings["run.checkpoint_every"] = trial.random.choice((0, 1, 5))
    return settings


def start_job(trial, settings):
    launcher = trial.random.choice(LAUNCHERS)
    launch = ["launch", "--mpirun", launcher, "--ranks", str(ranks_of(settings))]
    trial.note(f"{launcher}, {settings}")
    return trial.program.start([*launch, "train", configuration(trial.folder, settings)], trial.folder)


def processes(folder):
    """The processes of a job in a folder, by rank."""
    found, folder = {}, os.path.realpath(folder)
    for path in glob.glob("/proc/[0-9]*"):
        try:
            if os.readlink(f"{path}/cwd") != folder:
                continue
            with open(f"{path}/environ", "rb") as file:
                variables = dict(word.split(b"=", 1) for word in file.read().split(b"\0") if b"=" in word)
        except OSError:
            continue
        rank = variables.get(b"OMPI_COMM_WORLD_RANK", variables.get(b"PMI_RANK"))
        if rank is not None:
            found[int(rank)] = int(path.split("/")[2])
    return found


def has_thread(pid, name):
    for path in glob.glob(f"/proc/{pid}/task/*/comm"):
        try:
            with open(path) as file:
                if file.read().strip() == name:
                    return True
        except OSError:
            pass
    return False


def lines(folder):
    try:
        with open(os.path.join(folder, "out", "metrics.jsonl")) as file:
            return sum(1 for _ in file)
    except OSError:
        return 0


def wait_for(condition, process, seconds=60):
    end = time.monotonic() + seconds
    while not condition() and process.poll() is None:
        if time.monotonic() > end:
            raise Wrong("the job does not come so far")
        time.sleep(0.001)


def end_of(process, trial, since):
    """The job must end soon after its limit."""
    finished = trial.program.finish(process, patience=END_S + 20)
    seconds = time.monotonic() - since
    if seconds > END_S:
        raise Wrong(f"the job ended after {seconds:.0f} s")
    return finished


def stall(trial):
    """A process stops (SIGSTOP) at the start, in a step or at the end: the job ends with a message that names it."""
    when = trial.random.choice(("start", "step", "end"))
    steps = trial.random.randint(3, 20) if when == "end" else 100000
    settings = draw_job(trial, steps)
    victim = trial.random.randrange(ranks_of(settings))
    process = start_job(trial, settings)
    # A process has this thread as soon as MPI has started and the processes have met.
    wait_for(lambda: victim in (found := processes(trial.folder)) and has_thread(found[victim], "heartbeat"), process)
    if when == "start":
        time.sleep(trial.random.uniform(0, 0.2))
    elif when == "step":
        wait_for(lambda: lines(trial.folder) > 2, process)
        time.sleep(trial.random.uniform(0, 0.5))
    else:
        wait_for(lambda: lines(trial.folder) >= steps, process)
        time.sleep(trial.random.uniform(0, 0.05))
    pid = processes(trial.folder).get(victim)
    stopped = pid is not None and process.poll() is None
    since = time.monotonic()
    try:
        if stopped:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(1)
            if set(processes(trial.folder)) == {victim}:
                # The others have ended: it was stopped after its last word, and only the launcher waits for it.
                os.kill(pid, signal.SIGCONT)
                stopped = False
        finished = end_of(process, trial, since)
    finally:
        if stopped:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
    trial.fault(f"stall at {when}", stopped)
    check_whole(os.path.join(trial.folder, "out"))
    if finished.code == 0:
        if when != "end":
            raise Wrong("a job with a stopped process ended well")
        trial.found("ended before")
        return
    finished.check((1,))
    blamed = blamed_rank(finished.stderr)
    if blamed != victim:
        raise Wrong(f"rank {victim} was stopped, and rank {blamed} is blamed: {finished.stderr[-600:]}")
    trial.found("named")


def blamed_rank(text):
    """The rank at the end of the chain of waits, by the first error."""
    error = next((line for line in text.splitlines() if "error:" in line), "")
    found = re.search(r"rank (\d+) on \S+?, whose process has sent nothing", error)
    found = found or re.search(r"rank (\d+) on \S+ failed: its process has sent nothing", error)
    found = found or re.search(r"rank (\d+)(?: on \S+?)?, which waits for no other rank", error)
    return int(found[1]) if found else None


def dies(trial):
    """A process is killed: a line names its rank, and what was saved is whole."""
    settings = draw_job(trial, 100000)
    victim = trial.random.randrange(ranks_of(settings))
    process = start_job(trial, settings)
    wait_for(lambda: lines(trial.folder) > 2, process)
    time.sleep(trial.random.uniform(0, 0.3))
    since = time.monotonic()
    os.kill(processes(trial.folder)[victim], signal.SIGKILL)
    finished = end_of(process, trial, since).check((1,))
    trial.fault("kill -9 of a process")
    if f"rank {victim} on " not in finished.stderr and f"process rank {victim} " not in finished.stderr:
        raise Wrong(f"rank {victim} was killed, and is not named: {finished.stderr[-600:]}")
    check_whole(os.path.join(trial.folder, "out"))


def unshared(trial):
    """One process has another disk in place of run.out, or cannot write to it: noticed before the first step."""
    out = os.path.join(trial.folder, "out")
    os.makedirs(out)
    kind = trial.random.choice(("another disk", "read only"))
    mount = f"mount -t tmpfs none {out}"
    if kind == "read only":
        mount = f"mount --bind {out} {out} && mount -o remount,ro,bind {out}"
    settings = draw_job(trial, 10) | {"parallel.tp": 1, "parallel.pp": 1, "parallel.dp": 2, "sharding.zero": 1}
    name = configuration(trial.folder, settings)
    train = f"exec {trial.program.binary} train {name}"
    command = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n", "1", "bash", "-c", train]
    command += [":", "-n", "1", "unshare", "-m", "bash", "-c", f"{mount} && {train}"]
    ran = subprocess.run(command, cwd=trial.folder, env=trial.program.environment, capture_output=True, text=True, timeout=END_S)
    trial.fault(kind)
    expected = "is not the folder that rank 0 has" if kind == "another disk" else "cannot be written"
    if ran.returncode != 2 or "rank 1 on " not in ran.stderr or expected not in ran.stderr:
        raise Wrong(f"{kind}: exit code {ran.returncode}: {ran.stderr[-600:]}")
    if lines(trial.folder):
        raise Wrong(f"{kind}: steps were trained")


def noise(trial):
    """Strangers connect to rank 0 while its processes meet: they meet all the same."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {**TINY, "run.transport": "nccl", "run.device": "cuda", "run.communication_timeout": 60}
    name = configuration(trial.folder, settings)

    def start(rank):
        folder = trial.subfolder(f"rank-{rank}")
        shutil.copy(os.path.join(trial.folder, name), folder)
        variables = {"KINTSUGI_RANK": str(rank), "KINTSUGI_RANKS": "2", "KINTSUGI_SECRET": "a secret"}
        variables["KINTSUGI_RENDEZVOUS"] = f"127.0.0.1:{port}"
        under = ["env", *(f"{key}={value}" for key, value in variables.items())]
        return trial.program.start(["train", name], folder, under=under)

    first, strangers, begun = start(0), [], time.monotonic()
    while len(strangers) < trial.random.choice((10, 100, 300)) and time.monotonic() < begun + 20:
        try:
            stranger = socket.create_connection(("127.0.0.1", port), timeout=1)
            stranger.sendall(trial.random.randbytes(trial.random.choice((0, 1, 32, 200, 5000))))
            strangers.append(stranger)
        except OSError:
            time.sleep(0.01)
    trial.fault("stranger", count=len(strangers))
    second = start(1)
    since = time.monotonic()
    ended = [end_of(process, trial, since) for process in (second, first)]
    for stranger in strangers:
        stranger.close()
    # Rank 0 prints what both find.
    ended[1].check((0, 1, 2))
    for finished in ended:
        words = ("panicked", "did not connect", "did not reach")
        if finished.code not in (0, 1, 2) or any(word in finished.stderr for word in words):
            raise Wrong(f"the processes did not meet: {finished.stderr[-400:]}")
