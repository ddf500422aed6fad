"""Public functions and methods take and return only what a user can name."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.public_names import public_calls
from tools.public_names import public_names

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.embedded
CALLS = {name: call for name, call in public_calls().items() if not inspect.isclass(call)}
PUBLIC = frozenset().union(*public_names().values())
# Members that other modules of ours call, and no user.
OURS = (
    *("EngineConfig.access", "EngineConfig.of_kind"),
    *("Push.send", "Driver.stream_of", "RolloutDriver.stream_of"),
)


@cache
def homes_in(module: str) -> dict[str, str]:
    """Each name that a module imports of ours or defines itself, and where it is from."""
    found = {}
    for node in ast.walk(ast.parse(Path(str(sys.modules[module].__file__)).read_text())):
        match node:
            case ast.ImportFrom(module=str(source), names=names):
                found |= {alias.asname or alias.name: source for alias in names}
            case ast.ClassDef(name=name):
                found[name] = module
    return {name: home for name, home in found.items() if home.startswith(("rollout", "engines"))}


def is_class(home: str, name: str) -> bool:
    """Whether it is a class: an alias is only another way to write types that have names."""
    found = getattr(importlib.import_module(home), name)
    return inspect.isclass(found) and found.__module__.startswith(("rollout", "engines"))


def annotations(call: Any) -> Iterator[str]:
    function = call.fget if isinstance(call, property) else getattr(call, "__func__", call)
    signature = inspect.signature(inspect.unwrap(function))
    for one in (*signature.parameters.values(), signature):
        text = one.return_annotation if one is signature else one.annotation
        yield text if isinstance(text, str) else ""


def private_types(call: Any) -> set[str]:
    """The names of our types in its annotations that no public module has."""
    function = call.fget if isinstance(call, property) else getattr(call, "__func__", call)
    homes = homes_in(inspect.unwrap(function).__module__)
    named = {word for text in annotations(call) for word in re.findall(r"\b[A-Z]\w+", text)}
    return {name for name in (named & homes.keys()) - PUBLIC if is_class(homes[name], name)}


@pytest.mark.parametrize("name", [name for name in CALLS if name not in OURS])
def test_it_takes_and_returns_only_public_types(name: str) -> None:
    assert private_types(CALLS[name]) == set()


def test_a_private_type_would_be_found() -> None:
    from rollout.weights.push.push import Push

    assert private_types(Push.send) == {"WeightPush"}
