"""Names of version 0.1 that README, docs and examples used, and their new names.

Always true: an old path gives the module of the new one, not a second copy, and an old method calls
the new one.  Both warn, and are for one release.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

NEW_PATH = {
    "rollout.actors": "rollout.runtime.ray",
    "rollout.actors.launch": "rollout.runtime.ray.launch",
    "rollout.driver.batch": "rollout.driver.data.batch",
    "rollout.driver.dump": "rollout.driver.data.parquet_dump",
    "rollout.driver.hooks": "rollout.driver.stream.hooks",
    "rollout.driver.options": "rollout.driver.stream.options",
    "rollout.driver.session": "rollout.driver.client.session",
    "rollout.driver.sources": "rollout.driver.data.prompt_data",
    "rollout.timeline": "rollout.observability.timeline",
    "rollout.timeline.span": "rollout.observability.timeline.span",
    "rollout.weights.manifest": "rollout.weights.format.manifest",
}


class _Redirect(Loader):
    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        new = NEW_PATH[old]
        warnings.warn(f"{old} is now {new}", DeprecationWarning, stacklevel=2)
        # The import system returns what stands here when the loader has run.
        sys.modules[old] = importlib.import_module(new)


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, _Redirect()) if fullname in NEW_PATH else None


def redirect_old_paths() -> None:
    """Make the old paths importable."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        # First, or the parent's folder would be searched and the module loaded a second time.
        sys.meta_path.insert(0, _Finder())


def warn_of_name(old: str, new: str) -> None:
    """Warn the caller of a method that its name is ``new``."""
    warnings.warn(f"{old} is now {new}", DeprecationWarning, stacklevel=3)


def renamed(old: str, method: Callable[P, T]) -> Callable[P, T]:
    """``method`` under its old name, which warns."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        warn_of_name(old, method.__name__)
        return method(*args, **kwargs)

    names = ", ".join(list(inspect.signature(method).parameters)[1:])
    taken = f"Args:\n    {names}: see there.\n\n" if names else ""
    call.__doc__ = f"The old name of ``{method.__name__}``.\n\n{taken}Raises:\n    As it does.\n"
    return call
