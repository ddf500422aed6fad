"""The command line of an embedded engine.  Imports nothing heavy: launchers use it."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import fields

from engines.embedded.core.config import EmbeddedConfig
from engines.process.allocator import RETAINED_BACKUP
from engines.protocol import Endpoint, WorkerType
from engines.protocol.spec import (
    EngineSpec,
    Invocation,
    as_flags,
    inherited_environment,
    normalized,
    refuse,
)

# Of glibc, which reads them when a process starts.
MEMORY = {
    # Up to so much stays with the process when it is freed.  A push by value goes through a dozen
    # buffers of its size; memory that is new for each costs more than all the rest of it.
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(128 << 20),
}

_OWNERS = {
    "model_path": "the server's model_path",
    "host": "chosen at launch",
    "port": "chosen at launch",
    "weight_version": "chosen at launch",
    "enable_memory_saver": "the group's needs_offload",
    "enable_weights_cpu_backup": "engine.weights_cpu_backup",
    "device": "engine.gpus",
    "num_threads": "engine.cpus",
}


def build_command(spec: EngineSpec, endpoint: Endpoint) -> list[str]:
    """The command that starts this engine at this endpoint.

    Raises:
        ValueError: an option that the spec's own fields set, one the engine does not have, more
            than one GPU, or something only SGLang can be.
    """
    known = {item.name for item in fields(EmbeddedConfig)}
    options = normalized(spec.options)
    refuse(options, _OWNERS)
    if unknown := sorted(options.keys() - known):
        raise ValueError(
            f"the embedded engine has no options {', '.join(unknown)}; "
            f"it has {', '.join(sorted(known - _OWNERS.keys()))}"
        )
    if len(spec.gpu_ids) > 1:
        raise ValueError(
            f"the embedded engine uses one GPU, and engine.gpus is {len(spec.gpu_ids)}; "
            "set it to 1, and num_engines to the number of GPUs"
        )
    if spec.worker_type is not WorkerType.REGULAR:
        raise ValueError(f"the embedded engine cannot be a {spec.worker_type} worker; SGLang can")
    options |= {
        "model_path": spec.model_path,
        "host": endpoint.host,
        "port": endpoint.port,
        "weight_version": spec.weight_version,
        "enable_memory_saver": spec.memory_saver,
        "enable_weights_cpu_backup": spec.weights_cpu_backup,
        "device": "cuda" if spec.gpu_ids else "cpu",
        "num_threads": max(1, math.ceil(spec.num_cpus)),
    }
    return [spec.python or sys.executable, "-m", "engines.embedded", *as_flags(options)]


def invocation(spec: EngineSpec, endpoint: Endpoint, inherited: Mapping[str, str]) -> Invocation:
    environment = {
        **MEMORY,
        **inherited_environment(inherited),
        **(RETAINED_BACKUP if spec.gpu_ids else {}),
        **spec.visible_gpus,
        **spec.env,
    }
    return Invocation(build_command(spec, endpoint), environment)
