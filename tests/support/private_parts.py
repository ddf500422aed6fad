"""Private parts of libraries: which ones we use, and whether the installed release has them."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version


@dataclass(frozen=True)
class Part:
    """What we use of one class, or module.

    Attributes:
        used_in: our file.
        package: by which pip knows it, if not by the first name of ``path``.
        overrides: methods that ours replace -> their parameters, which must be just these.
        calls: methods that we call -> the arguments we give them.
        attributes: those that we read or set.
    """

    path: str
    used_in: str
    overrides: Mapping[str, str] = field(default_factory=dict)
    calls: Mapping[str, str] = field(default_factory=dict)
    attributes: str = ""
    package: str = ""

    @property
    def release(self) -> str:
        """Name and version of the package."""
        package = self.package or self.path.partition(".")[0]
        return f"{package} {version(package)}"


def moved(parts: Iterable[Part]) -> list[str]:
    """A line for everything that is not where we use it; empty if all is there."""
    return [
        f"{part.release}: {part.path}{problem}; used in {part.used_in}"
        for part in parts
        for problem in _problems(part)
    ]


def _problems(part: Part) -> Iterator[str]:
    module, _, name = part.path.rpartition(".")
    try:
        kind = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        yield " is gone"
        return
    for method, wanted in part.overrides.items():
        found = _parameters(kind, method)
        if found is None:
            yield f".{method} is gone"
        elif list(found)[1:] != wanted.split():
            yield f".{method} takes {', '.join(list(found)[1:])}, not {wanted.replace(' ', ', ')}"
    for method, given in part.calls.items():
        found = _parameters(kind, method)
        if found is None:
            yield f".{method} is gone"
            continue
        try:
            inspect.Signature(list(found.values())[1:]).bind(**dict.fromkeys(given.split()))
        except TypeError as error:
            yield f".{method} cannot be called with {given or 'nothing'}: {error}"
    known = set(_attributes(kind))
    for attribute in part.attributes.split():
        if attribute not in known:
            yield f".{attribute} is gone"


def _parameters(kind: type, method: str) -> Mapping[str, inspect.Parameter] | None:
    function = getattr(kind, method, None)
    return inspect.signature(function).parameters if callable(function) else None


def _attributes(kind: type) -> Iterator[str]:
    """Of the class, and of its objects as far as its source shows them: ``self.name = ...``."""
    yield from dir(kind)
    for base in getattr(kind, "__mro__", ()):
        if base.__module__.partition(".")[0] != kind.__module__.partition(".")[0]:
            continue
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base)))):
            match node:
                case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                    yield name
                case ast.AnnAssign(target=ast.Name(id=name)):
                    yield name
