"""Predictions: what `kintsugi plan --json` prints."""

from __future__ import annotations

import json
from typing import Any, Iterable, Mapping, Optional

from . import _kintsugi
from .config import Config, settings, source


def plan(config: Config = None, *, sets: Optional[Mapping[str, Any]] = None) -> dict[str, Any]:
    """Predicts a training step: memory and traffic exactly, time and energy as estimates. Nothing is allocated.

    `sets` overrides values of the configuration, as in {"parallel.tp": 4}. The result has the names of `kintsugi plan --json`; what
    is not predicted is None. A mistake in the configuration is a ValueError.
    """
    return json.loads(_kintsugi.plan(*source(config), settings(sets)))


class SearchResult(list):
    """The best strategies, the first of which is the pick: a list of dictionaries, so that `pandas.DataFrame(result)` is a table.

    `ranks` is their number, `counts` says how many strategies were tried, `pick` why the first is preferred to the fastest (None if it
    is the fastest), `gains` what its mechanisms gain, and `given` the strategy of the configuration, if it has as many ranks.
    """

    def __init__(self, answer: dict[str, Any]):
        super().__init__(answer["best"])
        self.ranks: int = answer["ranks"]
        self.counts: dict[str, Any] = answer["counts"]
        self.pick: Optional[str] = answer["pick"]
        self.gains: list[dict[str, Any]] = answer["gains"]
        self.given: Optional[dict[str, Any]] = answer["given"]


def search(
    config: Config = None,
    *,
    sets: Optional[Mapping[str, Any]] = None,
    only: Optional[Mapping[str, Iterable[Any]]] = None,
    by: str = "time",
    top: int = 10,
) -> SearchResult:
    """Ranks every strategy that fits: what `kintsugi plan --search` does.

    `only` restricts keys to values, as in {"parallel.tp": [4, 8]}. `by` is "time", "energy" or "pareto".
    """
    restrictions = [f"{key}={','.join(map(str, values))}" for key, values in (only or {}).items()]
    return SearchResult(json.loads(_kintsugi.search(*source(config), settings(sets), (restrictions, by, top))))
