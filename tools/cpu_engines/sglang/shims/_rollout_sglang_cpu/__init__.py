"""Import hook of the CPU environment of SGLang.  Costs nothing where SGLang is not imported.

Site loads this at each start of the interpreter, so it imports only what is loaded anyway.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Hook:
    """First on ``sys.meta_path``: sees every import that is not cached."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._has_triton: bool | None = None

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top = name.partition(".")[0]
        if top == "triton" and "sglang" in sys.modules:
            return self._triton(name)
        if name == "torchvision" and name not in self._seen:
            self._seen.add(name)
            from _rollout_sglang_cpu import torchvision_ops

            torchvision_ops.declare()
        elif name == "sglang.srt.entrypoints.engine" and name not in self._seen:
            self._seen.add(name)
            from _rollout_sglang_cpu import processes

            processes.fork()
        elif name == "sgl_kernel" and name not in self._seen:
            self._seen.add(name)
            from _rollout_sglang_cpu import cuda_calls, kernel_ops

            cuda_calls.replace()
            kernel_ops.declare()
        return None

    def _triton(self, name: str) -> ModuleSpec | None:
        if self._has_triton is None:
            from importlib.machinery import PathFinder

            self._has_triton = PathFinder.find_spec("triton") is not None
        if self._has_triton:
            return None
        from _rollout_sglang_cpu import triton_stub

        found: ModuleSpec = triton_stub.spec(name)
        return found


sys.meta_path.insert(0, _Hook())
