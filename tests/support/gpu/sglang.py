"""Settings of real SGLang on the GPU of a test: with or without its kernels, or on the CPU."""

from __future__ import annotations

import os
import sys
from typing import Any

from tests.support.cpu_engines import cpu_config
from tests.support.gpu.machine import Gpu, need

WITHOUT_KERNELS = "SGLANG_WITHOUT_KERNELS"
"""Set where the folder ``without_kernels`` stands for SGLang's kernel library."""
EMULATION = "GPU_EMULATION"
"""Where SGLang shall take its way on a GPU without any: ``emulated_cuda`` and SGLang's folder."""

# What they replace runs as torch's own operators.
_WITHOUT_KERNELS_ENV = {
    WITHOUT_KERNELS: "1",
    "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
    "SGLANG_FORCE_FUSED_OP_BACKEND": "torch",
    "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
    "TORCH_COMPILE_DISABLE": "1",
    # Its Rust form is a binary for another torch: with 2.11 the first request ended the scheduler.
    "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
}
_WITHOUT_KERNELS_OPTIONS = {
    "attention-backend": "triton",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
}
_GRAPHS = {"cuda-graph-max-bs-decode": 4}
_NO_GRAPHS = {"cuda-graph-backend-decode": "disabled"}
_NUM_TOKENS = 65_536
# Triton's interpreter takes a second and more for a token.
_EMULATED_ENV = {"TRITON_INTERPRET": "1", "EMULATE_CUDA": "1"}
_EMULATED_OPTIONS = {"max-total-tokens": 2048, "cuda-graph-backend-prefill": "disabled"}


def is_emulated(gpu: Gpu) -> bool:
    return not gpu.is_real and bool(os.environ.get(EMULATION))


def sglang_engine(gpu: Gpu, *, graphs: bool = False, num_tokens: int = 0) -> dict[str, Any]:
    """Settings of an SGLang engine; the test is skipped where SGLang is not installed.

    Args:
        graphs: with CUDA graphs for decoding.
        num_tokens: of its KV cache; 0 for 65 536.
    """
    need("sglang", gpu)
    if not gpu.is_real and not is_emulated(gpu):
        return cpu_config("sglang", gpus=1, cpus=1)
    options = {
        "disable-overlap-schedule": True,
        "skip-server-warmup": True,
        "max-running-requests": 8,
        "max-total-tokens": num_tokens or _NUM_TOKENS,
        "mem-fraction-static": 0.4,
        "dtype": "bfloat16",
        **(_GRAPHS if graphs else _NO_GRAPHS),
    }
    env: dict[str, str] = {}
    if os.environ.get(WITHOUT_KERNELS) == "1":
        options |= _WITHOUT_KERNELS_OPTIONS
        env |= _WITHOUT_KERNELS_ENV
    if is_emulated(gpu):
        options |= _EMULATED_OPTIONS
        # Nothing else: beside the doubles of a logical GPU is a kernel library for CPUs.
        env |= _EMULATED_ENV | {"PYTHONPATH": os.environ[EMULATION]}
    return {
        "kind": "sglang",
        "gpus": 1,
        "cpus": 8 if gpu.is_real else 1,
        "python": sys.executable if is_emulated(gpu) else "",
        "start_timeout_s": 150,
        "options": options,
        "env": env,
    }
