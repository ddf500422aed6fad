"""The public API: what ``rollout`` and ``rollout.driver`` export and the reference page lists."""

from __future__ import annotations

import enum
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import rollout
import rollout.driver
from tools.public_names import public_names

PAGE = Path(__file__).parents[2] / "docs/reference/python.md"
OURS = ("rollout", "engines")
SPECIAL = ("__call__", "__getitem__")


def public_objects() -> dict[str, Any]:
    """Functions and classes by name, each once."""
    found: dict[str, Any] = {}
    for module in (rollout, rollout.driver):
        for name in module.__all__:
            value = getattr(module, name)
            if _is_class(value) or _is_function(value):  # no alias of a type
                found.setdefault(name, value)
    public = frozenset().union(*public_names().values())
    text = PAGE.read_text()
    # Those that the page documents, and those that it names in a sentence.
    for path in re.findall(r"^::: (\S+)$|`(rollout\.driver\.(?:rewards|trackers))`", text, re.M):
        listed = _at(path[0] or path[1])
        if not isinstance(listed, ModuleType):
            found.setdefault(listed.__name__, listed)
            continue
        for name, value in vars(listed).items():
            is_own = getattr(value, "__module__", "") == listed.__name__
            if is_own and name in public and (_is_class(value) or _is_function(value)):
                short = listed.__name__.rpartition(".")[2]
                found.setdefault(f"{short}.{name}" if name in ("math", "every") else name, value)
    return found


def public_calls() -> dict[str, Any]:
    """What can be called or read: functions, classes that are no errors, methods, properties."""
    calls: dict[str, Any] = {}
    for name, value in public_objects().items():
        if not _is_class(value):
            calls[name] = value
            continue
        if not issubclass(value, BaseException | enum.Enum):
            calls[name] = value
        calls |= {f"{name}.{method}": found for method, found in _methods(value)}
    return calls


def parameters(call: Any) -> list[str]:
    """The names of what a function or method takes; nothing for a property."""
    if isinstance(call, property):
        return []
    function = call.__func__ if isinstance(call, classmethod) else call
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]


def _methods(kind: type) -> Iterator[tuple[str, Any]]:
    for name in dir(kind):
        owner = next((one for one in kind.__mro__ if name in vars(one)), object)
        is_ours = owner.__module__.partition(".")[0] in OURS
        value = inspect.getattr_static(kind, name)
        is_method = isinstance(value, property | classmethod | staticmethod) or _is_function(value)
        if is_ours and is_method and (not name.startswith("_") or name in SPECIAL):
            yield name, value


def _is_class(value: Any) -> bool:
    return inspect.isclass(value)


def _is_function(value: Any) -> bool:
    return inspect.isfunction(value)


def _at(path: str) -> Any:
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, name = path.rpartition(".")
        return getattr(_at(module), name)
