"""The command line of a fake engine in a process of its own."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from engines.invocation import Invocation, as_flags, normalized, refuse
from engines.protocol import Endpoint, WorkerType
from engines.spec import EngineSpec

_OWNERS = {
    "model_path": "the server's model_path",
    "host": "chosen at launch",
    "port": "chosen at launch",
    "weight_version": "chosen at launch",
    "no_memory_saver": "the group's needs_offload",
    "weights_cpu_backup": "engine.weights_cpu_backup",
    "nnodes": "follows from the placement",
    "node_rank": "follows from the placement",
    "dist_init_addr": "follows from the placement",
}


def build_command(spec: EngineSpec, endpoint: Endpoint) -> list[str]:
    """The command that starts this engine, or this node of it, at this endpoint.

    Raises:
        ValueError: an option that the spec's own fields set, or something only SGLang can be.
    """
    options = normalized(spec.options)
    refuse(options, _OWNERS)
    if spec.worker_type is not WorkerType.REGULAR:
        raise ValueError(f"the fake engine cannot be a {spec.worker_type} worker; SGLang can")
    options |= {
        "model_path": spec.model_path,
        "host": endpoint.host,
        "port": endpoint.port,
        "weight_version": spec.weight_version,
        "no_memory_saver": not spec.memory_saver,
        "weights_cpu_backup": spec.weights_cpu_backup,
    }
    if spec.num_nodes > 1:
        options |= {
            "nnodes": spec.num_nodes,
            "node_rank": spec.node_rank,
            "dist_init_addr": spec.dist_init_addr,
        }
    return [spec.python or sys.executable, "-m", "engines.fake", *as_flags(options)]


def invocation(spec: EngineSpec, endpoint: Endpoint, inherited: Mapping[str, str]) -> Invocation:
    """How this engine is started."""
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(str(gpu_id) for gpu_id in spec.gpu_ids)}
    return Invocation(build_command(spec, endpoint), {**inherited, **visible, **spec.env})
