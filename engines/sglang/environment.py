"""The environment of an SGLang server, and what a killed one leaves in shared memory.

The memory saver's library is preloaded by SGLang itself, into its scheduler processes only
(``torch_memory_saver.configure_subprocess`` around each start).  Preloading it here too would
load it into compilers and helpers that have no CUDA, and SGLang refuses to find it twice; our
part is an environment in which it works: also one in which the loader finds the CUDA runtime.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engines.process.allocator import RETAINED_BACKUP, refuse_expandable_segments
from engines.process.cuda_runtime import with_runtime
from engines.protocol.spec import (
    NCCL_CUMEM,
    SEMAPHORES,
    EngineSpec,
    inherited_environment,
    spelled,
)
from engines.sglang.features import installed_version, keeps_graphs
from engines.sglang.parallel import Parallel

CLEANUP = (
    "/dev/shm/sgl_shm_*_{pid}_*",
    "/dev/shm/sglang_loads_*.shm",
    *SEMAPHORES,
)

# An engine on a GPU that gives its memory to a trainer and takes it back.
_BESIDE_A_TRAINER = {
    # The trainer's ranks may use their GPUs unequally while the engine starts.
    "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0",
    **RETAINED_BACKUP,
}
# CUDA graphs lie in pausable memory; otherwise their release frees nothing.  Versions without a
# host copy of it would read garbage there after a resume.
_PAUSABLE_GRAPHS = {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1"}
# A server whose scheduler has died, also by our SIGTERM, would keep its GPUs for 5 s and more, to
# write down what its other processes do.
_NO_CRASH_DUMPS = {
    "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
}
_FALSE = ("", "0", "false", "no")


def nccl_cumem(options: Mapping[str, Any], env: Mapping[str, str], num_nodes: int) -> str | None:
    """``NCCL_CUMEM_ENABLE`` of an engine, which all ranks of an NCCL group must have, or None if
    SGLang chooses it on the engine's hosts.

    SGLang 0.5.23 takes 1 with these options, and with NVLink between nodes.

    Args:
        options, env: those of the engine.
    """
    named = {spelled(name): value for name, value in options.items()}
    if named.get("enable_symm_mem"):
        return "1"
    if NCCL_CUMEM in env:
        return env[NCCL_CUMEM]
    if named.get("moe_a2a_backend") == "deepep_v2":
        return "1"
    if num_nodes > 1:
        return None
    return "1" if named.get("enable_kv_cache_sharding") else "0"


def build_environment(
    spec: EngineSpec,
    inherited: Mapping[str, str],
    parallel: Parallel,
    *,
    cpu_ids: tuple[int, ...] = (0,),
) -> dict[str, str]:
    """The whole environment of the engine.

    Args:
        inherited: this process's own.
        cpu_ids: cores this machine lets us use; an engine on the CPU is given its share.

    Raises:
        ValueError: a variable that would break the memory saver, or hide the control endpoints.
    """
    env = inherited_environment(inherited, spec.python)
    env |= spec.visible_gpus
    # The health endpoints would generate, and fail a server for being paused.
    env["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "0"
    for name, value in _NO_CRASH_DUMPS.items():
        env.setdefault(name, value)
    if spec.is_on_cpu:
        env["SGLANG_USE_CPU_ENGINE"] = "1"
        # Some of its functions are compiled when first called, which wants a C++ compiler.
        env.setdefault("TORCH_COMPILE_DISABLE", "1")
        env.setdefault("SGLANG_CPU_OMP_THREADS_BIND", bind_cores(spec, parallel, cpu_ids))
    elif spec.memory_saver:
        graphs = _PAUSABLE_GRAPHS if keeps_graphs(installed_version(spec.python)) else {}
        for name, value in (graphs | _BESIDE_A_TRAINER).items():
            env.setdefault(name, value)
    cumem = nccl_cumem(spec.options, spec.env, spec.num_nodes)
    if cumem is not None and not spec.is_on_cpu:
        # Not that of the process which launches: a push compares it with the trainer's.
        env[NCCL_CUMEM] = cumem
    if Path(spec.model_path).is_dir():
        env.setdefault("HF_HUB_OFFLINE", "1")
    env.update(spec.env)
    _refuse(spec, env)
    return with_runtime(env, spec.python) if spec.memory_saver and not spec.is_on_cpu else env


def bind_cores(spec: EngineSpec, parallel: Parallel, cpu_ids: tuple[int, ...]) -> str:
    """Cores for each rank, as SGLang writes them: ``0,1|2,3``.

    Engines of a group are numbered; each begins where the one before it ends, so that two engines
    on one machine do not share a core while there are others.

    A node's cores are divided by the ranks on it, and its list stands once for each node: SGLang
    0.5.23 looks a rank up by its place on its node, older versions by its place in the engine,
    and those want an entry for every rank.
    """
    num_here = max(1, parallel.num_ranks // spec.num_nodes)
    threads = max(1, int(spec.num_cpus) // num_here)
    number = re.search(r"\d+$", spec.engine_id)
    first = int(number[0]) * num_here * threads if number else 0
    here = []
    for rank in range(num_here):
        start = first + rank * threads
        cores = {cpu_ids[(start + thread) % len(cpu_ids)] for thread in range(threads)}
        here.append(",".join(str(core) for core in sorted(cores)))
    return "|".join(here * spec.num_nodes)


def _refuse(spec: EngineSpec, env: Mapping[str, str]) -> None:
    if spec.memory_saver:
        refuse_expandable_segments(env, "the memory saver")
    if env.get("SGLANG_RUST_SERVER", "").lower() not in _FALSE:
        raise ValueError("SGLANG_RUST_SERVER: that front end lacks the control endpoints; unset it")
    if env["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"].lower() not in _FALSE:
        raise ValueError(
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION must stay 0: a health probe during a pause "
            "would mark the server unhealthy for good"
        )
