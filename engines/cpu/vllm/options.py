"""What vLLM on a CPU is started with, besides the options of any vLLM."""

from __future__ import annotations

from typing import Any

from engines.cpu.vllm.installation import ON_PATH

_KV_CACHE_BYTES = 64 << 20


def cpu_options() -> dict[str, Any]:
    """Its options, by name without ``--``.

    Without compiling, and with a KV cache of a known size, it starts without a warm-up.

    The worker is in the process of the engine core.  In processes of their own, as vLLM has them on
    a CPU, both poll shared memory with ``sched_yield`` while requests run, and other processes on
    the same cores wait for up to a second: a client had its first token after thousands had been
    made, and its abort came too late.
    """
    return {
        "worker-cls": "engines.cpu.vllm.worker.CpuWorker",
        "distributed-executor-backend": "uni",
        "enforce-eager": True,
        "dtype": "float32",
        "kv-cache-memory-bytes": _KV_CACHE_BYTES,
        "max-num-seqs": 16,
    }


def cpu_environment(num_threads: int) -> dict[str, str]:
    """Its variables.

    Args:
        num_threads: of a forward pass.  More than there are free cores make it many times slower.
    """
    return {
        # Where it finds the plugin of ``engines.vllm_plugin``.
        "PYTHONPATH": str(ON_PATH),
        "VLLM_NO_USAGE_STATS": "1",
        # Without it vLLM does not take the executor above on a CPU.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": str(num_threads),
    }
