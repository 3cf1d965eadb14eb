"""The folder of a run: metrics, summary, configuration, and the tensors of its checkpoints."""

from __future__ import annotations

import json
import os
import warnings
from functools import cached_property
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Union

import ml_dtypes
import numpy as np

from . import _kintsugi

_TYPES = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}


class Tensors(Mapping[str, np.ndarray]):
    """The tensors of one kind by the name of their parameter. Each is read when it is asked for.

    A tensor that lies whole in one file is a read-only view of that file, without a copy. One that several ranks have saved is put
    together in memory.
    """

    def __init__(self, places: Dict[str, Any]):
        self._places = places

    def __getitem__(self, name: str) -> np.ndarray:
        shape, slices = self._places[name]
        rows, columns = shape
        whole = [rows] if columns == 1 else [rows, columns]
        if len(slices) == 1:
            return _mapped(slices[0]).reshape(whole)
        result = np.empty((rows, columns), dtype=_TYPES[slices[0][2]])
        strips: Dict[tuple, List[Any]] = {}
        for one in slices:
            strips.setdefault(tuple(one[3]), []).append(one)
        # Tensor parallelism cuts strips of columns, ZeRO cuts a strip anywhere.
        for (first, last), parts in strips.items():
            strip = np.empty(rows * (last - first), dtype=result.dtype)
            for one in parts:
                start, count = one[4], one[5]
                strip[start : start + count] = _mapped(one)
            result[:, first:last] = strip.reshape(rows, last - first)
        return result.reshape(whole)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _mapped(one: Any) -> np.ndarray:
    path, offset, kind, _, _, count = one
    return np.memmap(path, dtype=_TYPES[kind], mode="r", offset=offset, shape=(count,)).view(np.ndarray)


class Checkpoint:
    """A checkpoint whose files were all compared with their checksums."""

    def __init__(self, path: Union[str, "os.PathLike[str]"]):
        folder, self.step, self.config, tensors, broken = _kintsugi.checkpoint(os.fspath(path))
        for reason in broken:
            warnings.warn(f"a newer checkpoint is not whole: {reason}", stacklevel=2)
        self.path = Path(folder)
        kinds: Dict[str, Dict[str, Any]] = {}
        for parameter, stored, shape, slices in tensors:
            kinds.setdefault(stored, {})[parameter] = (shape, slices)
        self.tensors: Dict[str, Tensors] = {kind: Tensors(places) for kind, places in kinds.items()}
        """The tensors by kind: "weights", and "first_moment" and "second_moment" of AdamW."""

    @property
    def weights(self) -> Tensors:
        """The weights in their highest precision."""
        return self.tensors["weights"]

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, step {self.step}, {len(self.weights)} parameters)"


class Run:
    """The folder of a run. It may be going on: what is asked for is read then."""

    def __init__(self, path: Union[str, "os.PathLike[str]"]):
        self.path = Path(path)
        self.metrics  # noqa: B018 - a folder that is not a run is an error here

    @property
    def metrics(self) -> Dict[str, np.ndarray]:
        """The figures of the steps by their name in metrics.jsonl; what a line does not have is NaN.

        validation_loss, checkpoint_s and skipped steps have steps of their own: validation_step, checkpoint_step, skipped_step.
        """
        columns, damaged = _kintsugi.metrics(os.fspath(self.path))
        if damaged:
            warnings.warn(f"{damaged} lines of {self.path / _kintsugi.METRICS} cannot be read", stacklevel=2)
        return {name: np.frombuffer(column, dtype=np.float64) for name, column in columns}

    @property
    def summary(self) -> Optional[Dict[str, Any]]:
        """summary.json, which a run writes when it ends: None before."""
        path = self.path / _kintsugi.SUMMARY
        return json.loads(path.read_text()) if path.exists() else None

    @cached_property
    def config(self) -> str:
        """The whole configuration as TOML, defaults included."""
        return (self.path / _kintsugi.CONFIG).read_text()

    def checkpoint(self, which: Union[None, int, str] = None) -> Checkpoint:
        """The newest whole checkpoint, that of a step, or "best"."""
        if isinstance(which, str):
            return Checkpoint(self.path / which)
        folder = self.path / "checkpoints"
        return Checkpoint(self.path if which is None else folder / f"step-{which:08}")

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"


def load(path: Union[str, "os.PathLike[str]"]) -> Run:
    """Opens the folder of a run. A folder that is none is a ValueError."""
    return Run(path)
