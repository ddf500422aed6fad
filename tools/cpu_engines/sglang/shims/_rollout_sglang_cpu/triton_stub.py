"""A ``triton`` whose kernels can be defined and not run.

Every name exists.  One with a capital is an empty class; any other is a module that can be called:
as a decorator it hands the function back, so that ``@triton.jit`` and ``@triton.autotune(...)``
leave plain functions behind.
"""

from __future__ import annotations

import importlib
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Stub(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        below: Any = (
            type(name, (_Anything,), {"__module__": self.__name__})
            if name[0].isupper()
            else importlib.import_module(f"{self.__name__}.{name}")
        )
        setattr(self, name, below)
        return below

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_bare = len(args) == 1 and not kwargs and callable(args[0])
        return args[0] if is_bare else lambda function: function


class _Anything:
    """Takes any arguments and keeps those that were named; may be derived from."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.__dict__.update(kwargs)


class _Constexpr:
    def __init__(self, value: Any = None) -> None:
        self.value = value


class OutOfResources(Exception):
    """Torch catches it around kernels; so it has to be an exception."""


def _cdiv(dividend: int, divisor: int) -> int:
    return (dividend + divisor - 1) // divisor


def _next_power_of_2(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


_CONTENTS: dict[str, dict[str, Any]] = {
    # No version that torch would take for one whose compiler it can use.
    "triton": {"__version__": "0.0.0", "cdiv": _cdiv, "next_power_of_2": _next_power_of_2},
    "triton.backends": {"backends": {}},
    "triton.language": {"constexpr": _Constexpr},
    "triton.runtime.errors": {"OutOfResources": OutOfResources},
    "triton.runtime.autotuner": {"OutOfResources": OutOfResources},
}


class _Maker(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(_CONTENTS.get(module.__name__, {}))


def spec(name: str) -> ModuleSpec:
    """How to import ``triton`` or anything below it."""
    return ModuleSpec(name, _Maker(), is_package=True)
