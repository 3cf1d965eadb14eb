"""Training: the command as a child of this process, whose metrics are streamed."""

from __future__ import annotations

import collections
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from pathlib import Path
from shutil import which
from typing import IO, Any, Callable, Deque, Dict, Mapping, Optional, Sequence, Union

from . import _kintsugi
from .config import Config, settings, source
from .run import Run

_PAUSE = 0.1


class TrainingError(RuntimeError):
    """A run that failed. Its message is the command's."""


def command() -> str:
    """The path of the command: KINTSUGI_COMMAND, the one that this package has installed, or the first on PATH."""
    named = os.environ.get("KINTSUGI_COMMAND")
    if named:
        return named
    schemes = [sysconfig.get_path("scripts"), sysconfig.get_path("scripts", f"{os.name}_user"), str(Path(sys.executable).parent)]
    for folder in schemes:
        path = os.path.join(folder, "kintsugi")
        if os.access(path, os.X_OK):
            return path
    found = which("kintsugi")
    if found is None:
        raise FileNotFoundError("the command kintsugi was not found; install the wheel, or set KINTSUGI_COMMAND to its path")
    return found


def train(
    config: Config = None,
    on_step: Optional[Callable[[Dict[str, Any]], Any]] = None,
    *,
    sets: Optional[Mapping[str, Any]] = None,
    resume: Union[bool, str, "os.PathLike[str]"] = False,
    launch: Sequence[str] = (),
    show: bool = False,
) -> Run:
    """Trains, and gives the run's folder.

    `on_step` is called with every new line of metrics.jsonl as a dictionary. `resume` continues from the newest checkpoint, or from
    the one that it names. `launch` has arguments of `kintsugi launch`, as in ["--ranks", "8"], for ranks that are processes. With
    `show` the output of the command is printed.

    Ctrl-C (in a notebook: interrupt) or an exception of `on_step` stops the run: it saves a checkpoint, and then KeyboardInterrupt or
    the exception is raised; `resume=True` continues it. A second Ctrl-C ends the run at once. A mistake in the configuration is a
    ValueError, and a run that fails a TrainingError.
    """
    path, text = source(config)
    overrides = settings(sets)
    out = _kintsugi.output_folder(path, text, overrides)
    with tempfile.TemporaryDirectory(prefix="kintsugi-") as temporary:
        if text is not None:
            path = os.path.join(temporary, "config.toml")
            Path(path).write_text(text, encoding="utf-8")
        arguments = [command(), *(["launch", *launch] if launch else []), "train", *([path] if path else [])]
        arguments += [part for setting in overrides for part in ("--set", setting)]
        if resume is not False:
            arguments.append("--resume" if resume is True else f"--resume={os.fspath(resume)}")
        _run(arguments, str(out), on_step, show)
    return Run(out)


def _run(arguments: Sequence[str], out: str, on_step: Optional[Callable[[Dict[str, Any]], Any]], show: bool) -> None:
    begin = time.time()
    # A group of its own: a terminal and Jupyter send Ctrl-C to the whole group, and a second signal would end the run at once.
    child = subprocess.Popen(
        arguments, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        start_new_session=True,
    )
    last: Deque[str] = collections.deque(maxlen=50)
    assert child.stdout is not None
    reader = threading.Thread(target=_read, args=(child.stdout, last, show), daemon=True)
    reader.start()
    follower = _kintsugi.Follower(out)
    try:
        ended = False
        while not ended:
            # Asked before the lines are read, so that the lines of an ended run are all.
            ended = child.poll() is not None
            for line in follower.lines():
                step = json.loads(line)
                # The lines of earlier runs in the folder stay when a run resumes.
                if on_step is not None and step.get("time", 0.0) >= begin:
                    on_step(step)
            if not ended:
                time.sleep(_PAUSE)
    except BaseException:
        _stop(child)
        raise
    finally:
        reader.join(timeout=10)
    if child.returncode == 0:
        return
    errors = [line[len("error: ") :] for line in last if line.startswith("error: ")]
    message = errors[-1] if errors else "\n".join(last) or f"kintsugi ended with {child.returncode}"
    raise ValueError(message) if child.returncode == 2 else TrainingError(message)


def _read(stream: IO[str], last: Deque[str], show: bool) -> None:
    for line in stream:
        last.append(line.rstrip("\n"))
        if show:
            print(line, end="", flush=True)


def _stop(child: "subprocess.Popen[str]") -> None:
    """Asks a run to save and end, and waits for it. Another Ctrl-C ends it at once."""
    for name in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
        if child.poll() is None:
            child.send_signal(name)
            try:
                child.wait()
            except KeyboardInterrupt:
                continue
        return
