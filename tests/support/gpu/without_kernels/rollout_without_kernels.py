"""Import hooks with which SGLang 0.5.23 runs on a GPU without its kernels, FlashInfer and nvcc.

SGLang's files are not changed.  Its fused operators have a torch form, which
``SGLANG_FORCE_FUSED_OP_BACKEND=torch`` selects.  The rest:

- ``sgl_kernel``: the package beside this file, whose names cannot be called.
- kernels that are compiled when first used: ``load_jit`` fails, as without a compiler, and SGLang
  takes its other way (``SGLANG_JIT=1`` leaves them on).
- the dual GEMM of Blackwell, whose module imports CuTe: it says that it cannot be used.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from enum import IntEnum
from types import ModuleType
from typing import Any

_DUAL_GEMM = "sglang.kernels.ops.gemm.cutedsl_dual_gemm"
_JIT = "sglang.kernels.jit.utils.compile"


class _QuantMode(IntEnum):
    UNQUANT = 1


class _DualGemm(importlib.abc.Loader):
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module: Any = ModuleType(spec.name)
        module.MAX_DUAL_GEMM_DECODE_TOKENS = 0
        module.DualGemmQuantMode = _QuantMode
        module.can_use_dual_gemm = lambda *_args, **_named: False
        return module  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: the module is complete."""


def _no_jit(*_args: Any, **_named: Any) -> Any:
    raise RuntimeError("kernels are not compiled here (SGLANG_JIT=1 turns it on)")


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name == _DUAL_GEMM:
            return importlib.machinery.ModuleSpec(name, _DualGemm())
        if name != _JIT or os.environ.get("SGLANG_JIT") == "1":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            module.load_jit = _no_jit

        loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder())
