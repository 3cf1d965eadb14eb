"""Configurations: a file, or tables as dictionaries, which become the TOML that the command reads."""

from __future__ import annotations

import json
import os
import re
from typing import Any, Mapping, Optional, Tuple, Union

Config = Union[str, "os.PathLike[str]", Mapping[str, Any], None]
"""A configuration: the path of a TOML file, a dictionary of tables or of dotted keys, or None for the built-in demo."""

_KEY = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


def source(config: Config) -> Tuple[Optional[str], Optional[str]]:
    """The path or the text of a configuration; one of them is None, or both."""
    if config is None:
        return None, None
    if isinstance(config, Mapping):
        return None, to_toml(config)
    return os.fspath(config), None


def settings(sets: Optional[Mapping[str, Any]]) -> list[str]:
    """Values that override those of a configuration, as `--set` takes them."""
    return [f"{_key(key)}={_value(key, value)}" for key, value in (sets or {}).items()]


def to_toml(config: Mapping[str, Any]) -> str:
    """The text of a configuration."""
    return "".join(f"{_key(key)} = {_value(key, value)}\n" for key, value in config.items())


def _key(key: Any) -> str:
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise ValueError(f"{key!r} is not a key of a configuration; use a table such as \"model\", or a key such as \"model.layers\"")
    return key


def _value(key: str, value: Any) -> str:
    if hasattr(value, "tolist"):  # a number or an array of NumPy
        value = value.tolist()
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(key, inner) for inner in value) + "]"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(name)} = {_value(f'{key}.{name}', inner)}" for name, inner in value.items()) + " }"
    raise ValueError(f"{key} = {value!r} is not a value of a configuration; use a number, a string, a bool, a list or a dictionary")
