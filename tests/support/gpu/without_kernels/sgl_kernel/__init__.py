"""In the place of SGLang's kernel library (373 MB) on a GPU machine that cannot be given it.

SGLang imports names from it and from its modules.  With ``SGLANG_FORCE_FUSED_OP_BACKEND=torch`` its
operators run as torch's own, attention as Triton's, sampling as PyTorch's: nothing of this is
called.  Every name is a function that says so if it is.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

__version__ = "0.4.10"


class _Missing:
    """A function that cannot be called; some names are looked up for their attributes."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __call__(self, *_args: Any, **_named: Any) -> Any:
        raise NotImplementedError(f"{self.__name__}: the kernel library is not on this machine")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self.__name__}.{name}")


class _Module(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "is_arch_support_pdl":
            return lambda: False
        return _Missing(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.startswith("sgl_kernel."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: every name of it is made when it is looked up."""


sys.meta_path.insert(0, _Finder())


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Missing(f"sgl_kernel.{name}")
