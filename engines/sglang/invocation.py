"""How an SGLang server is started on this machine."""

from __future__ import annotations

import os
from collections.abc import Mapping

from engines.protocol import Endpoint
from engines.protocol.spec import EngineSpec, Invocation, normalized
from engines.sglang.command import bootstrap_port, build_command, default_options
from engines.sglang.environment import CLEANUP, build_environment
from engines.sglang.parallel import divide


def invocation(spec: EngineSpec, endpoint: Endpoint, inherited: Mapping[str, str]) -> Invocation:
    """Command, environment and leftovers of this engine, or of this node of it.

    Raises:
        ValueError: as ``build_command`` and ``build_environment`` do.
    """
    command = build_command(spec, endpoint)
    env = build_environment(
        spec,
        inherited,
        divide(normalized(spec.options), len(spec.gpu_ids) * spec.num_nodes),
        cpu_ids=tuple(sorted(os.sched_getaffinity(0))),
    )
    port = bootstrap_port(spec, endpoint)
    ports = (port,) if port and spec.node_rank == 0 else ()
    return Invocation(command, env, CLEANUP, default_options(spec), ports=ports)
