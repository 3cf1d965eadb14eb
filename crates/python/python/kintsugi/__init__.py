"""Kintsugi from Python: plans, searches, runs, checkpoints and token files.

Plans and files are read in this process. Training is the command `kintsugi`, which this package carries and starts as a child, so
that MPI, GPUs and signals stay out of the interpreter.
"""

from ._kintsugi import __version__
from .config import Config
from .prediction import SearchResult, plan, search
from .run import Checkpoint, Run, load
from .tokens import TokenFile, tokens
from .training import TrainingError, command, train

__all__ = [
    "Checkpoint",
    "Config",
    "Run",
    "SearchResult",
    "TokenFile",
    "TrainingError",
    "__version__",
    "command",
    "load",
    "plan",
    "search",
    "tokens",
    "train",
]
