"""How a vLLM server is started on this machine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from engines.process.cached_environment import CachedEnvironment, recipe_of
from engines.protocol import Endpoint
from engines.protocol.spec import SEMAPHORES, EngineSpec, Invocation
from engines.vllm.command import build_command, default_options
from engines.vllm.environment import build_environment

# What one leaves that was killed.
CLEANUP = ("/dev/shm/psm_*", *SEMAPHORES, "/dev/shm/*-cpushm_*")
# The folder of the sockets between its processes; each has a UUID for its name.
SOCKETS = "VLLM_RPC_BASE_PATH"


def invocation(spec: EngineSpec, endpoint: Endpoint, inherited: Mapping[str, str]) -> Invocation:
    """Command and environment of this engine.

    Raises:
        ValueError: as ``build_command`` and ``build_environment`` do.
        InstallError: it needs the cached interpreter, and there is none.
    """
    python = spec.python
    options: Mapping[str, Any] = {}
    variables: Mapping[str, str] = {}
    if recipe := recipe_of(spec.python):
        python = str(CachedEnvironment(recipe).require())
        options = recipe.engine_options
        variables = recipe.engine_variables(max(1, math.ceil(spec.num_cpus)))
    return Invocation(
        build_command(spec, endpoint, python, options),
        build_environment(spec, inherited, python=python, cpu=variables),
        defaults=default_options(options),
        cleanup=CLEANUP,
        folder_variable=SOCKETS,
    )
