"""Checks of arguments that users pass: each error names the argument, its value and what fits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from os import PathLike
from typing import Any

from engines.protocol.plain_text import value_text
from rollout.core.errors import ConfigError


def check_number(name: str, value: Any, *, least: float, whole: bool = False) -> None:
    """Raise ConfigError unless ``value`` is a finite number of at least ``least``."""
    is_number = hasattr(value, "__index__") if whole else hasattr(value, "__float__")
    bound = "finite" if least == -math.inf else f"at least {least:g}"
    if not is_number or isinstance(value, bool):
        raise wrong(name, value, f"{'a whole number' if whole else 'a number'}, {bound}")
    if not least <= float(value) < math.inf:
        raise wrong(name, value, bound)


def check_positive(name: str, value: Any) -> None:
    """Raise ConfigError unless ``value`` is a finite number over 0."""
    check_number(name, value, least=0)
    if not value > 0:
        raise wrong(name, value, "more than 0")


def check_kind(name: str, value: Any, kind: type, words: str) -> None:
    """Raise ConfigError unless ``value`` is of ``kind``; ``words`` say what that is."""
    if not isinstance(value, kind):
        raise wrong(name, value, f"{words}, not a {type(value).__name__}")


def check_callable(name: str, value: Any) -> None:
    """Raise ConfigError unless ``value`` is None or can be called."""
    if value is not None and not callable(value):
        raise wrong(name, value, f"a function or None, not a {type(value).__name__}")


def check_path(name: str, value: Any) -> None:
    """Raise ConfigError unless ``value`` is a path."""
    if not isinstance(value, str | PathLike) or not str(value):
        raise wrong(name, value, "a path, as a text or Path")


def check_ids(name: str, ids: Any) -> None:
    """Raise ConfigError unless these are token ids."""
    is_list = isinstance(ids, Sequence) and not isinstance(ids, str | bytes)
    if not is_list or not all(type(one) is int for one in ids):
        raise wrong(name, ids, "token ids, each an int")


def wrong(name: str, value: Any, accepted: str) -> ConfigError:
    """The error for one argument."""
    return ConfigError(
        f"{name} = {value_text(value)}: must be {accepted}", setting=name, value=value
    )
