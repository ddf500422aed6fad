"""What vLLM on a CPU is started with, besides the options of any vLLM."""

from __future__ import annotations

from typing import Any

from engines.vllm_cpu.installation import ON_PATH

HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Elements of an attention head that vLLM's CPU kernels take (0.32.0)."""
_KV_CACHE_BYTES = 64 << 20


def cpu_options() -> dict[str, Any]:
    """Its options, by name without ``--``.

    Without compiling, and with a KV cache of a known size, it starts without a warm-up.
    """
    return {
        "worker-cls": "engines.vllm_plugin.cpu_worker.CpuWorker",
        "enforce-eager": True,
        "dtype": "float32",
        "kv-cache-memory-bytes": _KV_CACHE_BYTES,
        "max-num-seqs": 16,
    }


def cpu_environment() -> dict[str, str]:
    """Its variables: where it finds the plugin of ``engines.vllm_plugin``."""
    return {"PYTHONPATH": str(ON_PATH), "VLLM_NO_USAGE_STATS": "1"}
